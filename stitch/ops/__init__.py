"""Operators: one definition per operator, and the three ways of using one.

Comes in: ONNX names (opset 26), operand types, arrays. Goes out: result types, steps bound to
arrays, results. Must not know: graphs, devices, files.
"""

from stitch.ops.applying import bind, evaluate, infer_types, kernel_workspace
from stitch.ops.attributes import resolve_attributes
from stitch.ops.definition import (
    Attribute,
    Inference,
    InferenceContext,
    Kernel,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
)
from stitch.ops.element_types import data_type_of_code, onnx_code
from stitch.ops.gradient import Gradient, GradientBuilder, GradientContext
from stitch.ops.registry import lookup, operators
from stitch.ops.shape.rearranging import slices_of
from stitch.ops.shape.reshaping import known_by_type
from stitch.ops.steps import LINE_NBYTES, KernelMemory, bytes_from_a_line, workspace
from stitch.ops.types.conversions import conversion_steps, workspace_nbytes
from stitch.ops.work import estimated_steps

__all__ = [
    "Attribute", "Gradient", "GradientBuilder", "GradientContext", "Inference",
    "InferenceContext", "Kernel", "KernelArguments", "KernelMemory", "LINE_NBYTES", "OpDef",
    "Thunk", "WorkspaceContext", "WorkspaceRule", "bind", "bytes_from_a_line", "conversion_steps",
    "data_type_of_code", "estimated_steps", "evaluate", "infer_types", "kernel_workspace",
    "known_by_type", "lookup", "onnx_code", "operators", "resolve_attributes", "slices_of",
    "workspace", "workspace_nbytes",
]  # fmt: skip
