"""The contents of large arrays, each told apart from what the same array held before.

Comes in: arrays and tensors that functions close over. Goes out: for each a `Content`, the same one
as long as its bytes are the same: they are compared at each look with a copy. No array is kept
alive, and with it goes its copy. Threads may share it. Must not know functions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial
from threading import Lock
from typing import Any, final
from weakref import ref

import numpy as np

from stitch.fractal.programs import same_bits
from stitch.program import Array, same_bytes

#: Bytes of copies that are kept, beside those of the last one.
MAX_CONTENT_NBYTES = 1 << 28


@final
class Content:
    """Bytes that an array had; equal to itself alone. `copy` is None once they are of no array."""

    __slots__ = ("copy",)

    def __init__(self, copy: Any) -> None:
        self.copy = copy


@final
class ArrayContents:
    """What arrays hold, by the arrays.

    >>> seen, array = ArrayContents(), np.zeros(3)
    >>> before = seen.of(array)
    >>> seen.of(array) is before
    True
    >>> array[1] = 7
    >>> seen.of(array) is before
    False
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._held: OrderedDict[int, tuple[ref[Any], Content, int]] = OrderedDict()
        self._gone: deque[int] = deque()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, holder: Any, data: Any = None) -> Content:
        """What an array holds now, or the `data` of a tensor."""
        now = holder if data is None else data
        with self._lock:
            self._drop_gone()
            at, content, _ = self._held.get(id(holder), (None, None, 0))
        if at is not None and content is not None and at() is holder:
            before = content.copy
            if before is not None and _is_same(before, now):
                with self._lock:
                    if id(holder) in self._held:
                        self._held.move_to_end(id(holder))
                return content
        return self._kept(holder, now)

    def share(self, array: Array, held: Array) -> None:
        """Keep a copy that another one holds too, in place of our own, if it is one."""
        if np.may_share_memory(array, held):
            return
        with self._lock:
            at, content, _ = self._held.get(id(array), (None, None, 0))
            if at is not None and content is not None and at() is array:
                before = content.copy
                if before is not None and _is_same(before, held):
                    content.copy = held

    def _kept(self, holder: Any, now: Any) -> Content:
        content = Content(_copied(now))
        nbytes = int(now.nbytes)
        key = id(holder)
        # A finalizer may come at any place, so it takes no lock.
        at = ref(holder, partial(_end, content, self._gone, key))
        with self._lock:
            self._forget(key)
            while self._held and self.nbytes + nbytes > MAX_CONTENT_NBYTES:
                self._forget(next(iter(self._held)))
            self._held[key] = at, content, nbytes
            self.nbytes += nbytes
        return content

    def _drop_gone(self) -> None:
        while self._gone:
            key = self._gone.popleft()
            if key in self._held and self._held[key][0]() is None:
                self._forget(key)

    def _forget(self, key: int) -> None:
        found = self._held.pop(key, None)
        if found is not None:
            found[1].copy = None
            self.nbytes -= found[2]


def _end(content: Content, gone: deque[int], key: int, _: Any) -> None:
    content.copy = None
    gone.append(key)


def _copied(data: Any) -> Any:
    """A copy of an array, or of a tensor of torch."""
    return np.array(data, order="C") if isinstance(data, np.ndarray) else data.detach().clone()


def _is_same(before: Any, now: Any) -> bool:
    """Whether all is as it was, bit by bit; of torch, where what is no number is never the same."""
    if not isinstance(before, np.ndarray):
        return same_bits(before, now)
    return before.shape == now.shape and before.dtype == now.dtype and same_bytes(before, now)


#: Those of all functions of this process.
CONTENTS = ArrayContents()
