"""ATen's `grid_sampler` in two and three dimensions, and its gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import Call, Row, Several, rounded_once
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
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


@dataclass(frozen=True, slots=True)
class _Tap:
    """A neighbour of each grid point along an axis: its index, its weight, and the derivative of
    the weight by the grid (None if zero)."""

    index: SymbolicTensor
    weight: SymbolicTensor
    slope: SymbolicTensor | None


@dataclass(frozen=True, slots=True)
class _Axis:
    """A sampled axis."""

    call: Call
    length: int
    mode: str
    padding: str
    corners: bool

    def taps(self, grid: SymbolicTensor) -> list[_Tap]:
        """The neighbours of grid coordinates from -1 to 1."""
        b, n = self.call.builder, self.length
        scale = (n - 1) / 2 if self.corners else n / 2
        position = b.add(b.mul(grid, scale), (n - 1) / 2)
        slope = b.broadcast(b.constant(np.asarray(scale, grid.dtype)), grid.shape)
        position, slope = self._inside(position, slope)
        if self.mode == "nearest":
            return [self._tap(b.round(position), b.constant(np.ones(grid.shape, grid.dtype)), None)]
        low = b.floor(position)
        part = b.sub(position, low)
        return [
            self._tap(low, b.sub(1.0, part), b.neg(slope)),
            self._tap(b.add(low, 1.0), part, slope),
        ]

    def _inside(
        self, position: SymbolicTensor, slope: SymbolicTensor
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Positions moved into the image, and their derivatives: zero beyond the border."""
        b = self.call.builder
        if self.padding == "zeros":
            return position, slope
        if self.padding == "reflection":
            position, slope = self._reflected(position, slope)
        top = float(self.length - 1)
        moves = b.logical_and(b.greater(position, 0.0), b.less(position, top))
        return b.clip(position, 0.0, top), b.where(moves, slope, 0.0)

    def _reflected(
        self, position: SymbolicTensor, slope: SymbolicTensor
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        b, n = self.call.builder, self.length
        low, span = (0.0, float(n - 1)) if self.corners else (-0.5, float(n))
        if not span:
            return b.mul(position, 0.0), b.mul(slope, 0.0)
        apart = b.sub(position, low)
        distance = b.abs(apart)
        turns = b.floor(b.div(distance, span))
        rest = b.sub(distance, b.mul(turns, span))
        is_odd = b.equal(b.sub(turns, b.mul(b.floor(b.mul(turns, 0.5)), 2.0)), 1.0)
        result = b.add(b.where(is_odd, b.sub(span, rest), rest), low)
        back = b.logical_xor(is_odd, b.less(apart, 0.0))
        return result, b.where(back, b.neg(slope), slope)

    def _tap(
        self, position: SymbolicTensor, weight: SymbolicTensor, slope: SymbolicTensor | None
    ) -> _Tap:
        b, top = self.call.builder, float(self.length - 1)
        if self.padding == "zeros":
            inside = b.logical_and(
                b.greater_or_equal(position, 0.0), b.less_or_equal(position, top)
            )
            weight = b.where(inside, weight, 0.0)
            slope = None if slope is None else b.where(inside, slope, 0.0)
        # The index of a NaN may be any element.
        index = b.where(b.op("IsNaN", position), 0.0, b.clip(position, 0.0, top))
        return _Tap(b.cast(index, DataType.INT64), weight, slope)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Images [N, C, elements], and for each axis the neighbours of all points [N, points]."""

    call: Call
    image: SymbolicTensor
    lengths: tuple[int, ...]
    points: int
    taps: tuple[list[_Tap], ...]

    @staticmethod
    def of(
        call: Call, x: SymbolicTensor, grid: SymbolicTensor, mode: int, padding: int, corners: bool
    ) -> _Sampling:
        """The sampling for torch's numbers of mode and padding."""
        b, lengths = call.builder, x.shape[2:]
        points = math.prod(grid.shape[1:-1])
        flat = b.reshape(grid, (x.shape[0], points, len(lengths)))
        # The grid counts axes from the last.
        columns = [b.squeeze(c, -1) for c in b.split(flat, 1, -1)][::-1]
        taps = tuple(
            _Axis(call, n, _MODES[mode], _PADDINGS[padding], corners).taps(column)
            for n, column in zip(lengths, columns, strict=True)
        )
        image = b.reshape(x, (*x.shape[:2], math.prod(lengths)))
        return _Sampling(call, image, lengths, points, taps)

    def index(self, chosen: Sequence[_Tap]) -> SymbolicTensor:
        """The element of the image that is one neighbour of each point, for every channel."""
        b, index = self.call.builder, chosen[0].index
        for tap, n in zip(chosen[1:], self.lengths[1:], strict=True):
            index = b.add(b.mul(index, n), tap.index)
        return b.broadcast(b.unsqueeze(index, 1), (*self.image.shape[:2], self.points))


@rounded_once
def _grid_sample_backward(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, grid: SymbolicTensor, mode: int,
    padding: int, corners: bool, wanted: Sequence[bool],
) -> Several:  # fmt: skip
    if _MODES[mode] == "cubic":
        raise CompileError(
            "the gradient of grid_sample with mode 'bicubic' is not supported",
            remedy="use mode 'bilinear', or torch.compile, which leaves it to torch",
        )
    b, sampling = call.builder, _Sampling.of(call, x, grid, mode, padding, corners)
    parts = b.reshape(grad, (*x.shape[:2], sampling.points))
    has_slopes = _MODES[mode] != "nearest" and bool(wanted[1]) and 1 in call.used
    of_x = b.broadcast(call.cast(0, x.data_type), sampling.image.shape)
    of_axes: list[SymbolicTensor | None] = [None] * len(sampling.lengths)
    for chosen in itertools.product(*sampling.taps):
        index = sampling.index(chosen)
        if wanted[0] and 0 in call.used:
            added = b.mul(parts, b.unsqueeze(_product(call, [t.weight for t in chosen]), 1))
            of_x = b.op("ScatterElements", of_x, index, added, axis=2, reduction="add")
        if has_slopes:
            seen = b.reduce_sum(b.mul(parts, b.gather_elements(sampling.image, index, 2)), 1)
            for axis, tap in enumerate(chosen):
                assert tap.slope is not None, "weights of every mode but nearest have slopes"
                others = [t.weight for a, t in enumerate(chosen) if a != axis]
                part, so_far = _product(call, [seen, tap.slope, *others]), of_axes[axis]
                of_axes[axis] = part if so_far is None else b.add(so_far, part)
    parts_of_grid = [part for part in of_axes[::-1] if part is not None]
    of_grid = b.broadcast(call.cast(0, grid.data_type), grid.shape)
    if parts_of_grid:
        of_grid = b.reshape(b.stack(parts_of_grid, -1), grid.shape)
    return b.reshape(of_x, x.shape), of_grid


def _product(call: Call, factors: Sequence[SymbolicTensor]) -> SymbolicTensor:
    first, *rest = factors
    for factor in rest:
        first = call.builder.mul(first, factor)
    return first


LOWERINGS: dict[Any, Row] = {
    aten.grid_sampler_2d.default: _grid_sample, aten.grid_sampler_3d.default: _grid_sample,
    aten.grid_sampler_2d_backward.default: _grid_sample_backward,
    aten.grid_sampler_3d_backward.default: _grid_sample_backward,
}  # fmt: skip
