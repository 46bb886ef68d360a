"""Small ONNX models for tests, and the two ways of running one: Stitch, and ONNX's reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions

import stitch
from stitch.program import Array

FLOAT, INT64, BOOL = 1, 7, 9


def info(name: str, shape: Sequence[int | str | None] | None, code: int = FLOAT) -> Any:
    """A declared input."""
    return helper.make_tensor_value_info(name, code, shape)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[str],
    weights: Mapping[str, Array] | None = None,
    *,
    opset: int = 26,
    functions: Sequence[Any] = (),
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model whose outputs' types are left to inference."""
    graph = helper.make_graph(
        list(nodes),
        "case",
        list(inputs),
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(domain, v) for domain, v in (domains or {}).items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=list(functions))


def ours(proto: Any, arrays: Sequence[Array], **how: Any) -> list[Array]:
    """The results of Stitch, compiled with the arrays as examples."""
    with stitch.open_device("wormhole_n150") as device:
        program = device.load(stitch.compile(proto, tuple(arrays), **how))
        made = program(*arrays)
        return [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]


def theirs(proto: onnx.ModelProto, arrays: Sequence[Array]) -> list[Array]:
    """The results of ONNX's reference implementation."""
    feeds = dict(zip((i.name for i in proto.graph.input), arrays, strict=True))
    with np.errstate(all="ignore"):
        return [np.asarray(a) for a in ReferenceEvaluator(proto).run(None, feeds)]


def assert_agree(proto: onnx.ModelProto, arrays: Sequence[Array]) -> None:
    """Both ways give the same shapes, types and numbers."""
    for mine, other in zip(ours(proto, arrays), theirs(proto, arrays), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def drawn(*shape: int, seed: int = 3) -> Array:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


#: A node of one operator, drawn: operands by position (None: left out), results, attributes.
Drawn = tuple[list[Array | None], int | list[str], dict[str, Any]]


def one_node(
    op: str, case: Drawn, domain: str, version: int = 1, *, constants: Collection[int] = ()
) -> tuple[onnx.ModelProto, list[Array]]:
    """A model of one node, and what to give it; operands in `constants` are initializers."""
    operands, results, attributes = case
    names = [f"x{i}" if array is not None else "" for i, array in enumerate(operands)]
    outputs = results if isinstance(results, list) else [f"y{i}" for i in range(results)]
    node = helper.make_node(op, names, outputs, domain=domain, **attributes)
    inputs = [
        info(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))
        for i, (name, array) in enumerate(zip(names, operands, strict=True))
        if array is not None and i not in constants
    ]
    weights = {names[i]: a for i, a in enumerate(operands) if a is not None and i in constants}
    wanted = [name for name in outputs if name]
    domains, opset = ({domain: version}, 21) if domain else ({}, version if version > 1 else 21)
    proto = model([node], inputs, wanted, weights, opset=opset, domains=domains)
    return proto, [a for i, a in enumerate(operands) if a is not None and i not in constants]


def runtime(proto: onnx.ModelProto, arrays: Sequence[Array]) -> list[Array]:
    """The results of ONNX Runtime, its graph as it is."""
    options = SessionOptions()
    options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    # What is quantized while it runs depends on how rows are divided among threads.
    options.intra_op_num_threads = 1
    session = InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = dict(zip((i.name for i in session.get_inputs()), arrays, strict=True))
    return [np.asarray(a) for a in session.run(None, feeds)]


def assert_as_runtime(
    proto: onnx.ModelProto, arrays: Sequence[Array], rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    """Stitch and ONNX Runtime give the same shapes, types and numbers."""
    for mine, other in zip(ours(proto, arrays), runtime(proto, arrays), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=atol)
