"""Losses of reshaped predictions beside torch, on one device and on two."""

from __future__ import annotations

import copy
import io
import json
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
from stitch.training.views import (
    View,
    keeps_examples,
    shape_after,
    step_of_call,
    step_of_index,
    view_config,
    view_from_config,
    viewed,
)

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


def test_several_devices_refuse_a_view_that_moves_the_examples() -> None:
    module = Language()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, devices=2, algorithm="data_parallel")
    (ids,) = batches_of(4)
    moves: tuple[Callable[[Any], Any], ...] = (
        lambda p: p.transpose(0, 1), lambda p: p[:2], lambda p: p.permute(1, 0, 2),
    )  # fmt: skip
    for moved in moves:
        with pytest.raises(UsageError, match="is not that of the examples"):
            F.cross_entropy(moved(model(ids)).reshape(-1, CLASSES), torch.zeros(24).long())
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()


def test_a_view_that_does_not_fit_is_one_error_and_the_next_loss_works() -> None:
    module = Language()
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    (ids,) = batches_of(4)
    for wrong in ((-1, 7), (5, CLASSES), (1, 24)):
        with pytest.raises(RuntimeError, match="invalid for input of size 264"):  # As torch.
            F.cross_entropy(model(ids).view(wrong), ids.view(-1))
    with pytest.raises(IndexError):
        model(ids)[:, 99]
    with pytest.raises(UsageError, match="labels have another shape"):
        F.cross_entropy(model(ids).view(1, -1, CLASSES), ids.view(-1))
    F.cross_entropy(model(ids).view(-1, CLASSES), ids.view(-1)).backward()
    with pytest.raises(UsageError, match="compiled with another loss") as other:
        F.cross_entropy(model(ids).transpose(1, 2), ids)
    assert "of pred.reshape(-1, 11)" in str(other.value)
    assert "of pred.permute(0, 2, 1)" in str(other.value)


def test_what_is_computed_of_a_view_has_no_backward() -> None:
    module = Language()
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    (ids,) = batches_of(4)
    for _ in range(2):
        pred = model(ids)
        with pytest.raises(UsageError, match=r"does not support backward\(\)"):
            (pred.view(-1, CLASSES) * 2).sum().backward()
        for wanted in (pred, pred[:, 1:]):
            with pytest.raises(UsageError, match=r"does not support register_hook\(\)"):
                wanted.register_hook(lambda gradient: 2 * gradient)
        view = pred[:, 1:].flatten(1)
        expected = module(ids)[:, 1:].flatten(1)
        torch.testing.assert_close(torch.tensor(view.numpy()), expected.detach())
        assert view.shape == (4, 5 * CLASSES) and len(view) == 4 and view[0].shape == (55,)
        assert (view == expected).shape == (view != expected.detach().numpy()).shape == view.shape
        assert repr(view).startswith("<PredictionView pred[:, 1:].reshape(-1, 55) of <")
        F.cross_entropy(pred.flatten(0, 1), ids.flatten())


def test_a_checkpoint_has_the_view() -> None:
    module = Language()
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
    (ids,) = batches_of(4)
    shifted(model(ids), ids)
    model.dump(file := io.StringIO())
    loaded: Any = stitch.CompiledModel.load(io.StringIO(file.getvalue()))
    assert loaded.training.loss.config() == model.model.training.loss.config()
    assert loaded.training.loss.view[1] == ("reshape", (-1, CLASSES))
    again = loss_from_config(loaded.training.loss.config())
    assert repr(again).endswith("of pred[:, :-1, :].reshape(-1, 11)")


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


def random_call(generator: np.random.Generator, now: torch.Tensor) -> tuple[str, tuple[Any, ...]]:
    """Return a name and arguments of a method of torch, `index` for an index."""
    rank = now.dim()

    def axis(count: int = rank) -> int:
        return int(generator.integers(-count, count))

    def bound() -> Any:
        return generator.choice([None, 0, 1, -1, 2], 1)[0]  # type: ignore[arg-type]

    factor = int(generator.choice([d for d in range(1, 13) if now.numel() % d == 0]))
    calls: list[tuple[str, tuple[Any, ...]]] = [("unsqueeze", (axis(rank + 1),)), ("squeeze", ())]
    if rank:
        start, end = sorted([axis() % rank, axis() % rank])
        calls += [
            ("flatten", (start, end - rank)), ("flatten", ()), ("squeeze", (axis(),)),
            ("permute", tuple(generator.permutation(rank).tolist())),
            ("transpose", (axis(), axis())), ("movedim", (axis(), axis())),
            ("reshape", (-1, factor)), ("reshape", (factor, -1)),
            ("reshape", ((now.numel() // factor, factor),)), ("view", (now.size(0), -1)),
            ("index", (slice(bound(), bound()), ...)), ("index", (..., slice(bound(), bound()))),
            ("index", (slice(None), *[axis(n) for n in now.shape[1:2] if n])),
            ("index", (slice(0, now.size(0)), ..., slice(None))),
        ]  # fmt: skip
    return calls[generator.integers(len(calls))]


def test_random_views_equal_torch_for_a_batch_and_where_allowed_for_parts_of_it() -> None:
    generator = np.random.default_rng(0)
    divided = 0
    for _ in range(1_500):
        count = int(generator.integers(1, 4))
        rest = generator.integers(1, 5, size=generator.integers(0, 4)).tolist()
        shape = (count * int(generator.integers(1, 4)), *rest)
        value = torch.arange(int(np.prod(shape))).reshape(shape)
        view: View = ()
        now = value
        for _ in range(generator.integers(1, 6)):
            name, arguments = random_call(generator, now)
            try:
                if name == "index":
                    after = now[arguments]
                    step = step_of_index(lambda: shape, view, arguments)  # noqa: B023
                else:
                    after = getattr(now.contiguous(), name)(*arguments)
                    step = step_of_call(shape, view, name, arguments, {})
            except (IndexError, RuntimeError):
                continue
            if not after.numel():
                continue
            assert step is not None
            view, now = (*view, step), after
        torch.testing.assert_close(viewed(value, view), now)
        np.testing.assert_array_equal(viewed(value.numpy(), view), now.numpy())
        assert shape_after(shape, view) == now.shape
        assert view_from_config(json.loads(json.dumps(view_config(view)))) == view
        if count > 1 and keeps_examples(shape, view):
            divided += 1
            parts = [viewed(part, view) for part in value.chunk(count)]
            torch.testing.assert_close(torch.cat(parts), now)
    assert divided > 200


def test_views_that_mix_examples_are_known() -> None:
    for shape, calls in (
        ((4, 3), [("unsqueeze", (0,)), ("transpose", (1, 2)), ("flatten", ())]),
        ((4, 3), [("reshape", (2, -1, 3)), ("transpose", (1, 2)), ("flatten", ())]),
        ((10,), [("unsqueeze", (0,))]),
        ((4, 3), [("reshape", (1, -1))]),
    ):
        view: View = ()
        for name, arguments in calls:
            step = step_of_call(shape, view, name, arguments, {})
            assert step is not None
            view = (*view, step)
        assert not keeps_examples(shape, view)
    for index in ((..., slice(None, None, 3)), (..., 7), (..., 0), slice(1)):
        step = step_of_index(lambda: (10,), (), index)
        assert step is not None and not keeps_examples((10,), (step,))
    assert step_of_call((4, 3), (), "view", (torch.int32,), {}) is None
    assert step_of_index(lambda: (4, 3), (), (0, ...)) is None
    bound = torch.tensor(1)
    assert step_of_index(lambda: (4, 3), (), (slice(None), slice(bound, np.int64(3)))) == (
        "index", ((None, None, None), (1, 3, None)))  # fmt: skip
    assert CrossEntropyLoss().of_view(()).config() == CrossEntropyLoss().config()


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_module_whose_first_axis_is_not_the_batch_is_refused_on_several_devices(
    is_flat: bool,
) -> None:
    class Turned(Language):
        def forward(self, ids: Any) -> Any:
            turned = super().forward(ids).transpose(0, 1)
            return turned.flatten(0, 1) if is_flat else turned

    module = Turned()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, devices=2, algorithm="data_parallel")
    (ids,) = batches_of(WORDS)
    with pytest.raises(UsageError, match="is not that of the examples"):
        F.cross_entropy(model(ids).reshape(-1, CLASSES), ids.T.flatten())


def test_what_is_read_of_a_first_prediction_of_a_view_and_of_a_later_one_is_alike() -> None:
    module = nn.Linear(3, 1)
    model = stitch.torch.compile(module, optimizer=torch.optim.SGD(module.parameters(), 0.0))
    x = torch.ones(1, 3)
    expected = module(x).detach()
    for _ in range(2):
        pred = model(x)
        for value in (pred, pred.view(1, 1), pred[:, :1]):
            assert float(value) == value.item() == expected.item()
            assert bool(value) is bool(expected) and f"{value:.4f}" == f"{expected.item():.4f}"
            assert value.size(-1) == 1 and value.size() == value.shape == (1, 1)
            assert value.dim() == value.ndim == 2 and value.numel() == 1
            assert torch.equal(torch.from_dlpack(value), expected)
            assert np.array_equal(np.from_dlpack(value), expected.numpy())
        F.mse_loss(pred.squeeze(), torch.tensor(1.0))
    several = stitch.torch.compile(nn.Linear(3, 2), optimizer=torch.optim.SGD(module.parameters()))
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(several(x))


def test_the_shape_of_a_prediction_on_several_devices_is_computed_once() -> None:
    calls = []

    class Counted(Language):
        def forward(self, ids: Any) -> Any:
            calls.append(ids.shape)
            return super().forward(ids)

    module = Counted()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    model = stitch.torch.compile(module, optimizer=optimizer, devices=2, algorithm="data_parallel")
    (ids,) = batches_of(4)
    counts = []
    for _ in range(3):
        pred = model(ids)
        F.cross_entropy(pred.view(-1, pred.size(-1)), ids.view(-1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(len(calls))
    assert counts[0] == counts[1] == counts[2]
