"""Rewrite integer operators for which ONNX Runtime's kernels fail, crash or round.

As in `rewrites`: a rewrite returns whether it wrote the operation, or raises `CompileError`.
"""

from __future__ import annotations

import math

import numpy as np

from stitch.errors import CompileError
from stitch.program import ABSENT, DataType, Operation
from stitch.runtime.executors.onnx.model_writer import Attributes, ModelWriter, value_name

#: ONNX Runtime reduces these in float64, which holds 53 bits.
_WIDE = (DataType.INT64, DataType.UINT64)
_NARROW = (DataType.INT8, DataType.INT16, DataType.UINT8, DataType.UINT16)
#: The comparison by which an operand is the result.
_COMPARISON = {"Max": "Greater", "Min": "Less"}
_SUMMED = (DataType.INT32, DataType.INT64)
#: The most 32-bit terms whose sum float64 holds exactly.
_EXACT_TERMS = 2**21


def divide(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    """Divide by 0 to 0, and the lowest number by -1 to itself: ONNX Runtime fails or crashes."""
    if not _needs_guard(writer, operation):
        return False
    guarded = _Guarded(writer, operation)
    quotient = writer.node("Div", [guarded.x, guarded.safe])
    nothing = guarded.scalar(0)
    if guarded.signed:
        minus = writer.node("Equal", [guarded.d, guarded.scalar(-1)])
        quotient = writer.node("Where", [minus, writer.node("Sub", [nothing, guarded.x]), quotient])
    guarded.write(writer.node("Where", [guarded.zero, nothing, quotient]))
    return True


def modulo(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Return 0 modulo 0 and -1: ONNX Runtime fails, crashes, or computes 53 of 64 bits."""
    kind = writer.type_of(operation.inputs[1]).data_type
    fmod = attributes["fmod"]
    wide = fmod == 1 and kind in _WIDE
    if not wide and not _needs_guard(writer, operation):
        return False
    guarded = _Guarded(writer, operation)
    x, d = guarded.x, guarded.safe
    if wide:
        whole = writer.node("Mul", [writer.node("Div", [x, d]), d])
        guarded.write(writer.node("Sub", [x, whole]))
    else:
        guarded.write(writer.node("Mod", [x, d], fmod=fmod))
    return True


def extreme(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    """Compute Max and Min of narrow integers in 32 bits, as there is no kernel, and of 64-bit
    integers by comparisons: the kernel (1.31) compares 32 bits."""
    kind = writer.type_of(operation.outputs[0]).data_type
    if kind is DataType.INT64:
        first, *others = (writer.operand(v) for v in operation.inputs)
        for other in others:
            first = _select(writer, _COMPARISON[operation.op], first, other)
        return writer.give(operation, "Identity", [first])
    if kind not in _NARROW:
        return False
    wide = [writer.cast(writer.operand(v), DataType.INT32) for v in operation.inputs]
    writer.cast(writer.node(operation.op, wide), kind, value_name(operation.outputs[0]))
    return True


def relu(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    """Write Relu of 64-bit and narrow integers by others, as there are no kernels."""
    kind, data = writer.type_of(operation.inputs[0]).data_type, writer.operand(operation.inputs[0])
    if kind is DataType.INT64:
        positive = _select(writer, "Greater", data, writer.scalar(0, np.int64))
        return writer.give(operation, "Identity", [positive])
    if kind not in _NARROW:
        return False
    wide = writer.node("Relu", [writer.cast(data, DataType.INT32)])
    writer.cast(wide, kind, value_name(operation.outputs[0]))
    return True


def _select(writer: ModelWriter, comparison: str, x: str, bound: str) -> str:
    """Return `x` where the comparison with the bound holds, else the bound."""
    return writer.node("Where", [writer.node(comparison, [x, bound]), x, bound])


def clip(writer: ModelWriter, operation: Operation) -> bool:
    """Clip 64-bit integers by comparisons: the kernel compares 32 bits."""
    x = writer.operand(operation.inputs[0])
    for comparison, bound in zip(("Greater", "Less"), operation.inputs[1:], strict=False):
        if bound != ABSENT:
            x = _select(writer, comparison, x, writer.operand(bound))
    return writer.give(operation, "Identity", [x])


def sign(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    """Compute the sign of 64-bit integers by comparisons: the kernel compares 32 bits."""
    if writer.type_of(operation.outputs[0]).data_type is not DataType.INT64:
        return False
    x, zero = writer.operand(operation.inputs[0]), writer.scalar(0, np.int64)
    signs = (writer.node(op, [x, zero]) for op in ("Greater", "Less"))
    return writer.give(operation, "Sub", [writer.cast(s, DataType.INT64) for s in signs])


def reduced_extreme(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Reduce 64-bit integers by their upper halves, then by the lower halves of the extreme upper
    half: the kernel compares 32 bits."""
    kind = writer.type_of(operation.inputs[0])
    axes = writer.known(operation.inputs[1]) if len(operation.inputs) > 1 else None
    idle = attributes["noop_with_empty_axes"] == 1 and (axes is None or not axes.size)
    if kind.data_type is DataType.BOOL and 0 in kind.shape:
        raise CompileError("ONNX Runtime has no extreme of an empty tensor of booleans")
    if kind.data_type is not DataType.INT64 or 0 in kind.shape or idle:
        return False
    x, *rest = (writer.operand(v) for v in operation.inputs)
    keepdims, half = attributes["keepdims"], writer.scalar(2**32, np.int64)
    least = np.iinfo(np.int32)

    def reduced(number: str, keep: object) -> str:
        return writer.node(operation.op, [number, *rest], keepdims=keep)

    low = writer.node("BitwiseAnd", [x, writer.scalar(2**32 - 1, np.int64)])
    high = writer.cast(writer.node("Div", [writer.node("Sub", [x, low]), half]), DataType.INT32)
    middle = writer.scalar(2**31, np.int64)
    low = writer.cast(writer.node("Sub", [low, middle]), DataType.INT32)
    never = writer.scalar(least.min if operation.op == "ReduceMax" else least.max, np.int32)
    is_chosen = writer.node("Equal", [high, reduced(high, 1)])
    below = reduced(writer.node("Where", [is_chosen, low, never]), keepdims)
    upper, lower = (writer.cast(n, DataType.INT64) for n in (reduced(high, keepdims), below))
    total = writer.node("Add", [writer.node("Mul", [upper, half]), lower])
    return writer.give(operation, "Add", [total, middle])


def _needs_guard(writer: ModelWriter, operation: Operation) -> bool:
    divisor = operation.inputs[1]
    if writer.type_of(divisor).data_type.dtype.kind not in "iu":
        return False
    data = writer.known(divisor)
    return data is None or bool(np.isin(data, (0, -1)).any())


class _Guarded:
    """The dividend, the divisor, the divisor with 1 for 0 and -1, and where it was 0.

    Narrow integers are widened to 32 bits, which have a Where kernel.
    """

    def __init__(self, writer: ModelWriter, operation: Operation) -> None:
        self.writer = writer
        self.out = value_name(operation.outputs[0])
        self.kind = writer.type_of(operation.inputs[1]).data_type
        self.wide = DataType.INT32 if self.kind in _NARROW else self.kind
        self.signed = self.wide.dtype.kind == "i"
        self.x, self.d = map(writer.operand, operation.inputs)
        if self.wide is not self.kind:
            self.x, self.d = (writer.cast(name, self.wide) for name in (self.x, self.d))
        self.zero = bad = writer.node("Equal", [self.d, self.scalar(0)])
        if self.signed:
            bad = writer.node("Or", [bad, writer.node("Equal", [self.d, self.scalar(-1)])])
        self.safe = writer.node("Where", [bad, self.scalar(1), self.d])

    def scalar(self, number: int) -> str:
        return self.writer.scalar(number, self.wide.dtype.type)

    def write(self, name: str) -> None:
        """Write the operation's result, narrowed to its type."""
        if self.wide is self.kind:
            self.writer.node("Identity", [name], self.out)
        else:
            self.writer.cast(name, self.kind, self.out)


def power(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    """Refuse powers that ONNX Runtime computes in float64, which holds 53 bits."""
    if writer.type_of(operation.inputs[0]).data_type is not DataType.INT64:
        return False
    exponent = writer.known(operation.inputs[1])
    if exponent is None or exponent.size != 1 or exponent.reshape(()) not in (2, 3):
        raise CompileError("ONNX Runtime rounds powers of int64 to 53 bits, except 2 and 3")
    return False


def summed(writer: ModelWriter, operation: Operation, attributes: Attributes) -> bool:
    """Sum integers in parts that are exact in float64; the total wraps around."""
    kind = writer.type_of(operation.inputs[0])
    axes = writer.known(operation.inputs[1]) if len(operation.inputs) > 1 else None
    idle = attributes["noop_with_empty_axes"] == 1 and (axes is None or not axes.size)
    if kind.data_type.is_floating or idle:
        return False
    if kind.data_type not in _SUMMED or math.prod(kind.shape) > _EXACT_TERMS:
        raise CompileError("ONNX Runtime sums integers in float64, which rounds and saturates")
    x, *rest = (writer.operand(v) for v in operation.inputs)
    out, keepdims = value_name(operation.outputs[0]), attributes["keepdims"]
    if kind.data_type is DataType.INT32:
        wide = writer.cast(x, DataType.INT64)
        total = writer.node("ReduceSum", [wide, *rest], keepdims=keepdims)
        writer.cast(total, DataType.INT32, out)
        return True
    half = writer.scalar(2**31, np.int64)
    high = writer.node("Div", [x, half])
    low = writer.node("Sub", [x, writer.node("Mul", [high, half])])
    above = writer.node("ReduceSum", [high, *rest], keepdims=keepdims)
    below = writer.node("ReduceSum", [low, *rest], keepdims=keepdims)
    writer.node("Add", [writer.node("Mul", [above, half]), below], out)
    return True


def rounded_reduction(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    """Refuse integers that may round or saturate in float64; a mean of 32 bits cannot."""
    kind = writer.type_of(operation.inputs[0]).data_type
    exact = operation.op == "ReduceMean" and kind not in _WIDE
    if not kind.is_floating and not exact:
        raise CompileError("ONNX Runtime reduces integers in float64, which rounds and saturates")
    return False


def einsum(writer: ModelWriter, operation: Operation, _: Attributes) -> bool:
    if not all(writer.type_of(v).data_type.is_floating for v in operation.inputs):
        raise CompileError("ONNX Runtime's Einsum saturates sums of integers")
    return False
