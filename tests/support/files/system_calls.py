"""The system calls of `stitch.files`, replaced by ones that count, fail or kill."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable
from typing import Any

import pytest

from stitch.files import folder_lock, writing

NAMES = ("open", "write", "fsync", "replace", "unlink", "close", "flock")
Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class SystemCalls:
    """`os` and `fcntl` in the eyes of `stitch.files`, with each call of `NAMES` wrapped."""

    def __init__(self, wrap: Wrap) -> None:
        for name in NAMES:
            setattr(self, name, wrap(name, getattr(os, name, None) or getattr(fcntl, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(os if hasattr(os, name) else fcntl, name)

    def fdopen(self, handle: int, mode: str, buffering: int, closefd: bool) -> io.BufferedWriter:
        """A stream whose bytes go through `write`."""
        assert mode == "wb" and not closefd
        return io.BufferedWriter(_Raw(self, handle), buffering)


class _Raw(io.RawIOBase):
    def __init__(self, calls: SystemCalls, handle: int) -> None:
        super().__init__()
        self._calls, self._handle = calls, handle

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return int(self._calls.write(self._handle, data))


def replacing(**others: Callable[..., Any]) -> SystemCalls:
    """The real calls, but for these."""
    return SystemCalls(lambda name, call: others.get(name, call))


def use(patch: pytest.MonkeyPatch, calls: SystemCalls) -> None:
    """Let `stitch.files` call these."""
    patch.setattr(writing, "os", calls)
    patch.setattr(folder_lock, "os", calls)
    patch.setattr(folder_lock, "fcntl", calls)
