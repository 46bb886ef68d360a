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

    #: In C: no interrupt can come in between, and a finalizer that runs while another claim is
    #: made needs no lock.
    __slots__ = ("__del__", "__weakref__", "nbytes")
    __del__: Callable[[], object]

    def __init__(self, nbytes: int, remove: Callable[[], object]) -> None:
        self.__del__, self.nbytes = remove, nbytes

    def dispose(self) -> None:
        """Release the bytes; may be called twice."""
        self.__del__()


class Budget:
    """The reservations of a process. Thread-safe; a forked child has its own copy."""

    def __init__(self) -> None:
        #: Re-entrant: a finalizer that runs under the lock may close a device.
        self._lock = threading.RLock()
        #: Bytes and names by number; atomic under the GIL: `pop`, `update`, and copying the values.
        self._claims: dict[int, tuple[int, str]] = {}
        self._numbers = itertools.count()

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    @property
    def taken_nbytes(self) -> int:
        """The sum of all live reservations."""
        return sum(nbytes for nbytes, _ in list(self._claims.values()))

    def live(self) -> tuple[tuple[int, str], ...]:
        """Return bytes and names of live reservations, largest first."""
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
            if wanted and self.taken_nbytes + wanted > allowed:
                return None
            numbers = [next(self._numbers) for _ in parts]
            claims = [
                Claim(nbytes, partial(self._claims.pop, number, None))
                for number, (nbytes, _) in zip(numbers, parts, strict=True)
            ]
            self._claims.update(pair for pair in zip(numbers, parts, strict=True) if pair[1][0])
        return claims

    def _refusal(self, nbytes: int, what: str, allowed: int) -> OutOfMemoryError:
        live = self.live()
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
