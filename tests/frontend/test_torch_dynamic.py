"""Torch modules with named sizes, compared with eager torch; modules that are not the same for all
sizes are refused, and sizes at which torch.export assumes too much are excluded."""

from __future__ import annotations

import inspect
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental import symbolic_shapes

import stitch
from stitch.errors import CompileError, StitchError, UsageError

BATCH, LENGTH = stitch.Dim("batch", 1, 40), stitch.Dim("length", 2, 24)


class Layers(nn.Module):  # type: ignore[misc]
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Sizes(nn.Module):  # type: ignore[misc]
    """Sizes as shapes, as positions and as a number."""

    def forward(self, x: Any, y: Any) -> Any:
        n = x.shape[0]
        pairs = x.reshape(n * 2, -1).sum(1).view(n, 2)
        return {"sum": pairs + torch.arange(n)[:, None], "last": x[-1] / n, "both": x + y}


class OneApart(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * 2 if x.shape[0] == 1 else x + 0


class OneNamedApart(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return {"one": x * 2} if x.shape[0] == 1 else {"all": x * 2}


class Clamped(nn.Module):  # type: ignore[misc]
    """What size 1 does shows in large numbers only, and beside many rows only."""

    def forward(self, x: Any, y: Any) -> Any:
        if x.shape[0] == 1:
            x = x.clamp(max=10.0)
        return (x.sum() + y) * 2 if x.shape[0] == 1 and y.shape[0] > 6 else x.sum() + y


class Counted(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * 2, x.shape[0] * 2, x.shape[0] > 3


class Compared(nn.Module):  # type: ignore[misc]
    """torch.export checks no relation between two sizes."""

    def __init__(self, condition: Any) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: Any, y: Any) -> Any:
        return x * 2 if self.condition(x.shape[0], y.shape[0]) else x + 1


class Larger(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return x * 2 if x.shape[0] > 4 else x


def mlp() -> Any:
    return Layers(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))


def cnn() -> Any:
    return Layers(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                  nn.Linear(4 * 36, 5))  # fmt: skip


def transformer_block() -> Any:
    return Layers(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))


#: Module, example, and its dynamic axes.
MODULES: dict[str, tuple[Any, tuple[int, ...], dict[int, stitch.Dim]]] = {
    "mlp": (mlp, (8, 12), {0: BATCH}),
    "cnn": (cnn, (3, 1, 14, 14), {0: BATCH}),
    "transformer block": (transformer_block, (3, 6, 16), {0: BATCH, 1: LENGTH}),
}


def compiled(name: str) -> tuple[Any, stitch.DynamicModel]:
    torch.manual_seed(3)
    make, shape, axes = MODULES[name]
    module = make().eval()
    return module, stitch.compile(module, (torch.randn(shape),), dynamic_shapes={"x": axes})


def arrays(results: Any) -> Any:
    """Results of Stitch or torch as tensors of torch."""
    if isinstance(results, dict):
        return {name: arrays(value) for name, value in results.items()}
    return torch.as_tensor(np.asarray(results))


def check(name: str, module: Any, model: stitch.DynamicModel, *sizes: int) -> None:
    _, shape, axes = MODULES[name]
    x = torch.randn([dict(zip(axes, sizes, strict=True)).get(i, n) for i, n in enumerate(shape)])
    with torch.no_grad():
        torch.testing.assert_close(arrays(model(x)), module(x), rtol=1e-4, atol=1e-5)


def test_an_mlp_stays_free_with_dims_of_either_kind() -> None:
    module, model = compiled("mlp")
    dim = torch.export.Dim("batch", min=1, max=40)
    other = stitch.compile(module, (np.zeros((4, 12), np.float32),), dynamic_shapes=[{0: dim}])
    assert model.text() == other.text()
    assert model.text().splitlines()[1:3] == ["  size batch: 1 to 40", "  input x: batchx12xf32"]
    for batch in (1, 2, 7, 40):
        check("mlp", module, model, batch)
    assert stitch.load(model.encode()).at(batch=3).encode() == model.at(batch=3).encode()


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", MODULES)
def test_modules_give_what_eager_torch_gives_at_random_sizes(name: str) -> None:
    module, model = compiled(name)
    assert not model.program.guards
    draw, dims = random.Random(name), list(MODULES[name][2].values())
    check(name, module, model, *(dim.least for dim in dims))
    for _ in range(20):
        check(name, module, model, *(draw.randint(dim.least, dim.most) for dim in dims))


@pytest.mark.campaign("dynamic_sizes")
def test_sizes_of_a_module_may_be_shapes_positions_and_numbers() -> None:
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    axes = {0: stitch.Dim("batch", 2, 40)}
    model = stitch.compile(Sizes(), (x, y), dynamic_shapes={"x": axes, "y": axes})
    assert [guard.is_specialised for guard in model.program.guards] == [True]  # x / n
    torch.testing.assert_close(arrays(model(x, y)), Sizes()(x, y))
    with pytest.raises(CompileError, match="batch == 8"):
        model(x[:5], y[:5])
    for sizes in [(5, 8), (8, 5)]:
        with pytest.raises(UsageError, match="disagree about size 'batch'"):
            model(x[: sizes[0]], y[: sizes[1]])


class Scaled(nn.Module):  # type: ignore[misc]
    def forward(self, pair: Any) -> Any:
        return pair[0].sum() * pair[1]


def test_arguments_of_a_module_that_disagree_about_a_size_are_named() -> None:
    x, y = torch.randn(8), torch.randn(8)
    model = stitch.compile(Scaled(), ((x, y),), dynamic_shapes=(({0: BATCH}, {0: BATCH}),))
    torch.testing.assert_close(arrays(model((x, y))), Scaled()((x, y)))
    for shorter in [(x[:5], y), (x, y[:5])]:
        with pytest.raises(UsageError, match="disagree about size 'batch'"):
            model(shorter)


class Positions(nn.Module):  # type: ignore[misc]
    """Ranges, the last element of an axis, and attention whose mask hides a row or not."""

    def forward(self, x: Any) -> Any:
        length = x.shape[1]
        positions = torch.arange(length)
        x = x + positions[:, None] * 0.5 + torch.arange(0, length * 2, 2)[None, :, None]
        last = x[:, -1:]
        columns = torch.arange(4)[None, None]
        if x.shape[0] != 1:
            columns = columns.expand(x.shape[0], -1, -1)
            columns = torch.where(torch.tensor([True]), columns, torch.tensor(0))
        x = (x + columns) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        # At length 4 the first row sees nothing.
        seen = (positions[:, None] >= positions) & (positions + 4 != length)
        functions = nn.functional
        masked = functions.scaled_dot_product_attention(x, x, x, seen)
        return functions.scaled_dot_product_attention(masked, x, x, is_causal=True) + last


def same_texts(module: Any, example: Any, axes: dict[int, stitch.Dim], *sizes: Any) -> None:
    """Compare the text at each of some sizes with that of compiling there."""
    names = [dim.name for dim in axes.values()]
    with torch.no_grad():
        model = stitch.compile(module, (example(*sizes[0]),), dynamic_shapes=(axes,))
        for at in sizes[1:]:
            static = stitch.compile(module, (example(*at),))
            there = model.at(**dict(zip(names, at, strict=True)))
            assert there.text() == static.text(), at
            assert there.encode() == static.encode(), at


def test_a_module_at_a_size_has_the_text_of_compiling_there() -> None:
    sizes = [(3, 5), (2, 2), (4, 3), (2, 9), (7, 4), (2, 6), (1, 8)]
    same_texts(
        nn.Sequential(Positions()), lambda b, n: torch.zeros(b, n, 4), {0: BATCH, 1: LENGTH}, *sizes
    )


def test_ranges_of_equal_and_of_other_sizes_are_told_apart() -> None:
    class Ranges(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            rows, columns = torch.arange(x.shape[0]), torch.arange(x.shape[1])
            three, four = torch.arange(3), torch.arange(4)
            return x + rows[:, None] * 10 + columns, three[:, None] * four

    same_texts(Ranges(), torch.zeros, {0: BATCH, 1: LENGTH}, (3, 5), (4, 4), (3, 4), (4, 3))


class Resized(nn.Module):  # type: ignore[misc]
    """Nearest resizing to the size of another tensor, by whole scales, and to a fixed size."""

    def forward(self, x: Any) -> Any:
        resize, half = nn.functional.interpolate, nn.functional.max_pool2d(x, 2)
        back = x + resize(half, size=x.shape[-2:])
        return back, resize(half, scale_factor=(2, 3)), resize(x, size=(5, 7)), resize(x, (64, 9))


def test_nearest_resizing_keeps_named_sizes() -> None:
    module, axes = Resized(), {2: stitch.Dim("rows", 4, 40), 3: stitch.Dim("columns", 4, 24)}

    def example(rows: int, columns: int) -> Any:
        return torch.randn(1, 2, rows, columns)

    same_texts(module, example, axes, (6, 8), (4, 5), (40, 24), (5, 7))
    model = stitch.compile(module, (example(6, 8),), dynamic_shapes=(axes,))
    assert not model.program.guards
    for sizes in ((6, 8), (7, 9), (40, 4), (5, 7)):
        x = example(*sizes)
        for ours, theirs in zip(model(x), module(x), strict=True):
            assert torch.equal(arrays(ours), theirs)


class Written(nn.Module):  # type: ignore[misc]
    """Writes an element of each row: torch.export writes a slice of all rows for named sizes."""

    def forward(self, x: Any) -> Any:
        y = x.clone()
        y[:, 0] = 1.0
        y[..., 1].add_(2.0)
        return y


def test_writes_of_whole_axes_keep_named_sizes() -> None:
    example, axes = torch.ones, {0: BATCH, 1: LENGTH}
    same_texts(Written(), example, axes, (3, 5), (1, 2), (40, 24))
    model = stitch.compile(Written(), (example(3, 5),), dynamic_shapes=(axes,))
    assert not model.program.guards
    assert torch.equal(arrays(model(example(4, 7))), Written()(example(4, 7)))


class Shifted(nn.Module):  # type: ignore[misc]
    """Writes parts of named axes, and every second element of another one."""

    def forward(self, x: Any) -> Any:
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[1:-1, 2:3] += 2.0
        y[..., ::2] *= 3.0
        return y


def test_writes_of_parts_of_axes_keep_named_sizes() -> None:
    def example(batch: int, length: int) -> Any:
        return torch.randn(batch, length, 5)

    axes = {0: stitch.Dim("batch", 4, 40), 1: stitch.Dim("length", 4, 24)}
    same_texts(Shifted(), example, axes, (6, 8), (4, 4), (40, 24))
    model = stitch.compile(Shifted(), (example(6, 8),), dynamic_shapes=(axes,))
    assert not any(guard.is_specialised for guard in model.program.guards)
    for x in (example(4, 4), example(5, 7)):
        assert torch.equal(arrays(model(x)), Shifted()(x))


def test_pools_that_round_sizes_up_keep_named_sizes() -> None:
    module = nn.MaxPool2d(3, 2, ceil_mode=True)
    axes = {2: stitch.Dim("height", 5, 40), 3: stitch.Dim("width", 5, 24)}
    model = stitch.compile(module, (torch.randn(2, 3, 9, 8),), dynamic_shapes=(axes,))
    assert not model.program.guards
    for sizes in [(5, 6), (8, 7), (40, 24)]:
        x = torch.randn(2, 3, *sizes)
        assert torch.equal(arrays(model(x)), module(x))


class Moved(nn.Module):  # type: ignore[misc]
    """Writes slices of an axis of a fixed size, reverses axes, and pads by the other end."""

    def forward(self, x: Any) -> Any:
        y, z = x.clone(), torch.zeros(x.shape[0], 9, x.shape[2])
        y[:, :2] = 1.0
        y[:, 3:5] += x[:, :2]
        y[:, -1:] = 0.5
        y[:, 7:] = 2.0
        z[:, 1:-1:2] = x[:, 2:6]
        z[:, 8:3] = 4.0
        y[:, 0:6] *= 2.0
        return y, z, x.flip(0), x.flip(2, 1), nn.functional.pad(x, (1, 2, 2, 1), mode="circular")


def test_writes_of_slices_and_reversals_keep_named_sizes() -> None:
    axes = {0: BATCH, 2: LENGTH}

    def example(batch: int, length: int) -> Any:
        return torch.arange(batch * 6.0 * length).reshape(batch, 6, length)

    class Written(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return Moved()(x)[:4]

    same_texts(Written(), example, axes, (3, 5), (1, 2), (40, 24))
    model = stitch.compile(Written(), (example(3, 6),), dynamic_shapes=(axes,))
    assert not model.program.guards
    padded = stitch.compile(Moved(), (example(3, 6),), dynamic_shapes=({0: BATCH},))
    assert not padded.program.guards
    for batch, length in ((3, 6), (5, 6), (1, 2)):
        x = example(batch, length)
        for ours, theirs in zip(model(x), Written()(x), strict=True):
            assert torch.equal(arrays(ours), theirs)
    for ours, theirs in zip(padded(example(7, 6)), Moved()(example(7, 6)), strict=True):
        assert torch.equal(arrays(ours), theirs)


def test_instance_normalization_keeps_named_sizes() -> None:
    module, axes = nn.InstanceNorm1d(4), {0: BATCH, 2: LENGTH}

    def example(batch: int, length: int) -> Any:
        return torch.randn(batch, 4, length)

    same_texts(module, example, axes, (3, 6), (1, 2), (40, 24))
    model = stitch.compile(module, (example(3, 6),), dynamic_shapes=(axes,))
    assert not model.program.guards
    x = example(5, 7)
    torch.testing.assert_close(arrays(model(x)), module(x))


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM", "GPT2Model"])
def test_a_language_model_at_a_size_has_the_text_of_compiling_there(name: str) -> None:
    import transformers

    small = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 60,
        "use_cache": False, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    module = getattr(transformers, name)
    torch.manual_seed(0)
    network = module(module.config_class(**small)).eval()
    draw = random.Random(name)
    sizes = [(3, 5), *[(draw.randint(2, 40), draw.randint(2, 24)) for _ in range(3)], (1, 9)]
    words = partial(torch.ones, dtype=torch.int64)
    same_texts(network, words, {0: BATCH, 1: LENGTH}, *sizes)


def test_a_size_at_which_the_module_has_another_graph_is_excluded() -> None:
    model = stitch.compile(OneApart(), (torch.randn(8, 3),), dynamic_shapes={"x": {0: BATCH}})
    torch.testing.assert_close(arrays(model(torch.ones(2, 3))), torch.ones(2, 3))
    with pytest.raises(CompileError, match=r'another graph there\n.*\n.*Dim\("batch", 2, 40\)'):
        model(torch.ones(1, 3))


def test_a_size_stays_only_where_the_graph_is_the_same() -> None:
    n, m = stitch.Dim("n", 1, 9), stitch.Dim("m", 1, 9)
    x, y = torch.randn(4, 3), torch.randn(5)
    model = stitch.compile(Clamped(), (x, y), dynamic_shapes=[{0: n}, {0: m}])
    assert [guard.text().partition(" (")[0] for guard in model.program.guards] == ["n != 1"]
    torch.testing.assert_close(arrays(model(x, y[:1])), Clamped()(x, y[:1]))
    with pytest.raises(CompileError, match=r'n != 1\n(?s:.*)Dim\("n", 2, 9\)'):
        model(torch.full((1, 3), 50.0), y)
    named = stitch.compile(OneNamedApart(), (x,), dynamic_shapes=[{0: n}])
    assert named(x).keys() == {"all"}
    with pytest.raises(CompileError, match="n != 1"):
        named(x[:1])


def test_a_size_among_the_results_is_a_number_of_its_compilation() -> None:
    x = torch.randn(8, 3)
    model = stitch.compile(Counted(), (x,), dynamic_shapes={"x": {0: stitch.Dim("n", 2, 9)}})
    _, twice, is_large = model(x)
    assert type(twice) is int and twice == 16 and is_large is True
    with pytest.raises(CompileError, match=r"2\*n == 16"):
        model(x[:5])


BAD: list[tuple[Any, Any, str]] = [
    (mlp(), {"z": {0: BATCH}}, "'z', which is no argument of forward"),
    (mlp(), {"x": {2: BATCH}}, "axis 2 of 'x', which has 2 axes"),
    (mlp(), {"x": {0: BATCH, -2: BATCH}}, "twice"),
    (mlp(), {"x": {0: "batch"}}, "Dims with a name and bounds"),
    (mlp(), {"x": {0: torch.export.Dim.AUTO}}, "Dims with a name and bounds"),
    (mlp(), {"x": {0: 2 * torch.export.Dim("half")}}, "Dims with a name and bounds"),
    (mlp(), {"x": BATCH}, "mapping of axes to Dims"),
    (mlp(), {"x": {0: stitch.Dim("batch", 9, 10)}}, "out of bounds"),
    (mlp(), {"x": {1: BATCH}}, "not the same for all sizes|refuses these examples|12"),
    (mlp(), {"x": None}, "names no axis"),
    (mlp(), [{0: BATCH}, None], "more elements than forward has arguments"),
    (mlp(), [[None, stitch.Dim("n", 2, 20)]], "captured for axis 1 of 'x' = 12 alone\n"),
    (mlp(), [[BATCH, 13]], "and sizes of the example\n.*axis 1\n(?s:.*)got: 13"),
    (mlp(), [[BATCH, BATCH]], "two sizes of 'batch'\n.*axis 1\n.*expected: 8\n.*got: 12"),
    (mlp(), [[stitch.Dim("one", 8, 8)]], "has one size"),
    (mlp(), {"x": {"0": BATCH}}, "axis '0' of 'x'"),
    (
        torch.export.export(nn.Linear(12, 3), (torch.randn(8, 12),)), {"input": {0: BATCH}},
        r"captured for axis 0 of 'input' = 8 alone\n(?s:.*)torch.export.export\(",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shapes", "message"), BAD)
def test_dynamic_shapes_that_do_not_fit_are_refused(module: Any, shapes: Any, message: str) -> None:
    with pytest.raises(StitchError, match=message):
        stitch.compile(module, (torch.randn(8, 12),), dynamic_shapes=shapes)


@pytest.mark.campaign("dynamic_sizes")
def test_an_exported_program_keeps_its_dims() -> None:
    module = mlp().eval()
    dim = torch.export.Dim("batch", min=2, max=40)
    x = torch.randn(8, 12)
    program = torch.export.export(module, (x,), dynamic_shapes={"x": {0: dim}})
    model = stitch.compile(program, dynamic_shapes={"x": {0: dim}})
    with torch.no_grad():
        torch.testing.assert_close(arrays(model(x[:3])), module(x[:3]), rtol=1e-4, atol=1e-5)


class Sum(nn.Module):  # type: ignore[misc]
    def forward(self, x: Any, y: Any) -> Any:
        return x + y


def test_what_torch_relies_on_is_a_guard() -> None:
    shapes = {"x": {0: stitch.Dim("n", 2, 9)}, "y": {0: stitch.Dim("m", 2, 9)}}
    model = stitch.compile(Sum(), (torch.ones(3, 4), torch.ones(3, 4)), dynamic_shapes=shapes)
    assert np.asarray(model(torch.ones(5, 4), torch.ones(5, 4))).tolist() == [[2.0] * 4] * 5
    with pytest.raises(CompileError, match=r"compiled for sizes with (n == m|m == n)"):
        model(torch.ones(5, 4), torch.ones(2, 4))
    large = stitch.compile(Larger(), (torch.ones(8, 4),), dynamic_shapes={"x": {0: BATCH}})
    assert np.asarray(large(torch.ones(5, 4))).tolist() == Larger()(torch.ones(5, 4)).tolist()
    with pytest.raises(CompileError, match="4 < batch"):
        large(torch.ones(4, 4))


class Halved(nn.Module):  # type: ignore[misc]
    """Pools and resizes again, as a U-Net does: only even sizes fit."""

    def forward(self, x: Any) -> Any:
        half = nn.functional.max_pool2d(x, 2)
        return torch.cat([x, nn.functional.interpolate(half, scale_factor=2)], 1)


def test_sizes_that_must_be_even_are_a_guard() -> None:
    example, axes = partial(torch.randn, 1, 2), {2: BATCH, 3: stitch.Dim("columns", 4, 24)}
    model = stitch.compile(Halved(), (example(6, 8),), dynamic_shapes=(axes,))
    for sizes in ((6, 8), (40, 4), (4, 22)):
        x = example(*sizes)
        assert torch.equal(arrays(model(x)), Halved()(x))
    with pytest.raises(CompileError, match=re.escape("2*(columns // 2) == columns")):
        model(example(6, 7))


class SameShape(nn.Module):  # type: ignore[misc]
    """At one row, and there only, columns are compared."""

    def forward(self, x: Any, y: Any) -> Any:
        row = x.reshape(1, -1)
        return row + y if row.shape == y.shape else row - y.mean()


def test_a_size_of_1_is_excluded_where_it_relies_on_more() -> None:
    rows = stitch.Dim("rows", 1, 9)
    axes = {"x": {0: rows, 1: stitch.Dim("n", 2, 9)}, "y": {0: rows, 1: stitch.Dim("m", 2, 9)}}
    examples = torch.randn(4, 5), torch.randn(4, 3)
    model = stitch.compile(SameShape(), examples, dynamic_shapes=axes)
    for n, m in ((5, 3), (6, 6)):
        x, y = torch.randn(2, n), torch.randn(2, m)
        torch.testing.assert_close(arrays(model(x, y)), SameShape()(x, y))
    with pytest.raises(CompileError, match="rows != 1"):
        model(torch.randn(1, 6), torch.randn(1, 6))


def test_sizes_that_a_decomposition_of_torch_fixes_are_guards() -> None:
    halves = Layers(nn.AdaptiveMaxPool2d(2))
    shapes = {"x": {2: stitch.Dim("height", 4, 16)}}
    model = stitch.compile(halves, (torch.zeros(2, 3, 8, 4),), dynamic_shapes=shapes)
    x = torch.randn(2, 3, 8, 4)
    assert np.array_equal(model(x).numpy(), halves(x).numpy())
    for height in (4, 9, 16):
        with pytest.raises(CompileError, match=r"compiled for sizes with (.|\n)*height // 2"):
            model(torch.randn(2, 3, height, 4))


def test_a_guard_that_an_operator_of_torch_needs_names_the_line_of_the_module() -> None:
    before = symbolic_shapes.uninteresting_files
    shapes = {"x": {2: BATCH, 3: stitch.Dim("columns", 4, 24)}}
    model = stitch.compile(Halved(), (torch.zeros(1, 2, 6, 8),), dynamic_shapes=shapes)
    assert symbolic_shapes.uninteresting_files is before
    (guard,) = [g for g in model.program.guards if str(g.left) == "2*(columns // 2)"]
    first = inspect.getsourcelines(Halved.forward)[1]
    assert guard.line == f"{Path(__file__).name}:{first + 2}"


@pytest.mark.parametrize(
    "condition",
    [
        lambda b, n: b == n,
        lambda b, n: b > n,
        lambda b, n: b * n > 12,
        lambda b, n: b * n <= 12 and n != 2 * b,
        lambda b, n: max(b, n) == n,
    ],
)
def test_relations_between_sizes_on_which_a_module_relies_are_guards(condition: Any) -> None:
    module, y = Compared(condition), torch.zeros(5, 1)
    shapes = {"x": {0: stitch.Dim("b", 2, 7)}, "y": {0: stitch.Dim("n", 2, 7)}}
    model = stitch.compile(module, (torch.zeros(3, 1), y), dynamic_shapes=shapes)
    sizes = [(b, n) for b in range(2, 8) for n in range(2, 8)]
    others = [pair for pair in sizes if condition(*pair) != condition(3, 5)]
    for b, n in others:
        with pytest.raises(CompileError, match=r"for sizes with (.|\n)*test_torch_dynamic"):
            model.at(b=b, n=n)
    assert others and len(model.program.guards) <= 2


def test_the_larger_of_two_sizes_is_a_size() -> None:
    class Rows(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.arange(9)[max(0, 9 - x.shape[0]) :]

    shapes = {"x": {0: stitch.Dim("n", 2, 8)}}
    model = stitch.compile(Rows(), (torch.zeros(5),), dynamic_shapes=shapes)
    assert not model.program.guards
    assert model(torch.zeros(4)).numpy().tolist() == [5, 6, 7, 8]


def test_a_number_that_depends_on_data_is_refused_with_its_operator() -> None:
    class Counts(nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.bincount((x > 0).long(), minlength=5)[:2]

    with pytest.raises(CompileError, match=r"computed from sizes or data; got .*built-in function"):
        stitch.compile(Counts(), (torch.ones(8),), dynamic_shapes=[{0: BATCH}])
