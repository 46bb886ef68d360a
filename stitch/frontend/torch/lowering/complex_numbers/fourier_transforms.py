"""ATen's Fourier transforms: `_fft_r2c`, `_fft_c2r`, `_fft_c2c`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, ComplexTensor, Lowering
from stitch.graph import SymbolicTensor

aten = torch.ops.aten
#: How torch numbers normalizations: none, by the root of the count of elements, by the count.
_EXPONENTS = {0: 0.0, 1: -0.5, 2: -1.0}


def _transformed(
    call: Call, x: SymbolicTensor, axis: int, length: int, **attributes: int
) -> SymbolicTensor:
    lengths = [np.asarray(number, np.int64) for number in (length, axis)]
    return call.builder.apply("DFT", [x, *lengths], 1, attributes)[0]


def _scaled(
    call: Call, x: SymbolicTensor, count: int, normalization: int, *, is_inverse: bool
) -> SymbolicTensor:
    """Each inverse DFT has divided by its length, which torch leaves to the normalization."""
    factor = count ** (_EXPONENTS[normalization] + (1.0 if is_inverse else 0.0))
    return x if factor == 1 else call.builder.mul(x, factor)


def _each(call: Call, x: SymbolicTensor, axes: Sequence[int], *, inverse: bool) -> SymbolicTensor:
    for axis in axes:
        x = _transformed(call, x, axis, x.shape[axis], inverse=int(inverse))
    return x


def _complex_to_complex(
    call: Call, x: ComplexTensor, dim: Sequence[int], normalization: int, forward: bool
) -> ComplexTensor:
    axes = [d % len(x.shape) for d in dim]
    result = _each(call, x.pairs, axes, inverse=not forward)
    count = math.prod(x.shape[axis] for axis in axes)
    return ComplexTensor(_scaled(call, result, count, normalization, is_inverse=not forward))


def _real_to_complex(
    call: Call, x: SymbolicTensor, dim: Sequence[int], normalization: int, onesided: bool
) -> ComplexTensor:
    """The last of the axes is the first one: its input is real, and half its result is enough."""
    *others, last = (d % len(x.shape) for d in dim)
    wide = call.builder.unsqueeze(call.cast(x), -1)
    half = _transformed(call, wide, last, x.shape[last], onesided=int(onesided))
    count = math.prod(x.shape[axis] for axis in (*others, last))
    result = _each(call, half, others, inverse=False)
    return ComplexTensor(_scaled(call, result, count, normalization, is_inverse=False))


def _complex_to_real(
    call: Call, x: ComplexTensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> SymbolicTensor:
    *others, last = (d % len(x.shape) for d in dim)
    whole = _each(call, x.pairs, others, inverse=True)
    real = _transformed(call, whole, last, last_dim_size, inverse=1, onesided=1)
    count = math.prod(x.shape[axis] for axis in others) * last_dim_size
    result = _scaled(call, real, count, normalization, is_inverse=True)
    return call.builder.squeeze(result, -1)


LOWERINGS: dict[Any, Lowering] = {
    aten._fft_c2c.default: _complex_to_complex, aten._fft_r2c.default: _real_to_complex,
    aten._fft_c2r.default: _complex_to_real,
}  # fmt: skip
