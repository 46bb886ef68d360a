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
from stitch.compiler.loops.loop_costs import rates_of
from stitch.errors import UsageError
from stitch.fractal import FractalTensor
from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan
from stitch.machine import LoopRates, Machine, load_machine

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
