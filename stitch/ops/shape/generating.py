"""Values made from shapes and numbers alone: ConstantOfShape, Range, EyeLike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared, few, operands
from stitch.ops.element_types import (
    EVERY,
    FLOATS,
    INT64,
    NUMERIC,
    SIGNED_NUMERIC,
    data_type_of_code,
)
from stitch.ops.inference import InferenceContext, float_of, int_of
from stitch.ops.shape.reshaping import batch_eye_like
from stitch.ops.steps import CHUNK_SIZE, copy_steps, fill_step, stretches
from stitch.program import Array, DataType, ValueType


def _infer_filled(context: InferenceContext) -> tuple[ValueType, ...]:
    context.require_type(0, INT64)
    context.require_rank(0, 1, 1)
    shape = context.known_ints(0, "input")
    if any(size < 0 for size in shape):
        raise context.fail("a shape has sizes of at least 0", got=shape)
    return (ValueType(shape, data_type_of_code(context.int_of("dtype"), context.op)),)


def _filled(arguments: KernelArguments) -> Sequence[Thunk]:
    out = arguments.outputs[0]
    floating = out.dtype.kind == "f"
    read = float_of if floating else int_of
    value = read(arguments.attributes, "value_float" if floating else "value_int")
    return (fill_step(out, value),)


#: Bins of a MelWeightMatrix.
MAX_BINS = 1 << 20
_RANGES = SIGNED_NUMERIC - {DataType.INT8, DataType.FLOAT16, DataType.BFLOAT16}


def _range_length(start: Array, limit: Array, delta: Array) -> int:
    first, last, step = (v.reshape(()).item() for v in (start, limit, delta))
    if start.dtype.kind != "f":
        return max(0, int(-((first - last) // step)))
    length: float = (last - first) / step
    return math.ceil(min(max(length, 0.0), float(1 << 63)))


def _infer_range(context: InferenceContext) -> tuple[ValueType, ...]:
    first = context.require_type(0, _RANGES)
    context.require_same_type((0, 1, 2))
    known = []
    for index, name in enumerate(("start", "limit", "delta")):
        if math.prod(context.operand(index).shape) != 1:
            context.require_shape(index, ())
        data = context.constant(index)
        if data is None:
            raise context.fail(
                f"operand {index} ({name}) of Range must be known at compile time: "
                "it decides a shape"
            )
        known.append(data.astype(first.data_type.compute_dtype))
    if not known[2].any():
        raise context.fail("the delta of a Range must not be 0")
    if not all(np.isfinite(number).all() for number in known):
        raise context.fail("the operands of a Range must be finite")
    return (ValueType((_range_length(*known),), first.data_type),)


def _range(arguments: KernelArguments) -> Sequence[Thunk]:
    start, _, delta = (arguments.given(i).reshape(()) for i in range(3))
    out = arguments.outputs[0]

    def write() -> None:
        for part in stretches(out.size, CHUNK_SIZE):
            places = np.arange(part.start, part.stop)
            np.copyto(out[part], start + places * delta, "unsafe")

    return [write]


def _infer_eye(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, EVERY)
    context.require_rank(0, 2, 2)
    if "dtype" not in context.attributes:
        return (data,)
    code = context.int_of("dtype")
    return (ValueType(data.shape, data_type_of_code(code, context.op)),)


def _eye(arguments: KernelArguments) -> Sequence[Thunk]:
    out = arguments.outputs[0]
    k = arguments.int_of("k")
    rows, columns = out.shape
    first = max(0, -k) * columns + max(0, k)
    count = max(0, min(rows - max(0, -k), columns - max(0, k)))
    diagonal = out.reshape(-1)[first : first + count * (columns + 1) : columns + 1]
    return (fill_step(out, 0), fill_step(diagonal[:count], 1))


def _mel_numbers(arrays: Sequence[Array | None]) -> tuple[int, int, int, float, float]:
    bins, length, rate, low, high = (a.reshape(()).item() for a in arrays if a is not None)
    return int(bins), int(length), int(rate), float(low), float(high)


def _mel_places(arrays: Sequence[Array | None]) -> Array:
    """The spectrogram bins at which the triangles begin, peak and end."""
    bins, length, rate, low, high = _mel_numbers(arrays)
    first, last = (2595 * np.log1p(hertz / 700) / np.log(10) for hertz in (low, high))
    mels = np.arange(bins + 2) * ((last - first) / (bins + 2)) + first
    hertz = 700 * np.expm1(mels / 2595 * np.log(10))
    return np.asarray(((length + 1) * hertz) // rate)


def _infer_mel(context: InferenceContext) -> tuple[ValueType, ...]:
    for index, name in enumerate(("num_mel_bins", "dft_length", "sample_rate")):
        context.known_scalar(index, name)
    for index in (3, 4):
        context.require_type(index, FLOATS)
        context.require_shape(index, ())
        if context.constant(index) is None:
            raise context.fail(
                f"operand {index} of MelWeightMatrix must be known at compile time: the result "
                "has places for some frequencies only"
            )
    bins, length, rate, low, high = _mel_numbers(context.constants)
    if not 1 <= bins <= MAX_BINS:
        raise context.fail("MelWeightMatrix has no so many bins", expected=f"1 to {MAX_BINS}",
                           got=bins)  # fmt: skip
    if min(length, rate) < 1 or not 0 <= low <= high < np.inf:
        raise context.fail("the numbers of a MelWeightMatrix are positive, the edges in order")
    if not _mel_places(context.constants)[-1] <= length // 2:
        raise context.fail("the upper edge of a MelWeightMatrix is beyond its spectrogram")
    data_type = data_type_of_code(context.int_of("output_datatype"), context.op)
    if data_type not in NUMERIC:
        raise context.fail("MelWeightMatrix makes numbers", got=data_type.value)
    return (ValueType((length // 2 + 1, bins), data_type),)


def _mel(arguments: KernelArguments) -> Sequence[Thunk]:
    out = arguments.outputs[0]
    places = _mel_places(arguments.inputs).astype(np.intp)
    weights = np.zeros(out.shape)
    for i in range(out.shape[1]):
        low, center, high = (int(place) for place in places[i : i + 3])
        if low == center:
            weights[center, i] = 1
        else:
            weights[low : center + 1, i] = np.arange(center - low + 1) / (center - low)
        if high > center:
            weights[center:high, i] = np.arange(high - center, 0, -1) / (high - center)
    return copy_steps(weights, out)


OPERATORS = (
    OpDef(
        "MelWeightMatrix", (5, 5), _infer_mel, _mel, attributes=declared(output_datatype=1),
        workspace=operands(3),
    ),
    # ONNX's tensor attribute `value` is written as its type (an ONNX number) and one of value_float
    # (float types) and value_int (other types).
    OpDef(
        "ConstantOfShape", (1, 1), _infer_filled, _filled,
        attributes=declared(dtype=1, value_float=0.0, value_int=0), workspace=few,
    ),
    OpDef("Range", (3, 3), _infer_range, _range, workspace=few),
    OpDef(
        "EyeLike", (1, 1), _infer_eye, _eye, attributes=declared(dtype=Attribute("int"), k=0),
        batching=batch_eye_like, workspace=few,
    ),
)  # fmt: skip
