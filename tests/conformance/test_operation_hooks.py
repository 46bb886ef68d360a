"""Where an operation is seen by itself, who computes it is who computes it in a whole run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array
from stitch.runtime import HookContext
from stitch.runtime.executors.onnx import onnxruntime_executor, session
from tests.support.stitched_models import integers, model, one

WEIGHTS = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
CALLING = ["onnxruntime", "auto", "torch"]


def network(b: ComputationGraphBuilder) -> None:
    """Operators that ONNX Runtime computes with every executor that calls it."""
    x = b.input("x", (256, 64), "float32")
    y = b.op("Gelu", b.matmul(x, b.parameter("w", WEIGHTS)))
    b.output("y", b.op("Softmax", b.op("Erf", y)))


def outputs(executor: str, x: Array) -> dict[str, Array]:
    """What each operation of the network makes, by its operator."""
    seen: dict[str, Array] = {}

    def see(context: HookContext) -> None:
        assert context.operation is not None
        seen[context.operation.op] = context.outputs[0].copy()

    with stitch.open_device("host", executor=executor) as device:
        program = device.load(model("m", network, target="host"))
        device.hooks.register(after_operation=see)
        one(program(x)).numpy()
    return seen


@pytest.mark.parametrize("executor", CALLING)
def test_a_result_that_nobody_reads_is_seen_as_well(executor: str) -> None:
    def build(b: ComputationGraphBuilder) -> None:
        x = b.input("x", (64, 256), "float32")
        values, _ = b.op("TopK", x, np.array([3]), outputs=2)
        b.output("y", b.op("Erf", values))

    counts: list[int] = []
    with stitch.open_device("host", executor=executor) as device:
        program = device.load(model("m", build, target="host"))
        device.hooks.register(after_operation=lambda c: counts.append(len(c.outputs)))
        one(program(integers((64, 256)))).numpy()
    assert counts == [2, 1]


def test_a_kernel_of_onnxruntime_that_is_wrong_is_seen_by_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = session.session_call

    def wrong(made: Any, arrays: Any, program: Any, name: str) -> Any:
        run = call(made, arrays, program, name)
        if [o.op for o in program.operations] != ["Gelu"]:
            return run
        (result,) = (arrays[slot.value] for slot in program.outputs)
        return lambda: (run(), np.add(result, 1, out=result))

    monkeypatch.setattr(onnxruntime_executor, "session_call", wrong)
    x = np.random.default_rng(1).normal(size=(256, 64)).astype(np.float32)
    found, right = outputs("onnxruntime", x), outputs("numpy", x)
    np.testing.assert_allclose(found["Gelu"], right["Gelu"] + 1, 1e-4, 1e-4)
