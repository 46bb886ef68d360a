"""Random functions and ONNX models with named sizes, in which operations change nothing and
constants are equal at some sizes only: at each size the text and bytes of compiling there."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from onnx import helper

import stitch
from stitch.errors import CompileError, StitchError
from tests.support import run_seed
from tests.support.onnx.models import info, model

BATCH, LENGTH = stitch.Dim("batch", 1, 12), stitch.Dim("length", 1, 12)
#: By name: what a step makes of a tensor, the first argument, and two small numbers.
STEPS: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "rows": lambda v, x, p, q: v[:p],
    "reshaped": lambda v, x, p, q: v.reshape(-1) if q % 2 else v.reshape(v.shape[0], -1),
    "joined axes": lambda v, x, p, q: v.reshape(x.shape[0] * x.shape[1], -1),
    "exchanged axes": lambda v, x, p, q: v.reshape(*reversed(v.shape)),
    "same shape": lambda v, x, p, q: v.reshape(v.shape),
    "broadcast": lambda v, x, p, q: np.broadcast_to(v, (p, *v.shape)),
    "added": lambda v, x, p, q: v + x,
    "added ones": lambda v, x, p, q: v + np.ones((1,) * len(v.shape), np.float32) * p,
    "repeated rows": lambda v, x, p, q: np.concatenate([v, v[:p]], axis=0),
    "product": lambda v, x, p, q: v @ np.ones((v.shape[-1], q), np.float32),
    "sum": lambda v, x, p, q: v.sum(axis=0, keepdims=bool(q % 2)),
    "mean": lambda v, x, p, q: v.mean(axis=-1, keepdims=True),
    "transpose": lambda v, x, p, q: v.transpose(),
    "tiled": lambda v, x, p, q: np.tile(v, (p,) + (1,) * (len(v.shape) - 1)),
    "first": lambda v, x, p, q: np.take(v, [0], axis=0),
    "padded": lambda v, x, p, q: np.pad(v, [(0, q - 1)] + [(0, 0)] * (len(v.shape) - 1)),
    "maximum": lambda v, x, p, q: np.maximum(v, x.mean()),
    "stacked": lambda v, x, p, q: np.stack([v, v]),
}  # fmt: skip


def random_function(seed: int) -> Callable[[Any, Any], Any]:
    """A function of two arrays that returns the result of each step that is possible."""
    draw = random.Random(seed)
    chosen = [
        (STEPS[draw.choice(list(STEPS))], draw.randint(1, 6), draw.randint(1, 6), draw.random())
        for _ in range(draw.randint(2, 8))
    ]

    def function(x: Any, y: Any) -> Any:
        results = [x, y]
        for step, p, q, back in chosen:
            with suppress(StitchError, ValueError, TypeError, IndexError):
                results.append(step(results[-1 - int(back * min(2, len(results)))], x, p, q))
        return tuple(results[2:]) or x * 2

    return function


def random_onnx(seed: int) -> Any:
    """A model of ONNX whose nodes take shapes from those of other values."""
    draw, nodes, weights = random.Random(seed), list[Any](), dict[str, Any]()

    def add(op: str, *operands: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, operands, [f"t{len(nodes)}"], **attributes))
        return f"t{len(nodes) - 1}"

    def constant(array: Any) -> str:
        name = f"c{len(weights)}"
        weights[name] = np.asarray(array)
        return name

    def whole(*numbers: int) -> str:
        return constant(np.array(numbers, np.int64))

    def entry(value: str, axis: int) -> str:
        chosen = add("Gather", add("Shape", value), constant(np.int64(axis)))
        return add("Unsqueeze", chosen, whole(0))

    def size() -> str:
        if draw.random() < 0.3:
            return whole(draw.randint(1, 6))
        return entry(draw.choice("xy"), draw.randint(0, 1))

    def number(value: float) -> str:
        return constant(np.float32(value))

    values = ["x", "y"]

    def node(v: str, p: int) -> str:
        ways: list[Callable[[], str]] = [
            lambda: add("Slice", v, whole(0), size(), whole(0)),
            lambda: add("Slice", v, whole(0), size(), whole(0), whole(1)),
            lambda: add("Reshape", v, add("Concat", size(), whole(-1), axis=0)),
            lambda: add("Reshape", v, add("Concat", entry(v, 0), whole(-1), axis=0)),
            lambda: add("Expand", v, add("Shape", v)),
            lambda: add("Expand", number(p), add("Concat", size(), size(), axis=0)),
            lambda: add("ConstantOfShape", add("Shape", v)),
            lambda: add("Cast", add("Range", constant(np.int64(0)), add("Squeeze", size()),
                                    constant(np.int64(1))), to=1),
            lambda: add("Mul", v, number(p)),
            lambda: add("Add", v, draw.choice(values)),
            lambda: add("Concat", v, v, axis=0),
            lambda: add("Transpose", v),
            lambda: add("Flatten", v, axis=1),
            lambda: add("ReduceSum", v, whole(p % 3 - 1), keepdims=1),
        ]  # fmt: skip
        return draw.choice(ways)()

    for _ in range(draw.randint(2, 9)):
        values.append(node(draw.choice(values[-3:]), draw.randint(1, 6)))
    declared = [info("x", ["batch", "length", 4]), info("y", ["length", "batch"])]
    return model(nodes, declared, values[2:][-3:], weights, opset=18)


def shapes_at(sizes: Mapping[str, int], y: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    return {
        "x": (sizes["batch"], sizes["length"], 4),
        "y": tuple(sizes.get(size, size) for size in y),
    }


def compared(seed: int, way: str) -> int:
    """Compare a random module at random sizes with compiling there; return at how many."""
    if way == "function":
        module, y = random_function(seed), ["length", 4]
        axes: Any = {"x": {0: BATCH, 1: LENGTH}, "y": {0: LENGTH}}
    else:
        module, y = random_onnx(seed), ["length", "batch"]
        axes = {"batch": BATCH, "length": LENGTH}

    def options(sizes: Mapping[str, int]) -> dict[str, Any]:
        shapes = shapes_at(sizes, y)
        if way == "onnx":
            return {"input_shapes": shapes}
        return {"example_inputs": tuple(np.zeros(s, np.float32) for s in shapes.values())}

    first = options({"batch": 7, "length": 5}) if way == "function" else {}
    try:
        dynamic = stitch.compile(module, dynamic_shapes=axes, **first)
    except CompileError:
        return 0  # It is possible at some sizes only.
    read, draw, count = stitch.load(dynamic.encode()), random.Random(seed), 0
    for _ in range(4):
        sizes = {"batch": draw.randint(1, 12), "length": draw.randint(1, 12)}
        try:
            static = dynamic.at(**sizes)
        except CompileError:
            continue  # A guard does not hold.
        expected = stitch.compile(module, **options(sizes))
        assert static.text() == expected.text(), (seed, sizes)
        assert static.encode() == read.at(**sizes).encode() == expected.encode(), (seed, sizes)
        count += 1
    return count


@pytest.mark.parametrize("way", ["function", "onnx"])
def test_random_modules_equal_compiling_at_each_size(way: str) -> None:
    assert sum(compared(seed, way) for seed in range(12)) > 12


@pytest.mark.campaign("dynamic_sizes")
@pytest.mark.parametrize("way", ["function", "onnx"])
def test_many_random_modules_equal_compiling_at_each_size(way: str) -> None:
    first = run_seed.SEED * 1_000_000
    assert sum(compared(seed, way) for seed in range(first, first + 400)) > 400


def test_what_changes_nothing_at_one_size_is_absent_there() -> None:
    def function(x: Any) -> Any:
        return x[:3] * 2, x.reshape(x.shape[1], x.shape[0]) + 1

    axes = {"x": {0: stitch.Dim("n", 3, 40), 1: stitch.Dim("m", 3, 9)}}
    dynamic = stitch.compile(function, (np.zeros((8, 5), np.float32),), dynamic_shapes=axes)
    for sizes, wanted in (((8, 5), (1, 1)), ((3, 5), (0, 1)), ((5, 5), (1, 0)), ((3, 3), (0, 0))):
        text = dynamic.at(n=sizes[0], m=sizes[1]).text()
        assert (text.count("Slice("), text.count("Reshape(")) == wanted
        assert text == stitch.compile(function, (np.zeros(sizes, np.float32),)).text()
