"""The host memory limit of this process, and the memory that is reserved against it.

All devices and file readers share it; calls in the steady state do not use it.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from stitch.errors import OutOfMemoryError, UsageError
from stitch.program import Array

#: The default limit as a fraction of the memory of the machine or its control group.
DEFAULT_PART = 0.8
#: Arguments and results of calls are reserved from this size on.
LARGE_NBYTES = 32 << 20
#: Smaller arrays are not reserved.
SMALL_NBYTES = 1 << 16
#: Claims that an error lists.
_LISTED = 5
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_allowed: ContextVar[int | None] = ContextVar("allowed bytes of host memory", default=None)


def parse_nbytes(size: int | str) -> int:
    """Return a number of bytes from an integer or a text such as `512MiB`; raise `UsageError`.

    >>> parse_nbytes("2GiB"), parse_nbytes("1.5 kB"), parse_nbytes(4096)
    (2147483648, 1500, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    amount = float(match[1]) * _UNITS[(match[2] or "").lower()] if match else 0.0
    nbytes = int(amount) if math.isfinite(amount) else 0
    if nbytes < 1:
        raise UsageError(
            "not an amount of memory",
            expected='a positive number of bytes, or a text such as "512MiB" or "2GB"',
            got=repr(size),
        )
    return nbytes


def explicit_limit() -> int | None:
    """Return the limit set by `allowing`, or None."""
    return _allowed.get()


def allowed_nbytes() -> int:
    """Return the current limit: that of `allowing`, else 80 % of the machine's memory."""
    limit = _allowed.get()
    return int(DEFAULT_PART * machine_nbytes()) if limit is None else limit


@contextmanager
def allowing(nbytes: int | str | None) -> Iterator[None]:
    """Set the limit within the block; None leaves it unchanged."""
    token = _allowed.set(_allowed.get() if nbytes is None else parse_nbytes(nbytes))
    try:
        yield
    finally:
        _allowed.reset(token)


class Claim:
    """Reserved bytes, until `dispose` or until this object is collected."""

    #: The finalizer may run in this thread while the budget counts, so it only appends to a queue.
    #: In C: a Python method could be interrupted before its first line, which would leak the bytes.
    __slots__ = ("__del__", "__weakref__", "_budget", "nbytes", "number")
    __del__: Callable[[], object]

    def __init__(self, budget: Budget, number: int, nbytes: int) -> None:
        self.__del__ = partial(budget.released.append, number)
        self.number, self.nbytes, self._budget = number, nbytes, budget

    def dispose(self) -> None:
        """Release the bytes; may be called twice."""
        self._budget.released.append(self.number)


class Budget:
    """The reservations of a process. Thread-safe; a forked child has its own copy."""

    def __init__(self) -> None:
        #: Re-entrant: a finalizer that runs under the lock may close a device.
        self._lock = threading.RLock()
        self._claims: dict[int, tuple[int, str]] = {}
        self._numbers = itertools.count()
        #: The sum of the claims, and whether it is valid. It is invalid while claims change, so an
        #: interrupted change leads to a new sum; a change that finds it valid at its end
        #: overlapped with another.
        self._taken, self._is_sum = 0, True
        #: Numbers of released claims, appended by finalizers too.
        self.released: deque[int] = deque()

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()
        self._is_sum = False

    @property
    def taken_nbytes(self) -> int:
        """The sum of all live reservations."""
        with self._lock:
            return self._settled()

    def live(self) -> tuple[tuple[int, str], ...]:
        """Return bytes and names of live reservations, largest first."""
        with self._lock:
            self._settled()
            return tuple(sorted(self._claims.values(), reverse=True))

    def claim(
        self,
        nbytes: int,
        what: str,
        *,
        allowed: int | None = None,
        make_room: Callable[[], object] = gc.collect,
    ) -> Claim:
        """Reserve bytes for `what`; raise `OutOfMemoryError` above the limit.

        If the bytes do not fit, it calls `make_room` (default: garbage collection) and tries again.
        """
        allowed = allowed_nbytes() if allowed is None else allowed
        parts = ((nbytes, what),)
        return self.claim_parts(lambda: parts, what, allowed=allowed, make_room=make_room)[0]

    def claim_parts(
        self,
        parts: Callable[[], Sequence[tuple[int, str]]],
        what: str,
        *,
        allowed: int,
        make_room: Callable[[], object],
    ) -> list[Claim]:
        """Reserve several named amounts, all or none; see `claim`.

        `parts` is called again after `make_room`; the error names `what`.
        """
        claims = self._try(parts(), allowed)
        if claims is None:
            make_room()
            amounts = parts()
            claims = self._try(amounts, allowed)
            if claims is None:
                raise self._refusal(sum(n for n, _ in amounts), what, allowed)
        return claims

    def _try(self, parts: Sequence[tuple[int, str]], allowed: int) -> list[Claim] | None:
        with self._lock:
            wanted = sum(nbytes for nbytes, _ in parts)
            if self._settled() + wanted > allowed and wanted:
                return None
            claims = [Claim(self, next(self._numbers), nbytes) for nbytes, _ in parts]
            self._is_sum = False
            self._claims.update(zip((claim.number for claim in claims), parts, strict=True))
            self._taken += wanted
            self._is_sum = not self._is_sum
        return claims

    def _settled(self) -> int:
        released = self.released
        if released or not self._is_sum:
            was_sum, self._is_sum = self._is_sum, False
            while released:
                number = released[0]
                self._taken -= self._claims.pop(number, (0, ""))[0]
                # Remove the entry after processing it: an interrupt must not lose it.
                if released and released[0] == number:
                    released.popleft()
            if not was_sum or self._is_sum:
                self._taken = sum(nbytes for nbytes, _ in list(self._claims.values()))
            self._is_sum = True
        return self._taken

    def _refusal(self, nbytes: int, what: str, allowed: int) -> OutOfMemoryError:
        live = [(n, name) for n, name in self.live() if n]
        taken = sum(n for n, _ in live)
        others = "; ".join(f"{n} B {name}" for n, name in live[:_LISTED])
        if len(live) > _LISTED:
            others += f"; and {len(live) - _LISTED} more"
        return OutOfMemoryError(
            f"{what} needs {nbytes} bytes of host memory, {max(0, allowed - taken)} of "
            f"{allowed} are free",
            expected=f"at most {max(0, allowed - taken)} bytes",
            got=f"{nbytes} bytes" + (f", beside {others}" if others else ", beside nothing else"),
            remedy="drop unused tensors, use smaller shapes, or allow more: "
            "open_device(max_memory=), --max_memory (default: 80 % of the machine's memory)",
        )


#: The budget of this process.
BUDGET = Budget()
os.register_at_fork(after_in_child=BUDGET.after_fork)
#: Reserves bytes of the process; raises `OutOfMemoryError`.
claim = BUDGET.claim


def claim_for(owner: Any, nbytes: int, what: str) -> None:
    """Reserve bytes for the lifetime of `owner`."""
    keep(owner, claim(nbytes, what))


def claimed_array(
    shape: tuple[int, ...], dtype: Any, what: str, allowed: int | None = None
) -> Array:
    """Return an uninitialized array; a large one is reserved for its lifetime."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    taken = None if nbytes < SMALL_NBYTES else claim(nbytes, what, allowed=allowed)
    array: Array = np.empty(shape, dtype)
    if taken is not None:
        keep(array, taken)
    return array


def copied(array: Array, what: str, allowed: int | None = None) -> Array:
    """Return a dense copy; a large one is reserved for its lifetime."""
    if array.nbytes < LARGE_NBYTES:
        return array.copy()
    taken = claim(array.nbytes, what, allowed=allowed)
    copy: Array = array.copy()
    keep(copy, taken)
    return copy


def keep(owner: Any, taken: Claim) -> None:
    """Keep a claim for the lifetime of an array's base object, or of `owner`."""
    base = owner
    while getattr(base, "base", None) is not None:
        base = base.base
    try:
        weakref.finalize(base, taken.dispose).atexit = False
    except TypeError:
        # Bytes and mappings have no weak references: use the array's own lifetime.
        weakref.finalize(owner, taken.dispose).atexit = False


#: The control groups of this process, and their mount point.
_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
#: Larger values mean no limit (cgroup v1 writes the largest multiple of a page).
_UNLIMITED = 1 << 60


@cache
def machine_nbytes() -> int:
    """Return the machine's memory, or the limit of this process's control groups if that is
    less."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(installed, group_limit(_MEMBERSHIP, _MOUNT) or installed)


def group_limit(membership: Path, mount: Path) -> int | None:
    """Return the smallest limit of a process's control groups and their parents, None if unlimited.

    Version 2 has one tree (`0::/path`, `memory.max`), version 1 a separate one for memory.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and not controllers:
            limits += _limits(mount, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(mount / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(root: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and its parents; a container shows its own group only."""
    inside = [part for part in path.split("/") if part not in ("", "..", ".")]
    limits = []
    for depth in range(len(inside) + 1):
        try:
            text = root.joinpath(*inside[:depth], name).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            continue
        if re.fullmatch(r"\d+", text) and int(text) < _UNLIMITED:
            limits.append(int(text))
    return limits
