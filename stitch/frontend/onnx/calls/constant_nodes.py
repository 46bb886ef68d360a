"""Values that are known when the model is read: Constant nodes, and nodes on constants alone.

Operators that Stitch lacks are computed here by ONNX's reference implementation, where all their
operands are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from stitch.errors import LayoutError
from stitch.frontend.onnx.calls.node_call import NodeCall
from stitch.frontend.onnx.protos import NEWEST_IR, dense_array, tensor_array
from stitch.program import Array, DataType

#: How a Constant holds numbers: the attribute, and how it is read.
_FORMS: Mapping[str, Callable[[NodeCall, str], Array]] = {
    "value_int": lambda call, form: np.asarray(call.whole(form), np.int64),
    "value_ints": lambda call, form: np.asarray(call.wholes(form), np.int64),
    "value_float": lambda call, form: np.asarray(call.real(form), np.float32),
    "value_floats": lambda call, form: call.reals(form),
}
#: Their results are not decided by their operands.
_UNDECIDED = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial",
     "Bernoulli", "Loop", "Scan", "If", "ImageDecoder"}
)  # fmt: skip


def constant_array(call: NodeCall, folder: Path | None) -> Array:
    """What a Constant node holds; raises `FormatError`, or `CompileError` for strings."""
    if len(call.attributes) != 1:
        raise call.malformed(
            "a Constant has exactly one attribute",
            expected=f"value, sparse_value, {', '.join(_FORMS)}",
            got=", ".join(call.attributes) or "none",
        )  # fmt: skip
    ((form, value),) = call.attributes.items()
    if form == "value" and isinstance(value, onnx.TensorProto):
        return tensor_array(value, folder, f"{call.where}, attribute 'value'")
    if form == "sparse_value" and isinstance(value, onnx.SparseTensorProto):
        return dense_array(value, folder, f"{call.where}, attribute 'sparse_value'")
    if form in _FORMS:
        return _FORMS[form](call, form)
    raise call.refused(
        f"a Constant with the attribute {form!r} is not supported",
        expected=f"value, sparse_value, {', '.join(_FORMS)}",
    )  # fmt: skip


def reference_results(
    node: Any, call: NodeCall, operands: Sequence[Array | None]
) -> Sequence[Array] | None:
    """The results of ONNX's reference implementation; None where it gives no plain arrays."""
    if call.domain or call.op in _UNDECIDED or not any(node.output):
        return None
    names = ["" if data is None else f"x{i}" for i, data in enumerate(operands)]
    wanted = [f"y{i}" if name else "" for i, name in enumerate(node.output)]
    try:
        single = helper.make_node(call.op, names, wanted, **call.attributes)
        model = helper.make_model(
            helper.make_graph(
                [single],
                "one_node",
                [helper.make_empty_tensor_value_info(name) for name in names if name],
                [helper.make_empty_tensor_value_info(name) for name in wanted if name],
            ),
            opset_imports=[helper.make_opsetid("", call.version)],
            ir_version=NEWEST_IR,
        )
        feeds = {f"x{i}": np.array(data) for i, data in enumerate(operands) if data is not None}
        with np.errstate(all="ignore"):
            results = iter(ReferenceEvaluator(model).run(None, feeds))
    except Exception:
        # The reference raises what it likes for nodes that it cannot compute.
        return None
    arrays = [next(results) if name else np.zeros(0, np.float32) for name in wanted]
    return arrays if all(_is_plain(array) for array in arrays) else None


def _is_plain(result: object) -> bool:
    if not isinstance(result, np.ndarray | np.generic):
        return False
    try:
        DataType.from_dtype(result.dtype)
    except LayoutError:
        return False
    return True
