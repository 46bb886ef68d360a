"""ATen's sampling of images at places of a grid, in two and three axes, and its gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stitch.frontend.torch.aten_call import Call, Row, Several, rounded_once
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
#: By torch's numbers for them.
_MODES = ("linear", "nearest", "cubic")
_PADDINGS = ("zeros", "border", "reflection")
#: The rate of torch's and ONNX's cubic weights.
_CUBIC = -0.75


def _grid_sample(
    call: Call, x: SymbolicTensor, grid: SymbolicTensor, mode: int, padding: int, corners: bool
) -> SymbolicTensor:
    if (_MODES[mode], _PADDINGS[padding]) == ("cubic", "border"):
        return _weighed(call, x, grid, mode, padding, corners)
    return call.builder.op(
        "GridSample", x, call.cast(grid, x.data_type),
        mode=_MODES[mode], padding_mode=_PADDINGS[padding], align_corners=int(corners),
    )  # fmt: skip


@rounded_once
def _weighed(
    call: Call, x: SymbolicTensor, grid: SymbolicTensor, mode: int, padding: int, corners: bool
) -> SymbolicTensor:
    """Neighbours times weights: torch brings those to the border, and ONNX the place itself."""
    b, sampling = call.builder, _Sampling.of(call, x, grid, mode, padding, corners)
    total = b.broadcast(call.cast(0), (*x.shape[:2], sampling.points))
    for chosen in itertools.product(*sampling.taps):
        seen = b.gather_elements(sampling.image, sampling.places(chosen), 2)
        weight = _product(call, [t.weight for t in chosen])
        total = b.add(total, b.mul(seen, b.unsqueeze(weight, 1)))
    return b.reshape(total, call.shape)


# Neighbours ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tap:
    """One neighbour of each place along an axis: where, with which weight, and how that changes
    as the place moves (None where it does not)."""

    place: SymbolicTensor
    weight: SymbolicTensor
    slope: SymbolicTensor | None


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis that is sampled: its length, and how places on it are made."""

    call: Call
    length: int
    mode: str
    padding: str
    corners: bool

    def taps(self, grid: SymbolicTensor) -> list[_Tap]:
        """The neighbours of places from -1 to 1."""
        b, n = self.call.builder, self.length
        rate = (n - 1) / 2 if self.corners else n / 2
        place = b.add(b.mul(grid, rate), (n - 1) / 2)
        pace = b.broadcast(b.constant(np.asarray(rate, grid.dtype)), grid.shape)
        if self.mode != "cubic":
            place, pace = self._inside(place, pace)
        if self.mode == "nearest":
            return [self._tap(b.round(place), b.constant(np.ones(grid.shape, grid.dtype)), None)]
        low = b.floor(place)
        part = b.sub(place, low)
        if self.mode == "linear":
            weights = [(b.sub(1.0, part), b.neg(pace)), (part, pace)]
            start = 0
        else:
            weights = [self._cubic(b.sub(part, float(k)), pace) for k in range(-1, 3)]
            start = -1
        return [
            self._tap(b.add(low, float(start + k)), weight, slope)
            for k, (weight, slope) in enumerate(weights)
        ]

    def _cubic(
        self, apart: SymbolicTensor, pace: SymbolicTensor
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        """The weight of an element this far away, and its slope."""
        b, a, d = self.call.builder, _CUBIC, self.call.builder.abs(apart)

        def polynomial(*factors: float) -> SymbolicTensor:
            total = b.mul(d, factors[0])
            for factor in factors[1:-1]:
                total = b.mul(b.add(total, factor), d)
            return b.add(total, factors[-1])

        is_near = b.less_or_equal(d, 1.0)
        weight = b.where(is_near, polynomial(a + 2, -(a + 3), 0.0, 1.0),
                         polynomial(a, -5 * a, 8 * a, -4 * a))  # fmt: skip
        slope = b.where(is_near, polynomial(3 * (a + 2), -2 * (a + 3), 0.0),
                        polynomial(3 * a, -10 * a, 8 * a))  # fmt: skip
        return weight, b.mul(b.mul(slope, b.sign(apart)), pace)

    def _inside(
        self, place: SymbolicTensor, pace: SymbolicTensor
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Places brought back inside, and how they move then: not at all beyond the border."""
        b = self.call.builder
        if self.padding == "zeros":
            return place, pace
        if self.padding == "reflection":
            place, pace = self._reflected(place, pace)
        top = float(self.length - 1)
        moves = b.logical_and(b.greater(place, 0.0), b.less(place, top))
        return b.clip(place, 0.0, top), b.where(moves, pace, 0.0)

    def _reflected(
        self, place: SymbolicTensor, pace: SymbolicTensor | None
    ) -> tuple[SymbolicTensor, Any]:
        b, n = self.call.builder, self.length
        low, span = (0.0, float(n - 1)) if self.corners else (-0.5, float(n))
        if not span:
            return b.mul(place, 0.0), None if pace is None else b.mul(pace, 0.0)
        apart = b.sub(place, low)
        distance = b.abs(apart)
        turns = b.floor(b.div(distance, span))
        rest = b.sub(distance, b.mul(turns, span))
        is_odd = b.equal(b.sub(turns, b.mul(b.floor(b.mul(turns, 0.5)), 2.0)), 1.0)
        result = b.add(b.where(is_odd, b.sub(span, rest), rest), low)
        if pace is None:
            return result, None
        back = b.logical_xor(is_odd, b.less(apart, 0.0))
        return result, b.where(back, b.neg(pace), pace)

    def _tap(
        self, place: SymbolicTensor, weight: SymbolicTensor, slope: SymbolicTensor | None
    ) -> _Tap:
        b, top = self.call.builder, float(self.length - 1)
        if self.padding == "reflection" and self.mode == "cubic":
            place = self._reflected(place, None)[0]
        elif self.padding == "zeros":
            inside = b.logical_and(b.greater_or_equal(place, 0.0), b.less_or_equal(place, top))
            weight = b.where(inside, weight, 0.0)
            slope = None if slope is None else b.where(inside, slope, 0.0)
        # A NaN is nowhere: its index is any that is inside.
        known = b.where(b.op("IsNaN", place), 0.0, b.clip(place, 0.0, top))
        return _Tap(b.cast(known, DataType.INT64), weight, slope)


@dataclass(frozen=True, slots=True)
class _Sampling:
    """Images [N, C, places], and the neighbours of every point [N, points], axis by axis."""

    call: Call
    image: SymbolicTensor
    lengths: tuple[int, ...]
    points: int
    taps: tuple[list[_Tap], ...]

    @staticmethod
    def of(
        call: Call, x: SymbolicTensor, grid: SymbolicTensor, mode: int, padding: int, corners: bool
    ) -> _Sampling:
        """What torch's numbers for mode and padding ask for."""
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

    def places(self, chosen: Sequence[_Tap]) -> SymbolicTensor:
        """Where one neighbour of each point lies in the image, for every channel."""
        b, places = self.call.builder, chosen[0].place
        for tap, n in zip(chosen[1:], self.lengths[1:], strict=True):
            places = b.add(b.mul(places, n), tap.place)
        return b.broadcast(b.unsqueeze(places, 1), (*self.image.shape[:2], self.points))


@rounded_once
def _grid_sample_backward(
    call: Call, grad: SymbolicTensor, x: SymbolicTensor, grid: SymbolicTensor, mode: int,
    padding: int, corners: bool, wanted: Sequence[bool],
) -> Several:  # fmt: skip
    b, sampling = call.builder, _Sampling.of(call, x, grid, mode, padding, corners)
    parts = b.reshape(grad, (*x.shape[:2], sampling.points))
    moves = _MODES[mode] != "nearest" and bool(wanted[1]) and 1 in call.used
    of_x = b.broadcast(call.cast(0, x.data_type), sampling.image.shape)
    of_axes: list[SymbolicTensor | None] = [None] * len(sampling.lengths)
    for chosen in itertools.product(*sampling.taps):
        index = sampling.places(chosen)
        if wanted[0] and 0 in call.used:
            added = b.mul(parts, b.unsqueeze(_product(call, [t.weight for t in chosen]), 1))
            of_x = b.op("ScatterElements", of_x, index, added, axis=2, reduction="add")
        if moves:
            seen = b.reduce_sum(b.mul(parts, b.gather_elements(sampling.image, index, 2)), 1)
            for axis, tap in enumerate(chosen):
                assert tap.slope is not None, "weights of every mode but nearest have slopes"
                others = [t.weight for a, t in enumerate(chosen) if a != axis]
                part, so_far = _product(call, [seen, tap.slope, *others]), of_axes[axis]
                of_axes[axis] = part if so_far is None else b.add(so_far, part)
    kept = [part for part in of_axes[::-1] if part is not None]
    zero = b.broadcast(call.cast(0, grid.data_type), grid.shape)
    of_grid = b.reshape(b.stack(kept, -1), grid.shape) if kept else zero
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
