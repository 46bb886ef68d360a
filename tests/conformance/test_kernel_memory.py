"""Kernels may use the same bytes one after the other: they keep nothing there between runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from stitch.compiler import differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.ops import KernelArguments, KernelMemory, OpDef, lookup, resolve_attributes
from stitch.program import ABSENT, Array, DataType

DRAW = np.random.default_rng(5)


def convolutions(b: ComputationGraphBuilder) -> Any:
    x = b.input("x", (5, 4, 12, 12), "float32")
    w = b.input("w", (6, 4, 3, 3), "float32")
    made = b.op("Conv", x, w, pads=(1, 1, 1, 1), kernel_shape=(3, 3))
    scale, offset = b.input("scale", (6,), "float32"), b.input("offset", (6,), "float32")
    mean, variance = b.input("mean", (6,), "float32"), b.input("variance", (6,), "float32")
    normal = b.apply(
        "BatchNormalization", [made, scale, offset, mean, variance], 3, {"training_mode": 1}
    )[0]
    pooled = b.op("MaxPool", b.op("Relu", normal), kernel_shape=(2, 2), strides=(2, 2))
    wide = b.op("MaxPool", pooled, kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    up = b.op("ConvTranspose", wide, b.input("u", (6, 4, 2, 2), "float32"), strides=(2, 2))
    return up + b.op("AveragePool", x, kernel_shape=(3, 3), pads=(1, 1, 1, 1))


def attention(b: ComputationGraphBuilder) -> Any:
    x = b.input("x", (6, 40, 24), "float32")
    scale, offset = b.input("scale", (24,), "float32"), b.input("offset", (24,), "float32")
    normal = b.op("LayerNormalization", x, scale, offset)
    scores = b.softmax(b.matmul(normal, b.transpose(normal, (0, 2, 1))))
    made = b.gelu(b.matmul(scores, normal)) + b.op("Swish", x)
    return b.op("LogSoftmax", made) + b.op("Softplus", b.op("Mish", x))


def choices(b: ComputationGraphBuilder) -> Any:
    x, y = b.input("x", (300, 500), "float32"), b.input("y", (300, 500), "float32")
    zero = b.constant(np.zeros((), np.float32))
    kept = b.op("Where", b.op("Greater", x, y), x, zero)
    return b.op("Where", b.op("Less", kept, y), b.op("Elu", x), b.op("Sigmoid", y))


GRAPHS = {"convolutions": convolutions, "attention": attention, "choices": choices}


def graphs(build: Callable[[ComputationGraphBuilder], Any]) -> tuple[ComputationGraph, ...]:
    """A graph's forward and backward graphs."""
    b = ComputationGraphBuilder("graph")
    b.output("y", build(b))
    both = differentiate(b.build(), ["x"])
    return both.forward, both.backward


def values_of(graph: ComputationGraph) -> dict[int, Array]:
    found = {c.value: c.data for c in graph.constants}
    for slot in graph.inputs:
        kind = graph.values[slot.value].type
        drawn = DRAW.uniform(0.1, 1.0, kind.shape)
        found[slot.value] = drawn.astype(kind.data_type.dtype)
    return found


Arguments = Callable[[tuple[Array, ...]], KernelArguments]


def operations_of(graph: ComputationGraph) -> Iterator[tuple[OpDef, Arguments, tuple[Array, ...]]]:
    """Each operation's definition, what makes its arguments of places for results, and the results
    of its kernel in memory of its own."""
    values, constants = values_of(graph), graph.constant_data()
    for operation in graph.operations:
        definition = lookup(operation.op, operation.domain)
        kinds = [graph.values[v].type for v in operation.outputs if v != ABSENT]
        alone = tuple(np.empty(k.shape, k.data_type.dtype) for k in kinds)

        def arguments(outputs: tuple[Array, ...]) -> KernelArguments:
            return KernelArguments(
                tuple(None if v == ABSENT else values[v] for v in operation.inputs),  # noqa: B023
                outputs,
                resolve_attributes(definition, operation.attributes, ""),  # noqa: B023
                tuple(v in constants for v in operation.inputs),  # noqa: B023
                types=tuple(DataType.from_dtype(a.dtype) for a in outputs),
            )

        with np.errstate(all="ignore"):
            for step in definition.kernel(arguments(alone)):
                step()
        yield definition, arguments, alone
        values.update(zip((v for v in operation.outputs if v != ABSENT), alone, strict=True))


@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_write_what_they_read_of_the_common_memory(name: str) -> None:
    for graph in graphs(GRAPHS[name]):
        for definition, arguments, alone in operations_of(graph):
            common = tuple(np.empty_like(a) for a in alone)
            memory = KernelMemory()
            everything = memory.take(1 << 24)
            with np.errstate(all="ignore"):
                with memory:
                    steps = definition.kernel(arguments(common))
                for byte in (0xFF, 0x00):
                    everything[:] = byte
                    for step in steps:
                        step()
                    for one, other in zip(alone, common, strict=True):
                        np.testing.assert_array_equal(one, other, err_msg=definition.name)


@pytest.mark.parametrize("name", GRAPHS)
def test_binding_writes_nothing_so_other_programs_may_run_meanwhile(name: str) -> None:
    for graph in graphs(GRAPHS[name]):
        for definition, arguments, alone in operations_of(graph):
            memory = KernelMemory()
            everything = memory.take(1 << 24)
            everything[:] = 0xA5
            results = tuple(np.full_like(a, 7) for a in alone)
            with memory:
                definition.kernel(arguments(results))
            assert (everything == 0xA5).all(), definition.name
            for result in results:
                np.testing.assert_array_equal(result, np.full_like(result, 7), definition.name)


def test_what_is_taken_at_one_time_lies_apart_and_begins_at_a_line() -> None:
    memory = KernelMemory()
    taken = [memory.take(n) for n in (100, 1, 0, 5000, 64, 7)]
    for index, array in enumerate(taken):
        array[:] = index
    for index, array in enumerate(taken):
        assert (array == index).all()
        assert array.size == 0 or array.ctypes.data % 64 == 0
    memory.restart()
    again = memory.take(64)
    assert any(np.shares_memory(again, array) for array in taken)
