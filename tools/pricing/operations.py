"""The operations that are measured: small programs, each of one operator, at several sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.compiler import CompileOptions, compile_graph
from stitch.graph import ComputationGraphBuilder, scan
from stitch.machine import load_machine
from stitch.ops import multiply_adds
from stitch.program import Array, Program

MACHINE = load_machine("host")
#: Columns of a matrix of elements, and of a row that is normalised: as wide as it is high.
_LEAST_EDGE = 8
#: Operations of a chain.
CHAIN = 6
#: Rounds of a scan, and operations of the longer bodies.
ROUNDS, MORE = 64, 9
#: Matrices of a batch, and their edge.
BATCH, SMALL = 64, 16
#: Images of a training's batch: of its convolutions, and of the rest; channels of a block, and
#: blocks of what is computed long with.
MANY_IMAGES, IMAGES, BLOCK = 64, 16, 16
BLOCKS = 4
#: Multiply-adds for each element that is read or made: by blocks, and by points.
BLOCK_PRODUCTS, POINT_PRODUCTS = BLOCKS * BLOCK * 9 / 2, BLOCK / 2
_AS_WRITTEN = CompileOptions(optimize=False)

_Build = Callable[[ComputationGraphBuilder], Any]


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredOperation:
    """A program on operands, its name, and its size: multiply-adds of products, else elements."""

    name: str
    size: int
    program: Program
    inputs: tuple[Array, ...]


def _measured(name: str, build: _Build, size: int = 0) -> MeasuredOperation:
    builder = ComputationGraphBuilder("measured")
    builder.output("y", build(builder))
    program = compile_graph(builder.build(), MACHINE, _AS_WRITTEN).program
    draw, inputs = np.random.default_rng(0), []
    for slot in program.inputs:
        kind = program.values[slot.value].type
        drawn = draw.random(kind.shape) * 0.9 + 0.05
        dtype = kind.data_type.dtype
        inputs.append(np.ascontiguousarray(drawn < 0.5 if dtype == np.bool_ else drawn, dtype))
    products = sum(multiply_adds(o, program.values) for o in program.operations)
    if not size:
        size = products or max(math.prod(v.type.shape) for v in program.values)
    return MeasuredOperation(name, size, program, tuple(inputs))


def _edges(largest: int) -> tuple[int, int, int]:
    """Edges of square matrices of the three sizes."""
    edge = max(_LEAST_EDGE, math.isqrt(largest))
    return max(_LEAST_EDGE, edge // 16), max(_LEAST_EDGE, edge // 4), edge


def _one(edge: int, op: str, domain: str, more: int, attributes: dict[str, Any], b: Any) -> Any:
    """An operator on `1 + more` matrices."""
    given = [b.input(f"x{i}", (edge, edge), "float32") for i in range(1 + more)]
    return b.op(op, *given, domain=domain, **attributes)


def _reduced(edge: int, op: str, b: Any) -> Any:
    return b.op(op, b.input("x", (edge, edge), "float32"), [-1])


def _power(edge: int, b: Any) -> Any:
    return b.op("Pow", b.input("x", (edge, edge), "float32"), 3.0)


def _chosen(edge: int, b: Any) -> Any:
    x, y = (b.input(n, (edge, edge), "float32") for n in "xy")
    return b.op("Where", b.input("c", (edge, edge), "bool"), x, y)


def _normalised(edge: int, op: str, b: Any) -> Any:
    x, scale = b.input("x", (edge, edge), "float32"), b.constant(np.ones(edge, np.float32))
    return b.op(op, x, scale)


def _layer_gradient(edge: int, b: Any) -> Any:
    gradient, x = (b.input(n, (edge, edge), "float32") for n in ("gradient", "x"))
    mean, inverse = (b.input(n, (edge, 1), "float32") for n in ("mean", "inverse"))
    scale = b.input("scale", (edge,), "float32")
    return b.op("LayerNormalizationGradient", gradient, x, mean, inverse, scale,
                domain="stitch", outputs=3)[0]  # fmt: skip


def _image(edge: int, b: Any, name: str = "x", part: int = 1) -> Any:
    """An image of as many elements as a matrix has, in channels of 8 by 8 or more."""
    side = max(8, edge // 16)
    channels = max(1, edge * edge // side**2)
    return b.input(name, (1, channels, side // part, side // part), "float32")


def _pooled(edge: int, op: str, attributes: dict[str, Any], b: Any) -> Any:
    return b.op(op, _image(edge, b), **attributes)


def _pool_gradient(edge: int, b: Any) -> Any:
    small = [_image(edge, b, name, 2) for name in ("gradient", "y")]
    return b.op("MaxPoolGradient", small[0], _image(edge, b), small[1], domain="stitch",
                kernel_shape=[2, 2], strides=[2, 2])  # fmt: skip


def _batch_normalised(edge: int, b: Any) -> Any:
    x = _image(edge, b)
    figures = [b.constant(np.full(x.shape[1], v, np.float32)) for v in (1.0, 0.1, 0.1, 1.0)]
    return b.op("BatchNormalization", x, *figures)


def _batch_gradient(edge: int, b: Any) -> Any:
    side = max(8, edge // 64)
    shape = (IMAGES, max(1, edge * edge // side**2 // IMAGES), side, side)
    images = (b.input(name, shape, "float32") for name in ("gradient", "x"))
    figures = (b.input(name, (shape[1],), "float32") for name in ("scale", "mean", "variance"))
    return b.op("BatchNormalizationGradient", *images, *figures, domain="stitch",
                outputs=3)[0]  # fmt: skip


def _scattered(edge: int, b: Any) -> Any:
    x, rows = b.input("x", (edge, edge), "float32"), np.arange(edge, dtype=np.int64)[::2, None]
    return b.op("ScatterND", x, rows, b.input("updates", (len(rows), edge), "float32"))


def _functions(edge: int) -> Iterator[tuple[str, _Build]]:
    for op in ("Erf", "Exp", "Gelu", "Log", "Sigmoid", "Softplus", "Tanh"):
        yield op, partial(_one, edge, op, "", 0, {})
    for op in ("LogSoftmax", "Softmax"):
        yield op, partial(_one, edge, op, "", 0, {"axis": -1})
    for op in ("ReduceMean", "ReduceSum"):
        yield op, partial(_reduced, edge, op)
    for op in ("LayerNormalization", "RMSNormalization"):
        yield op, partial(_normalised, edge, op)
    yield "Pow", partial(_power, edge)
    yield "Where", partial(_chosen, edge)
    yield "ScatterND", partial(_scattered, edge)
    yield "BatchNormalization", partial(_batch_normalised, edge)
    # 64 elements of a window: `division.USUAL_WINDOW`.
    window = {"kernel_shape": [8, 8], "strides": [8, 8]}
    yield "AveragePool", partial(_pooled, edge, "AveragePool", window)
    halved = {"kernel_shape": [2, 2], "strides": [2, 2]}
    yield "MaxPool", partial(_pooled, edge, "MaxPool", halved)
    yield "GlobalAveragePool", partial(_pooled, edge, "GlobalAveragePool", {})
    yield "stitch.BatchNormalizationGradient", partial(_batch_gradient, edge)
    yield "stitch.GeluGradient", partial(_one, edge, "GeluGradient", "stitch", 1, {})
    softmax = {"axis": -1}
    yield "stitch.SoftmaxGradient", partial(_one, edge, "SoftmaxGradient", "stitch", 1, softmax)
    yield "stitch.LayerNormalizationGradient", partial(_layer_gradient, edge)
    yield "stitch.MaxPoolGradient", partial(_pool_gradient, edge)


def _product(rows: int, edge: int, is_constant: bool, b: Any) -> Any:
    x = b.input("x", (rows, edge), "float32")
    if is_constant:
        drawn = np.random.default_rng(1).random((edge, edge), np.float32)
        return b.matmul(x, b.parameter("w", drawn))
    return b.matmul(x, b.input("w", (edge, edge), "float32"))


def _turned_product(rows: int, edge: int, b: Any) -> Any:
    """A linear layer, with its bias: some add that in a second pass."""
    x, w = b.input("x", (rows, edge), "float32"), b.input("w", (edge, edge), "float32")
    return b.op("Gemm", x, w, b.input("bias", (edge,), "float32"), transB=1)


def _batched(b: Any) -> Any:
    x, y = (b.input(n, (BATCH, SMALL, SMALL), "float32") for n in "xy")
    return b.matmul(x, y)


def _convolved(channels: int, side: int, b: Any) -> Any:
    drawn = np.random.default_rng(1).random((channels, channels, 3, 3), np.float32) - 0.5
    x = b.input("x", (1, channels, side, side), "float32")
    return b.op("Conv", x, b.parameter("w", drawn), pads=[1] * 4)


def _by_no_constants(op: str, shape: tuple[int, ...], b: Any) -> Any:
    w = b.input("w", (shape[1], shape[1], 3, 3), "float32")
    return b.op(op, b.input("x", shape, "float32"), w, pads=[1] * 4)


def _by_points(images: int, side: int, b: Any) -> Any:
    # Little is computed of what is read and made.
    x = b.input("x", (images, BLOCK, side, side), "float32")
    return b.op("Conv", x, b.input("w", (BLOCK, BLOCK, 1, 1), "float32"))


def _batch_of_images(edge: int) -> tuple[int, int, int, int]:
    """Of a training: many images of few channels, each a small product by itself."""
    channels, side = max(1, edge // 64), max(4, edge // 64)
    return MANY_IMAGES, channels, side, side


def _weights_gradient(edge: int, b: Any) -> Any:
    x, gradient = (b.input(n, _batch_of_images(edge), "float32") for n in ("x", "gradient"))
    return b.op("ConvWeightGradient", x, gradient, domain="stitch", kernel_shape=[3, 3],
                pads=[1] * 4)  # fmt: skip


def _turned(edge: int, b: Any) -> Any:
    # Heads of attention: rows of 8 elements and more change places.
    width = max(_LEAST_EDGE, edge // 16)
    x = b.input("x", (edge, edge // width, width), "float32")
    return b.transpose(x, (1, 0, 2))


def _added(edge: int, count: int, b: Any) -> Any:
    x = b.input("x", (edge, edge), "float32")
    for index in range(count):
        x = x + b.input(f"y{index}", (edge, edge), "float32")
    return x


def _chain(edge: int, op: str, b: Any) -> Any:
    """A function and an addition in turns: all of one length, for chunks."""
    x, y = (b.input(n, (edge, edge), "float32") for n in "xy")
    c = b.input("c", (edge, edge), "bool") if op == "Where" else None
    for _ in range(CHAIN // 2):
        if op == "Where":
            x = b.op("Where", c, x, y)
        elif op in ("Add", "Div"):
            x = b.op(op, x, y)
        else:
            x = b.op(op, x)
        x = b.op("Mul", x, y)
    return x


def _rounds(count: int, operations: int, elements: int, b: Any) -> Any:
    y = b.constant(np.full(_LEAST_EDGE, 0.01, np.float32))

    def step(states: Any, given: Any) -> Any:
        x = states[0]
        for index in range(operations):
            x = x + (given[index] if given else y)
        return [x], []

    xs = [b.parameter(f"xs{i}", np.zeros((count, _LEAST_EDGE), np.float32))
          for i in range(elements)]  # fmt: skip
    (last,), _ = scan(b, step, [b.input("x", (_LEAST_EDGE,), "float32")], xs, count=count)
    return last


#: Functions that have a price in chunks.
CHUNKED = ("Add", "Div", "Erf", "Exp", "Log", "Sigmoid", "Sqrt", "Tanh", "Where")
TINY = 4


def measured_operations(largest: int) -> Iterator[MeasuredOperation]:
    """All that is measured, with operands of at most about so many elements."""
    edges = _edges(largest)
    for edge in sorted(set(edges)):
        for name, build in _functions(edge):
            yield _measured(name, build)
        yield _measured("added", partial(_added, edge, 1))
        yield _measured("moved", partial(_turned, edge))
        yield _measured("row", partial(_product, 1, edge, True))
        rows = max(2, edge // 8)
        yield _measured("packed", partial(_product, rows, edge, True))
        yield _measured("products", partial(_product, rows, edge, False))
        yield _measured("turned_products", partial(_turned_product, rows, edge))
        channels, side = max(1, edge // 16), max(4, edge // 32)
        batch = _batch_of_images(edge)
        yield _measured("convolutions", partial(_convolved, channels, side))
        yield _measured(
            "transposed_convolutions", partial(_by_no_constants, "ConvTranspose", batch)
        )
        # Weights that are no constants are a training's, of many small images.
        yield _measured("unpacked_convolutions", partial(_by_no_constants, "Conv", batch))
        # As many products of few places, for which ONNX Runtime's model arranges no weights.
        places = max(2, side // 4)
        image = (1, 4 * channels, places, places)
        yield _measured("unblocked_convolutions", partial(_by_no_constants, "Conv", image))
        yield _measured(
            "blocks", partial(_by_no_constants, "Conv", (1, BLOCKS * BLOCK, side, side))
        )
        yield _measured("arranged", partial(_by_points, IMAGES, max(2, edge // BLOCK)))
        yield _measured("weight_gradients", partial(_weights_gradient, edge))
    for op in CHUNKED:
        yield _measured(f"chunked {op}", partial(_chain, edges[-1], op), edges[-1] ** 2)
    yield _measured("batched", _batched)
    yield _measured("convolution", partial(_by_points, 1, TINY))
    yield _measured("call", partial(_added, TINY, 1))
    yield _measured("calls", partial(_added, TINY, MORE))
    yield _measured("function", partial(_one, TINY, "Sigmoid", "", 0, {}))
    for name, operations, elements in (
        ("round", 1, 0), ("round of operations", MORE, 0), ("round of elements", MORE, MORE),
    ):  # fmt: skip
        yield _measured(name, partial(_rounds, ROUNDS, operations, elements))
        yield _measured(f"{name}, twice", partial(_rounds, 2 * ROUNDS, operations, elements))
