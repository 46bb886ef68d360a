"""What sessions of ONNX Runtime are told: denormals, fusions, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.program import Array
from stitch.runtime.executors import make_executor
from stitch.runtime.executors.onnx import Sessions, onnxruntime_executor
from stitch.runtime.executors.onnx.onnx_model import write_model
from stitch.runtime.executors.onnx.session import flushing, has_effect
from tests.support.stitched_models import one

TINY = 5e-324


def run(graph: ComputationGraph, x: Array, executor: str, threads: int | None = None) -> Array:
    with stitch.open_device("host", executor=executor, threads=threads) as device:
        found: Array = one(device.load(stitch.compile(graph, target="host"))(x)).numpy()
        return found


def masked_softmax(length: int = 32) -> ComputationGraph:
    b = ComputationGraphBuilder("masked")
    scores = b.input("x", (2, length, length), "float32")
    later = np.triu(np.full((length, length), -np.inf, np.float32), 1)
    b.output("y", b.op("Softmax", b.op("Add", scores, later), axis=-1))
    return b.build()


def added_and_normalised(layers: int) -> ComputationGraph:
    b = ComputationGraphBuilder("normalised")
    x = b.input("x", (8, 64), "float32")
    scale, bias = np.linspace(0.5, 2, 64).astype(np.float32), np.ones(64, np.float32)
    for _ in range(layers):
        x = b.op("LayerNormalization", b.op("Add", x, b.op("Tanh", x)), scale, bias)
    b.output("y", x)
    return b.build()


def test_a_flushing_call_sees_no_denormals_and_its_thread_sees_them_afterwards() -> None:
    found: list[float] = []
    flushing(lambda: found.append(TINY * float(len(found) + 1)))()
    assert found == [0.0 if has_effect() else TINY]
    assert TINY * float(len(found)) == TINY


def test_a_flushing_call_that_fails_leaves_its_thread_as_it_was() -> None:
    def fail() -> None:
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        flushing(fail)()
    assert TINY * float(len("x")) == TINY


def test_a_masked_softmax_is_the_same_by_both_executors_and_leaves_denormals_alone() -> None:
    x = np.random.default_rng(0).standard_normal((2, 32, 32)).astype(np.float32)
    graph = masked_softmax()
    ours, theirs = run(graph, x, "numpy"), run(graph, x, "onnxruntime")
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-7)
    assert not np.triu(theirs, 1).any()
    small = np.full(4, 1e-40, np.float32)
    assert (small * np.float32(1) == small).all() and small.all()


def test_sums_that_are_normalised_agree() -> None:
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    graph = added_and_normalised(3)
    np.testing.assert_allclose(
        run(graph, x, "onnxruntime"), run(graph, x, "numpy"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_threads_are_the_users_to_set(executor: str) -> None:
    x = np.random.default_rng(2).standard_normal((8, 64)).astype(np.float32)
    graph = added_and_normalised(1)
    want = run(graph, x, executor)
    np.testing.assert_allclose(run(graph, x, executor, threads=2), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("executor", ["numpy", "null"])
def test_threads_of_an_executor_without_them_are_refused(executor: str) -> None:
    with pytest.raises(UsageError, match=f"{executor!r} takes no number of threads"):
        stitch.open_device("host", executor=executor, threads=2)


def test_threads_of_an_executor_that_is_made_already_are_refused() -> None:
    with pytest.raises(UsageError, match="'onnxruntime' takes no number of threads"):
        stitch.open_device("host", executor=make_executor("onnxruntime"), threads=2)


@pytest.mark.parametrize("executor", ["onnxruntime", "auto"])
def test_there_is_at_least_one_thread(executor: str) -> None:
    with pytest.raises(UsageError, match="at least one thread"):
        stitch.open_device("host", executor=executor, threads=0)


def test_programs_that_share_a_session_have_errors_with_their_own_names() -> None:
    def gather(name: str) -> Any:
        b = ComputationGraphBuilder(name)
        x, rows = b.input("x", (4, 4), "float32"), b.input("rows", (2,), "int64")
        b.output("y", b.op("Gather", b.op("Tanh", x), rows, axis=0))
        return stitch.compile(b.build(), target="host")

    x, rows = np.ones((4, 4), np.float32), np.array([0, 9])
    with stitch.open_device("host", executor="onnxruntime") as device:
        for program in [device.load(gather(name)) for name in ("first", "second")]:
            with pytest.raises(TaskError, match=f"program '{program.name}'"):
                one(program(x, rows)).numpy()


def test_a_program_may_leave_an_input_unread() -> None:
    b = ComputationGraphBuilder("unread")
    x, _ = b.input("x", (2, 3), "float32"), b.input("unread", (2, 3), "float32")
    b.output("y", b.op("Relu", x))
    with stitch.open_device("host", executor="onnxruntime") as device:
        program = device.load(stitch.compile(b.build(), target="host"))
        given = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
        np.testing.assert_array_equal(one(program(given, given)).numpy(), np.maximum(given, 0))


def test_parts_of_a_program_that_a_size_does_not_change_are_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []

    def counted(program: Any) -> Any:
        written[-1] += 1
        return write_model(program)

    monkeypatch.setattr(onnxruntime_executor, "write_model", counted)

    def function(x: Any, y: Any) -> Any:
        return x * 2 - np.tanh(y).sum()

    model = stitch.compile(
        function, (np.ones((7, 13), np.float32), np.ones((5, 11, 3), np.float32)),
        dynamic_shapes={"x": {0: stitch.Dim("rows", 1, 64)}},
    )  # fmt: skip
    sessions, kept = Sessions(1), []
    for rows in (7, 9, 7):
        written.append(0)
        program = model.at(rows=rows).binary.program(0)
        able = sessions.able(program)
        calls, _ = sessions.calls(program, [(i,) for i in range(len(able))], able)
        kept.append(calls)
    assert written == [4, 2, 0]
