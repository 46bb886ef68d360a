"""Operators that ONNX Runtime computes otherwise than Stitch does, written in other operators.

Comes in: an operation and the writer of its model. Goes out: whether it was rewritten; if not, it
is written as it is. Raises `CompileError` where ONNX Runtime would be wrong and nothing helps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from stitch.errors import CompileError
from stitch.ops import evaluate, onnx_code
from stitch.program import ABSENT, Array, AttributeValue, DataType, Operation
from stitch.runtime.executors.onnx_writer import FormWriter, value_name
from stitch.runtime.executors.staging import computable, compute_type

Attributes = Mapping[str, AttributeValue]
Rewrite = Callable[[FormWriter, Operation, Attributes], bool]

_FLOAT32 = onnx_code(DataType.FLOAT32)


def _cast(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Narrow types round and come back; float to integer saturates, and NaN becomes 0."""
    source, value = operation.inputs[0], operation.outputs[0]
    given, wanted = writer.type_of(source).data_type, writer.type_of(value).data_type
    data = writer.operand(source)
    code, out = onnx_code(wanted), value_name(value)
    if wanted.dtype != wanted.compute_dtype:
        narrow = writer.node("Cast", [data], to=code)
        writer.node("Cast", [narrow], out, to=_FLOAT32)
    elif given.is_floating and wanted.dtype.kind in "iu":
        _saturating(writer, data, given.compute_dtype.type, wanted, out)
    else:
        writer.node("Cast", [data], out, to=code)
    return True


def _saturating(
    writer: FormWriter, data: str, floating: type[np.floating], wanted: DataType, out: str
) -> None:
    limits = np.iinfo(wanted.dtype)
    # The largest number of the floating type below the first that is too large.
    most = np.nextafter(floating(float(limits.max) + 1), floating(0))
    if float(limits.max) < float(most):
        most = floating(limits.max)
    number = writer.node(
        "Where", [writer.node("IsNaN", [data]), _scalar(writer, 0, floating), data]
    )
    bounds = [_scalar(writer, limits.min, floating), _scalar(writer, most, floating)]
    whole = writer.node("Cast", [writer.node("Clip", [number, *bounds])], to=onnx_code(wanted))
    above = writer.node("Greater", [number, bounds[1]])
    writer.node("Where", [above, _scalar(writer, limits.max, wanted.dtype.type), whole], out)


def _scalar(writer: FormWriter, number: object, kind: type[np.generic]) -> str:
    return writer.constant(np.array(number, kind))


def _divide(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Integers by 0 give 0, the least number by -1 itself; ONNX Runtime stops or crashes there."""
    if not _needs_guard(writer, operation):
        return False
    x, d, number, one, zero = _guarded(writer, operation)
    quotient = writer.node("Div", [x, one])
    if number.kind == "i":
        minus = writer.node("Equal", [d, _scalar(writer, -1, number.type)])
        negative = writer.node("Sub", [_scalar(writer, 0, number.type), x])
        quotient = writer.node("Where", [minus, negative, quotient])
    out = value_name(operation.outputs[0])
    writer.node("Where", [zero, _scalar(writer, 0, number.type), quotient], out)
    return True


def _modulo(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Integers modulo 0 and -1 give 0; ONNX Runtime stops or crashes there."""
    if not _needs_guard(writer, operation):
        return False
    x, _, _, one, _ = _guarded(writer, operation)
    writer.node("Mod", [x, one], value_name(operation.outputs[0]), fmod=attributes["fmod"])
    return True


def _needs_guard(writer: FormWriter, operation: Operation) -> bool:
    divisor = operation.inputs[1]
    if writer.type_of(divisor).data_type.dtype.kind not in "iu":
        return False
    data = writer.known(divisor)
    return data is None or bool(np.isin(data, (0, -1)).any())


def _guarded(
    writer: FormWriter, operation: Operation
) -> tuple[str, str, np.dtype[np.generic], str, str]:
    """Dividend, divisor, their type, the divisor with 1 for 0 and -1, and where it was 0."""
    x, d = (writer.operand(v) for v in operation.inputs)
    number = writer.type_of(operation.inputs[1]).data_type.dtype
    zero = bad = writer.node("Equal", [d, _scalar(writer, 0, number.type)])
    if number.kind == "i":
        minus = writer.node("Equal", [d, _scalar(writer, -1, number.type)])
        bad = writer.node("Or", [zero, minus])
    one = writer.node("Where", [bad, _scalar(writer, 1, number.type), d])
    return x, d, number, one, zero


def _power(writer: FormWriter, operation: Operation, _: Attributes) -> bool:
    """Integer powers go through float64 there, which holds 53 bits."""
    if writer.type_of(operation.inputs[0]).data_type is not DataType.INT64:
        return False
    exponent = writer.known(operation.inputs[1])
    if exponent is None or exponent.size != 1 or exponent.reshape(()) not in (2, 3):
        raise CompileError("it rounds 64-bit integers to 53 bits unless the exponent is 2 or 3")
    return False


def _known_result(writer: FormWriter, operation: Operation, attributes: Attributes) -> bool:
    """Results that types and constants decide are computed here, once."""
    operands: list[Array | None] = []
    for value in operation.inputs:
        if value == ABSENT:
            operands.append(None)
            continue
        kind, data = writer.type_of(value), writer.known(value)
        operands.append(np.zeros(kind.shape, kind.data_type.dtype) if data is None else data)
    made = evaluate(operation.op, operands, attributes=attributes, outputs=len(operation.outputs))
    for value, data in zip(operation.outputs, made, strict=True):
        kind = writer.type_of(value)
        held = writer.constant(computable(data, kind))
        writer.node("Cast", [held], value_name(value), to=onnx_code(compute_type(kind)))
    return True


REWRITES: Mapping[str, Rewrite] = {
    "Cast": _cast,
    "CastLike": _cast,
    "ConstantOfShape": _known_result,
    "Div": _divide,
    "EyeLike": _known_result,
    "Mod": _modulo,
    "Pow": _power,
    "Range": _known_result,
    "Shape": _known_result,
    "Size": _known_result,
}
