"""Nodes of older opsets in the words of opset 26, and what ONNX writes in tensors as attributes.

Comes in: one `NodeCall` and the builder. Goes out: a `NodeCall` that means the same in opset 26,
perhaps after operations of its own. Operators that did not change are not mentioned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import TensorProto

from stitch import ops
from stitch.frontend.onnx.calls.node_call import NodeCall
from stitch.frontend.onnx.protos import tensor_array
from stitch.graph import ComputationGraphBuilder, SymbolicTensor

Upgrade = Callable[[ComputationGraphBuilder, NodeCall], NodeCall]


def upgraded(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The same computation in the words of opset 26; raises `CompileError`."""
    if call.domain:
        return call
    for before, upgrade in _UPGRADES.get(call.op, ()):
        if call.version < before:
            call = upgrade(builder, call)
    return call


def _with_axes(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Axes became an operand (opset 18)."""
    attributes = dict(call.attributes)
    axes = attributes.pop("axes", None)
    if not isinstance(axes, tuple):
        return call
    inputs = (*call.inputs[:1], builder.constant(list(axes)))
    return replace(call, inputs=inputs, attributes=attributes)


def _split(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The number of equal parts became an attribute (opset 18)."""
    if call.operand(1) is not None:
        return call
    return replace(call, attributes=call.attributes | {"num_outputs": len(call.outputs)})


def _group_normalization(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Scale and bias became per channel (opset 21)."""
    data, groups = call.operand(0), call.attributes.get("num_groups")
    if data is None or len(data.shape) < 2 or not isinstance(groups, int) or groups < 1:
        return call  # refused where it is typed
    channels = data.shape[1]

    def spread(per_group: SymbolicTensor | None) -> SymbolicTensor | None:
        if per_group is None or per_group.shape != (groups,) or channels % groups:
            return per_group
        columns = builder.op("Reshape", per_group, [groups, 1])
        return builder.op("Reshape", builder.op("Expand", columns, [groups, channels // groups]),
                          [channels])  # fmt: skip

    return replace(call, inputs=(data, *map(spread, call.inputs[1:])))


def _batch_normalization(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Training got a mode of its own, with other outputs (opset 14)."""
    if any(call.outputs[1:]):
        raise call.refused(
            "BatchNormalization in training mode is not supported before opset 14",
            remedy="export the model for inference, or with opset 14 or newer",
        )  # fmt: skip
    return replace(call, outputs=call.outputs[:1])


def _prelu(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """A vector of slopes was one per channel (before opset 7; the converter leaves it so)."""
    data, slope = call.operand(0), call.operand(1)
    if data is None or slope is None or len(slope.shape) != 1 or slope.size == 1:
        return call
    spread = builder.op("Reshape", slope, [slope.size, *[1] * (len(data.shape) - 2)])
    return replace(call, inputs=(data, spread))


def _roi_align(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The default of coordinate_transformation_mode changed (opset 16)."""
    return replace(
        call, attributes={"coordinate_transformation_mode": "output_half_pixel"} | call.attributes
    )


def _grid_sample(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Modes were renamed (opset 20)."""
    mode = str(call.attributes.get("mode", "bilinear"))
    return replace(
        call, attributes=call.attributes | {"mode": mode.removeprefix("bi") if mode in
                                            ("bilinear", "bicubic") else mode}
    )  # fmt: skip


def _dft(builder: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """The axis became an operand (opset 20)."""
    attributes = dict(call.attributes)
    wanted = attributes.pop("axis", 1)
    if not isinstance(wanted, int):
        return call
    axis = builder.constant(np.array(wanted, np.int64))
    return replace(call, inputs=(call.operand(0), call.operand(1), axis), attributes=attributes)


def _constant_of_shape(_: ComputationGraphBuilder, call: NodeCall) -> NodeCall:
    """Graphs hold no tensors in attributes: the value is spelt as its type and a number."""
    attributes = dict(call.attributes)
    tensor = attributes.pop("value", None)
    if not isinstance(tensor, TensorProto):
        return call
    value = tensor_array(tensor, None, f"{call.where}, attribute 'value'")
    if value.size != 1:
        raise call.refused(
            "the value of ConstantOfShape is one element", got=f"{value.size} elements"
        )
    number = value.reshape(()).astype(value.dtype)
    attributes["dtype"] = int(tensor.data_type)
    if ops.data_type_of_code(tensor.data_type).is_floating:
        attributes["value_float"] = float(number)
    else:
        attributes["value_int"] = int(number)
    return replace(call, attributes=attributes)


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
#: By operator: for nodes of opsets before this one, what to do.
_UPGRADES: dict[str, tuple[tuple[int, Upgrade], ...]] = {
    **{f"Reduce{name}": ((18, _with_axes),) for name in _REDUCTIONS},
    "Split": ((18, _split),),
    "GroupNormalization": ((21, _group_normalization),),
    "BatchNormalization": ((14, _batch_normalization),),
    "PRelu": ((7, _prelu),),
    "RoiAlign": ((16, _roi_align),),
    "GridSample": ((20, _grid_sample),),
    "DFT": ((20, _dft),),
    "ConstantOfShape": ((99, _constant_of_shape),),
}
