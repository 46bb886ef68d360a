"""Arrays that are only to be read stay so, whatever they hold and however they lie."""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import pytest

from stitch.program import Array, Constant, DataType, as_read_only, can_change

TYPES = [kind for kind in DataType if not kind.is_block]


def drawn(kind: DataType, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape)) * kind.dtype.itemsize
    raw = np.random.default_rng(0).integers(0, 2, count, np.uint8)
    return raw.view(kind.dtype).reshape(shape)


def several_ways(array: Array) -> list[Array]:
    """An array, parts of it, and it seen in other orders."""
    return [array, array[::2], array[::-1, 1:].T, np.broadcast_to(array[:1], (5, *array.shape))]


@pytest.mark.parametrize("kind", TYPES)
def test_a_read_only_view_has_the_same_bytes_and_nobody_makes_it_writable(kind: DataType) -> None:
    wide = drawn(kind, (4, 6))
    for array in (*several_ways(wide), drawn(kind, (0, 3)), drawn(kind, ())):
        view = as_read_only(array)
        assert (view.dtype, view.shape, view.strides) == (array.dtype, array.shape, array.strides)
        assert view.tobytes() == array.tobytes()
        assert not array.size or np.shares_memory(view, array)
        for seen in (view, view.view(), view[...], view.T):
            with pytest.raises(ValueError, match="WRITEABLE"):
                seen.flags.writeable = True
            with pytest.raises(ValueError, match="WRITEABLE"):
                seen.setflags(write=True)
            with pytest.raises(ValueError, match="read-only"):
                seen[...] = 0
            assert can_change(seen)


def test_a_read_only_view_keeps_its_bytes_and_shows_what_is_written_to_them() -> None:
    array = np.zeros(3, np.float32)
    view, gone = as_read_only(array), weakref.ref(array)
    array[1] = 5
    del array
    assert view.tolist() == [0, 5, 0] and gone() is not None
    del view
    assert gone() is None


def test_what_can_change_is_what_somebody_can_write() -> None:
    array = np.zeros(4, np.uint8)
    assert can_change(array) and can_change(np.asarray(array.data.toreadonly()))
    assert can_change(np.asarray(memoryview(bytearray(4)).toreadonly())[1:])
    array.flags.writeable = False
    assert not can_change(array) and not can_change(as_read_only(array))
    assert not can_change(np.frombuffer(b"1234", np.uint8)[1:])
    assert not can_change(np.asarray(memoryview(b"1234")))
    with mmap.mmap(-1, 4096) as mapped:
        lent = memoryview(mapped).toreadonly()
        shown = np.asarray(lent)
        assert can_change(shown)
        del shown
        lent.release()


def test_the_array_of_a_constant_cannot_be_made_writable() -> None:
    constant = Constant(0, np.ones(3, np.float32))
    with pytest.raises(ValueError, match="WRITEABLE"):
        constant.data.flags.writeable = True
