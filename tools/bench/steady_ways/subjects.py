"""What is measured: chains of tiny programs, the same by hand and by ONNX Runtime, and a training.

Each program is one Gemm and one Relu on a row of `WIDTH` numbers, compiled by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

import stitch
from steady_ways.measuring import Pass

Floats = npt.NDArray[np.float32]
Layer = tuple[Floats, Floats]

WIDTH = 64
MACHINE = "wormhole_n150"
#: Keeps values within bounds over any number of layers, and from dying out.
SCALE = 0.1
#: How many inputs there are: a result that another pass has overwritten is told by its numbers.
INPUTS = 7
#: Opset and IR version of the peers' models.
OPSET, IR_VERSION = 17, 8


@cache
def layer(number: int) -> Layer:
    """Weights [WIDTH, WIDTH] and biases [WIDTH]."""
    random = np.random.default_rng(number)
    return (
        random.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(SCALE),
        random.uniform(0.1, 1.0, WIDTH).astype(np.float32),
    )


@cache
def model(number: int) -> stitch.CompiledModel:
    """One Gemm and one Relu, as a binary of its own."""
    builder = stitch.ComputationGraphBuilder(f"layer{number}")
    x = builder.input("x", (1, WIDTH), "float32")
    w, b = (builder.parameter(n, a) for n, a in zip("wb", layer(number), strict=True))
    builder.output("y", builder.op("Relu", builder.op("Gemm", x, w, b)))
    return stitch.compile(builder.build(), target=MACHINE)


@cache
def two_output_model() -> stitch.CompiledModel:
    """The second layer, and its result with the sign changed beside it."""
    builder = stitch.ComputationGraphBuilder("two")
    x = builder.input("x", (1, WIDTH), "float32")
    w, b = (builder.parameter(n, a) for n, a in zip("wb", layer(1), strict=True))
    y = builder.op("Relu", builder.op("Gemm", x, w, b))
    builder.output("y", y)
    builder.output("z", builder.op("Neg", y))
    return stitch.compile(builder.build(), target=MACHINE)


def load(device: Any, count: int) -> list[Any]:
    """So many loaded programs, each of its own binary; those of one output give one tensor."""
    return [device.load(model(number)) for number in range(count)]


@cache
def inputs() -> tuple[Floats, ...]:
    """The arrays that passes take in turn."""
    random = np.random.default_rng(1000)
    return tuple(random.standard_normal((1, WIDTH), np.float32) for _ in range(INPUTS))


def in_turn() -> Callable[[], Floats]:
    """Gives one input after the other."""
    turning: Iterator[Floats] = itertools.cycle(inputs())
    return turning.__next__


@cache
def expected(count: int, number: int) -> Floats:
    """What a chain makes of an input."""
    value = inputs()[number]
    for w, b in map(layer, range(count)):
        value = np.maximum(value @ w + b, 0)
    return value


def by_hand(count: int) -> Callable[[Floats], Floats]:
    """The least that NumPy can do: `out=` on buffers that exist before, in two turns."""
    zero = np.zeros((), np.float32)
    steps = [
        (
            np.ascontiguousarray(w), b.reshape(1, WIDTH).copy(), np.empty((1, WIDTH), np.float32),
            itertools.cycle([np.empty((1, WIDTH), np.float32) for _ in range(2)]).__next__,
        )
        for w, b in map(layer, range(count))
    ]  # fmt: skip
    dot, add, maximum = np.dot, np.add, np.maximum

    def run(x: Floats) -> Floats:
        for w, b, product, place in steps:
            dot(x, w, out=product)
            add(product, b, out=product)
            x = maximum(product, zero, out=place())
        return x

    return run


def one_by_one(programs: Sequence[stitch.LoadedProgram]) -> Callable[[Any], Any]:
    """`c(b(a(x)))`: a future."""

    def run(x: Any) -> Any:
        for program in programs:
            x = program(x)
        return x

    return run


def onnx_bound(count: int) -> Pass:
    """A session of ONNX Runtime for each program, bound: values lie at fixed places, and nothing is
    copied in or out. Raises `ImportError` where it is not installed."""
    import onnxruntime  # A peer, and an extra.
    from onnx import TensorProto, helper, numpy_helper

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    value = onnxruntime.OrtValue.ortvalue_from_numpy(inputs()[0])
    calls = []
    for number in range(count):
        w, b = layer(number)
        slots = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, WIDTH]) for n in ("x", "y")
        ]
        nodes = [
            helper.make_node("Gemm", ["x", "w", "b"], ["h"]), helper.make_node("Relu", ["h"], ["y"])
        ]  # fmt: skip
        weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
        graph = helper.make_graph(nodes, "layer", slots[:1], slots[1:], weights)
        whole = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION
        )
        session = onnxruntime.InferenceSession(
            whole.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", value)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty((1, WIDTH), np.float32))
        binding.bind_ortvalue_output("y", value)
        calls.append((session.run_with_iobinding, binding))

    def run() -> object:
        for call, binding in calls:
            call(binding)
        return value

    run()
    check(value.numpy(), expected(count, 0))
    return run


def check(found: Any, wanted: Floats) -> None:
    """Raises unless a result, a handle or an array, is what was expected."""
    array = found if isinstance(found, np.ndarray) else found.numpy()
    np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)
