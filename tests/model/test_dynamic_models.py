"""Dynamic models: what `at` returns equals compiling the module at these sizes, in text and bytes;
calls choose it by their arguments; what a module relied on is named with its line."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from numbers import Integral
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, OutOfMemoryError, UsageError
from stitch.graph.control_flow import scan

RNG = np.random.default_rng(3)


def weights(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


W1, B1, W2, B2 = weights(12, 16), weights(16), weights(16, 5), weights(5)


def mlp(x: Any) -> Any:
    return np.maximum(x @ W1 + B1, 0) @ W2 + B2


K1, K2, HEAD = weights(4, 1, 3, 3), weights(6, 4, 3, 3), weights(6 * 4, 5)


def cnn(x: Any) -> Any:
    b = x.builder
    h = b.pool2d(b.relu(b.conv2d(x, K1)), 2)
    h = b.pool2d(b.relu(b.conv2d(h, K2)), 2)
    return h.reshape(x.shape[0], -1) @ HEAD


WIDTH, HEADS = 8, 2
QUERY, KEY, VALUE, OUT = (weights(WIDTH, WIDTH) for _ in range(4))
UP, DOWN = weights(WIDTH, 3 * WIDTH), weights(3 * WIDTH, WIDTH)


def normalised(x: Any) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)


def transformer_block(x: Any) -> Any:
    batch, length, width = x.shape
    h = normalised(x)
    q, k, v = (
        (h @ w).reshape(batch, length, HEADS, width // HEADS).transpose(0, 2, 1, 3)
        for w in (QUERY, KEY, VALUE)
    )
    scores = np.exp(q @ k.transpose(0, 1, 3, 2))
    attended = scores / scores.sum(axis=-1, keepdims=True) @ v
    x = x + attended.transpose(0, 2, 1, 3).reshape(batch, length, width) @ OUT
    return x + np.maximum(normalised(x) @ UP, 0) @ DOWN


def two_inputs(x: Any, y: Any) -> Any:
    return {"sum": x + y, "product": x @ y.T, "flat": x.reshape(-1), "joined": (x * 2).ravel()}


BATCH, LENGTH = stitch.Dim("batch", 1, 40), stitch.Dim("length", 1, 24)
#: Module, example shapes by input, and their dynamic axes.
MODULES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "mlp": (mlp, {"x": (8, 12)}, {"x": {0: BATCH}}),
    "cnn": (cnn, {"x": (3, 1, 14, 14)}, {"x": {0: BATCH}}),
    "transformer_block": (transformer_block, {"x": (3, 6, WIDTH)}, {"x": {0: BATCH, 1: LENGTH}}),
    "two_inputs": (two_inputs, {"x": (9, 5), "y": (9, 5)}, {"x": {0: BATCH}, "y": {0: BATCH}}),
}


def dynamic_model(name: str) -> stitch.DynamicModel:
    module, shapes, axes = MODULES[name]
    model: stitch.DynamicModel = stitch.compile(module, zeros(shapes.values()), dynamic_shapes=axes)
    return model


def zeros(shapes: Any) -> tuple[Any, ...]:
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


def shapes_at(name: str, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    _, shapes, axes = MODULES[name]
    for slot, shape in shapes.items():
        yield tuple(
            sizes[axes[slot][i].name] if i in axes[slot] else n for i, n in enumerate(shape)
        )


def check_at(model: stitch.DynamicModel, name: str, sizes: Mapping[str, int]) -> None:
    """The static model equals compiling at its sizes; so do its results."""
    static = model.at(**sizes)
    shapes = list(shapes_at(name, sizes))
    expected = stitch.compile(MODULES[name][0], zeros(shapes))
    assert static.text() == expected.text()
    assert static.encode() == expected.encode()
    arguments = [weights(*shape) for shape in shapes]
    results, wanted = model(*arguments), expected(*arguments)
    several = isinstance(wanted, tuple)
    for one, other in zip(*((r if several else (r,)) for r in (results, wanted)), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


@pytest.mark.parametrize("name", MODULES)
def test_every_size_stays_free_and_equals_compiling_there(name: str) -> None:
    model = dynamic_model(name)
    assert not model.program.guards
    for batch, length in ((1, 1), (2, 24), (7, 2), (40, 8)):
        sizes = {"batch": batch, "length": length}
        check_at(model, name, {n: sizes[n] for n in model.program.sizes.dims})


#: Random sizes of a module in the campaign: at which both run, and of its file.
MANY = {"mlp": (2_400, 2_400), "cnn": (1_500, 800), "two_inputs": (800, 400),
        "transformer_block": (500, 250)}  # fmt: skip


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", MODULES)
def test_random_sizes_equal_compiling_there(name: str) -> None:
    model, draw = dynamic_model(name), random.Random(name)
    dims, read = model.program.sizes.dims.values(), stitch.load(model.encode())
    for k in range(MANY[name][0]):
        sizes = {dim.name: draw.randint(dim.least, dim.most) for dim in dims}
        check_at((model, read)[k % 2], name, sizes)


#: Bounds of sizes that are compared without running.
WIDE = {
    "mlp": {"batch": 100_000}, "cnn": {"batch": 20_000},
    "transformer_block": {"batch": 500, "length": 200}, "two_inputs": {"batch": 2_000},
}  # fmt: skip


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("name", MODULES)
def test_a_file_at_random_sizes_equals_compiling_there(name: str) -> None:
    check_file(name, MANY[name][1], random.Random(name))


def check_file(name: str, count: int, draw: random.Random) -> None:
    """A saved and loaded model equals the one saved and compiling, in text and bytes."""
    module, shapes, axes = MODULES[name]
    wide = {slot: {axis: stitch.Dim(dim.name, 1, WIDE[name][dim.name])
                   for axis, dim in by_axis.items()}
            for slot, by_axis in axes.items()}  # fmt: skip
    model = stitch.compile(module, zeros(shapes.values()), dynamic_shapes=wide)
    read = stitch.load(model.encode())
    assert not model.program.guards and read.encode() == model.encode()
    for _ in range(count):
        sizes = {dim.name: draw.randint(1, dim.most) for dim in model.program.sizes.dims.values()}
        expected = stitch.compile(module, zeros(shapes_at(name, sizes)))
        for one in (read.at(**sizes), model.at(**sizes)):
            assert one.text() == expected.text()
            assert one.encode() == expected.encode()


def test_calls_choose_by_shape_and_each_size_is_made_once() -> None:
    model = dynamic_model("mlp")
    x = weights(8, 12)
    whole = np.asarray(model(x))
    assert np.array_equal(np.asarray(model(x=x)), whole)
    assert np.array_equal(np.asarray(model(x.tolist())), whole)
    assert np.asarray(model(x[:3])).shape == (3, 5)
    assert model.models.keys() == {(8,), (3,)}
    assert model.at(batch=3) is model.models[3,]


@pytest.mark.parametrize("axes", [(2, 0), (1, 0), (2, 1), (0, 2, 1), (-1, 0)])
def test_calls_find_the_model_by_every_named_axis(axes: tuple[int, ...]) -> None:
    dims = {axis: stitch.Dim(f"n{i}", 1, 9) for i, axis in enumerate(axes)}
    model = stitch.compile(lambda x: x + 1, zeros([(4, 4, 4)]), dynamic_shapes={"x": dims})
    shapes = [(4, 4, 4)] + [
        tuple(size if at == axis % 3 else 4 for at in range(3)) for axis in axes for size in (1, 9)
    ]
    for shape in shapes * 2:
        assert np.asarray(model(np.zeros(shape, np.float32))).shape == shape
        assert np.asarray(model(ListedShape(shape))).shape == shape
    assert len(model.models) == len(model._by_key) == len(shapes)
    for wrong in [(4,), (4, 4), (4, 4, 4, 4), (1, 10, 10)] * 20:
        with pytest.raises((UsageError, stitch.LinkError)):
            model(np.zeros(wrong, np.float32))
    assert len(model.models) == len(model._by_key) == len(shapes)
    model.models.clear()
    for shape in shapes:  # Found by the shape alone: no model is asked for.
        model(np.zeros(shape, np.float32))
    assert not model.models


def test_calls_find_the_model_by_an_axis_of_each_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    axes = {"x": {0: stitch.Dim("n", 1, 9)}, "y": {1: stitch.Dim("m", 1, 9)}}
    model = stitch.compile(
        lambda x, y: x.sum(axis=1) + y.sum(), zeros([(4, 2), (2, 4)]), dynamic_shapes=axes
    )
    monkeypatch.setattr("stitch.dynamic_model.MAX_MODELS", 3)
    for n, m in [(4, 4), (5, 4), (4, 5), (4, 4), (9, 9), (1, 9)]:
        assert np.asarray(model(*zeros([(n, 2), (2, m)]))).shape == (n,)
        assert len(model._by_key) <= len(model.models) <= 3
    dropped, *others = map(id, model.models.values())
    assert dropped in map(id, model._by_key.values())
    model.at(n=2, m=2)  # The oldest model is dropped, so it is found no more; others are.
    assert {*map(id, model._by_key.values())} == {*others} - {id(model.at(n=2, m=2))}
    for width in range(3, 9):
        with pytest.raises(stitch.LinkError):
            model(*zeros([(4, width), (2, 4)]))
        assert len(model._by_key) <= 3


@pytest.mark.parametrize(
    "axes",
    [
        {"x": "n", "y": "nm", "z": "m"}, {"x": "nm", "y": "mk", "z": "nk"}, {"z": "nmk"},
        {"x": "n", "y": "m", "z": "k"},
    ],
)  # fmt: skip
def test_calls_find_the_model_where_several_arguments_have_a_size(axes: dict[str, str]) -> None:
    def form(arguments: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes.get(size, 4) for size in axes.get(arguments, "").ljust(3))

    sizes = {
        name: stitch.Dim(name, 1, 9) for name in "nmk" if any(name in a for a in axes.values())
    }
    model = stitch.compile(
        lambda x, y, z: (x.sum() + y.sum()) * z,
        zeros([form(name, {}) for name in "xyz"]),
        dynamic_shapes={name: {i: sizes[size] for i, size in enumerate(given)}
                        for name, given in axes.items()},
    )  # fmt: skip
    for values in product((4, 7), repeat=len(sizes)):
        shapes = [form(name, dict(zip(sizes, values, strict=True))) for name in "xyz"]
        for _ in range(2):
            assert np.asarray(model(*zeros(shapes))).shape == shapes[2]
        wrong = [shape if at else (*shape[:-1], 9) for at, shape in enumerate(shapes)]
        with pytest.raises((UsageError, stitch.LinkError)):
            model(*zeros(wrong))


class ListedShape:
    """An array of a library whose shapes are lists, which have no hash."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = list(shape)

    def __array__(self, dtype: Any = None, *, copy: Any = None) -> Any:
        return np.zeros(self.shape, np.float32)


def test_a_static_model_is_an_ordinary_one(tmp_path: Any) -> None:
    model, x = dynamic_model("mlp"), weights(6, 12)
    model.at(batch=6).save(tmp_path / "six.ttb")
    with stitch.open_device("tiny") as device, pytest.raises(stitch.errors.IncompatibleError):
        device.load(tmp_path / "six.ttb")
    with stitch.open_device("wormhole_n150") as device:
        loaded = device.load(tmp_path / "six.ttb")
        assert np.array_equal(loaded(x).numpy(), np.asarray(model(x)))
    assert model.program.at(batch=6).text() == model.at(batch=6).text()


def test_what_static_models_have_is_named_where_a_dynamic_one_is_asked_for_it() -> None:
    model = dynamic_model("mlp")
    with pytest.raises(UsageError, match=r"choose sizes: model.at\(batch=...\).binary"):
        _ = model.binary


def test_a_size_is_a_whole_number_also_where_its_model_is_there() -> None:
    model = dynamic_model("mlp")
    model.at(batch=3)
    wrong: tuple[Any, ...] = (3.0, True, [3])
    for size in wrong:
        with pytest.raises(UsageError, match="needs a whole number as size 'batch'"):
            model.at(batch=size)
    with pytest.raises(UsageError, match=r"got: nothing\n  try: model\.at\(batch=\d+\)"):
        model.at()
    with pytest.raises(stitch.LayoutError, match="input 'x'"):
        model([[1.0] * 5, [1.0]])


@pytest.mark.parametrize(
    "is_whole",
    [
        lambda n: isinstance(n, int), lambda n: isinstance(n, Integral), np.isscalar,
        lambda n: hasattr(n, "bit_length"),
    ],
)  # fmt: skip
def test_a_size_passes_the_tests_for_integers(is_whole: Any) -> None:
    def module(x: Any) -> Any:
        return x * (2 if is_whole(x.shape[0]) else 1)

    model = stitch.compile(
        module, zeros([(8, 2)]), dynamic_shapes={"x": {0: stitch.Dim("batch", 2, 64)}}
    )
    np.testing.assert_array_equal(model(np.ones((5, 2), np.float32)), np.full((5, 2), 2))


def test_the_text_shows_sizes_guards_and_expressions() -> None:
    def halves(x: Any) -> Any:
        count = x.shape[0]
        if count > 4:
            x = x * 2
        return x.reshape(count * 2, -1), np.zeros(count, np.float32) + x[:, 0]

    model = stitch.compile(halves, zeros([(8, 12)]), dynamic_shapes={"x": {0: BATCH}})
    file = "test_dynamic_models.py"
    first = halves.__code__.co_firstlineno
    assert model.text().splitlines() == [
        "dynamic program @halves {",
        "  size batch: 1 to 40",
        f"  guard 4 < batch ({file}:{first + 2})",
        f"  specialised batch == 8 ({file}:{first + 4})",
        "  input x: batchx12xf32",
        "  output output_0: (2*batch)x6xf32",
        "  output output_1: 8xf32",
        "}",
    ]
    assert "input x: %x batchx12xf32" in model.program.graph.text()
    assert "(x: batchx12xf32)" in repr(model.program.graph)
    with pytest.raises(CompileError, match=f"batch == 8\n.*{file}:{first + 4}"):
        model.at(batch=9)
    with pytest.raises(CompileError, match=f"4 < batch\n.*{file}:{first + 2}"):
        model(weights(4, 12))


def test_a_product_of_sizes_that_must_agree_is_a_guard() -> None:
    def module(x: Any, y: Any) -> Any:
        return x + y

    dims = {"x": {0: stitch.Dim("n", 1, 9)}, "y": {0: stitch.Dim("m", 1, 9)}}
    model = stitch.compile(module, zeros([(4, 2), (4, 2)]), dynamic_shapes=dims)
    assert [guard.text().split(" (")[0] for guard in model.program.guards] == ["m == n"]
    assert model.at(n=5, m=5).text() == stitch.compile(module, zeros([(5, 2), (5, 2)])).text()
    with pytest.raises(CompileError, match="m == n"):
        model.at(n=5, m=6)


def test_the_sides_of_an_image_are_not_compared() -> None:
    def module(x: Any) -> Any:
        return x.builder.conv2d(x, weights(2, 3, 3, 3))

    axes = {2: stitch.Dim("h", 3, 64), 3: stitch.Dim("w", 3, 64)}
    model = stitch.compile(module, zeros([(1, 3, 8, 9)]), dynamic_shapes={"x": axes})
    assert not model.program.guards
    assert model.at(h=9, w=8).text() == stitch.compile(module, zeros([(1, 3, 9, 8)])).text()


def coincidences(x: Any) -> Any:
    n = x.shape[0]
    return (
        x[:5] * 2, x[: n // 2], x.reshape(n * 4), np.broadcast_to(x[:1], (n, 4)),
        np.tile(x[:4, :4].reshape(4, 4), (2, 1)), x.reshape(n, 2, 2) + x[:1].reshape(1, 2, 2),
    )  # fmt: skip


def test_sizes_that_coincide_with_others_need_no_guard() -> None:
    axes = {"x": {0: stitch.Dim("n", min=5, max=12)}}
    model = stitch.compile(coincidences, zeros([(8, 4)]), dynamic_shapes=axes)
    assert not model.program.guards
    for n in range(5, 13):
        x = weights(n, 4)
        expected = stitch.compile(coincidences, (x,))(x)
        for one, other in zip(model(x), expected, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(other))


NUMBERS: list[Callable[[Any], Any]] = [
    lambda x: np.clip(x, 0, x.shape[0]), lambda x: np.where(x > 0, x.shape[0], x),
    lambda x: np.where(x > 0, x, x.shape[0] * 2), lambda x: np.clip(x, -x.shape[0], None),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(NUMBERS)))
def test_a_size_as_data_is_specialised(index: int) -> None:
    axes = {"x": {0: stitch.Dim("n", 2, 12)}}
    model = stitch.compile(NUMBERS[index], zeros([(8, 3)]), dynamic_shapes=axes)
    (guard,) = model.program.guards
    assert guard.is_specialised
    x = weights(8, 3) * 10
    assert np.array_equal(np.asarray(model(x)), NUMBERS[index](x))
    with pytest.raises(CompileError, match="== "):
        model(x[:7])


#: Functions of x [n, 3] and y [m, 3], compiled at 8 and 8: a size that breaks the guard, and its
#: text.
BROKEN: dict[str, tuple[Callable[..., Any], dict[str, int], str]] = {
    "comparison": (lambda x, y: x * 2 if x.shape[0] > 4 else x, {"n": 4}, "4 < n"),
    "bound of two": (lambda x, y: x[: min(x.shape[0], 10)], {"n": 11}, "n <= 10"),
    "equality": (lambda x, y: x * 2 if x.shape[0] == 8 else x, {"n": 9}, "n == 8"),
    "inequality": (lambda x, y: x if x.shape[0] == 9 else x * 2, {"n": 9}, "n != 9"),
    "divisibility": (
        lambda x, y: x * 2 if x.shape[0] % 4 == 0 else x, {"n": 10}, "-4*(n // 4) + n == 0"
    ),
    "divisibility of a product": (
        lambda x, y: x.reshape(2, -1), {"n": 7}, "-2*(3*n // 2) + 3*n == 0"
    ),
    "truth of an expression": (
        lambda x, y: x * 2 if x.shape[0] // 8 else x, {"n": 7}, "(n // 8) != 0"
    ),
    "specialised": (lambda x, y: x / x.shape[0], {"n": 9}, "n == 8"),
    "agreement of two inputs": (lambda x, y: x + y, {"m": 9}, "m == n"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_guard_names_the_line_that_relied_on_it(kind: str) -> None:
    function, wrong, text = BROKEN[kind]
    dims = {"x": {0: stitch.Dim("n", 1, 40)}, "y": {0: stitch.Dim("m", 1, 40)}}
    model = stitch.compile(function, zeros([(8, 3), (8, 3)]), dynamic_shapes=dims)
    assert model.at(n=8, m=8).program.outputs
    sizes = {"n": 8, "m": 8, **wrong}
    with pytest.raises(CompileError) as caught:
        model(*zeros([(sizes["n"], 3), (sizes["m"], 3)]))
    line = f"test_dynamic_models.py:{function.__code__.co_firstlineno}"
    assert f"compiled for sizes with {text}\n" in str(caught.value) and line in str(caught.value)
    assert f"n={sizes['n']}, m={sizes['m']}" in str(caught.value)


BAD_CALLS: list[tuple[Sequence[tuple[int, ...]], str]] = [
    ([(3, 5), (4, 5)], r"disagree about size 'batch'"),
    ([(41, 5), (41, 5)], r"out of bounds\n.*x\.shape\[0\](.*\n)*.*Dim\(\"batch\", 1, 41\)"),
    ([(0, 5), (0, 5)], "out of bounds"), ([(), (3, 5)], "number of axes"), ([(3, 5)], "missing: y"),
    ([], "missing: x, y"),
    ([(1, 3, 5), (3, 5)], "'x' has another number of axes"),
    ([(3, 5), (1, 3, 5)], "'y' has another number of axes"), ([(3, 5), (3, 6)], "another shape"),
    ([(3, 6), (3, 6)], "another shape"), ([(3, 5)] * 3, "surplus"),
]  # fmt: skip


@pytest.mark.parametrize(("shapes", "message"), BAD_CALLS)
def test_bad_calls_are_refused(shapes: Sequence[tuple[int, ...]], message: str) -> None:
    model = dynamic_model("two_inputs")
    for _ in range(2):
        with pytest.raises((UsageError, stitch.LinkError), match=message):
            model(*zeros(shapes))
        # The next call finds a model by the first argument.
        model(*zeros([(3, 5)] * 2))


BAD_OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (mlp, {"dynamic_shapes": {"y": {0: BATCH}}}, "'y', which is no input"),
    (mlp, {"dynamic_shapes": {"x": {0: "batch"}}}, "mapping of axes to Dims"),
    (mlp, {"dynamic_shapes": {"x": {}}}, "no input of program 'mlp' has an axis of a named size"),
    (mlp, {"dynamic_shapes": {"x": {0: stitch.Dim("n", 9, 10)}}}, "out of bounds"),
    (mlp, {"optimizer": "sgd", "loss": "mse"}, "only without dynamic_shapes="),
    (mlp, {"algorithm": "search"}, "only without dynamic_shapes="),
    ("model.yaml", {}, "Python functions, ONNX models and torch modules only"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(module: Any, options: dict[str, Any], message: str) -> None:
    given = {"dynamic_shapes": {"x": {0: BATCH}}, **options}
    with pytest.raises(UsageError, match=message):
        stitch.compile(module, zeros([(8, 12)]), **given)


def test_loops_are_refused() -> None:
    def looped(x: Any) -> Any:
        return scan(x.builder, lambda states, rows: ([states[0] + rows[0]], []), [x[0]], [x])[0]

    with pytest.raises(CompileError, match="does not support operations with a body"):
        stitch.compile(looped, zeros([(8, 12)]), dynamic_shapes={"x": {1: BATCH}})


def test_placement_and_options_reach_every_size() -> None:
    options: dict[str, Any] = {"placement": "input.x.space=dram", "name": "other", "target": "tiny"}
    model = stitch.compile(mlp, zeros([(8, 12)]), dynamic_shapes={"x": {0: BATCH}}, **options)
    expected = stitch.compile(mlp, zeros([(11, 12)]), **options)
    assert model.at(batch=11).encode() == expected.encode()


def test_a_program_that_does_not_fit_at_some_sizes_names_them() -> None:
    axes = {"x": {0: stitch.Dim("batch", 1, 10**9)}}
    model = stitch.compile(mlp, zeros([(8, 12)]), dynamic_shapes=axes, target="tiny")
    with pytest.raises(OutOfMemoryError, match="machine 'tiny', at batch=10000000\n"):
        model.at(batch=10**7)
