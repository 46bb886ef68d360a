"""Losses of torch.nn as they are: the same numbers, and the same gradients, as torch gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import stitch
from stitch.errors import CompileError, StitchError, UsageError
from stitch.training import loss_from_config, loss_of
from tests.support.grids import every, in_turn

WEIGHTS = [0.5, 2.0, 1.0, 0.25, 3.0]
COUNTED = torch.tensor(WEIGHTS)


def classes(ignored: int | None = None) -> Any:
    label = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(3))
    if ignored is not None:
        label[::3] = ignored
    return label


def shares() -> Any:
    return torch.rand(12, 5, generator=torch.Generator().manual_seed(4))


LOSSES: list[tuple[Any, Any]] = [
    (lambda r: nn.CrossEntropyLoss(reduction=r), classes()),
    (lambda r: nn.CrossEntropyLoss(reduction=r), classes(-100)),
    (lambda r: nn.CrossEntropyLoss(weight=COUNTED, reduction=r), classes(-100)),
    (lambda r: nn.CrossEntropyLoss(ignore_index=2, reduction=r), classes()),
    (lambda r: nn.CrossEntropyLoss(label_smoothing=0.1, reduction=r), classes(-100)),
    (lambda r: nn.CrossEntropyLoss(COUNTED, label_smoothing=0.1, reduction=r), classes()),
    (lambda r: nn.NLLLoss(weight=COUNTED, reduction=r), classes(-100)),
    (lambda r: nn.MSELoss(reduction=r), shares()),
    (lambda r: nn.L1Loss(reduction=r), shares()),
    (lambda r: nn.SmoothL1Loss(beta=0.5, reduction=r), shares()),
    (lambda r: nn.HuberLoss(delta=0.7, reduction=r), shares()),
    (lambda r: nn.BCEWithLogitsLoss(reduction=r), shares()),
    (lambda r: nn.BCEWithLogitsLoss(COUNTED, pos_weight=COUNTED, reduction=r), shares()),
]


def network(*more: Any) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), *more)


def compare(net: Any, loss_fn: Any, label: Any, own: Any = None) -> None:
    """The loss and the gradients of one batch, by torch and here, where it is `own` if given."""
    own = own or loss_fn
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
    model = stitch.compile(net, (x,), target="host", optimizer=optimizer, loss=own)
    found = own(model(x), label)
    found.backward()
    expected = loss_fn(net(x), label)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in net.named_parameters():
        gradient = model.instance.get_tensor(f"{name}.grad")
        np.testing.assert_allclose(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
    again = loss_from_config(model.training.loss.config())  # type: ignore[union-attr]  # it has one
    assert again.config() == model.training.loss.config()  # type: ignore[union-attr]  # it has one


@pytest.mark.parametrize(("loss", "reduction"), in_turn(LOSSES, ["mean", "sum"]))
def test_a_loss_of_torch_is_taken_as_it_is(loss: tuple[Any, Any], reduction: str) -> None:
    make, label = loss
    compare(network(), make(reduction), label)


def test_a_loss_of_stitch_is_torchs() -> None:
    own: Any = stitch.losses.CrossEntropyLoss(label_smoothing=0.1)
    compare(network(), nn.CrossEntropyLoss(label_smoothing=0.1), classes(), own)
    own = stitch.losses.CategoricalCrossEntropyLoss("sum", WEIGHTS, 0.1)
    theirs = nn.CrossEntropyLoss(COUNTED, reduction="sum", label_smoothing=0.1)
    compare(network(), theirs, shares(), own)


class Shift(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Its parameter's gradient is that of its prediction."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(count))

    def forward(self, x: Any) -> Any:
        return x + self.by


BENDS = [0.0, 1e-45, 1e-40, 1e-30, 1e-3, 0.5, 1.0, 7, 1e30, float("inf")]
AROUND = [0.0, -0.0, 0.25, 0.5, -0.5, 1.0, 1.0000001, -1.0, 3.0, 1e-30, 1e-20, -1e15]


@pytest.mark.parametrize(
    "loss_fn",
    every(
        4,
        [
            *(nn.SmoothL1Loss(beta=bend, reduction="sum") for bend in BENDS),
            *(nn.HuberLoss(delta=bend, reduction="sum") for bend in BENDS if bend),
        ],
    ),
    ids=repr,
)
def test_bent_losses_are_torchs_around_every_bend(loss_fn: Any) -> None:
    net, x = Shift(len(AROUND)), torch.tensor(AROUND)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = stitch.compile(net, (x,), target="host", optimizer=optimizer, loss=loss_fn)
    found, expected = loss_fn(model(x), torch.zeros_like(x)), loss_fn(net(x), torch.zeros_like(x))
    found.backward()
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradient = model.instance.get_tensor("by.grad")
    np.testing.assert_allclose(gradient, net.by.grad, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize(
    ("kind", "word", "bend"),
    [
        (stitch.losses.SmoothL1Loss, "beta", -0.5), (stitch.losses.SmoothL1Loss, "beta", np.nan),
        (stitch.losses.HuberLoss, "delta", 0), (stitch.losses.HuberLoss, "delta", np.nan),
    ],
)  # fmt: skip
def test_a_bend_that_torch_refuses_is_refused(kind: Any, word: str, bend: float) -> None:
    with pytest.raises(UsageError, match=f"{word} of {kind.__name__} must be"):
        kind(**{word: bend})


def test_probabilities_go_through_a_binary_cross_entropy() -> None:
    compare(network(nn.Sigmoid()), nn.BCELoss(weight=COUNTED), shares())


def test_a_function_that_calls_a_loss_is_one() -> None:
    compare(network(), lambda p, y: functional.cross_entropy(p, y, COUNTED), classes())


def test_pictures_of_class_numbers_are_judged_pixel_by_pixel() -> None:
    torch.manual_seed(1)
    net, label = nn.Conv2d(3, 5, 1), torch.randint(0, 5, (2, 4, 4))
    loss_fn = nn.CrossEntropyLoss(weight=COUNTED, label_smoothing=0.2)
    x = torch.randn(2, 3, 4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = stitch.compile(net, (x,), target="host", optimizer=optimizer, loss=loss_fn)
    assert loss_fn(model(x), label).item() == pytest.approx(loss_fn(net(x), label).item(), rel=1e-5)


@pytest.mark.parametrize(
    "given",
    [nn.CosineEmbeddingLoss(), lambda p, y: (p - y).abs().mean(), lambda p, y: 3.0],
    ids=["module", "arithmetic", "number"],
)
def test_a_loss_that_we_lack_is_named_with_those_we_have(given: Any) -> None:
    with pytest.raises(UsageError, match="is not a supported loss") as caught:
        loss_of(given)
    assert "cross_entropy, nll_loss, mse_loss" in str(caught.value)


def test_a_reduction_that_gives_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="reduction of MSELoss is unknown"):
        loss_of(nn.MSELoss(reduction="none"))


def test_weights_are_one_for_each_class() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(CompileError, match="one weight per class"):
        stitch.compile(
            net, (torch.ones(2, 6),), optimizer=optimizer,
            loss=nn.CrossEntropyLoss(weight=torch.ones(4)),
        )  # fmt: skip


def test_settings_that_a_loss_cannot_have_are_refused() -> None:
    losses: Any = stitch.losses
    cases: tuple[tuple[Any, str], ...] = (
        (lambda: losses.NLLLoss(weight="heavy"), "weight of NLLLoss must be numbers"),
        (lambda: losses.NLLLoss(weight=[1, np.nan]), "weight of NLLLoss must be finite"),
        (lambda: losses.CrossEntropyLoss(label_smoothing=2), r"must be in \[0, 1\]"),
        (lambda: loss_from_config({"loss": "mse", "beta": 1}), "loss 'mse' takes no beta"),
    )
    for make, told in cases:
        with pytest.raises(UsageError, match=told):
            make()
    for loss, told in (
        (losses.CrossEntropyLoss(), "needs a prediction"),
        (losses.BCEWithLogitsLoss(weight=[1, 2, 3]), "must broadcast to the prediction"),
    ):
        net = Shift(4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(CompileError, match=told):
            stitch.compile(net, (torch.ones(4),), optimizer=optimizer, loss=loss)


def test_floating_labels_of_a_cross_entropy_are_probabilities() -> None:
    loss = functional.cross_entropy
    call = stitch.training.loss_of_call(
        loss, (torch.ones(2, 5), torch.ones(2, 5)), {"weight": COUNTED, "label_smoothing": 0.1}
    )
    assert call.loss.config() == {
        "loss": "categorical_crossentropy", "reduction": "mean", "weight": WEIGHTS,
        "label_smoothing": 0.1,
    }  # fmt: skip


def test_labels_are_taken_as_torch_takes_them_or_refused() -> None:
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randn(8, 3).bfloat16()
    expected = functional.mse_loss(net(x), y).item()
    model: Any = stitch.compile(
        net, (x,), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss()
    )
    assert nn.MSELoss()(model(x), y).item() == pytest.approx(expected, rel=1e-6)
    wrong: tuple[tuple[Any, str], ...] = (
        (y.float().requires_grad_(), r"labels have a gradient(.|\n)*y\.detach"),
        ([[1.0, 2.0]] * 7 + [[1.0]], r"labels cannot become an array"),
    )
    for label, told in wrong:
        with pytest.raises(StitchError, match=told):
            model.training.loss(model(x), label)
