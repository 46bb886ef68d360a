"""ONNX Runtime: two sessions by `run`, two sessions bound, and one session of the whole chain.

Bound sessions read the input where it lies and write buffers that exist before; nothing is bound
anew from pass to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from peer_ways.chains import Case, Layer, Way
from stitch.program import Array

OPSET = 17
IR_VERSION = 8


def make_session(layers: Sequence[Layer], batch: int) -> Any:
    """A session over a model of Gemm and Relu, on one thread."""
    nodes, tensors, name = [], [], "x"
    for i, (w, b) in enumerate(layers):
        tensors += [numpy_helper.from_array(w, f"w{i}"), numpy_helper.from_array(b, f"b{i}")]
        last = "y" if i == len(layers) - 1 else f"h{i}"
        nodes.append(helper.make_node("Gemm", [name, f"w{i}", f"b{i}"], [f"g{i}"]))
        nodes.append(helper.make_node("Relu", [f"g{i}"], [last]))
        name = last
    ends = [("x", layers[0][0].shape[0]), ("y", layers[-1][0].shape[1])]
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, (batch, width)) for n, width in ends
    )
    model = helper.make_model(
        helper.make_graph(nodes, "chain", [x], [y], tensors),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def bound_way(name: str, sessions: Sequence[Any], case: Case) -> Way:
    """Sessions whose values lie at fixed places, each reading what the one before wrote."""
    value = onnxruntime.OrtValue.ortvalue_from_numpy(case.x)
    calls = []
    for session in sessions:
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", value)
        shape = session.get_outputs()[0].shape
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty(shape, np.float32))
        binding.bind_ortvalue_output("y", value)
        calls.append((session.run_with_iobinding, binding))

    def run(result: Any) -> Any:
        for call, binding in calls:
            call(binding)
        return result

    return Way(name, run, value, lambda found: np.array(found.numpy()))


def make_ways(case: Case, stack: ExitStack) -> list[Way]:
    """Three ways: unbound, bound, merged and bound."""
    sessions = [make_session(layers, case.chain.batch) for layers in case.programs]

    def run(x: Array) -> Array:
        for session in sessions:
            (x,) = session.run(None, {"x": x})
        return x

    merged = make_session(case.layers, case.chain.batch)
    return [
        Way("onnxruntime, a session each, run", run, case.x),
        bound_way("onnxruntime, a session each, bound", sessions, case),
        bound_way("onnxruntime, merged, bound", [merged], case),
    ]
