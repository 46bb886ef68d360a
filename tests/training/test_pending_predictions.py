"""A prediction is computed with: torch's functions and operators read it, losses do not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import stitch
from stitch.errors import UsageError
from stitch.training import TensorFuture
from tests.support.grids import in_turn

TARGETS = ["host", "wormhole_n150"]
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])


def predicted(target: str = "host", **options: Any) -> tuple[TensorFuture, Any, Any]:
    """A pending prediction, what it will be, and its model."""
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss()
    model = stitch.compile(net, (X,), target=target, optimizer=optimizer, loss=loss, **options)
    model.start(window=64)
    pred = model(X)
    assert isinstance(pred, TensorFuture)
    return pred, net(X).detach(), model


USES: list[Callable[[Any], Any]] = [
    lambda p: p * 2 + 1,
    lambda p: 1 - p / 4,
    lambda p: 2**p,
    lambda p: -abs(p),
    lambda p: p + Y.reshape(8, 1).float(),
    lambda p: np.ones((8, 5), np.float32) - p if not isinstance(p, torch.Tensor) else 1 - p,
    lambda p: p @ torch.ones(5, 2),
    lambda p: p > 0,
    lambda p: p <= 0.5,
    lambda p: p[1:3, 0],
    lambda p: p[torch.tensor([0, 2])],
    lambda p: p.argmax(dim=1),
    lambda p: p.mean(0) - p,
    lambda p: p.T,
    lambda p: ~((p > 0) & (p < 0.5)),
    lambda p: list(p)[-1],
    lambda p: torch.argmax(p, dim=1),
    lambda p: (p.argmax(1) == Y).type(torch.float).sum(),
    lambda p: torch.cat([p, p * 2, torch.ones(8, 1)], 1),
    lambda p: torch.where(p > 0, p, torch.zeros(8, 5)),
    lambda p: p.sigmoid().view(4, 10),
    lambda p: torch.ones(5) - p,
    lambda p: torch.max(p, 1).indices,
    lambda p: p.sort(1).values,
    lambda p: torch.tensor(p.size()),
]


@pytest.mark.parametrize(("number", "target"), in_turn(range(len(USES)), TARGETS))
def test_operators_indices_methods_and_functions_are_torchs(number: int, target: str) -> None:
    pred, expected, _ = predicted(target)
    torch.testing.assert_close(USES[number](pred).detach(), USES[number](expected))


def test_a_prediction_says_what_its_array_says() -> None:
    pred, expected, _ = predicted()
    assert (pred.shape, pred.ndim, pred.dtype.name) == ((8, 5), 2, "float32")
    np.testing.assert_allclose(pred.tolist(), expected.tolist(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close((-pred).detach(), -expected)
    assert pred == pred and "8x5" in repr(pred)
    loss = torch.nn.CrossEntropyLoss()(pred, Y)
    assert repr(loss) == "<LossTensor pending>"
    assert f"<LossTensor {loss.item()}>" == repr(loss)


def test_the_only_element_is_a_number() -> None:
    net, x = torch.nn.Linear(6, 1), X[:1]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = stitch.compile(net, (x,), target="host", optimizer=optimizer, loss="mse")
    pred, expected = model(x), net(x).item()
    assert pred.item() == float(pred) == pytest.approx(expected, rel=1e-5)
    assert (int(pred), f"{pred:.3f}") == (int(expected), f"{expected:.3f}")


def test_without_torch_they_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    pred, expected, _ = predicted()
    loss = stitch.losses.CrossEntropyLoss(ignore_index=-100)(pred, Y.numpy())
    monkeypatch.delitem(sys.modules, "torch")
    np.testing.assert_allclose((1 - pred).mean(0), (1 - expected).mean(0), rtol=1e-5, atol=1e-6)
    assert pred.argmax(1).tolist() == expected.argmax(1).tolist()
    assert not hasattr(pred, "softmax")
    with pytest.raises(UsageError, match="a loss can be combined with numbers only"):
        loss + abs(pred).mean() * 0.1


def test_a_narrow_prediction_keeps_its_type() -> None:
    pred, expected, _ = predicted(precision="bfloat16")
    assert (pred * 1).dtype is torch.bfloat16
    torch.testing.assert_close((pred * 1).detach().float(), expected, rtol=0.05, atol=0.05)


def test_a_computed_value_goes_nowhere_back() -> None:
    pred, _, _ = predicted()
    with pytest.raises(UsageError, match="is not a supported loss"):
        F.kl_div(pred, torch.ones(8, 5))
    for use in (lambda p: p.backward(), lambda p: p.add_(1), torch.relu_):
        with pytest.raises(UsageError, match="does not support"):
            use(pred)
    with pytest.raises(UsageError, match="does not support backward"):
        (pred * 2).mean().backward()
    with pytest.raises(UsageError, match="a loss can be combined with numbers only"):
        torch.nn.CrossEntropyLoss()(pred, Y) + pred.square().mean()
    with pytest.raises(UsageError, match="first argument of a loss function is not the prediction"):
        torch.nn.MSELoss()(torch.ones(8, 5), pred)
    for use in (lambda p: p + "a", lambda p: ~p):
        with pytest.raises(TypeError):
            use(pred)
    with torch.no_grad():
        assert not (pred * 2).requires_grad


def test_the_loss_still_judges_a_prediction_that_was_used() -> None:
    pred, expected, model = predicted()
    shares = torch.softmax(pred, 1)
    loss = torch.nn.CrossEntropyLoss()(pred, Y)
    loss.backward()
    model.training.optimizer.step()
    assert loss.item() == pytest.approx(F.cross_entropy(expected, Y).item(), rel=1e-5)
    torch.testing.assert_close(shares.detach(), torch.softmax(expected, 1))


def test_bytes_are_exported_once_they_are_there() -> None:
    pred, expected, _ = predicted()
    torch.testing.assert_close(torch.from_dlpack(pred), expected)
