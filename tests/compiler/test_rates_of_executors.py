"""Schedules of loops are weighed by the rates of the executor that will compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.compiler import RATED_EXECUTORS, CompileOptions, compile_graph
from stitch.compiler.loops.loop_costs import LoopCosts, rates_of
from stitch.errors import UsageError
from stitch.fractal import FractalTensor
from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan
from stitch.machine import LoopRates, Machine, load_machine
from stitch.program import Body, Constant, DataType, Operation, ScanForm, Value, ValueType

HOST = load_machine("host")
NUMPY, ONNX = rates_of(HOST, "numpy")[0], rates_of(HOST, "onnxruntime")[0]


def machine(**rates: LoopRates) -> Machine:
    """The host, where executors take what is said of them."""
    others = [each for each in HOST.loops if each.executor not in rates]
    return replace(HOST, loops=(*others, *rates.values()))


def slow_calls(rates: LoopRates) -> LoopRates:
    """An executor that takes a second for whatever it is asked to do, and nothing for products."""
    return replace(
        rates, round_seconds=1.0, operation_seconds=1.0, function_seconds=1.0,
        movement_seconds=1.0, flops_per_second=1e18, packed_flops_per_second=1e18,
    )  # fmt: skip


def recurrent() -> ComputationGraph:
    """An element's product, and the element times the state."""
    b = ComputationGraphBuilder("recurrent")
    xs, start = b.input("xs", (32, 4, 8), "float32"), b.input("start", (4, 8), "float32")
    weights = b.parameter("weights", np.eye(8, dtype=np.float32))

    def step(states: Sequence[Any], elements: Sequence[Any]) -> Any:
        after = elements[0] @ weights + states[0] * elements[0]
        return [after], [after]

    _, (states,) = scan(b, step, [start], [xs])
    b.output("states", states)
    return b.build()


def taken(where: Machine, executor: str | None) -> tuple[str, str]:
    """The schedule of the only loop, and by whose rates."""
    (note,) = compile_graph(recurrent(), where, CompileOptions(executor=executor)).loops
    return note.schedule, note.executor


def test_another_executor_takes_another_schedule() -> None:
    dear = replace(NUMPY, element_seconds=1.0, operation_seconds=0.0)
    where = machine(numpy=dear, onnxruntime=slow_calls(ONNX))
    # One more element in each round against one operation less.
    assert taken(where, "numpy") == ("rounds", "numpy")
    assert taken(where, "onnxruntime") == ("hoisted", "onnxruntime")


def test_without_an_executor_the_rates_are_those_of_devices() -> None:
    with stitch.open_device("host") as device:
        assert taken(HOST, None) == taken(HOST, device.executor)


def test_auto_takes_what_costs_least_by_either_of_its_executors() -> None:
    numpy_is_dear = machine(numpy=slow_calls(NUMPY))
    onnxruntime_is_dear = machine(onnxruntime=slow_calls(ONNX))
    assert taken(numpy_is_dear, "auto")[1] == "onnxruntime"
    assert taken(onnxruntime_is_dear, "auto")[1] == "numpy"


def test_a_machine_without_an_executors_rates_has_those_of_the_host() -> None:
    only = replace(HOST, loops=(slow_calls(NUMPY),))
    assert rates_of(only, "onnxruntime") == (ONNX,)
    assert rates_of(only, "numpy") == (slow_calls(NUMPY),)


def test_an_executor_without_rates_is_named_with_those_that_have_some() -> None:
    with pytest.raises(UsageError, match="'onnxrt'") as caught:
        CompileOptions(executor="onnxrt")
    assert str(caught.value.expected) == ", ".join(RATED_EXECUTORS)
    assert "onnxruntime" in str(caught.value.remedy)


def sums(xs: Any) -> Any:
    return ops.scan(lambda s, x: s + x, xs)


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime"])
def test_a_compiled_nest_says_by_whom_and_computes_by_him(executor: str) -> None:
    xs = FractalTensor(np.ones((4, 2), np.float32))
    nest = ops.compile(sums, xs, executor=executor)
    assert f" by {executor})" in nest.explain()
    assert np.array_equal(nest(xs).leaves()[-1], [4, 4])
    (loaded,) = nest._loaded
    assert loaded.device.executor == executor


def test_calls_in_parallel_are_weighed_for_the_executor_of_their_device() -> None:
    xs = FractalTensor(np.ones((4, 2), np.float32))
    with (
        stitch.open_device("host", executor="onnxruntime") as device,
        ops.mode("parallel", device=device) as report,
    ):
        assert np.array_equal(sums(xs).leaves()[-1], [4, 4])
    assert " by onnxruntime)" in report.explain()


def test_a_model_computes_by_the_executor_that_it_was_compiled_for() -> None:
    model = stitch.compile(recurrent(), target="host", executor="onnxruntime")
    xs, start = np.ones((32, 4, 8), np.float32), np.zeros((4, 8), np.float32)
    model(xs, start)
    (loaded,) = model.session.programs
    assert loaded.device.executor == "onnxruntime"
    assert [note.executor for note in model.loops] == ["onnxruntime"]


def float32(*shape: int) -> Value:
    return Value("value", ValueType(shape, DataType.FLOAT32))


def picked(rows: int) -> Body:
    """Two rows of a table of so many."""
    values = (float32(rows, 64), Value("at", ValueType((2,), DataType.INT64)), float32(2, 64))
    at = Constant(1, np.zeros(2, np.int64))
    return Body((0,), (2,), values, (Operation("Gather", (0, 1), (2,), {"axis": 0}),), (at,))


@pytest.mark.parametrize("rates", [NUMPY, ONNX])
def test_what_is_picked_costs_no_more_from_a_longer_table(rates: LoopRates) -> None:
    estimate = LoopCosts(rates, ())
    assert estimate.round(picked(4)) == estimate.round(picked(1 << 20))


def joined(same: int) -> Body:
    """An element beside so many rows that all lanes have in common."""
    values = (float32(1, 64), float32(same, 64), float32(1 + same, 64))
    return Body((0, 1), (2,), values, (Operation("Concat", (0, 1), (2,), {"axis": 0}),))


def test_what_lanes_have_in_common_is_written_for_each_where_nothing_is_a_view() -> None:
    def costs(rates: LoopRates) -> float:
        return LoopCosts(rates, ()).round(joined(1 << 12), 64, [0])

    assert costs(replace(NUMPY, has_views=False)) > 1.5 * costs(replace(NUMPY, has_views=True))


def passed_on() -> tuple[Body, ScanForm]:
    """A scan that gives the double of each of its elements."""
    values = (float32(64), float32(64))
    body = Body((0,), (1,), values, (Operation("Add", (0, 0), (1,), {}),))
    return body, ScanForm(32, 0, 1, 1, (False,), (False,))


def test_elements_are_copied_only_by_executors_that_do_so() -> None:
    body, form = passed_on()
    there, here = (
        LoopCosts(replace(NUMPY, copies_elements=copies), ()).scan(body, form)
        for copies in (False, True)
    )
    copied = 2 * 2 * form.count * 64 * 4
    assert here - there == pytest.approx(copied / NUMPY.near_bytes_per_second)


def test_a_loop_takes_what_it_is_to_begin_it_once() -> None:
    body, form = passed_on()
    soon, late = (
        LoopCosts(replace(NUMPY, loop_seconds=seconds), ()).scan(body, form)
        for seconds in (0.0, 1.0)
    )
    assert late - soon == pytest.approx(1.0)
