"""What the ONNX Runtime executor promises beyond the suite: memory, aliases, hooks, refusals."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import ComputationGraphBuilder
from stitch.errors import CompileError, TaskError, UsageError
from stitch.machine import load_machine
from stitch.program import Array, Ownership, Program
from stitch.runtime.executors import BoundProgram, as_bytes, dense_view, make_executor
from stitch.runtime.executors.onnx.onnxruntime_executor import OnnxRuntimeExecutor
from stitch.runtime.executors.onnx.session import bound_call
from tests.support.stitched_models import integers, model, one

MACHINE = load_machine("host").shape


def program_of(build: Any, placement: tuple[str, ...] = ()) -> Program:
    return model("p", build, target="host", placement=placement).binary.programs[0]


def bound_to(program: Program, arrays: list[Array]) -> tuple[BoundProgram, list[Array]]:
    """A binding to these inputs and to new outputs; a donated buffer is the output's."""
    outputs = []
    for i, slot in enumerate(program.outputs):
        kind = program.values[slot.value].type
        size = program.output_desc(i).elements * kind.data_type.itemsize
        source = slot.aliases_input
        outputs.append(np.zeros(size, np.uint8) if source is None else as_bytes(arrays[source]))
    scratch = np.zeros(program.scratch.size_per_bank, np.uint8)
    prepared = OnnxRuntimeExecutor().prepare(program, MACHINE)
    bound = prepared.bind(tuple(map(as_bytes, arrays)), tuple(outputs), scratch)
    kinds = [program.values[slot.value].type for slot in program.outputs]
    return bound, [dense_view(o, k) for o, k in zip(outputs, kinds, strict=True)]


def run(bound: BoundProgram) -> None:
    for step in bound.steps:
        step()


def linear(b: ComputationGraphBuilder) -> None:
    x = b.input("x", (4, 64), "float32")
    b.output("y", b.op("Relu", b.matmul(x, b.parameter("w", integers((64, 32), 5)))))


def test_dense_values_are_computed_where_they_lie_in_one_call() -> None:
    x = integers((4, 64))
    bound, (y,) = bound_to(program_of(linear), [x])
    assert len(bound.steps) == 1
    run(bound)
    np.testing.assert_array_equal(y, x @ integers((64, 32), 5))
    x[0] = 0
    run(bound)
    assert not y[0].any() and y[1].any()


def test_a_product_added_to_a_donated_input_is_right_over_its_buffer() -> None:
    """The product and the sum become one kernel, which writes before it has read all of x."""
    random = np.random.default_rng(0)
    w, x = (random.standard_normal((256, 256), np.float32) for _ in range(2))

    def build(b: ComputationGraphBuilder) -> None:
        given = b.input("x", x.shape, "float32", ownership=Ownership.DONATE)
        b.output("y", b.add(b.matmul(given, b.parameter("w", w)), given))

    program = program_of(build)
    assert program.outputs[0].aliases_input == 0
    expected = x @ w + x
    bound, (y,) = bound_to(program, [x])
    run(bound)
    assert np.shares_memory(y, x)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("op", ["Gelu", "Softplus", "Mish", "HardSwish", "Erf", "Elu"])
def test_functions_of_many_passes_are_right_over_a_donated_buffer(op: str) -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (5, 33), "float32", ownership=Ownership.DONATE)
        b.output("y", b.op(op, x))

    x = np.linspace(-4, 4, 165, dtype=np.float32).reshape(5, 33)
    (expected,) = stitch.ops.evaluate(op, [x])
    program = program_of(build)
    assert program.outputs[0].aliases_input == 0
    bound, (y,) = bound_to(program, [x])
    run(bound)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_an_update_of_plain_arithmetic_is_written_in_place_without_a_copy() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        w = b.input("w", (300, 7), "float32", ownership=Ownership.DONATE)
        g = b.input("g", (300, 7), "float32")
        b.output("w2", b.sub(w, b.mul(g, b.constant(np.float32(0.5)))))

    w, g = integers((300, 7)), integers((300, 7), 9)
    expected = w - g * 0.5
    bound, (made,) = bound_to(program_of(build), [w, g])
    assert len(bound.steps) == 1
    run(bound)
    np.testing.assert_array_equal(made, expected)
    assert np.shares_memory(made, w)


def test_dividing_integers_by_zero_and_the_least_number_by_minus_one_do_no_harm() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, d = b.input("x", (4,), "int32"), b.input("d", (4,), "int32")
        b.output("q", b.op("Div", x, d))
        b.output("r", b.op("Mod", x, d))

    x = np.array([1, -(2**31), -7, 7], np.int32)
    bound, (q, r) = bound_to(program_of(build), [x, np.array([0, -1, 2, -2], np.int32)])
    run(bound)
    assert q.tolist() == [0, -(2**31), -3, -3]
    assert r.tolist() == [0, 0, 1, -1]


@pytest.mark.parametrize("kind", ["int8", "int16", "uint8", "uint16", "int64"])
def test_narrow_integers_divide_and_compare_in_wider_ones(kind: str) -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, d = b.input("x", (3,), kind), b.input("d", (3,), kind)
        b.output("q", b.op("Div", x, d))
        b.output("m", b.op("Max", x, d))

    x, d = np.array([100, 7, 5], kind), np.array([3, 0, 9], kind)
    bound, (q, m) = bound_to(program_of(build), [x, d])
    run(bound)
    assert q.tolist() == [33, 0, 0]
    assert m.tolist() == [100, 7, 9]


def test_an_input_that_decides_shapes_is_checked_before_the_model_runs() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, k = b.input("x", (3,), "float32"), b.input("k", (1,), "int64")
        wanted = b.constant(np.array([2]))
        b.output("y", b.op("Expect", x, k, wanted, domain="stitch", name="k") + 1)

    x, k = integers((3,)), np.array([2])
    bound, (y,) = bound_to(program_of(build), [x, k])
    run(bound)
    assert y.tolist() == [1, 2, 3]
    k[0] = 3
    with pytest.raises(TaskError, match="'k'"):
        run(bound)


def test_sums_of_integers_keep_all_bits() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        b.output("y", b.op("ReduceSum", b.input("x", (3,), "int64"), keepdims=0))

    bound, (y,) = bound_to(program_of(build), [np.array([2**62, 1, -(2**40) - 1])])
    run(bound)
    assert int(y) == 2**62 - 2**40


def test_casts_to_integers_saturate_and_casts_to_narrow_floats_round() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (6,), "float32")
        b.output("i", b.cast(x, "int32"))
        b.output("u", b.cast(x, "uint8"))
        b.output("h", b.cast(b.cast(x, "bfloat16"), "float32"))

    x = np.array([np.nan, np.inf, -np.inf, 300.7, -2.5, 1.001], np.float32)
    bound, (i, u, h) = bound_to(program_of(build), [x])
    run(bound)
    assert i.tolist() == [0, 2**31 - 1, -(2**31), 300, -2, 1]
    assert u.tolist() == [0, 255, 0, 255, 0, 1]
    assert h[3:].tolist() == [300.0, -2.5, 1.0]


def test_every_operation_that_cannot_run_is_listed() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, i = b.input("x", (2, 3), "float64"), b.input("i", (3, 3), "int64")
        b.output("a", b.op("Softsign", x))
        b.output("b", b.op("Mish", b.op("Relu", x)))
        b.output("c", b.op("ReduceProd", i))

    program = program_of(build)
    with pytest.raises(CompileError) as error:
        OnnxRuntimeExecutor().prepare(program, MACHINE)
    text = str(error.value)
    assert all(op in text for op in ("Softsign(2x3xf64)", "Mish(2x3xf64)", "ReduceProd(3x3xi64)"))
    assert "Relu(" not in text and "executor='numpy'" in text


def test_a_failure_while_running_names_the_program() -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x, i = b.input("x", (4,), "float32"), b.input("i", (1,), "int64")
        b.output("y", b.gather(x, i))

    with stitch.open_device("tiny", executor="onnxruntime") as device:
        program = device.load(model("picks", build))
        with pytest.raises(TaskError, match="picks"):
            one(program(integers((4,)), np.array([9]))).numpy()
        assert one(program(integers((4,)), np.array([3]))).numpy().tolist() == [3]


@pytest.mark.parametrize("name", ["onnxruntime", "onnx"])
def test_what_is_not_installed_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [m for m in sys.modules if m.startswith("stitch.runtime.executors.onnx")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="stitch-runtime\\[onnx\\]"):
        make_executor("onnxruntime")


def test_importing_stitch_and_computing_with_numpy_loads_neither_package() -> None:
    code = (
        "import sys, stitch\n"
        "stitch.open_device('tiny').close()\n"
        "assert not {'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_binding_runs_through_public_methods_alone() -> None:
    prepared: Any = OnnxRuntimeExecutor().prepare(program_of(linear), MACHINE)
    (call,) = prepared.calls.values()
    held = call.bind.args[0].session
    session = held.session
    binding = session.io_binding()
    x, y = integers((4, 64)), np.zeros((4, 32), np.float32)
    binding.bind_cpu_input(f"v{held.model.inputs[0]}", x)
    binding.bind_output(f"v{held.model.outputs[0]}", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    bound_call(SimpleNamespace(run_with_iobinding=session.run_with_iobinding), binding)()
    np.testing.assert_array_equal(y, x @ integers((64, 32), 5))
