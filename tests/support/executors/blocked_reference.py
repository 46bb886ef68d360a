"""ONNX Runtime's operators for images in blocks of channels, by NumPy, for blocks of any length.

As ONNX Runtime's, a convolution takes an image of at least a block's channels for one in blocks,
and another for a plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from stitch.ops import evaluate
from stitch.runtime.executors.onnx.blocked_writer import DOMAIN
from stitch.runtime.executors.onnx.model_writer import OnnxModel, value_name

Array = np.ndarray[Any, Any]


def blocked_results(model: OnnxModel, arrays: Mapping[int, Array], block: int) -> list[Array]:
    """The results of a model for blocks of `block` channels."""
    graph = onnx.load_from_string(model.serialized).graph
    known = {value_name(v): data for v, data in arrays.items()} | dict(model.weights)
    small = [t for t in graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    known |= {tensor.name: numpy_helper.to_array(tensor) for tensor in small}
    for node in graph.node:
        operands = [known[name] if name else None for name in node.input]
        attributes = {a.name: _plain(onnx.helper.get_attribute_value(a)) for a in node.attribute}
        if node.domain == DOMAIN:
            results: Sequence[Array] = [_in_blocks(node.op_type, operands, attributes, block)]
        else:
            results = evaluate(
                node.op_type, operands, attributes=attributes, outputs=len(node.output)
            )
        known |= dict(zip(node.output, results, strict=True))
    return [known[value_name(v)] for v in model.outputs]


def _in_blocks(op: str, operands: list[Any], attributes: dict[str, Any], block: int) -> Array:
    image = operands[0]
    if op == "ReorderInput":
        assert image.shape[1] % 4 == 0
        return _to_blocks(image, block)
    if op == "ReorderOutput":
        return _from_blocks(image, block)[:, : attributes["channels"]]
    if op == "Conv":
        return _convolved(operands, attributes, block)
    return _to_blocks(_one(op, [_from_blocks(image, block)], attributes), block)


def _convolved(operands: list[Any], attributes: dict[str, Any], block: int) -> Array:
    image, weight, shift, added = [*operands, None, None][:4]
    activation = attributes.pop("activation", None)
    bounds = attributes.pop("activation_params", None)
    if image.shape[1] >= block:
        image = _from_blocks(image, block)
    # Each block of filters lies with its filters innermost, and so does each block of what they
    # read, if that lies in blocks.
    outer, inner, *window = weight.shape
    if image.shape[1] >= block and inner > 1:
        lies = weight.reshape(outer // block, inner // block, *window, block, block)
        plain = lies.transpose(0, 5, 1, 4, 2, 3)
    else:
        plain = weight.reshape(outer // block, inner, *window, block).transpose(0, 4, 1, 2, 3)
    result = _one("Conv", [image, plain.reshape(weight.shape), shift], attributes)
    if added is not None:
        result = result + _from_blocks(added, block)
    if activation == "Relu":
        result = np.maximum(result, 0)
    elif activation == "Clip":
        result = np.clip(result, *bounds)
    return _to_blocks(result, block)


def _to_blocks(image: Array, block: int) -> Array:
    n, c, h, w = image.shape
    filled = np.pad(image, [(0, 0), (0, -c % block), (0, 0), (0, 0)])
    lies = filled.reshape(n, -1, block, h, w).transpose(0, 1, 3, 4, 2)
    return np.ascontiguousarray(lies).reshape(filled.shape)


def _from_blocks(image: Array, block: int) -> Array:
    n, _, h, w = image.shape
    lies = image.reshape(n, -1, h, w, block)
    return lies.transpose(0, 1, 4, 2, 3).reshape(image.shape)


def _one(op: str, operands: list[Any], attributes: dict[str, Any]) -> Array:
    (result,) = evaluate(op, operands, attributes=attributes)
    return np.asarray(result)


def _plain(attribute: Any) -> Any:
    if isinstance(attribute, bytes):
        return attribute.decode()
    return tuple(attribute) if isinstance(attribute, list) else attribute
