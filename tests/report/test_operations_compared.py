"""Every operation of a run beside NumPy's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.graph import ComputationGraphBuilder
from stitch.machine import MachineShape
from stitch.program import Array, Ownership, Program
from stitch.report import OperationComparison
from stitch.runtime.executors import BoundProgram, Executor, PreparedProgram, make_executor
from stitch.runtime.executors.executor import ProgramBytes, Workspace
from stitch.runtime.executors.onnx import onnxruntime_executor, session
from tests.support.bodied_graphs import bodied_graph
from tests.support.grids import in_turn
from tests.support.scan_cases import CASES, graph_of, inputs_of
from tests.support.stitched_models import integers, model, one, scaled

SHAPE = (32, 32)
EXECUTORS = ["numpy", "onnxruntime", "auto", "torch"]


def network(b: ComputationGraphBuilder) -> None:
    """A product, a function, a softmax."""
    x = b.input("x", (64, 64), "float32")
    w = b.parameter("w", np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))
    b.output("y", b.op("Softmax", b.op("Gelu", b.matmul(x, w))))


def x() -> Array:
    return np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)


def off_by_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's results of an operator are one too large, where it is called by itself."""
    call = session.session_call

    def wrong(made: Any, arrays: Any, program: Any, name: str) -> Any:
        run = call(made, arrays, program, name)
        if [o.op for o in program.operations] != [op]:
            return run
        (result,) = (arrays[slot.value] for slot in program.outputs)
        return lambda: (run(), np.add(result, 1, out=result))

    monkeypatch.setattr(onnxruntime_executor, "session_call", wrong)


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_a_wrong_kernel_is_found_and_those_after_it_are_right(
    executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_by_one("Gelu", monkeypatch)
    with stitch.open_device("host", executor=executor) as device:
        program = device.load(model("m", network, target="host"))
        with OperationComparison(device) as compared:
            one(program(x())).numpy()
    assert [line.verdict.passed for line in compared.lines] == [True, False, True]
    assert compared.first is not None
    text = compared.first.text
    assert text.startswith("program 'm', operation 1 (Gelu) at ")
    assert "output 0 ('gelu'), run 1: 4096 of 4096 elements differ" in text
    assert compared.first.verdict.max_abs_difference == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("executor", "placement"),
    in_turn(
        EXECUTORS,
        [
            ("output.y.data_type=bf16",),
            ("output.y.data_type=bfp8", "output.y.layout=tile"),
            ("input.x.data_type=bfp4", "input.x.layout=tile"),
        ],
    ),
)
def test_narrow_values_agree_once_they_are_rounded(
    executor: str, placement: tuple[str, ...]
) -> None:
    given = np.random.default_rng(2).normal(size=SHAPE).astype(np.float32) * 50
    with stitch.open_device("tiny", executor=executor) as device:
        program = device.load(scaled("a", 2.7, SHAPE, placement=placement))
        with OperationComparison(device) as compared:
            one(program(given)).numpy()
    assert len(compared.lines) == 2
    assert compared.first is None


def test_an_operation_that_overwrites_its_operand_is_compared_with_what_it_was_given() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        state = b.input("s", SHAPE, "float32", ownership=Ownership.DONATE)
        b.output("t", b.op("Add", state, state), aliases_input=0)

    with stitch.open_device("tiny") as device:
        program = device.load(model("grow", build))
        state = device.tensor(np.ones(SHAPE, np.float32))
        with OperationComparison(device) as compared:
            for _ in range(3):
                state = one(program(state))
            assert state.numpy()[0, 0] == 8
    assert compared.first is None
    assert compared.lines[0].runs == 3


@pytest.mark.parametrize(("executor", "name"), in_turn(EXECUTORS, ["lstm", "nested", "bfloat16"]))
def test_a_scan_is_compared_as_one_operation(name: str, executor: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    compiled = stitch.compile(graph_of(case, 5), target="host", schedule="rounds")
    with stitch.open_device("host", executor=executor) as device:
        program = device.load(compiled)
        with OperationComparison(device) as compared:
            stitch.wait(program(*inputs_of(case, 5)))
    assert compared.first is None
    assert "Scan" in {line.op for line in compared.lines}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_operation_with_a_body_is_compared_as_what_it_is_computed_by(executor: str) -> None:
    random = np.random.default_rng(0)
    given = [random.normal(size=shape).astype(np.float32) for shape in ((6, 8), (6, 8))]
    with stitch.open_device("host", executor=executor) as device:
        program = device.load(stitch.compile(bodied_graph(), target="host"))
        with OperationComparison(device) as compared:
            stitch.wait(program(*given))
    assert compared.first is None
    assert {line.op for line in compared.lines} == {"Mul", "Tanh", "Add", "MatMul", "Exp"}


def test_a_device_that_computes_nothing_is_refused() -> None:
    with (
        stitch.open_device("tiny", executor="null") as device,
        pytest.raises(UsageError, match="this device computes no operations"),
    ):
        OperationComparison(device)


def test_results_are_not_held_while_the_run_goes_on() -> None:
    import tracemalloc

    def build(b: ComputationGraphBuilder) -> None:
        y = b.input("x", (512, 512), "float32")
        for _ in range(40):
            y = b.op("Sin", y)
        b.output("y", y)

    with stitch.open_device("host") as device:
        program = device.load(model("sines", build, target="host"))
        given = np.ones((512, 512), np.float32)
        one(program(given)).numpy()
        with OperationComparison(device):
            tracemalloc.start()
            one(program(given)).numpy()
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    # Each result is 1 MiB; modules that load late take some MiB themselves.
    assert most < 24 << 20


class Whole(Executor):
    """NumPy's kernels, whose operations nobody sees."""

    name = "whole"

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        return _Whole(make_executor("numpy").prepare(program, machine, workspace))

    def host_bytes(self, program: Program) -> ProgramBytes:
        return make_executor("numpy").host_bytes(program)


class _Whole(PreparedProgram):
    def __init__(self, prepared: PreparedProgram) -> None:
        self.prepared = prepared

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        return BoundProgram(self.prepared.bind(inputs, outputs, scratch).steps, (), {}, 0)


def test_an_executor_that_shows_no_operations_is_refused() -> None:
    with stitch.open_device("tiny", executor=Whole()) as device:
        program = device.load(scaled("a", 2.0, SHAPE))
        with (
            OperationComparison(device),
            pytest.raises(UsageError, match="without hooks of operations"),
        ):
            one(program(integers(SHAPE))).numpy()
