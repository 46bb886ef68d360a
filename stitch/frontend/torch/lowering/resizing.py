"""ATen operators that resize images: nearest and linear interpolation.

Comes in: a `Call` and the operands of the schema. Goes out: per axis a gather, or a product with
the weights of the interpolation. Must not know: fx nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, KeptWhole, Row
from stitch.graph import SymbolicTensor
from stitch.program import Array

aten = torch.ops.aten
Sizes = Sequence[int] | None
Scales = Sequence[float] | None


def _steps(length: int, size: int, scales: Scales, axis: int) -> float:
    """How far the source moves for one step of the result."""
    return length / size if scales is None else 1.0 / scales[axis]


def _nearest(call: Call, x: SymbolicTensor, sizes: Sizes, scales: Scales = None) -> SymbolicTensor:
    spatial = len(call.shape) - 2
    for axis in range(spatial):
        length, size = x.shape[axis + 2], call.shape[axis + 2]
        # torch computes these places in float32.
        step = np.float32(_steps(length, size, scales, axis))
        places = np.floor(np.arange(size, dtype=np.float32) * step).astype(np.int64)
        x = call.builder.gather(x, np.minimum(places, length - 1), axis + 2)
    return x


def _linear(
    call: Call, x: SymbolicTensor, sizes: Sizes, align_corners: bool, scales: Scales = None
) -> SymbolicTensor:
    b, spatial = call.builder, len(call.shape) - 2
    for axis in range(spatial):
        length, size = x.shape[axis + 2], call.shape[axis + 2]
        step = _steps(length, size, scales, axis)
        weights = b.constant(_weights(length, size, step, align_corners).astype(x.dtype))
        last = axis == spatial - 1
        resized = b.matmul(x if last else b.swapaxes(x, axis + 2, -1), weights)
        x = resized if last else b.swapaxes(resized, axis + 2, -1)
    return x


def _weights(length: int, size: int, step: float, align_corners: bool) -> Array:
    """[length, size]: how much of each element goes into each of the result."""
    steps = np.arange(size)
    if align_corners:
        places = steps * ((length - 1) / (size - 1) if size > 1 else 0.0)
    else:
        places = np.maximum((steps + 0.5) * step - 0.5, 0.0)
    low = np.minimum(np.floor(places).astype(np.int64), length - 1)
    share = np.clip(places - low, 0.0, 1.0)
    weights = np.zeros((length, size))
    np.add.at(weights, (low, steps), 1.0 - share)
    np.add.at(weights, (np.minimum(low + 1, length - 1), steps), share)
    return weights


LOWERINGS: dict[Any, Row] = {
    aten.upsample_nearest1d.vec: KeptWhole(_nearest),
    aten.upsample_nearest2d.vec: KeptWhole(_nearest),
    aten.upsample_nearest3d.vec: KeptWhole(_nearest),
    aten.upsample_linear1d.vec: KeptWhole(_linear),
    aten.upsample_bilinear2d.vec: KeptWhole(_linear),
    aten.upsample_trilinear3d.vec: KeptWhole(_linear),
}
