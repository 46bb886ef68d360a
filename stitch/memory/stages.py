"""The stages that convert one strip of a tensor, and the staging memory that strips share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from stitch.memory.cells import Bytes

Call = Callable[[], object]
#: Where a stage writes into zeroed bytes: (start, stride, width) of rows.
RowSpans: TypeAlias = tuple[tuple[int, int, int], ...]
_LINE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Stage:
    """One step for one strip; `calls(source, target, scratch)` binds it to memory.

    With `zeros_nbytes`, `scratch` is zeroed memory that only stages with the same `rows` write, so
    the bytes between the rows remain zeros.
    """

    target_nbytes: int
    calls: Callable[[Bytes, Bytes, Bytes], Sequence[Call]]
    scratch_nbytes: int = 0
    zeros_nbytes: int = 0
    rows: RowSpans = ()


@dataclass(frozen=True, slots=True)
class Strip:
    """The stages of one strip.

    `source` and `target` are the strip's contiguous bytes in the footprints; None if the first
    stage gathers from the whole source, or the last stage scatters into the whole target.
    """

    stages: tuple[Stage, ...]
    source: slice | None
    target: slice | None


@dataclass(frozen=True, slots=True)
class Staging:
    """Sizes of the memory that all strips share: two alternating buffers, scratch, zeroed bytes."""

    turns: tuple[int, int]
    scratch: int
    zeros: tuple[tuple[RowSpans, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(self.turns) + self.scratch + sum(nbytes for _, nbytes in self.zeros)

    @staticmethod
    def of(strips: Sequence[Strip]) -> Staging:
        """Return the least staging with which every strip can run."""
        turns = [0, 0]
        scratch, zeros = 0, dict[RowSpans, int]()
        for strip in strips:
            for i, stage in enumerate(strip.stages):
                scratch = max(scratch, stage.scratch_nbytes)
                if stage.zeros_nbytes:
                    zeros[stage.rows] = max(zeros.get(stage.rows, 0), stage.zeros_nbytes)
                if i + 1 < len(strip.stages):
                    turns[i % 2] = max(turns[i % 2], stage.target_nbytes)
        return Staging((turns[0], turns[1]), scratch, tuple(zeros.items()))


def bind_strips(
    strips: Sequence[Strip], staging: Staging, source: Bytes, target: Bytes
) -> list[Call]:
    """Return the calls of all strips on two regions, with newly allocated staging."""
    turns = [aligned_bytes(nbytes) for nbytes in staging.turns]
    scratch = aligned_bytes(staging.scratch)
    zeros = {rows: aligned_bytes(nbytes) for rows, nbytes in staging.zeros}
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
            calls += stage.calls(current, following, zeros.get(stage.rows, scratch))
            current = following
    return calls


def aligned_bytes(nbytes: int) -> Bytes:
    """Allocate bytes at a cache line, so that no chunk of a copy crosses one."""
    raw = np.empty(nbytes + _LINE_NBYTES, np.uint8)
    start = -raw.ctypes.data % _LINE_NBYTES
    return raw[start : start + nbytes]


def typed(raw: Bytes, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the first `count` elements of a strip as an array of a type."""
    return raw[: count * dtype.itemsize].view(dtype)
