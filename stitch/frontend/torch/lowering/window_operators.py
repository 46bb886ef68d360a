"""ATen's poolings (fixed and adaptive), grid samples, and resizing by nearest and linear
interpolation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, KeptWhole, Row, Several
from stitch.graph import SymbolicTensor
from stitch.program import Array, DataType, int64_array

aten = torch.ops.aten
Sizes = Sequence[int] | None
Scales = Sequence[float] | None


def spread(values: Sequence[int] | int, count: int) -> list[int]:
    """One number per spatial axis; torch passes one for all axes, or one for each."""
    listed = [values] if isinstance(values, int) else list(values)
    return listed * count if len(listed) == 1 else listed


def _pooled(
    call: Call, op: str, x: SymbolicTensor, spatial: int, outputs: int, **attributes: Any
) -> tuple[SymbolicTensor, ...]:
    """A pooling of [N, C, ...] or [C, ...]."""
    b = call.builder
    if len(x.shape) == spatial + 2:
        return b.apply(op, [x], outputs, attributes)
    pooled = b.apply(op, [b.unsqueeze(x, 0)], outputs, attributes)
    return tuple(b.squeeze(tensor, 0) for tensor in pooled)


def _max_pool(
    spatial: int, call: Call, x: SymbolicTensor, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1, ceil_mode: bool = False,
) -> Several:  # fmt: skip
    kernel = spread(kernel_size, spatial)
    pooled = _pooled(
        call, "MaxPool", x, spatial, 2 if 1 in call.used else 1,
        kernel_shape=kernel, strides=spread(stride, spatial) if stride else kernel,
        pads=spread(padding, spatial) * 2, dilations=spread(dilation, spatial),
        ceil_mode=int(ceil_mode),
    )  # fmt: skip
    if len(pooled) == 1:
        return pooled[0], None
    # Indices are those of the whole tensor in ONNX, of one plane in torch.
    return pooled[0], call.builder.mod(pooled[1], math.prod(x.shape[-spatial:]))


def _average_pool(
    spatial: int, call: Call, x: SymbolicTensor, kernel_size: Sequence[int],
    stride: Sequence[int] = (), padding: Sequence[int] | int = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> SymbolicTensor:  # fmt: skip
    kernel, pads = spread(kernel_size, spatial), spread(padding, spatial)
    strides = spread(stride, spatial) if stride else kernel
    if divisor_override is not None and ceil_mode:
        # Windows may extend beyond the padding: multiply by tables of ones and zeros.
        sizes = zip(x.shape[-spatial:], call.shape[-spatial:], kernel, strides, pads, strict=True)
        tables = [window_reads(*each).T for each in sizes]
        return call.builder.mul(weighted(call, x, tables), 1.0 / divisor_override)
    means = _pooled(
        call, "AveragePool", x, spatial, 1, kernel_shape=kernel, strides=strides, pads=pads * 2,
        ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad or divisor_override is not None),
    )[0]  # fmt: skip
    if divisor_override is None:
        return means
    return call.builder.mul(means, math.prod(kernel) / divisor_override)


def _adaptive_average(
    spatial: int, call: Call, x: SymbolicTensor, output_size: Sequence[int]
) -> SymbolicTensor:
    """Means over windows that cover each axis; uneven windows are a product with weights."""
    pairs = list(zip(x.shape[-spatial:], call.shape[-spatial:], strict=True))
    if all(s == 1 for _, s in pairs):
        return call.builder.reduce_mean(x, tuple(range(-spatial, 0)), keepdims=True)
    if all(s and n % s == 0 for n, s in pairs):
        return _average_pool(spatial, call, x, [n // s for n, s in pairs])
    return weighted(call, x, [window_weights(n, s) for n, s in pairs])


def weighted(call: Call, x: SymbolicTensor, weights: Iterable[Array]) -> SymbolicTensor:
    """Multiply each of the last axes of x by its matrix [axis, new axis]."""
    b, tables = call.builder, list(weights)
    for axis, table in enumerate(tables, -len(tables)):
        matrix = b.constant(table.astype(x.dtype))
        if axis == -1:
            x = b.matmul(x, matrix)
        else:
            x = b.swapaxes(b.matmul(b.swapaxes(x, axis, -1), matrix), axis, -1)
    return x


def window_reads(length: int, count: int, kernel: int, stride: int, padding: int) -> Array:
    """[windows, length]: the elements that each window reads."""
    starts, elements = np.arange(count)[:, None] * stride - padding, np.arange(length)
    reads: Array = (elements >= starts) & (elements < starts + kernel)
    return reads


def window_weights(length: int, size: int) -> Array:
    """[length, size]: column j averages elements floor(j n/s) to ceil((j + 1) n/s)."""
    weights = np.zeros((length, size))
    for j in range(size):
        start, end = j * length // size, -(-(j + 1) * length // size)
        weights[start:end, j] = 1.0 / (end - start)
    return weights


# Resizing ------------------------------------------------------------------------------------


#: torch has a kernel for images of at most so many rows and columns together: it copies an axis of
#: equal length, and repeats each element of one of double length, for any scale.
SMALL_IMAGE = 128


def _step(length: int, size: int, scales: Scales, axis: int) -> float:
    """Elements of the source per element of the result."""
    return length / size if scales is None else 1.0 / scales[axis]


def _nearest(call: Call, x: SymbolicTensor, sizes: Sizes, scales: Scales = None) -> SymbolicTensor:
    b, shape = call.builder, x.shape
    for axis, (length, size) in enumerate(zip(shape[2:], call.shape[2:], strict=True)):
        scale = None if scales is None else scales[axis]
        # Of whole numbers and of less than 1, scale and lengths say the same.
        if scale is not None and scale > 1 and scale % 1:
            is_small = len(shape) == 4 and sum(call.shape[2:]) <= SMALL_IMAGE
            scale = None if is_small and size in (length, 2 * length) else scale
        numbers = b.op("Range", 0, int64_array([size], ()), 1)
        # torch computes the index in float32.
        index = b.mul(b.cast(numbers, DataType.FLOAT32), _nearest_step(call, length, size, scale))
        last = b.constant(int64_array([length - 1], ()))
        index = b.minimum(b.cast(b.op("Floor", index), DataType.INT64), last)
        x = b.gather(x, index, axis + 2)
    return x


def _nearest_step(
    call: Call, length: int, size: int, scale: float | None
) -> SymbolicTensor | np.float32:
    """Elements of the source per element of the result, in float32; sizes may be symbolic."""
    if scale is not None:
        return np.float32(1.0 / scale)
    b = call.builder
    lengths = [b.cast(b.constant(int64_array([n], ())), DataType.FLOAT64) for n in (length, size)]
    return b.cast(b.div(*lengths), DataType.FLOAT32)


def _linear(
    call: Call, x: SymbolicTensor, sizes: Sizes, align_corners: bool, scales: Scales = None
) -> SymbolicTensor:
    lengths = enumerate(zip(x.shape[2:], call.shape[2:], strict=True))
    return weighted(call, x, [
        # An axis of equal length is copied, for any scale.
        _linear_weights(length, size, _step(length, size, scales if size != length else None, axis),
                        align_corners)
        for axis, (length, size) in lengths
    ])  # fmt: skip


def _linear_weights(length: int, size: int, step: float, align_corners: bool) -> Array:
    """[length, size]: the weight of each element in each element of the result."""
    steps = np.arange(size)
    if align_corners:
        positions = steps * ((length - 1) / (size - 1) if size > 1 else 0.0)
    else:
        positions = np.maximum((steps + 0.5) * step - 0.5, 0.0)
    low = np.minimum(np.floor(positions).astype(np.int64), length - 1)
    share = np.clip(positions - low, 0.0, 1.0)
    weights = np.zeros((length, size))
    np.add.at(weights, (low, steps), 1.0 - share)
    np.add.at(weights, (np.minimum(low + 1, length - 1), steps), share)
    return weights


# Grid samples --------------------------------------------------------------------------------

#: By torch's numbers.
_MODES = ("linear", "nearest", "cubic")
_PADDINGS = ("zeros", "border", "reflection")


def _grid_sample(
    call: Call, x: SymbolicTensor, grid: SymbolicTensor, mode: int, padding: int, corners: bool
) -> SymbolicTensor:
    if (_MODES[mode], _PADDINGS[padding]) == ("cubic", "border"):
        # torch clips the neighbours to the border, ONNX the position itself.
        raise CompileError(
            "grid_sample with mode 'bicubic' and padding_mode 'border' is not supported",
            remedy="use another mode or padding_mode, or torch.compile, which leaves it to torch",
        )
    return call.builder.op(
        "GridSample", x, call.cast(grid, x.data_type),
        mode=_MODES[mode], padding_mode=_PADDINGS[padding], align_corners=int(corners),
    )  # fmt: skip


LOWERINGS: dict[Any, Row] = {
    aten.grid_sampler_2d.default: _grid_sample,
    aten.grid_sampler_3d.default: _grid_sample,
    aten.max_pool2d_with_indices.default: partial(_max_pool, 2),
    aten.max_pool3d_with_indices.default: partial(_max_pool, 3),
    aten.avg_pool2d.default: partial(_average_pool, 2),
    aten.avg_pool3d.default: partial(_average_pool, 3),
    aten.adaptive_avg_pool1d.default: KeptWhole(partial(_adaptive_average, 1)),
    aten._adaptive_avg_pool2d.default: partial(_adaptive_average, 2),
    aten.adaptive_avg_pool2d.default: KeptWhole(partial(_adaptive_average, 2)),
    aten._adaptive_avg_pool3d.default: partial(_adaptive_average, 3),
    aten.upsample_nearest1d.vec: KeptWhole(_nearest),
    aten.upsample_nearest2d.vec: KeptWhole(_nearest),
    aten.upsample_nearest3d.vec: KeptWhole(_nearest),
    aten.upsample_linear1d.vec: KeptWhole(_linear),
    aten.upsample_bilinear2d.vec: KeptWhole(_linear),
    aten.upsample_trilinear3d.vec: KeptWhole(_linear),
}
