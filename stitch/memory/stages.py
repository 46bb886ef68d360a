"""Stages: what a conversion does to one strip of a tensor, and how strips run one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stitch.memory.cells import Bytes

#: One prepared call.
Call = Callable[[], object]
#: Where a stage writes: starts, strides and widths.
Places: TypeAlias = tuple[tuple[int, int, int], ...]
_LINE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Stage:
    """One step for one strip: `calls(source, target, scratch)` prepares it on given bytes."""

    target_nbytes: int
    calls: Callable[[Bytes, Bytes, Bytes], Sequence[Call]]
    scratch_nbytes: int = 0
    #: Instead of `scratch`: bytes that begin as zeros, where only stages with the same `places`
    #: write, all of them the same bytes: what lies between these stays zeros.
    zeros_nbytes: int = 0
    places: Places = ()


@dataclass(frozen=True, slots=True)
class Strip:
    """The stages of one strip, from source bytes to target bytes.

    `source`, `target` say where the strip lies contiguously in its footprint; None means that
    the first stage gathers from the whole source region, or the last scatters into the target's.
    """

    stages: tuple[Stage, ...]
    source: slice | None
    target: slice | None


@dataclass(frozen=True, slots=True)
class Staging:
    """Bytes that all strips of a conversion share: two that take turns, scratch, and zeros, by
    where stages write there."""

    turns: tuple[int, int]
    scratch: int
    zeros: tuple[tuple[Places, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.turns) + self.scratch + sum(nbytes for _, nbytes in self.zeros)

    @staticmethod
    def of(strips: Sequence[Strip]) -> Staging:
        """The least staging with which every strip can run."""
        turns = [0, 0]
        scratch, zeros = 0, dict[Places, int]()
        for strip in strips:
            for i, stage in enumerate(strip.stages):
                scratch = max(scratch, stage.scratch_nbytes)
                if stage.zeros_nbytes:
                    zeros[stage.places] = max(zeros.get(stage.places, 0), stage.zeros_nbytes)
                if i + 1 < len(strip.stages):
                    turns[i % 2] = max(turns[i % 2], stage.target_nbytes)
        return Staging((turns[0], turns[1]), scratch, tuple(zeros.items()))


def bind_strips(
    strips: Sequence[Strip], staging: Staging, source: Bytes, target: Bytes
) -> list[Call]:
    """The calls of all strips on given regions, with staging of their own."""
    turns = [aligned_bytes(nbytes) for nbytes in staging.turns]
    scratch = aligned_bytes(staging.scratch)
    zeros = {places: aligned_bytes(nbytes) for places, nbytes in staging.zeros}
    for raw in zeros.values():
        raw.fill(0)
    calls: list[Call] = []
    for strip in strips:
        current = source if strip.source is None else source[strip.source]
        last = len(strip.stages) - 1
        for i, stage in enumerate(strip.stages):
            if i < last:
                following = turns[i % 2][: stage.target_nbytes]
            else:
                following = target if strip.target is None else target[strip.target]
            calls += stage.calls(current, following, zeros.get(stage.places, scratch))
            current = following
    return calls


def aligned_bytes(nbytes: int) -> Bytes:
    """New bytes that begin with a cache line: no chunk of a copy lies across two of them."""
    raw = np.empty(nbytes + _LINE_NBYTES, np.uint8)
    start = -raw.ctypes.data % _LINE_NBYTES
    return raw[start : start + nbytes]


def typed(raw: Bytes, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The first `count` elements of a strip as elements of a type."""
    return raw[: count * dtype.itemsize].view(dtype)
