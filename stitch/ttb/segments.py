"""Segments: how the constants of all programs lie behind the metadata.

Comes in: programs. Goes out: rows (offset, length, CRC-32) and the arrays to write, equal bytes
once. Must not know: the metadata.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from stitch.program import Array, Program
from stitch.ttb.binary import SegmentRow
from stitch.ttb.envelope import padded


@dataclass(frozen=True, slots=True)
class Segments:
    """The data of a file: rows of the root's table, and the contiguous bytes of each."""

    rows: tuple[SegmentRow, ...]
    arrays: tuple[Array, ...]
    of_constant: Mapping[int, int]  # id of a `Constant` -> its segment


def collect_segments(programs: Iterable[Program]) -> Segments:
    """Lay the constants of all programs out behind each other; equal bytes become one segment."""
    rows: list[SegmentRow] = []
    arrays: list[Array] = []
    known: dict[tuple[int, int], list[int]] = {}
    of_constant: dict[int, int] = {}
    end = 0
    for program in programs:
        for constant in program.constants:
            data = dense_bytes(constant.data)
            key = (data.nbytes, zlib.crc32(data.data))
            same = [i for i in known.get(key, ()) if np.array_equal(dense_bytes(arrays[i]), data)]
            if not same:
                offset = padded(end)
                end = offset + data.nbytes
                same = [len(rows)]
                known.setdefault(key, []).append(len(rows))
                rows.append(SegmentRow(offset, data.nbytes, key[1]))
                arrays.append(constant.data)
            of_constant[id(constant)] = same[0]
    return Segments(tuple(rows), tuple(arrays), of_constant)


def dense_bytes(data: Array) -> Array:
    """An array's elements, row-major, as a flat array of bytes; a view where it is dense."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
