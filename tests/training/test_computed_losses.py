"""Losses are computed with as in torch: read as numbers, gone back from by the chain rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.errors import UsageError
from tests.support.grids import in_turn

LOSS = torch.nn.MSELoss()


def made(target: str = "host", **options: Any) -> tuple[Any, Any]:
    """A layer of torch's, and the model of it."""
    torch.manual_seed(0)
    net = torch.nn.Linear(6, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = stitch.compile(
        net, (torch.ones(8, 6),), target=target, optimizer=optimizer, loss=LOSS, **options
    )
    return net, model


def batch(seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.rand(8, 5, generator=generator)


def assert_gradients(net: Any, model: Any, rtol: float = 1e-5) -> None:
    for name, parameter in net.named_parameters():
        found = model.instance.get_tensor(f"{name}.grad")
        np.testing.assert_allclose(found, parameter.grad, rtol=rtol, atol=1e-7)


COMPUTED: list[Callable[[Any], Any]] = [
    lambda loss: loss / 4, lambda loss: loss * 0.5, lambda loss: 3 * loss, lambda loss: -loss,
    lambda loss: loss + 1.5, lambda loss: 2 - loss, lambda loss: (1 + loss - 0.5) * 3 / 7,
    lambda loss: loss * np.float32(0.3), lambda loss: loss * torch.tensor(0.3),
    lambda loss: torch.tensor(0.3) * loss, lambda loss: np.float64(0.25) * loss,
    lambda loss: torch.tensor(2.0) - loss, lambda loss: np.float32(0.25) - loss,
]  # fmt: skip


@pytest.mark.parametrize(("compute", "target"), in_turn(COMPUTED, ["host", "wormhole_n150"]))
def test_what_is_computed_from_a_loss_goes_back_as_in_torch(
    compute: Callable[[Any], Any], target: str
) -> None:
    net, model = made(target)
    x, y = batch()
    found, expected = compute(LOSS(model(x), y)), compute(LOSS(net(x), y))
    found.backward()
    expected.backward()
    assert_gradients(net, model)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_programs_in_bfloat16_go_back_from_a_part_of_a_loss() -> None:
    net, model = made(precision="bfloat16")
    x, y = batch()
    (LOSS(model(x), y) * 0.125).backward()
    (LOSS(net(x), y) * 0.125).backward()
    for name, parameter in net.named_parameters():
        found = model.instance.get_tensor(f"{name}.grad").astype(np.float32)
        np.testing.assert_allclose(found, parameter.grad, rtol=0.05, atol=1e-3)


def test_a_loss_is_read_in_every_way_that_a_number_is() -> None:
    _, model = made()
    x, y = batch()
    loss = LOSS(model(x), y)
    number = loss.item()
    assert float(loss) == number == loss.detach().item() == loss.detach().cpu().numpy()
    assert np.asarray(loss) == np.float32(number) and bool(loss) and not math.isnan(loss)
    assert loss < number + 1 and loss <= number and loss > 0 and loss >= loss.detach()
    assert (loss * 100).item() == float(np.float32(number) * np.float32(100))
    assert f"{loss / 2:.3f}" == f"{number / 2:.3f}"


def test_a_computed_loss_goes_back_once_and_only_from_the_last_batch() -> None:
    _, model = made()
    x, y = batch()
    early = LOSS(model(x), y) / 2
    late = LOSS(model(x), y) / 2
    with pytest.raises(UsageError, match="can run once, for the last loss"):
        early.backward()
    late.backward()
    with pytest.raises(UsageError, match="can run once, for the last loss"):
        late.backward()


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda loss: loss.detach(), "on a detached loss"),
        (lambda loss: loss / 0, "with respect to its loss is not finite"),
    ],
)
def test_what_cannot_go_back_says_why_and_the_loss_still_does(
    compute: Callable[[Any], Any], said: str
) -> None:
    net, model = made()
    x, y = batch()
    loss = LOSS(model(x), y)
    with pytest.raises(UsageError, match=said):
        compute(loss).backward()
    loss.backward()
    LOSS(net(x), y).backward()
    assert_gradients(net, model)


def test_what_is_no_number_is_refused_and_the_loss_still_goes_back() -> None:
    net, model = made()
    x, y = batch()
    pred = model(x)
    loss = LOSS(pred, y)
    penalty = net.weight.square().sum()
    assert float(loss + loss.detach()) == pytest.approx(2 * loss.item())
    for other in (penalty, pred.sum(), loss, loss / 2):
        for left, right in ((loss, other), (other, loss)):
            with pytest.raises(UsageError, match="combined with numbers only") as caught:
                left + right
            assert "float(value)" in str(caught.value)
    with pytest.raises(TypeError):
        loss + "1"
    loss.backward()
    LOSS(net(x), y).backward()
    assert_gradients(net, model)


def test_options_of_backward_that_are_set_are_refused() -> None:
    net, model = made()
    x, y = batch()
    loss = LOSS(model(x), y)
    for one in (loss, loss / 1):
        with pytest.raises(UsageError, match="takes no options") as caught:
            one.backward(retain_graph=True)
        assert caught.value.got == "retain_graph"
    loss.backward(retain_graph=None, create_graph=False)
    LOSS(net(x), y).backward()
    assert_gradients(net, model)
