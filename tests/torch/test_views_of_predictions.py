"""Losses of reshaped predictions beside torch, on one device and on two."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import stitch
import stitch.torch
import stitch.torch.nn as nn
from stitch.errors import CompileError, UsageError
from stitch.program import DataType, ValueType
from stitch.training.losses import CrossEntropyLoss, loss_from_config
from stitch.training.views import Step, step_of_call, step_of_index, viewed

WORDS, CLASSES = 6, 11


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Any) -> Any:
        return self.out(torch.tanh(self.embed(ids)))


def shifted(pred: Any, ids: Any) -> Any:
    """The loss of the language models in transformers."""
    logits = pred[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), ids[..., 1:].contiguous().view(-1))


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "view": lambda p, y: F.cross_entropy(p.view(-1, CLASSES), y.view(-1)),
    "numbers": lambda p, y: F.cross_entropy(p.reshape(len(y) * WORDS, CLASSES), y.reshape(-1)),
    "flatten": lambda p, y: nn.CrossEntropyLoss(reduction="sum")(p.flatten(0, 1), y.flatten()),
    "function": lambda p, y: F.cross_entropy(torch.flatten(p, 0, 1), y.flatten()),
    "classes second": lambda p, y: F.cross_entropy(p.transpose(1, 2), y),
    "permute": lambda p, y: F.cross_entropy(p.permute(0, 2, 1), y),
    "shifted": shifted,
    "last word": lambda p, y: F.cross_entropy(p[:, -1, :], y[:, -1]),
    "squeeze": lambda p, y: F.mse_loss(p[..., :1].squeeze(-1), y / 10),
    "float": lambda p, y: F.cross_entropy(p.float().cpu()[:, -1].float(), y[:, -1]),
    "unsqueeze": lambda p, y: F.mse_loss(p[:, :, 0].unsqueeze(1), y[:, None] / 10),
}


def losses_of(
    way: Callable[[Any, Any], Any], batches: list[torch.Tensor], **options: Any
) -> tuple[list[float], list[float]]:
    """Train beside torch; return both losses of each step, and compare the weights."""
    torch.manual_seed(0)
    ours = Language()
    theirs = copy.deepcopy(ours)
    found: tuple[list[float], list[float]] = ([], [])
    updates = [torch.optim.Adam(module.parameters(), 0.01) for module in (ours, theirs)]
    models = (stitch.torch.compile(ours, optimizer=updates[0], **options), theirs)
    for ids in batches:
        for model, optimizer, losses in zip(models, updates, found, strict=True):
            optimizer.zero_grad()
            pred = model(ids)
            loss = way(pred, ids)
            hits = (pred.view(-1, CLASSES).argmax(-1) == ids.view(-1)).sum()
            loss.backward()
            optimizer.step()
            losses += [loss.item(), float(hits)]
    for name, value in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), value, rtol=1e-4, atol=1e-5)
    return found


def batches_of(*lengths: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, CLASSES, (length, WORDS)) for length in lengths]


@pytest.mark.parametrize("name", LOSSES)
def test_a_reshaped_prediction_trains_as_in_torch(name: str) -> None:
    ours, theirs = losses_of(LOSSES[name], batches_of(4, 4, 3))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("name", ["view", "shifted", "classes second"])
def test_on_several_devices_too(name: str) -> None:
    options = {"devices": 2, "algorithm": "data_parallel"}
    ours, theirs = losses_of(LOSSES[name], batches_of(4, 4), **options)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("name", ["view", "function", "classes second", "shifted", "last word"])
def test_a_function_that_is_given_as_the_loss_has_a_view(name: str) -> None:
    (ids,) = batches_of(4)
    module = Language()
    way = LOSSES[name] if name != "shifted" else lambda p, y: CrossEntropyLoss()(
        p[..., :-1, :].reshape(-1, CLASSES), y)  # fmt: skip
    compiled = stitch.torch.compile(module, (ids,), optimizer=stitch.SGD(lr=0.1), loss=way)
    labels = ids if name != "shifted" else ids[:, 1:].flatten()
    loss = way(compiled(ids), labels)
    expected = LOSSES[name](module(ids), ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_several_devices_refuse_a_view_that_moves_the_examples() -> None:
    module = Language()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, devices=2, algorithm="data_parallel")
    (ids,) = batches_of(4)
    moves: tuple[Callable[[Any], Any], ...] = (
        lambda p: p.transpose(0, 1), lambda p: p[:2], lambda p: p.permute(1, 0, 2),
    )  # fmt: skip
    for moved in moves:
        with pytest.raises(UsageError, match="first axis of the prediction, which this loss moves"):
            F.cross_entropy(moved(model(ids)).reshape(-1, CLASSES), torch.zeros(24).long())
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def test_a_view_that_does_not_fit_is_one_error_and_the_next_loss_works() -> None:
    module = Language()
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    (ids,) = batches_of(4)
    with pytest.raises(CompileError, match="cannot be reshaped for its loss") as caught:
        F.cross_entropy(model(ids).view(-1, 7), ids.view(-1))
    assert "pred.reshape(-1, 7)" in str(caught.value) and "4x6x11xf32" in str(caught.value)
    F.cross_entropy(model(ids).view(-1, CLASSES), ids.view(-1)).backward()
    with pytest.raises(UsageError, match="compiled with another loss") as other:
        F.cross_entropy(model(ids).transpose(1, 2), ids)
    assert "of pred.reshape(-1, 11)" in str(other.value)
    assert "of pred.transpose(1, 2)" in str(other.value)


def test_what_is_computed_of_a_view_has_no_backward() -> None:
    module = Language()
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    (ids,) = batches_of(4)
    for _ in range(2):
        pred = model(ids)
        with pytest.raises(UsageError, match=r"does not support backward\(\)"):
            (pred.view(-1, CLASSES) * 2).sum().backward()
        view = pred[:, 1:].flatten(1)
        expected = module(ids)[:, 1:].flatten(1)
        torch.testing.assert_close(torch.tensor(view.numpy()), expected.detach())
        assert view.shape == (4, 5 * CLASSES) and len(view) == 4 and view[0].shape == (55,)
        assert (view == expected).shape == (view != expected.detach().numpy()).shape == view.shape
        assert repr(view).startswith("<PredictionView pred[:, 1:].flatten(1, -1) of <")
        F.cross_entropy(pred.flatten(0, 1), ids.flatten())


def test_a_checkpoint_has_the_view() -> None:
    module = Language()
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    (ids,) = batches_of(4)
    shifted(model(ids), ids)
    model.dump(file := io.StringIO())
    loaded: Any = stitch.CompiledModel.load(io.StringIO(file.getvalue()))
    assert loaded.training.loss.config() == model.model.training.loss.config()
    assert loaded.training.loss.view[1] == ["reshape", [-1, CLASSES]]
    again = loss_from_config(loaded.training.loss.config())
    assert repr(again).endswith("of pred[..., :-1, :].reshape(-1, 11)")


@pytest.mark.parametrize(
    "view",
    [
        1,
        ["reshape"],
        [["reshap", [1]]],
        [["permute", [0, 7, 1]]],
        [["index", {}]],
        [[]],
        [["reshape", [10**30]]],
        [["flatten"]],
        [["reshape", "ab"]],
    ],
)
def test_views_of_a_damaged_file_are_refused(view: Any) -> None:
    with pytest.raises((UsageError, CompileError)):
        loss_from_config({"loss": "mse", "view": view}).graph(
            ValueType((2, 3, 4), DataType.FLOAT32)
        )


def test_random_views_equal_torch() -> None:
    generator = np.random.default_rng(0)

    def axis(rank: int) -> int:
        return int(generator.integers(-rank, rank))

    made = 0
    for _ in range(400):
        shape = generator.integers(1, 4, size=generator.integers(1, 5)).tolist()
        value = torch.arange(int(np.prod(shape))).reshape(shape)
        view: tuple[Step, ...] = ()
        now = value
        for _ in range(generator.integers(1, 5)):
            rank = now.dim()
            if not rank or not now.numel():
                break
            factor = int(generator.choice([d for d in range(1, 9) if now.numel() % d == 0]))
            calls: list[tuple[str, list[Any]]] = [
                ("flatten", sorted([abs(axis(rank)) % rank for _ in range(2)])),
                ("permute", generator.permutation(rank).tolist()), ("squeeze", [axis(rank)]),
                ("squeeze", []), ("unsqueeze", [axis(rank + 1)]),
                ("transpose", [axis(rank), axis(rank)]), ("view", [-1, factor]),
                ("reshape", [now.numel() // factor, factor]), ("reshape", [[factor, -1]]),
            ]  # fmt: skip
            name, arguments = calls[generator.integers(len(calls))]
            if generator.random() < 0.2:
                index = (slice(None, int(generator.integers(1, 4))), ...)
                step = step_of_index(index)
                now = now[index]
            else:
                step = step_of_call(name, arguments, {})
                now = getattr(now.contiguous(), name)(*arguments)
            assert step is not None
            view += (step,)
        torch.testing.assert_close(viewed(value, view), now)
        np.testing.assert_array_equal(viewed(value.numpy(), view), now.numpy())
        made += len(view)
    assert made > 400
    assert step_of_call("view", [torch.int32], {}) is None and step_of_index((0, ...)) is None
    assert CrossEntropyLoss().of_view(()).config() == CrossEntropyLoss().config()
