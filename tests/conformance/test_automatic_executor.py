"""The automatic executor passes the suite of all executors, and divides programs soundly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

import stitch
from stitch import ComputationGraphBuilder
from stitch.errors import UsageError
from stitch.machine import load_machine
from stitch.program import Array, Program
from stitch.runtime.executors import BoundProgram, PreparedProgram, Workspace, as_bytes
from stitch.runtime.executors.host.numpy_executor import NumpyExecutor, PreparedKernels
from stitch.runtime.executors.onnx.onnxruntime_executor import Sessions
from stitch.runtime.executors.prices import divide
from stitch.testing import ExecutorSuite, PlacementSuite
from tests.support.executors.named_prices import TABLE
from tests.support.grids import CAMPAIGN
from tests.support.stitched_models import model, one

MACHINE = load_machine("host").shape
DRAW = np.random.default_rng(11)


class TestAutomaticExecutor(ExecutorSuite):
    executor: ClassVar[str] = "auto"
    left_out: ClassVar[int] = 8


@CAMPAIGN
class TestAutomaticExecutorWithAllPlacements(PlacementSuite):
    executor: ClassVar[str] = "auto"
    left_out: ClassVar[int] = 0


def draw(*shape: int) -> Array:
    return DRAW.standard_normal(shape, dtype=np.float32)


def attention(b: ComputationGraphBuilder) -> None:
    """Heads are views into one product, and results go back into one; some are outputs too."""
    x = b.input("x", (6, 8, 16), "float32")
    w, out = b.parameter("w", draw(16, 48)), b.parameter("out", draw(16, 16))
    parts = b.split(b.matmul(x, w), 16, axis=2)
    heads = [b.transpose(b.reshape(p, (6, 8, 4, 4)), (0, 2, 1, 3)) for p in parts]
    scores = b.softmax(b.matmul(heads[0], b.transpose(heads[1], (0, 1, 3, 2))) * 0.5)
    mixed = b.reshape(b.transpose(b.matmul(scores, heads[2]), (0, 2, 1, 3)), (6, 8, 16))
    b.output("value heads", heads[2])
    b.output("mixed", mixed)
    b.output("y", b.matmul(mixed, out) + x)


def joined(b: ComputationGraphBuilder) -> None:
    """Products made inside a Concat, one of whose operands is an input, and one is there twice."""
    x, y = b.input("x", (2, 3, 4), "float32"), b.input("y", (2, 4, 5), "float32")
    product = b.matmul(x, y)
    sums = product + product
    whole = b.concat([sums, b.input("z", (2, 3, 5), "float32"), product, product], axis=2)
    b.output("whole", whole)
    b.output("again", b.op("Tanh", b.transpose(whole, (2, 0, 1))))


def cut(b: ComputationGraphBuilder) -> None:
    """Parts of parts, turned and reshaped where only a copy can be."""
    x = b.input("x", (4, 6, 8), "float32")
    sums = x * 2.0
    turned = b.transpose(sums, (2, 1, 0))
    flat = b.reshape(turned, (8, 24))
    first, second = b.split(flat, 12, axis=1)
    b.output("difference", first - second)
    b.output("rows", b.op("Erf", b.op("Slice", flat, [1], [7], [0], [2])))
    b.output("spread", b.op("Expand", b.op("Slice", flat, [0], [1], [0]), [3, 24]) + flat[:3])


def reused(b: ComputationGraphBuilder) -> None:
    """Many short-lived values of one size: workspaces are shared, results take operands' places."""
    value = b.input("x", (16, 16), "float32")
    for index in range(6):
        product = b.matmul(value, b.transpose(value, (1, 0)))
        value = b.op("Tanh", b.reshape(product, (256,)) * 0.1 - float(index))
        value = b.reshape(value, (16, 16)) + b.transpose(product, (1, 0)) * 0.01
    b.output("y", value)


PROGRAMS = {"attention": attention, "joined": joined, "cut": cut, "reused": reused}


def program_of(name: str) -> Program:
    return model(name, PROGRAMS[name], target="host").binary.programs[0]


def divisions(program: Program) -> list[tuple[tuple[int, ...], ...]]:
    """None, each operation by itself, all in one, and some drawn ones."""
    count = len(program.operations)
    found: list[tuple[tuple[int, ...], ...]] = [(), tuple((i,) for i in range(count))]
    found.append((tuple(range(count)),))
    for _ in range(12):
        runs: list[list[int]] = []
        foreign = DRAW.integers(0, 2, count)
        for index in range(count):
            if foreign[index] and index and foreign[index - 1] and DRAW.integers(0, 2):
                runs[-1].append(index)
            elif foreign[index]:
                runs.append([index])
        found.append(tuple(map(tuple, runs)))
    return found


def results(prepared: PreparedProgram, program: Program, inputs: Sequence[Array]) -> list[Array]:
    """What a program gives, twice over the same bytes."""
    kinds = [program.values[s.value].type for s in program.outputs]
    outputs = [np.full(k.shape, np.nan, k.data_type.dtype) for k in kinds]
    scratch = np.zeros(program.scratch.size_per_bank, np.uint8)
    bound = prepared.bind(tuple(map(as_bytes, inputs)), tuple(map(as_bytes, outputs)), scratch)
    for _ in range(2):
        run(bound)
    return outputs


def run(bound: BoundProgram) -> None:
    with np.errstate(all="ignore"):
        for step in bound.steps:
            step()


def plain(program: Program, inputs: Sequence[Array]) -> list[Array]:
    """What the program gives operation by operation, every value in its own place."""
    kinds = [program.values[s.value].type for s in program.outputs]
    outputs = [np.empty(k.shape, k.data_type.dtype) for k in kinds]
    scratch = np.zeros(program.scratch.size_per_bank, np.uint8)
    prepared = NumpyExecutor().prepare(program, MACHINE)
    assert isinstance(prepared, PreparedKernels)
    regions = tuple(map(as_bytes, inputs)), tuple(map(as_bytes, outputs))
    run(prepared.bind_plainly(*regions, scratch))
    return outputs


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_division_gives_the_numbers_of_one_operation_after_the_other(name: str) -> None:
    program = program_of(name)
    inputs = [draw(*program.values[s.value].type.shape) for s in program.inputs]
    wanted = plain(program, inputs)
    sessions, workspace = Sessions(1), Workspace()
    for runs in divisions(program):
        calls, _ = sessions.calls(program, runs, sessions.able(program))
        assert calls is not None
        prepared = PreparedKernels(program, MACHINE, workspace, calls)
        for found, right in zip(results(prepared, program, inputs), wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=2e-4, atol=2e-5, err_msg=str(runs))


def gated(b: ComputationGraphBuilder) -> None:
    """A large product, a function that NumPy has not, and a choice that ONNX Runtime is slow at."""
    x = b.input("x", (512, 256), "float32")
    u = b.matmul(x, b.parameter("w", draw(256, 1024) * 0.05))
    zero = b.constant(np.zeros((), np.float32))
    kept = b.op("Where", b.op("Greater", u, zero), u, zero)
    b.output("y", b.op("Erf", kept) * 0.5)


def test_products_and_functions_go_to_onnx_runtime_and_choices_to_numpy() -> None:
    compiled = model("gated", gated, target="host")
    program = compiled.binary.programs[0]
    able = Sessions(1).able(program)
    foreign = {program.operations[i].op for run in divide(program, able, TABLE).runs for i in run}
    assert {"MatMul", "Erf"} <= foreign
    assert foreign.isdisjoint({"Where", "Greater"})
    x = draw(512, 256)
    with stitch.open_device("host") as device, stitch.open_device("host", executor="auto") as fast:
        found, right = (one(d.load(compiled)(x)).numpy() for d in (fast, device))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)


def test_an_onnx_runtime_that_cannot_be_loaded_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise ImportError("libcrypt is missing")

    monkeypatch.setattr("stitch.runtime.executors.automatic.import_module", broken)
    x = draw(300, 300)
    product = stitch.compile(lambda a, b: a @ b, (x, x), target="host")
    with stitch.open_device("host", executor="auto") as device:
        for _ in range(2):
            with pytest.raises(UsageError, match="cannot be loaded"):
                one(device.load(product)(x, x)).numpy()
