"""A prediction is computed with before it is there: the work is queued behind it."""

from __future__ import annotations

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


def predicted(target: str = "host") -> tuple[TensorFuture, Any, Any]:
    """A pending prediction, what it will be, and its model."""
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = torch.nn.CrossEntropyLoss()
    model = stitch.compile(net, (X,), target=target, optimizer=optimizer, loss=loss)
    model.start(window=64)
    pred = model(X)
    assert isinstance(pred, TensorFuture)
    return pred, net(X).detach(), model


def same(found: Any, expected: Any) -> None:
    assert type(found).__name__ == "PendingValue"
    np.testing.assert_allclose(found.numpy(), np.asarray(expected), rtol=1e-5, atol=1e-6)


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
    lambda p: p[..., -1],
    lambda p: p.argmax(1),
    lambda p: p.argmax(dim=1),
    lambda p: p.sum(),
    lambda p: p.mean(0) - p,
    lambda p: p.reshape(2, 20),
    lambda p: p.T,
    lambda p: p[torch.tensor([0, 2])],
    lambda p: ~((p > 0) & (p < 0.5)),
    lambda p: (p > 0) ^ (p < 0.5),
    lambda p: list(p)[-1],
]


@pytest.mark.parametrize(("number", "target"), in_turn(range(len(USES)), TARGETS))
def test_operators_indices_and_methods_queue_more_work(number: int, target: str) -> None:
    pred, expected, _ = predicted(target)
    was_pending = pred.tensor.is_pending
    found = USES[number](pred)
    assert pred.tensor.is_pending == was_pending
    assert found.tensor.is_pending
    same(found, USES[number](expected))


TORCHS: list[Callable[[Any], Any]] = [
    lambda p: torch.softmax(p, 1),
    lambda p: F.softmax(p, dim=-1),
    lambda p: torch.argmax(p, dim=1),
    lambda p: p.argmax(1) == Y,
    lambda p: (p.argmax(1) == Y).type(torch.float).sum(),
    lambda p: torch.cat([p, p * 2, torch.ones(8, 1)], 1),
    lambda p: torch.where(p > 0, p, torch.zeros(8, 5)),
    lambda p: p.sigmoid().view(4, 10),
    lambda p: torch.ones(5) - p,
]


@pytest.mark.parametrize(("number", "target"), in_turn(range(len(TORCHS)), TARGETS))
def test_functions_and_methods_of_torch_queue_more_work(number: int, target: str) -> None:
    pred, expected, _ = predicted(target)
    was_pending = pred.tensor.is_pending
    found = TORCHS[number](pred)
    assert pred.tensor.is_pending == was_pending
    assert found.tensor.is_pending
    same(found, TORCHS[number](expected))


def test_other_losses_are_refused_and_a_computed_value_goes_nowhere_back() -> None:
    pred, _, _ = predicted()
    with pytest.raises(UsageError, match="is not a supported loss"):
        F.kl_div(pred, torch.ones(8, 5))
    for name in ("backward", "add_"):
        with pytest.raises(UsageError, match=f"does not support {name}"):
            getattr(pred * 2, name)
    with pytest.raises(TypeError):
        pred + "a"


def test_the_loss_still_judges_a_prediction_that_was_used() -> None:
    pred, expected, model = predicted()
    shares = torch.softmax(pred, 1)
    loss = torch.nn.CrossEntropyLoss()(pred, Y)
    loss.backward()
    model.training.optimizer.step()
    assert loss.item() == pytest.approx(F.cross_entropy(expected, Y).item(), rel=1e-5)
    same(shares, torch.softmax(expected, 1))


def test_indices_that_look_alike_in_print_are_told_apart() -> None:
    pred, expected, _ = predicted()
    first, second = np.zeros(3000, np.int64), np.zeros(3000, np.int64)
    second[1500] = 3
    same(pred[first], expected[first])
    same(pred[second], expected[second])


PAIRS: list[Callable[[Any], Any]] = [
    lambda p: torch.max(p, 1),
    lambda p: p.max(dim=1),
    lambda p: torch.topk(p, 2),
    lambda p: p.sort(1),
]


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_functions_of_torch_that_give_two_values_give_both_by_their_names(number: int) -> None:
    pred, expected, _ = predicted()
    values, indices = found = PAIRS[number](pred)
    same(values, PAIRS[number](expected).values)
    same(indices, PAIRS[number](expected).indices)
    assert found.indices is indices


@pytest.mark.parametrize(
    "asked", [lambda p: p.size(), lambda p: p.size(0), lambda p: p.dim(), lambda p: torch.numel(p)]
)
def test_what_torch_says_of_a_shape_is_no_pending_value(asked: Callable[[Any], Any]) -> None:
    pred, expected, _ = predicted()
    assert asked(pred) == asked(expected)
    assert type(asked(pred)) is type(asked(expected))


def test_a_pending_number_is_formatted_as_a_number() -> None:
    pred, expected, _ = predicted()
    assert f"{pred.mean():.3f}" == f"{expected.mean().item():.3f}"


def test_a_loop_that_counts_what_is_right_reads_nothing_before_its_end() -> None:
    _, expected, model = predicted()
    right = 0
    for _ in range(3):
        right = right + (model(X).argmax(1) == Y).sum()
    assert right.tensor.is_pending  # type: ignore[attr-defined]  # no number any more
    assert int(right) == 3 * int((expected.argmax(1) == Y).sum())


def test_bytes_are_exported_once_they_are_there() -> None:
    pred, expected, _ = predicted()
    torch.testing.assert_close(torch.from_dlpack(pred), expected)
