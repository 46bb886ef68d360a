"""Conversions between data types: Cast, BitCast, QuantizeLinear, DequantizeLinear.

`Cast` and copies between layouts share these conversions, so they agree bit for bit. NumPy's cast
is used except where it differs from the wanted result:

* float64 and integers of 32 and 64 bits go to float16, bfloat16 and block formats through float32,
  rounded to odd so that only the second rounding counts (Boldo and Melquiond 2008).
* Floats to integers truncate; out of range, which ONNX leaves undefined, saturates, NaN becomes 0.
* Types of 8 bits and fewer follow ONNX's Cast (opset 25). The sign of negative numbers is ignored
  for float8_e8m0; NaN becomes -0 in float4, as in ml_dtypes; int4 and int2 keep the low bits.
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
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared, elementwise
from stitch.ops.element_types import BYTES, FLOATS, MOVED, NARROW, data_type_of_code
from stitch.ops.gradient import GradientContext, of_first
from stitch.ops.inference import Attributes, InferenceContext, Shape, int_of
from stitch.ops.steps import CHUNK_SIZE, along, copy_steps, slice_range
from stitch.program import Array, DataType, ValueType

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Batching -----------------------------------------------------------------------------------------


def batch_quantized(c: BatchingContext) -> Sequence[Any] | None:
    """QuantizeLinear, DequantizeLinear: with shared scales, not one per block."""
    if c.varies(1, 2) or c.rank(1) > 1:
        return None
    return c.emit(*c.operands, axis=c.axis_behind(c.int_of("axis")))


# Rounding to types of 8 bits and fewer ------------------------------------------------------------

_FLOAT32 = np.dtype(np.float32)
_E8M0 = DataType.FLOAT8_E8M0.dtype
#: float8_e8m0: the least exponent is -127, code 255 is NaN.
_BIAS, _LARGEST_CODE, _NAN_CODE = 127, 254, 255


def _wider(kind: DataType) -> np.dtype[Any]:
    if kind.is_floating:
        return _FLOAT32
    return np.dtype(np.int8 if kind.limits[0] else np.uint8)


#: NumPy's type that holds every number of a narrow type.
WIDER = {t.dtype: _wider(t) for t in DataType if not t.is_block and t.is_narrow}


def _largest(kind: DataType) -> Any:
    numbers = np.arange(1 << kind.bits, dtype=np.uint8).view(kind.dtype).astype(np.float32)
    return numbers[np.isfinite(numbers)].max()


_LARGEST = {t.dtype: _largest(t) for t in DataType if t.is_floating and t.is_narrow}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The attributes of Cast that apply to narrow types."""

    saturate: bool = True
    mode: str = "up"


DEFAULT = Rounding()


def stops(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the intermediate types of a conversion from or to a narrow type."""
    path = [WIDER[source]] if source in WIDER else []
    if target in WIDER:
        current, wider = (path or [source])[-1], WIDER[target]
        if wider != _FLOAT32:
            # Through int32: negative numbers keep their low bits too.
            floating = current.kind == "f" or current == DataType.BFLOAT16.dtype
            path += [np.dtype(np.int32)] if floating else []
        elif current != _FLOAT32 or not path:
            path.append(_FLOAT32)
    return tuple(path)


def narrow_steps(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> Sequence[Thunk]:
    """Return steps from float32 (which they may overwrite) or integers to a narrow type.

    `workspace` has 8 bytes per element.
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
    """Convert to float8_e8m0: a number is fraction * 2**exponent with 0.5 <= fraction < 1."""
    size, codes = source.size, out.view(np.uint8)
    fractions = workspace[: 4 * size].view(np.float32)
    exponents = workspace[4 * size : 8 * size].view(np.int32)
    # From this fraction on, the number rounds up to the next power of two.
    first = {"up": np.nextafter(np.float32(0.5), np.float32(1)), "down": np.float32(2)}.get(
        rounding.mode, np.float32(0.75)
    )
    infinite = _LARGEST_CODE if rounding.saturate else _NAN_CODE

    def run() -> None:
        np.frexp(source, fractions, exponents)
        np.abs(fractions, fractions)
        # The bytes of the codes hold masks until the last step.
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
#: Rounding float64 to odd keeps 14 bits of fraction. The next types have at most 10, and float32
#: represents all 14 down to 2**-134, half of bfloat16's least number, so going through it is exact.
_DROPPED_BITS = 52 - 14
#: Below 2**40 a 64-bit integer is an exact float64; above, dropping 24 bits leaves 16.
_DROPPED_INTEGER_BITS = 24
_EXACT_INTEGER = 1 << 40


def workspace_nbytes(source: np.dtype[Any], target: np.dtype[Any], rounds_again: bool) -> int:
    """Return the bytes per element of the workspace that `conversion_steps` needs."""
    if source in WIDER or target in WIDER:
        path = (source, *stops(source, target), target)
        plain = ((a, b) for a, b in pairwise(path) if a not in WIDER and b not in WIDER)
        inner = (workspace_nbytes(a, b, target in WIDER) for a, b in plain)
        # 8 bytes per element for each intermediate type keep the next one aligned.
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
    """Return steps that convert `source` to `out`; run them under `np.errstate(all="ignore")`.

    Args:
        source: Flat array.
        out: Flat array of the same length; may be the same bytes.
        workspace: `workspace_nbytes` bytes per element.
        rounds_again: A float32 `out` will be rounded to a type of at most 11 bits of precision.
        rounding: How numbers are rounded to types of 8 bits and fewer.
    """
    if source.dtype in WIDER or out.dtype in WIDER:
        return _through_stops(source, out, workspace, rounding)
    if _truncates(source.dtype, out.dtype):
        return _truncation(source, out, workspace)
    if _rounds_to_odd(source.dtype, out.dtype, rounds_again):
        return _rounding_to_odd(source, out, workspace)
    return (partial(np.copyto, out, source, "unsafe"),)


def _through_stops(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> list[Thunk]:
    """Convert through types that NumPy converts; only the last step rounds."""
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
    """Convert integers to float64, exact below 2**40, else rounded to odd."""
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
    """Clear the low bits; if one was set, set the lowest remaining bit.

    This rounds to odd both sign-magnitude and two's complement numbers.
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
    # The largest float64 in range: 2**63 - 1 is not a float64.
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
    """Return `size` float64 and `size` booleans in a workspace."""
    split = size * _FLOAT64.itemsize
    return workspace[:split].view(_FLOAT64), workspace[split : split + size].view(np.bool_)


# QuantizeLinear and DequantizeLinear --------------------------------------------------------------

_E8M0_quantization = frozenset({DataType.FLOAT8_E8M0})
QUANTIZED = BYTES | {DataType.INT16, DataType.UINT16} | (NARROW - _E8M0_quantization)
REALS = FLOATS - {DataType.FLOAT64}
SCALES = REALS | _E8M0_quantization


def _check_scale(context: InferenceContext, shape: Shape) -> None:
    """Check the scale: one number, one per element of the axis, or one per block along it."""
    scale = context.operand(1).shape
    is_one = math.prod(scale) == 1 and len(scale) <= 1
    # [] and [1] are equivalent.
    if is_one:
        context.require_scalar(2)
    else:
        context.require_shape(2, scale)
    if is_one:
        return
    axis = context.axis_of(context.int_of("axis"), len(shape))
    block = context.int_of("block_size")
    what = f"block_size={block} of {context.op} is negative"
    context.require(block >= 0, what, expected="0 (no blocks) or the size of a block", got=block)
    wanted: Shape = (shape[axis],)
    if block:
        blocks = -(-shape[axis] // block)
        wanted = (*shape[:axis], blocks, *shape[axis + 1 :])
    what = f"scale of {context.op} has the wrong shape"
    context.require(scale == wanted, what, expected=f"[] or {list(wanted)}", got=scale)


def _output_type(context: InferenceContext, default: DataType) -> DataType:
    code = context.int_of("output_dtype")
    return data_type_of_code(code, context.op) if code else default


def _infer_quantize(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, REALS | {DataType.INT32})
    context.require_type(1, SCALES | {DataType.INT32})
    zero = context.present(2)
    if zero is not None:
        context.require_type(2, QUANTIZED)
    if context.int_of("precision"):
        precision = data_type_of_code(context.int_of("precision"), context.op)
        what = "precision of QuantizeLinear is not a float type"
        context.require(precision in REALS, what, expected=REALS, got=precision.value)
    target = _output_type(context, DataType.UINT8 if zero is None else zero.data_type)
    allowed = QUANTIZED if zero is None else QUANTIZED & {zero.data_type}
    what = "QuantizeLinear does not support this output type"
    context.require(target in allowed, what, expected=allowed, got=target.value)
    _check_scale(context, x.shape)
    return (ValueType(x.shape, target),)


def _infer_dequantize(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, QUANTIZED | {DataType.INT32})
    scale = context.require_type(1, SCALES)
    context.require_same_type((0, 2))
    target = _output_type(context, scale.data_type)
    what = "output_dtype of DequantizeLinear is not a float type"
    context.require(target in REALS, what, expected=REALS, got=target.value)
    _check_scale(context, x.shape)
    return (ValueType(x.shape, target),)


def _spread(values: Array, shape: Shape, attributes: Attributes) -> Array:
    """Return scales or zero points, shaped to broadcast against the data."""
    if values.size == 1 and values.ndim <= 1:
        return values.reshape(())
    axis = int_of(attributes, "axis") % len(shape)
    block = int_of(attributes, "block_size")
    if block:
        return np.take(values, np.arange(shape[axis]) // block, axis)
    return along(values, axis, len(shape))


def _wide(values: Array) -> Array:
    """Return values in a type that NumPy computes in."""
    return values.astype(WIDER.get(values.dtype, values.dtype), copy=False)


def _quantize(arguments: KernelArguments) -> Sequence[Thunk]:
    x, scale, zero = arguments.operand(0), arguments.operand(1), arguments.optional(2)
    out, attributes = arguments.outputs[0], arguments.attributes
    target = DataType.from_dtype(out.dtype)
    code = int_of(attributes, "precision")
    exact = data_type_of_code(code).dtype if code else None

    def divided() -> Array:
        steps = _spread(_wide(scale), x.shape, attributes)
        if exact is None:
            return np.asarray(x / steps)
        # Divide in the type that `precision` names.
        return np.asarray(x.astype(exact) / steps.astype(exact)).astype(np.float32)

    def run() -> None:
        # In float64: the data type may not represent the sum with the zero point.
        whole = np.asarray(np.rint(divided()), np.float64)
        if zero is not None:
            whole += _spread(_wide(zero), x.shape, attributes)
        # NaN becomes the least number, as in ONNX Runtime; the result of a cast is undefined.
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
    x, scale, zero = arguments.operand(0), arguments.operand(1), arguments.optional(2)
    out, attributes = arguments.outputs[0], arguments.attributes
    exact = out.dtype if DataType.from_dtype(x.dtype).is_floating else np.dtype(np.int64)

    def run() -> None:
        work = _wide(x).astype(exact)
        if zero is not None:
            work -= _spread(_wide(zero), x.shape, attributes)
        np.multiply(work.astype(out.dtype), _spread(_wide(scale), x.shape, attributes), out)

    return (run,)


_AXIS = declared(axis=1, block_size=0)


# Cast --------------------------------------------------------------------------------

_NARROW = (DataType.FLOAT16, DataType.BFLOAT16)


def _infer_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, MOVED)
    context.require_word("round_mode", ("up", "down", "nearest"))
    return (ValueType(data.shape, data_type_of_code(context.int_of("to"), context.op)),)


def _cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.operand(0), arguments.outputs[0]
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
    for part in slice_range(goal.size, CHUNK_SIZE):
        steps += conversion_steps(
            flat[part], goal[part], workspace, rounds_again=narrow, rounding=rounding
        )
    return steps


#: Types that kernels see as they are stored; 16-bit floats are converted to float32.
_PLAIN = MOVED.difference(_NARROW)


def _infer_bit_cast(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, _PLAIN)
    target = data_type_of_code(context.int_of("to"), context.op)
    allowed = frozenset(t for t in _PLAIN if t.bits == data.data_type.bits)
    what = f"BitCast from {data.data_type.value} does not support this type"
    context.require(target in allowed, what, expected=allowed, got=target.value)
    return (ValueType(data.shape, target),)


def _bit_cast(arguments: KernelArguments) -> Sequence[Thunk]:
    source, out = arguments.operand(0), arguments.outputs[0]
    return copy_steps(source.reshape(-1).view(out.dtype), out.reshape(-1))


def _cast_slope(context: GradientContext) -> Any:
    return context.cast(context.gradient, context.type_of(0).data_type)


OPERATORS: tuple[OpDef, ...] = (
    # saturate applies to float8 types, round_mode to float8_e8m0.
    elementwise(
        "Cast", (1, 1), _infer_cast, _cast, of_first(_cast_slope),
        to=Attribute("int", required=True), round_mode="up", saturate=1,
    ),
    OpDef(
        "BitCast", (1, 1), _infer_bit_cast, _bit_cast, batching=broadcasting,
        attributes=declared(to=Attribute("int", required=True)),
    ),
    OpDef(
        "QuantizeLinear", (2, 3), _infer_quantize, _quantize,
        attributes=declared(**_AXIS, output_dtype=0, precision=0, saturate=1),
        batching=batch_quantized,
    ),
    OpDef(
        "DequantizeLinear", (2, 3), _infer_dequantize, _dequantize,
        attributes=declared(**_AXIS, output_dtype=0), batching=batch_quantized,
    ),
)  # fmt: skip
