"""The bound on a program's intermediate values holds for every order of its operations."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stitch.graph import ComputationGraphBuilder
from stitch.program import Program
from stitch.runtime.executors import make_executor
from stitch.runtime.executors.host.host_bytes import most_inner_nbytes
from tests.support.grids import every
from tests.support.stitched_models import model

ELEMENTS = 256


def layers(depth: int) -> Program:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (8192, 256), "float32")
        for _ in range(depth):
            w = b.constant(np.full((256, 256), 0.01, np.float32))
            x = b.softmax(b.matmul(x, w)) + x
        b.output("y", x)

    return model("deep", build, target="host").binary.programs[0]


def drawn(seed: int) -> Program:
    """A few operations, each on any of the values before it; all of them are needed."""
    chosen = random.Random(seed)

    def build(b: ComputationGraphBuilder) -> None:
        values = [b.input("x", (ELEMENTS,), "float32")]
        unread: list[int] = []
        for _ in range(7):
            left, right = (chosen.randrange(len(values)) for _ in range(2))
            unread = [i for i in unread if i not in (left, right)] + [len(values)]
            values.append(b.op(chosen.choice(["Add", "Mul", "Sub"]), values[left], values[right]))
        for i in unread:
            b.output(f"y{i}", b.op("Tanh", values[i]))

    return model("drawn", build, target="host").binary.programs[0]


def worst(program: Program) -> int:
    """The largest peak of all orders, by trying every one."""
    slots = {s.value for s in program.inputs} | {s.value for s in program.outputs}
    operations = program.operations
    readers: dict[int, set[int]] = {}
    for index, operation in enumerate(operations):
        for value in operation.inputs:
            readers.setdefault(value, set()).add(index)
    inner = {v for o in operations for v in o.outputs} - slots
    given = {s.value for s in program.inputs} | {c.value for c in program.constants}
    most, seen, left = 0, set(), [frozenset[int]()]
    while left:
        done = left.pop()
        if done in seen:
            continue
        seen.add(done)
        made = {v for i in done for v in operations[i].outputs}
        for index, operation in enumerate(operations):
            if index in done or not set(operation.inputs) <= made | given:
                continue
            alive = sum(1 for v in made & inner if not readers[v] <= done)
            most = max(most, alive + sum(1 for v in operation.outputs if v in inner))
            left.append(done | {index})
    return most * ELEMENTS * 4


@pytest.mark.parametrize("seed", every(4, range(20)))
def test_no_order_of_the_operations_takes_more(seed: int) -> None:
    program = drawn(seed)
    inner = sum(1 for o in program.operations for _ in o.outputs) - len(program.outputs)
    assert worst(program) <= most_inner_nbytes(program) <= inner * ELEMENTS * 4


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", "torch"])
def test_what_a_deep_network_claims_does_not_grow_with_its_depth(executor: str) -> None:
    shallow, deep = (make_executor(executor).host_bytes(layers(depth)) for depth in (3, 30))
    assert deep.values == shallow.values
    assert deep.kernels == shallow.kernels
    # Weights and steps, a block of rows, but no value of 8 MiB.
    assert deep.bound + deep.kept - shallow.bound - shallow.kept < 27 * (4 << 20)
