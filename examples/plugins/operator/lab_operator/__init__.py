"""The operator `lab.SquaredRelu`: y = max(x, 0) ** 2, with gradient, ONNX form and batching rule.

Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops import (
    BatchingContext,
    GradientContext,
    InferenceContext,
    KernelArguments,
    OpDef,
    Thunk,
)
from stitch.program import Operation, ValueType


def infer(context: InferenceContext) -> tuple[ValueType, ...]:
    """Return the type of the operand, which must be floating."""
    kind = context.operand(0)
    if not kind.data_type.is_floating:
        raise context.fail("SquaredRelu takes floating tensors", got=kind.data_type.value)
    return (kind,)


def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    """Return the two steps; the output may be the operand's array."""
    x, y = arguments.operand(0), arguments.outputs[0]
    return (lambda: np.maximum(x, 0, out=y), lambda: np.multiply(y, y, out=y))


def gradient(context: GradientContext) -> tuple[Any, ...]:
    """Return 2 max(x, 0) times the gradient of y."""
    x = context.read("input", 0)
    slope = context.apply("Relu", x)
    return (context.apply("Mul", context.gradients[0], context.apply("Add", slope, slope)),)


def batch(context: BatchingContext) -> Any:
    """Return the operation on the whole batch: it is elementwise."""
    return context.emit(*context.operands)


def onnx_form(writer: Any, operation: Operation, _: Any) -> None:
    """Write the operation as Relu and Mul."""
    relu = writer.node("Relu", [writer.operand(operation.inputs[0])])
    writer.give(operation, "Mul", [relu, relu])


OPERATORS = (
    OpDef(
        "SquaredRelu", (1, 1), infer, kernel, domain="lab", elementwise=True,
        gradient=gradient, batching=batch, onnx=onnx_form,
    ),
)  # fmt: skip
