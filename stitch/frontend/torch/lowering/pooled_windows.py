"""ATen operators over windows: maxima and means, of given or of fitting size.

Comes in: a `Call` and the operands of the schema. Goes out: operations in the builder. Must not
know: fx nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, KeptWhole, Row, Several
from stitch.graph import SymbolicTensor
from stitch.program import Array

aten = torch.ops.aten


def spread(values: Sequence[int] | int, count: int) -> list[int]:
    """One number per spatial axis: torch gives one for all, or each."""
    listed = [values] if isinstance(values, int) else list(values)
    return listed * count if len(listed) == 1 else listed


def _pooled(
    call: Call, op: str, x: SymbolicTensor, spatial: int, outputs: int, **attributes: Any
) -> tuple[SymbolicTensor, ...]:
    """A pooling of [N, C, ...]; a tensor without N gets one on the way."""
    b = call.builder
    if len(x.shape) == spatial + 2:
        return b.apply(op, [x], outputs, attributes)
    pooled = b.apply(op, [b.unsqueeze(x, 0)], outputs, attributes)
    return tuple(b.squeeze(tensor, 0) for tensor in pooled)


def _max_pool(
    spatial: int,
    call: Call,
    x: SymbolicTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> Several:
    kernel = spread(kernel_size, spatial)
    pooled = _pooled(
        call, "MaxPool", x, spatial, 2 if 1 in call.used else 1,
        kernel_shape=kernel, strides=spread(stride, spatial) if stride else kernel,
        pads=spread(padding, spatial) * 2, dilations=spread(dilation, spatial),
        ceil_mode=int(ceil_mode),
    )  # fmt: skip
    if len(pooled) == 1:
        return (pooled[0], None)
    # ONNX counts places over the whole tensor, torch within one plane.
    return pooled[0], call.builder.mod(pooled[1], math.prod(x.shape[-spatial:]))


def _one_max_pool(spatial: int, call: Call, *operands: Any) -> SymbolicTensor | None:
    return _max_pool(spatial, call, *operands)[0]


def _average_pool(
    spatial: int,
    call: Call,
    x: SymbolicTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> SymbolicTensor:
    kernel = spread(kernel_size, spatial)
    if divisor_override is not None and ceil_mode:
        raise CompileError("average pooling with ceil_mode and a divisor of its own")
    means = _pooled(
        call, "AveragePool", x, spatial, 1,
        kernel_shape=kernel, strides=spread(stride, spatial) if stride else kernel,
        pads=spread(padding, spatial) * 2, ceil_mode=int(ceil_mode),
        count_include_pad=int(count_include_pad or divisor_override is not None),
    )[0]  # fmt: skip
    if divisor_override is None:
        return means
    return call.builder.mul(means, math.prod(kernel) / divisor_override)


def _adaptive_average(
    spatial: int, call: Call, x: SymbolicTensor, output_size: Sequence[int]
) -> SymbolicTensor:
    """Means over windows that cover each axis; a product with weights where they are uneven."""
    b, sizes = call.builder, call.shape[-spatial:]
    lengths = x.shape[-spatial:]
    if all(s == 1 for s in sizes):
        return b.reduce_mean(x, tuple(range(-spatial, 0)), keepdims=True)
    if all(s and n % s == 0 for n, s in zip(lengths, sizes, strict=True)):
        return _average_pool(
            spatial, call, x, [n // s for n, s in zip(lengths, sizes, strict=True)]
        )
    for axis, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        place = axis - spatial
        weights = b.constant(window_weights(length, size).astype(x.dtype))
        moved = x if place == -1 else b.swapaxes(x, place, -1)
        mean = b.matmul(moved, weights)
        x = mean if place == -1 else b.swapaxes(mean, place, -1)
    return x


def window_weights(length: int, size: int) -> Array:
    """[length, size]: column j averages elements floor(j n/s) to ceil((j + 1) n/s)."""
    weights = np.zeros((length, size))
    for j in range(size):
        start, end = j * length // size, -(-(j + 1) * length // size)
        weights[start:end, j] = 1.0 / (end - start)
    return weights


def _adaptive_max(
    spatial: int, call: Call, x: SymbolicTensor, output_size: Sequence[int]
) -> Several:
    lengths, sizes = x.shape[-spatial:], call.shape[-spatial:]
    if any(s < 1 or n % s for n, s in zip(lengths, sizes, strict=True)):
        raise CompileError(
            "adaptive maxima need an output size that divides the input's",
            expected=f"divisors of {list(lengths)}",
            got=str(list(sizes)),
        )
    windows = [n // s for n, s in zip(lengths, sizes, strict=True)]
    return _max_pool(spatial, call, x, windows)


LOWERINGS: dict[Any, Row] = {
    aten.max_pool2d_with_indices.default: partial(_max_pool, 2),
    aten.max_pool3d_with_indices.default: partial(_max_pool, 3),
    aten.max_pool2d.default: partial(_one_max_pool, 2),
    aten.avg_pool1d.default: partial(_average_pool, 1),
    aten.avg_pool2d.default: partial(_average_pool, 2),
    aten.avg_pool3d.default: partial(_average_pool, 3),
    aten.adaptive_avg_pool1d.default: KeptWhole(partial(_adaptive_average, 1)),
    aten._adaptive_avg_pool2d.default: partial(_adaptive_average, 2),
    aten.adaptive_avg_pool2d.default: KeptWhole(partial(_adaptive_average, 2)),
    aten._adaptive_avg_pool3d.default: partial(_adaptive_average, 3),
    aten.adaptive_max_pool2d.default: partial(_adaptive_max, 2),
}  # fmt: skip
