"""Conversions between data types: Cast, CastLike, QuantizeLinear, DequantizeLinear.

`Cast` and copies between layouts share these conversions, so they agree bit for bit. NumPy's cast
is used except where it differs from the wanted result:

* Double rounding: float64 and integers of 32 and 64 bits are converted to float16, bfloat16 and
  block formats through float32, which is rounded to odd so that only the second rounding counts
  (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
  rounding to odd", 2008).
* Floating to integer truncates toward zero. ONNX's Cast leaves values out of range, infinity and
  NaN undefined, and processors differ: here values saturate and NaN becomes 0.
* Types of 8 bits and fewer follow ONNX's Cast (opset 25). float8 rounds to nearest even; beyond the
  largest number, and for infinity, it saturates, or without `saturate` becomes infinite, or NaN if
  the type has no infinity; NaN stays NaN. float8_e8m0 (powers of two without sign or zero) rounds
  up, down or to nearest; without `saturate` values out of range and 0 become NaN; the sign of
  negative numbers is ignored. float4 always saturates; NaN becomes -0, as in ml_dtypes. int4 and
  int2 keep the low bits of the integer, as ONNX's tests do; a float is first converted through 32
  bits, so NaN becomes 0.

A quantized number represents (integer - zero point) * scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.ops.batching import BatchingContext, broadcasting
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared, few, operands
from stitch.ops.element_types import BYTES, FLOATS, MOVED, NARROW, data_type_of_code
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import Attributes, InferenceContext, Shape, int_of
from stitch.ops.steps import CHUNK_SIZE, along, copy_steps, stretches
from stitch.program import Array, DataType, ValueType

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Batching -----------------------------------------------------------------------------------------


def batch_cast_like(c: BatchingContext) -> Sequence[Any]:
    """Of the second operand only the type counts."""
    return c.again(c.broadcast(0), c.operands[1])


def batch_quantized(c: BatchingContext) -> Sequence[Any]:
    """Quantize- and DequantizeLinear: one number, one for each place of an axis, or for a block."""
    scale, has_zero = c.shape(1), c.has(2)
    is_one = math.prod(scale) == 1 and len(scale) <= 1
    behind = 0 if is_one else c.axis_behind(c.int_of("axis"))
    zero = c.operands[2] if has_zero else None
    if not c.varies(1, 2):
        if c.int_of("block_size") and not is_one:
            return c.again(*c.all_broadcast(), axis=behind)
        return c.again(c.operands[0], c.operands[1], zero, axis=behind)
    if is_one:
        # One number per example: one per index of the first axis.
        numbers = [c.shaped(c.broadcast(i), (c.batch_size,)) for i in (1, 2) if c.has(i)]
        return c.again(c.broadcast(0), *numbers, axis=0, block_size=0)
    if c.int_of("block_size"):
        return c.again(*c.all_broadcast(), axis=behind)
    axis = behind - 1
    numbers = [c.folded(i) for i in (1, 2) if c.has(i)]
    return (c.split(c.again(c.folded(0, axis), *numbers, axis=axis)[0], axis),)


# Rounding to types of 8 bits and fewer ------------------------------------------------------------

_FLOAT32 = np.dtype(np.float32)
_E8M0 = DataType.FLOAT8_E8M0.dtype
#: The exponent of float8_e8m0's least number is -127; code 255 is NaN.
_BIAS, _LARGEST_CODE, _NAN_CODE = 127, 254, 255


def _wider(kind: DataType) -> np.dtype[Any]:
    if kind.is_floating:
        return _FLOAT32
    return np.dtype(np.int8 if kind.limits[0] else np.uint8)


#: The type of NumPy that holds every number of a narrow type.
WIDER = {t.dtype: _wider(t) for t in DataType if not t.is_block and t.is_narrow}


def _largest(kind: DataType) -> Any:
    numbers = np.arange(1 << kind.bits, dtype=np.uint8).view(kind.dtype).astype(np.float32)
    return numbers[np.isfinite(numbers)].max()


_LARGEST = {t.dtype: _largest(t) for t in DataType if t.is_floating and t.is_narrow}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The attributes of Cast that concern narrow types."""

    saturate: bool = True
    mode: str = "up"


DEFAULT = Rounding()


def stops(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """The types on the way between two types, of which one at least is narrow."""
    path = [WIDER[source]] if source in WIDER else []
    if target in WIDER:
        current, wider = (path or [source])[-1], WIDER[target]
        if wider != _FLOAT32:
            # Negative numbers, too, keep their low bits.
            floating = current.kind == "f" or current == DataType.BFLOAT16.dtype
            path += [np.dtype(np.int32)] if floating else []
        elif current != _FLOAT32 or not path:
            path.append(_FLOAT32)
    return tuple(path)


def narrow_steps(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> Sequence[Thunk]:
    """Steps from float32 that may be changed, or whole numbers, to a narrow type.

    `workspace` has 8 bytes for each element.
    """
    if out.dtype == _E8M0:
        return _exponent_steps(source, out, workspace, rounding)
    if WIDER[out.dtype] != _FLOAT32:
        whole = workspace[: source.size]
        mask = np.uint8((1 << DataType.from_dtype(out.dtype).bits) - 1)
        return (
            partial(np.copyto, whole, source, "unsafe"),
            partial(np.bitwise_and, whole, mask, out.view(np.uint8)),
        )
    steps: list[Thunk] = []
    if rounding.saturate:
        most = _LARGEST[out.dtype]
        steps.append(partial(np.clip, source, -most, most, source))
    return (*steps, partial(np.copyto, out, source, "unsafe"))


def _exponent_steps(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> list[Thunk]:
    """A number is fraction * 2**exponent, its fraction at least a half and less than one."""
    size, codes = source.size, out.view(np.uint8)
    fractions = workspace[: 4 * size].view(np.float32)
    exponents = workspace[4 * size : 8 * size].view(np.int32)
    # From this fraction on, the exponent is that of the next power.
    first = {"up": np.nextafter(np.float32(0.5), np.float32(1)), "down": np.float32(2)}.get(
        rounding.mode, np.float32(0.75)
    )
    infinite = _LARGEST_CODE if rounding.saturate else _NAN_CODE

    def run() -> None:
        np.frexp(source, fractions, exponents)
        np.abs(fractions, fractions)
        # The codes' own bytes hold truth values until the last step.
        mask = codes.view(np.bool_)
        np.greater_equal(fractions, first, mask)
        np.add(exponents, mask, exponents)
        np.add(exponents, _BIAS - 1, exponents)
        np.equal(fractions, 0, mask)
        np.copyto(exponents, -1, where=mask)
        if rounding.saturate:
            np.clip(exponents, 0, _LARGEST_CODE, exponents)
        else:
            np.less(exponents, 0, mask)
            np.copyto(exponents, _NAN_CODE, where=mask)
            np.minimum(exponents, _NAN_CODE, out=exponents)
        np.isinf(source, mask)
        np.copyto(exponents, infinite, where=mask)
        np.isnan(source, mask)
        np.copyto(exponents, _NAN_CODE, where=mask)
        np.copyto(codes, exponents, "unsafe")

    return [run]


# Conversion steps ---------------------------------------------------------------------------------

_FLOAT64 = np.dtype(np.float64)
#: What rounding to odd leaves of float64: 14 bits of fraction. The types rounded to next have at
#: most 10; and the least float32, 2**-149, still holds all 14 where half of bfloat16's least
#: number, 2**-134, lies, so that going on to float32 changes nothing that is left of a number.
_DROPPED_BITS = 52 - 14
#: Below 2**40 a 64-bit integer is an exact float64; above, 24 bits may go and 16 are left.
_DROPPED_INTEGER_BITS = 24
_EXACT_INTEGER = 1 << 40


def workspace_nbytes(source: np.dtype[Any], target: np.dtype[Any], rounds_again: bool) -> int:
    """Bytes per element that `conversion_steps` needs as workspace."""
    if source in WIDER or target in WIDER:
        path = (source, *stops(source, target), target)
        plain = ((a, b) for a, b in pairwise(path) if a not in WIDER and b not in WIDER)
        inner = (workspace_nbytes(a, b, target in WIDER) for a, b in plain)
        # Every stop has 8 bytes an element, so that what comes behind it is aligned.
        return 8 * (len(path) - 1) + max(inner, default=0)
    if _truncates(source, target):
        return 9
    if not _rounds_to_odd(source, target, rounds_again):
        return 0
    return 8 if source == _FLOAT64 else 17


def conversion_steps(
    source: Array,
    out: Array,
    workspace: NDArray[np.uint8],
    *,
    rounds_again: bool,
    rounding: Rounding = DEFAULT,
) -> Sequence[Thunk]:
    """Steps that convert `source` to `out` (flat, same length; they may be the same bytes).

    `rounds_again`: a float32 `out` will be rounded to a type of at most 11 bits of precision.
    `rounding` is how types of ml_dtypes are reached. `workspace` has `workspace_nbytes` for each
    element. Run under `np.errstate(all="ignore")`.
    """
    if source.dtype in WIDER or out.dtype in WIDER:
        return _by_stops(source, out, workspace, rounding)
    if _truncates(source.dtype, out.dtype):
        return _truncation(source, out, workspace)
    if _rounds_to_odd(source.dtype, out.dtype, rounds_again):
        return _rounding_to_odd(source, out, workspace)
    return (partial(np.copyto, out, source, "unsafe"),)


def _by_stops(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> list[Thunk]:
    """By way of types that NumPy converts; only the last step rounds."""
    size, current = source.size, source
    path = stops(source.dtype, out.dtype)
    inner = workspace[8 * size * (len(path) + 1) :]
    steps: list[Thunk] = []
    for index, stop in enumerate(path):
        following = workspace[8 * size * index :][: size * stop.itemsize].view(stop)
        if current.dtype in WIDER:
            steps.append(partial(np.copyto, following, current, "unsafe"))
        else:
            narrow = out.dtype in WIDER
            steps += conversion_steps(current, following, inner, rounds_again=narrow)
        current = following
    if out.dtype in WIDER:
        spare = workspace[8 * size * len(path) :][: 8 * size]
        return [*steps, *narrow_steps(current, out, spare, rounding)]
    return [*steps, *conversion_steps(current, out, inner, rounds_again=False)]


def _truncates(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    return source.kind == "f" and target.kind in "iu"


def _rounds_to_odd(source: np.dtype[Any], target: np.dtype[Any], rounds_again: bool) -> bool:
    # float32 holds integers of 8 and 16 bits exactly.
    wide = source == _FLOAT64 or (source.kind in "iu" and source.itemsize > 2)
    return rounds_again and target == np.float32 and wide


def _rounding_to_odd(source: Array, out: Array, workspace: NDArray[np.uint8]) -> list[Thunk]:
    first = workspace[: 8 * source.size]
    exact: Array = source
    steps: list[Thunk] = []
    if source.dtype != _FLOAT64:
        exact, mask = _numbers_and_mask(workspace[8 * source.size :], source.size)
        steps = _integers_to_odd(source, exact, first.view(np.uint64), mask)
    steps += _sticky(exact.view(np.uint64), first.view(np.uint64), _DROPPED_BITS)
    return [*steps, partial(np.copyto, out, first.view(np.float64), "unsafe")]


def _integers_to_odd(source: Array, out: Array, work: Array, small: Array) -> list[Thunk]:
    """Integers to float64: exact, but those of 40 bits and more are rounded to odd."""
    if source.itemsize < 8:
        return [partial(np.copyto, out, source)]
    bits, limit = source.view(np.uint64), _EXACT_INTEGER
    signed = source.dtype.kind == "i"
    return [
        *_sticky(bits, work, _DROPPED_INTEGER_BITS),
        partial(np.copyto, out, work.view(source.dtype)),
        # -limit <= source < limit, or source < limit, as one comparison without a sign.
        partial(np.add, bits, np.uint64(limit if signed else 0), work),
        partial(np.less, work, np.uint64(2 * limit if signed else limit), small),
        partial(np.copyto, out, source, where=small),
    ]


def _sticky(bits: Array, out: Array, dropped: int) -> list[Thunk]:
    """Clears the low bits; where one was set, the lowest that is left becomes 1.

    That rounds to odd a magnitude with a sign bit and a two's complement number alike.
    """
    low = np.uint64((1 << dropped) - 1)
    return [
        partial(np.bitwise_and, bits, low, out),
        partial(np.add, out, low, out),
        partial(np.bitwise_or, out, bits, out),
        partial(np.bitwise_and, out, ~low, out),
    ]


def _truncation(source: Array, out: Array, workspace: NDArray[np.uint8]) -> list[Thunk]:
    limits = np.iinfo(out.dtype)
    # The largest float64 that still fits: 2**63 - 1 itself is none.
    beyond = float(limits.max) + 1.0 if limits.bits < 64 else float(limits.max)
    largest = float(limits.max) if limits.bits < 64 else float(np.nextafter(beyond, 0.0))
    numbers, mask = _numbers_and_mask(workspace, source.size)
    return [
        partial(np.copyto, numbers, source),
        partial(np.isnan, numbers, mask),
        partial(np.copyto, numbers, 0.0, where=mask),
        partial(np.greater_equal, numbers, beyond, mask),
        partial(np.clip, numbers, float(limits.min), largest, numbers),
        partial(np.copyto, out, numbers, "unsafe"),
        partial(np.copyto, out, out.dtype.type(limits.max), where=mask),
    ]


def _numbers_and_mask(workspace: NDArray[np.uint8], size: int) -> tuple[Array, Array]:
    """`size` float64 and `size` truth values in a workspace."""
    split = size * _FLOAT64.itemsize
    return workspace[:split].view(_FLOAT64), workspace[split : split + size].view(np.bool_)


# QuantizeLinear and DequantizeLinear --------------------------------------------------------------

_E8M0_quantization = frozenset({DataType.FLOAT8_E8M0})
QUANTIZED = BYTES | {DataType.INT16, DataType.UINT16} | (NARROW - _E8M0_quantization)
REALS = FLOATS - {DataType.FLOAT64}
SCALES = REALS | _E8M0_quantization


def _check_scale(context: InferenceContext, shape: Shape) -> None:
    """The scale is one number, one per element of the axis, or one per block along it."""
    scale = context.operand(1).shape
    zero = context.present(2)
    is_one = math.prod(scale) == 1 and len(scale) <= 1
    # One number is one number, whether or not it is written as a vector.
    if zero is not None and not (is_one and zero.shape in ((), (1,))):
        context.require_shape(2, scale)
    if is_one:
        return
    axis = context.axis_of(context.int_of("axis"), len(shape))
    block = context.int_of("block_size")
    if block < 0:
        raise context.fail(
            f"a block of {context.op} has at least one element", expected="0: none, or its size",
            got=f"block_size={block}",
        )  # fmt: skip
    wanted: Shape = (shape[axis],)
    if block:
        blocks = -(-shape[axis] // block)
        wanted = (*shape[:axis], blocks, *shape[axis + 1 :])
    if scale != wanted:
        raise context.fail(
            f"the scale of {context.op} does not fit",
            expected=f"one number or {list(wanted)}",
            got=scale,
        )


def _output_type(context: InferenceContext, default: DataType) -> DataType:
    code = context.int_of("output_dtype")
    return data_type_of_code(code, context.op) if code else default


def _infer_quantize(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, REALS | {DataType.INT32})
    context.require_type(1, SCALES | {DataType.INT32})
    zero = context.present(2)
    if zero is not None:
        context.require_type(2, QUANTIZED)
    precision = context.int_of("precision")
    if precision and data_type_of_code(precision, context.op) not in REALS:
        raise context.fail(
            "the precision of QuantizeLinear is that of real numbers",
            expected=" or ".join(sorted(t.value for t in REALS)),
            got=data_type_of_code(precision, context.op).value,
        )
    target = _output_type(context, DataType.UINT8 if zero is None else zero.data_type)
    if target not in QUANTIZED or (zero is not None and zero.data_type is not target):
        raise context.fail(
            "QuantizeLinear does not make this type",
            expected=" or ".join(sorted(t.value for t in QUANTIZED))
            if zero is None
            else zero.data_type.value,
            got=target.value,
        )
    _check_scale(context, x.shape)
    return (ValueType(x.shape, target),)


def _infer_dequantize(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, QUANTIZED | {DataType.INT32})
    scale = context.require_type(1, SCALES)
    context.require_same_type((0, 2))
    target = _output_type(context, scale.data_type)
    if target not in REALS:
        raise context.fail("DequantizeLinear makes real numbers", got=target.value)
    _check_scale(context, x.shape)
    return (ValueType(x.shape, target),)


def _spread(values: Array, shape: Shape, attributes: Attributes) -> Array:
    """Scales or zero points, shaped to broadcast against the data."""
    if values.size == 1 and values.ndim <= 1:
        return values.reshape(())
    axis = int_of(attributes, "axis") % len(shape)
    block = int_of(attributes, "block_size")
    if block:
        places = np.arange(shape[axis]) // block
        return np.take(values, places, axis)
    return along(values, axis, len(shape))


def _wide(values: Array) -> Array:
    """Numbers of a type that NumPy computes in."""
    return values.astype(WIDER.get(values.dtype, values.dtype), copy=False)


def _quantize(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, zero = arguments.given(0), arguments.given(1), arguments.optional(2)
    out, attributes = arguments.outputs[0], arguments.attributes
    target = DataType.from_dtype(out.dtype)
    code = int_of(attributes, "precision")
    exact = data_type_of_code(code).dtype if code else None

    def divided() -> Array:
        steps = _spread(_wide(scale), x.shape, attributes)
        if exact is None:
            return np.asarray(x / steps)
        # A division in a narrower type: what it gives is rounded to it.
        return np.asarray(x.astype(exact) / steps.astype(exact)).astype(np.float32)

    def run() -> None:
        # A wide zero point would not fit beside rounded values in the type of the data.
        whole = np.asarray(np.rint(divided()), np.float64)
        if zero is not None:
            whole += _spread(_wide(zero), x.shape, attributes)
        # What is no number becomes the least one, as in ONNX Runtime; a cast would leave it open.
        least, most = target.limits
        np.minimum(np.fmax(whole, least, out=whole), most, out=whole)
        np.copyto(out, whole.astype(np.int32) if target.is_narrow else whole, casting="unsafe")

    def run_floating() -> None:
        work = divided().astype(np.float32)
        if zero is not None and _wide(zero).any():
            work = work + _spread(_wide(zero), x.shape, attributes)
        flat = work.reshape(-1)
        workspace = np.empty(flat.size * workspace_nbytes(flat.dtype, out.dtype, False), np.uint8)
        rounding = Rounding(bool(int_of(attributes, "saturate")))
        for step in conversion_steps(
            flat, out.reshape(-1), workspace, rounds_again=False, rounding=rounding
        ):
            step()

    return (run_floating if target.is_floating else run,)


def _dequantize(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, zero = arguments.given(0), arguments.given(1), arguments.optional(2)
    out, attributes = arguments.outputs[0], arguments.attributes
    exact = out.dtype if DataType.from_dtype(x.dtype).is_floating else np.dtype(np.int64)

    def run() -> None:
        work = _wide(x).astype(exact)
        if zero is not None:
            work -= _spread(_wide(zero), x.shape, attributes)
        np.multiply(work.astype(out.dtype), _spread(_wide(scale), x.shape, attributes), out)

    return (run,)


_AXIS = declared(axis=1, block_size=0)


# Cast and CastLike --------------------------------------------------------------------------------

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)
_MODES = ("up", "down", "nearest")


def _infer_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    """To the type that `to` says, or to that of a second operand."""
    data = context.require_type(0, MOVED)
    like = None if "to" in context.attributes else context.require_type(1, MOVED).data_type
    mode = context.string_of("round_mode")
    if mode not in _MODES:
        raise context.fail(
            f"{context.op} has no such round_mode", expected=" or ".join(_MODES), got=mode
        )
    target = like or data_type_of_code(context.int_of("to"), context.op)
    return (ValueType(data.shape, target),)


def _cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    narrow = bool(arguments.types) and arguments.types[0] in _NARROW
    if source.dtype == out.dtype and not narrow:
        return copy_steps(source, out)
    rounding = Rounding(bool(arguments.int_of("saturate")), arguments.string_of("round_mode"))
    per_element = workspace_nbytes(source.dtype, out.dtype, narrow)
    if not per_element:
        return copy_steps(source, out)
    flat, goal = source.reshape(-1), out.reshape(-1)
    workspace = np.empty(per_element * min(goal.size, CHUNK_SIZE), np.uint8)
    steps: list[Thunk] = []
    for part in stretches(goal.size, CHUNK_SIZE):
        steps += conversion_steps(
            flat[part], goal[part], workspace, rounds_again=narrow, rounding=rounding
        )
    return steps


#: Those whose bits a kernel sees: 16-bit floats are computed in float32.
_PLAIN = MOVED.difference(_NARROW)


def _infer_bit_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, _PLAIN)
    target = data_type_of_code(context.int_of("to"), context.op)
    if target not in _PLAIN or target.bits != data.data_type.bits:
        raise context.fail(
            "BitCast does not make this type of that one",
            expected=" or ".join(sorted(t.value for t in _PLAIN if t.bits == data.data_type.bits)),
            got=target.value,
        )
    return (ValueType(data.shape, target),)


def _bit_cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.given(0), arguments.outputs[0]
    return copy_steps(source.reshape(-1).view(out.dtype), out.reshape(-1))


_ROUNDING = declared(round_mode="up", saturate=1)


def cast_gradient(context: GradientContext) -> Sequence[Any]:
    """Between floats: the gradient in the operand's type."""
    return (context.in_type(context.gradient, context.type_of(0).data_type), None)[
        : len(context.input_types)
    ]


OPERATORS: tuple[OpDef, ...] = (
    # saturate concerns float8 types, round_mode float8_e8m0 alone. From floating to integer, where
    # ONNX leaves it undefined: out of range saturates, and NaN becomes 0; int4 and int2 then keep
    # the low bits.
    OpDef(
        "Cast", (1, 1), _infer_cast, _cast,
        attributes=declared(to=Attribute("int", required=True), **_ROUNDING), elementwise=True,
        batching=broadcasting,
        gradient=cast_gradient, workspace=operands(1 / 2),
    ),
    OpDef(
        "BitCast", (1, 1), _infer_bit_cast, _bit_cast,
        attributes=declared(to=Attribute("int", required=True)),
        batching=broadcasting, workspace=few,
    ),
    OpDef(
        "CastLike", (2, 2), _infer_cast, _cast, attributes=_ROUNDING, gradient=cast_gradient,
        batching=batch_cast_like, workspace=operands(1 / 2),
    ),
    OpDef(
        "QuantizeLinear", (2, 3), _infer_quantize, _quantize,
        attributes=declared(**_AXIS, output_dtype=0, precision=0, saturate=1),
        batching=batch_quantized,
        workspace=operands(4, is_kept=False),
    ),
    OpDef(
        "DequantizeLinear", (2, 3), _infer_dequantize, _dequantize,
        attributes=declared(**_AXIS, output_dtype=0), batching=batch_quantized,
        workspace=operands(3, is_kept=False),
    ),
)  # fmt: skip
