"""ONNX's node tests for several lanes at once: what ONNX's functions expand to is lifted, too, and
types that few operators move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.compiler import compile_graph
from stitch.errors import StitchError, TaskError
from stitch.frontend.onnx.protos import READABLE_OPSET
from stitch.graph import ComputationGraphBuilder, vmap
from stitch.program import Array, Program
from stitch.runtime.executors import make_executor
from tests.support.onnx import node_tests as suite
from tests.support.operators.lanes import HOST, one_after_the_other
from tests.support.operators.one_operation import Binding

LANES = 2


def chosen() -> list[Any]:
    """Every fifth case, and those of narrow types. ONNX makes its cases when they are asked for,
    for seconds: not while tests are collected, which each worker does."""
    return [
        case
        for index, case in enumerate(suite.cases())
        if index % 5 == 0 or any(word in case.name for word in ("castlike_", "quantizelinear"))
    ]


def programs_of(case: Any) -> list[tuple[Program, list[Array]]]:
    """The programs of a case that take its operands, all of them."""
    if suite.opset_of(case) > READABLE_OPSET:
        return []
    try:
        _, models = suite.compiled_case(case)
    except StitchError:
        return []
    found = []
    for data_set, model in zip(case.data_sets, models, strict=True):
        given = [np.asarray(a) for a in suite.flat(suite._feeds(case, data_set).values())]
        (program, *more) = model.binary.programs
        if not more and not program.bodies and 0 < len(program.inputs) == len(given):
            found.append((program, given))
    return found


def other(array: Array) -> Array:
    """Another operand of the same kind."""
    if array.dtype.kind == "f":
        return np.asarray(array * array.dtype.type(0.75))
    return np.roll(array, 1)


@pytest.mark.campaign("onnx")
@pytest.mark.parametrize("part", range(4))
def test_a_case_for_two_lanes_is_the_case_twice(part: int) -> None:
    vmapped = 0
    for case in chosen()[part::4]:
        for program, given in programs_of(case):
            check(case.name, program, given)
            vmapped += 1
    assert vmapped > 75


def check(name: str, program: Program, given: list[Array]) -> None:
    """With each operand alone in two forms, and with all of them."""
    executor = make_executor("numpy")
    alone = Binding(executor.prepare(program, HOST.shape), program)
    count = len(given)
    patterns = [[i == k for i in range(count)] for k in range(count)]
    for batched in [*patterns, [True] * count] if count > 1 else patterns:
        pairs = [(a, other(a) if varies else a) for a, varies in zip(given, batched, strict=True)]
        expected = [alone.outcome([pair[lane] for pair in pairs]) for lane in range(LANES)]
        if any(isinstance(outcome, TaskError) for outcome in expected):
            # Indices and lengths may be good as they are alone.
            pairs = [(a, a) for a in given]
            expected = [alone.outcome(given)] * LANES
        whole, are_batched = lifted_program(program, batched)
        stacks = [np.stack(p) if v else p[0] for p, v in zip(pairs, batched, strict=True)]
        made = Binding(executor.prepare(whole, HOST.shape), whole).outcome(stacks)
        assert not isinstance(made, TaskError), name
        for lane, outcome in enumerate(expected):
            assert not isinstance(outcome, TaskError), name
            for ours, theirs, is_batched in zip(made, outcome, are_batched, strict=True):
                mine = ours[lane] if is_batched else ours
                assert not suite.difference(mine, theirs, *tolerance(mine)), (name, batched)


def tolerance(array: Array) -> tuple[float, float]:
    return (2e-2, 1e-2) if array.dtype.itemsize <= 2 else (2e-5, 2e-6)


def lifted_program(program: Program, batched: list[bool]) -> tuple[Program, list[bool]]:
    """A program for two lanes, and which of its results have a lane axis."""
    builder = ComputationGraphBuilder(program.name)
    operands = []
    for slot, varies in zip(program.inputs, batched, strict=True):
        kind = program.values[slot.value].type
        shape = (LANES, *kind.shape) if varies else kind.shape
        operands.append(builder.input(slot.name, shape, kind.data_type))
    done = vmap(program, operands, batched, LANES, builder, one_after_the_other)
    for index, result in enumerate(done.results):
        builder.output(f"y{index}", result.tensor)
    return compile_graph(builder.build(), HOST).program, [r.is_batched for r in done.results]
