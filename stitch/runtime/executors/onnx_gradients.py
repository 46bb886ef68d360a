"""Stitch's own operators of backward passes, written in ONNX's.

Comes in: an operation and the writer of its model. Goes out: its expansion, which is also what the
operator means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from stitch.ops.windows import windows_of
from stitch.program import AttributeValue, Operation
from stitch.runtime.executors.onnx_writer import FormWriter, value_name

Attributes = Mapping[str, AttributeValue]


def _ints(writer: FormWriter, *numbers: int) -> str:
    return writer.constant(np.array(numbers, np.int64))


def conv_weight_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Pad, a slice per kernel element, one product per sample and group, and their sum."""
    image, seen = (writer.type_of(v).shape for v in operation.inputs)
    made = writer.type_of(operation.outputs[0]).shape
    windows = windows_of(attributes, image[2:], made[2:])
    rank, group = len(windows.kernel), image[1] // made[1]
    data = writer.operand(operation.inputs[0])
    if windows.needs_padding:
        ends = [e + o for e, o in zip(windows.end, windows.overhang, strict=True)]
        data = writer.node("Pad", [data, _ints(writer, 0, 0, *windows.begin, 0, 0, *ends)])
    axes, strides = _ints(writer, *range(2, rank + 2)), _ints(writer, *windows.strides)
    taps = []
    for tap in np.ndindex(*windows.kernel):
        starts = [int(t) * d for t, d in zip(tap, windows.dilations, strict=True)]
        ends = [
            start + (places - 1) * stride + 1
            for start, places, stride in zip(starts, seen[2:], windows.strides, strict=True)
        ]
        bounds = [_ints(writer, *starts), _ints(writer, *ends), axes, strides]
        taps.append(writer.node("Slice", [data, *bounds]))
    places, count = math.prod(seen[2:]), len(taps)
    lead = [image[0], group, image[1] // group]
    # [N, group, channels, taps, places], places last, then exchanged with all before.
    apart = _ints(writer, *lead, 1, places)
    parts = [writer.node("Reshape", [tap, apart]) for tap in taps]
    joined = parts[0] if count == 1 else writer.node("Concat", parts, axis=3)
    flat = writer.node("Reshape", [joined, _ints(writer, *lead[:2], lead[2] * count, places)])
    turned = writer.node("Transpose", [flat], perm=[0, 1, 3, 2])
    rows = _ints(writer, seen[0], group, seen[1] // group, places)
    gradient = writer.node("Reshape", [writer.operand(operation.inputs[1]), rows])
    products = writer.node("MatMul", [gradient, turned])
    total = writer.node("ReduceSum", [products, _ints(writer, 0)], keepdims=0)
    shape = _ints(writer, *made)
    writer.node("Reshape", [total, shape], value_name(operation.outputs[0]))
    return True


def max_pool_gradient(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """The pool's own indices say where each gradient goes."""
    shape = writer.type_of(operation.inputs[1]).shape
    kind = writer.type_of(operation.outputs[0]).data_type
    gradient, x = (writer.operand(v) for v in operation.inputs[:2])
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()}
    indices = writer.second("MaxPool", [x], **written)
    every = _ints(writer, -1)
    places, given = (writer.node("Reshape", [v, every]) for v in (indices, gradient))
    zero = writer.constant(np.zeros((), kind.compute_dtype))
    table = writer.node("Expand", [zero, _ints(writer, math.prod(shape))])
    made = writer.node("ScatterElements", [table, places, given], axis=0, reduction="add")
    writer.node("Reshape", [made, _ints(writer, *shape)], value_name(operation.outputs[0]))
    return True
