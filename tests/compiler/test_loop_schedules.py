"""Schedules of loops: what they cost is told of one body at a time, and none is taken that cannot
be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.compiler import SCHEDULES, CompileOptions, compile_graph
from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan
from stitch.machine import load_machine
from stitch.ttb import Binary
from tests.support.grids import in_turn

HOST = load_machine("host")


def run(graph: ComputationGraph, schedule: str | None, *given: Any) -> Any:
    """What the graph gives, as arrays."""
    compiled = compile_graph(graph, HOST, CompileOptions(schedule=schedule))
    with stitch.open_device("host") as device:
        found = device.load(Binary((compiled.program,), HOST.shape, "test"))(*given)
        return [each.numpy() for each in (found if isinstance(found, tuple) else (found,))]


def loops_in_a_loop(rounds: int, width: int = 2, *, product: bool = False) -> ComputationGraph:
    """Running sums in rounds, each from the last one on; of a state a `product`, perhaps."""
    b = ComputationGraphBuilder("sums")
    xs = b.input("xs", (rounds, 3, width), "float32")
    start = b.input("start", (width,), "float32")
    weights = b.parameter("weights", np.eye(width, dtype=np.float32))

    def row(states: Sequence[Any], elements: Sequence[Any]) -> Any:
        first = states[0] @ weights if product else states[0]
        (last,), (sums,) = scan(
            b, lambda s, x: ([s[0] + x[0]], [s[0] + x[0]]), [first], [elements[0]]
        )
        return [last], [sums]

    (last,), (sums,) = scan(b, row, [start], [xs])
    b.output("last", last)
    b.output("sums", sums)
    return b.build()


@pytest.mark.parametrize(("schedule", "rounds"), in_turn([None, *SCHEDULES], [0, 1, 2]))
def test_loops_in_a_loop_of_few_rounds_or_none(rounds: int, schedule: str | None) -> None:
    xs = np.arange(rounds * 6, dtype=np.float32).reshape(rounds, 3, 2)
    start = np.ones(2, np.float32)
    last, sums = run(loops_in_a_loop(rounds), schedule, xs, start)
    expected = np.cumsum(xs.reshape(-1, 2), axis=0) + start
    assert np.array_equal(last, expected[-1] if rounds else start)
    assert np.array_equal(sums, expected.reshape(rounds, 3, 2))


@pytest.mark.parametrize("schedule", [None, "hoisted", "rounds"])
def test_values_that_no_round_can_take_stay_inside_the_loop(schedule: str | None) -> None:
    """A product could leave, but what it is made of is read with the state as well: a float8."""
    b = ComputationGraphBuilder("narrow")
    xs, start = b.input("xs", (5, 4, 8), "float32"), b.input("start", (4, 8), "float32")
    weights = b.parameter("weights", np.eye(8, dtype=np.float32))

    def step(states: Sequence[Any], elements: Sequence[Any]) -> Any:
        inside, narrow = elements[0].builder, elements[0].cast("float8_e4m3fn")
        scale = inside.apply("ReduceMax", [states[0]], 1, {"keepdims": 0})[0]
        scaled = inside.apply("DequantizeLinear", [narrow, scale], 1, {})[0]
        return [narrow.cast("float32") @ weights + scaled], []

    b.output("last", scan(b, step, [start], [xs])[0][0])
    given = np.full((5, 4, 8), 0.5, np.float32)
    (last,) = run(b.build(), schedule, given, np.ones((4, 8), np.float32))
    expected = 1.0
    for _ in range(5):
        expected = 0.5 + 0.5 * expected
    assert np.array_equal(last, np.full((4, 8), expected, np.float32))


@pytest.mark.parametrize("schedule", [None, "rows"])
def test_rows_in_rows_are_written_out_as_often_as_rows_are(schedule: str | None) -> None:
    b = ComputationGraphBuilder("deep")
    given = b.input("xs", (12, 12, 12, 2), "float32")

    def deep(state: Any, xs: Any, depth: int) -> Any:
        if not depth:
            return np.tanh(state + xs)
        (last,), _ = scan(b, lambda s, e: ([deep(s[0], e[0], depth - 1)], []), [state], [xs])
        return last

    b.output("y", deep(b.constant(np.zeros(2, np.float32)), given, 3))
    model = stitch.compile(b.build(), target="host", schedule=schedule)
    assert {"rows", "rounds"} <= {note.schedule for note in model.loops}
    assert len(model.program.operations) < 4 * 12
    x = np.random.default_rng(1).standard_normal((12, 12, 12, 2), np.float32)
    expected = np.zeros(2, np.float32)
    for row in x.reshape(-1, 2):
        expected = np.tanh(expected + row)
    with stitch.open_device("host", executor="numpy") as device:
        found = device.load(model)(x)
        assert isinstance(found, stitch.Tensor)
        np.testing.assert_allclose(found.numpy(), expected, 1e-5, 1e-6)


@pytest.mark.parametrize("schedule", [None, "rows"])
def test_a_long_body_is_not_written_out_row_by_row(schedule: str | None) -> None:
    b = ComputationGraphBuilder("long")
    xs = b.input("xs", (64, 3, 4), "float32")

    def layer(states: Any, elements: Any) -> Any:
        made = states[0]
        for _ in range(40):
            made = np.tanh(made + np.float32(0.5))
        return scan(b, lambda s, e: ([np.tanh(s[0] + e[0])], []), [made], [elements[0]])[0], []

    (last,), _ = scan(b, layer, [b.constant(np.zeros(4, np.float32))], [xs])
    b.output("y", last)
    model = stitch.compile(b.build(), target="host", schedule=schedule)
    assert len(model.program.operations) == 1
