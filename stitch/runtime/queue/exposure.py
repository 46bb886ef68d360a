"""Exposed bytes: others hold them too (NumPy, torch, whoever borrowed), and may write them unseen.

Comes in: values whose primary bytes are a caller's array, or were exported. Goes out: the same
values without the copies elsewhere that are no longer equal to them. Nobody is trusted to say what
he has written: the bytes are compared, all of them, each time that a value enters the queue's run.
Must not know plans.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from stitch.program import Array
from stitch.runtime.queue.constant_cache import ConstantCache
from stitch.runtime.values import InstanceRecord, Records, ValueRecord

#: The C library's: at memory's speed, without an array of answers, done at the first difference.
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare.restype = ctypes.c_int


class Bytes(Protocol):
    """A device, as those know it who compare what it holds."""

    records: Records

    def dense(self, instance: InstanceRecord) -> Array | None:
        """An instance as an array over its own bytes, None where its layout is not dense."""


def expose(value: ValueRecord, remembered: ConstantCache) -> None:
    """Others hold the primary bytes of a value from now on, and so those of all that share them."""
    for sharer in value.instances[0].buffer.users:
        sharer.is_exposed = True
        sharer.lease = None
        if sharer.version:
            remembered.forget(sharer)
            sharer.version = 0


def forget_stale_copies(device: Bytes, value: ValueRecord) -> None:
    """Drop the copies of an exposed value unless each of them has its bytes, bit by bit.

    A copy of another form (tiles, another data type) cannot be compared, so it never stays.
    """
    original = device.dense(value.instances[0])
    for copy in value.instances[1:]:
        if original is None or not _are_equal(original, device.dense(copy)):
            device.records.forget_copies(value)
            return


def _are_equal(original: Array, copy: Array | None) -> bool:
    if copy is None or copy.dtype != original.dtype or copy.shape != original.shape:
        return False
    if not (original.flags.c_contiguous and copy.flags.c_contiguous):
        return False
    differs: int = _compare(original.ctypes.data, copy.ctypes.data, original.nbytes)
    return not differs
