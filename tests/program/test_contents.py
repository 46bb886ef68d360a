"""Contents: equal bytes have one number, found without a copy, also where sums collide."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stitch.program import Array, Contents
from stitch.program.contents import PIECE_NBYTES, same_bytes


def test_equal_bytes_have_one_number_within_a_kind() -> None:
    zeros, ones = np.zeros(4, np.float32), np.ones(4, np.float32)
    seen = Contents()
    given = [
        zeros,
        ones,
        zeros.copy(),
        -zeros,
        ones[:2],
        ones.view(np.int32),
        np.zeros((2, 2), "f4"),
    ]
    assert [seen.number(array) for array in given] == [0, 1, 0, 2, 3, 1, 0]
    assert seen.number(zeros, "other") == 4 and seen.number(zeros.copy(), "other") == 4
    assert seen.arrays[1] is ones


def test_views_that_are_not_dense_are_taken_by_their_elements() -> None:
    table = np.arange(16, dtype=np.int32).reshape(4, 4)
    seen = Contents()
    numbers = [seen.number(a) for a in (table, table.T, table.T.copy(), table[::2], table[::2] + 0)]
    assert numbers == [0, 1, 1, 2, 2]
    assert seen.number(np.broadcast_to(np.float32(1), (8,))) == seen.number(np.ones(8, np.float32))


def test_arrays_whose_sums_collide_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stitch.program.contents.zlib.crc32", lambda _: 7)
    seen = Contents()
    arrays = [np.full(3, i % 5) for i in range(20)]
    assert [seen.number(array) for array in arrays] == [i % 5 for i in range(20)]


@pytest.mark.parametrize("at", [0, PIECE_NBYTES - 1, PIECE_NBYTES, 3 * PIECE_NBYTES + 4])
def test_one_byte_makes_the_difference_wherever_it_stands(at: int) -> None:
    one = np.zeros(3 * PIECE_NBYTES + 5, np.uint8)
    other = one.copy()
    assert same_bytes(one, other)
    other[at] = 1
    assert not same_bytes(one, other) and not same_bytes(one, one[:-1])


def test_mapped_arrays_are_compared_without_a_copy(tmp_path: Path) -> None:
    size = 32 * PIECE_NBYTES
    mapped: list[Array] = []
    for name in "ab":
        np.full(size, 3, np.uint8).tofile(tmp_path / name)
        mapped.append(np.memmap(tmp_path / name, np.uint8, "r"))
    tracemalloc.start()
    try:
        seen = Contents()
        assert [seen.number(array) for array in mapped] == [0, 0]
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < size / 8
