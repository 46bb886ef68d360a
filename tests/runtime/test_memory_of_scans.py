"""A scan takes no more host memory than `host_bytes` says, nested bodies included."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder, choose, repeat_while
from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime import make_executor
from stitch.runtime.executors import BoundProgram, ProgramBytes, Workspace, with_fp_errors_ignored
from tests.support.grids import in_turn
from tests.support.scanned_graphs import FORMS, scanned_graph

#: Rows that kernels go through at once, and rows that they go through in pieces.
WIDTHS = (32, 100_000)


def run(bound: BoundProgram) -> None:
    for step in bound.steps:
        step()


def measured(program: Program, machine: MachineShape) -> tuple[ProgramBytes, int, bool]:
    """What is said, what is taken at most from preparing on, and whether kernels wanted more memory
    than was reserved for them."""
    executor = make_executor("numpy")
    said = executor.host_bytes(program)
    sides = ([s.value for s in side] for side in (program.inputs, program.outputs))
    given, made = (
        tuple(np.zeros(program.values[v].type.nbytes, np.uint8) for v in side) for side in sides
    )
    scratch: Array = np.zeros(program.scratch.size_per_bank, np.uint8)
    # What is found once and kept for good belongs to nobody.
    with_fp_errors_ignored(run, executor.prepare(program, machine).bind(given, made, scratch))
    workspace = Workspace()
    tracemalloc.start()
    try:
        workspace.kernels.reserve(said.kernels)
        reserved = workspace.kernels.take(0).base
        prepared = executor.prepare(program, machine, workspace)
        with_fp_errors_ignored(run, prepared.bind(given, made, scratch))
        return (
            said,
            tracemalloc.get_traced_memory()[1],
            (workspace.kernels.take(0).base is not reserved),
        )
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("width", "form"), in_turn(WIDTHS, FORMS))
def test_a_scan_takes_no_more_than_host_bytes_says(form: str, width: int) -> None:
    width = min(width, 600) if form == "cell" else width
    model = stitch.compile(scanned_graph(form, width), target="host", schedule="rounds")
    said, taken, has_grown = measured(model.program, model.binary.machine)
    assert taken <= said.peak
    assert not has_grown
    # Nor so much that what fits would be refused.
    assert said.peak < 6 * taken


@pytest.mark.parametrize("width", WIDTHS)
def test_a_choice_and_a_loop_take_no_more_than_host_bytes_says(width: int) -> None:
    b = ComputationGraphBuilder("by_data")
    x = b.input("x", (8, width), "float32")
    sides = (lambda t: [b.tanh(b.neg(t[0]))], lambda t: [b.exp(t[0])])
    (side,) = choose(b, b.greater(b.reduce_sum(x), 0), sides, [x], [x.type])
    (last,) = repeat_while(
        b, lambda s: b.greater(b.reduce_sum(s[0]), 1), lambda s: [b.div(s[0], 2)], [side]
    )
    b.output("last", last)
    model = stitch.compile(b.build(), target="host")
    said, taken, has_grown = measured(model.program, model.binary.machine)
    assert taken <= said.peak
    assert not has_grown
    # What pieces of a pass keep is a megabyte for each body, however narrow rows are.
    assert said.peak < 6 * taken + (8 << 20)


def test_a_body_that_several_scans_carry_is_counted_for_each() -> None:
    executor = make_executor("numpy")

    def bound(times: int) -> int:
        b = stitch.ComputationGraphBuilder("chain")
        x = b.input("x", (16,), "float32")
        for _ in range(times):
            (x,), _ = stitch.graph.scan(
                b, lambda s, _: ([b.op("Tanh", s[0])], []), [x], [], count=2
            )  # fmt: skip
        b.output("y", x)
        program = stitch.compile(b.build(), target="host", schedule="rounds").program
        assert len(program.bodies) == 1 and len(program.operations) == times
        return executor.host_bytes(program).bound

    assert bound(6) == 3 * bound(2) > 0
