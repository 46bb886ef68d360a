"""The phases of a command: timed for `--timings`, logged for `-v`, and shown while they are long.

A phase that takes longer than a second is shown on standard error, if that is a terminal. Phases
inside other phases count by themselves, not in those that contain them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stitch.errors import UsageError, closest

if TYPE_CHECKING:
    from rich.status import Status

#: A phase is shown after so many seconds.
SHOWN_AFTER = 1.0
LEVELS = ("error", "warning", "info", "debug")
_log = logging.getLogger("stitch.cli")


@dataclass(slots=True, eq=False)
class _OpenPhase:
    """A phase under way: its name, and how many of its parts are done, if it has several."""

    what: str
    parts: int
    done: int = 0

    def text(self) -> str:
        return f"{self.what} ..." + (f" {self.done} of {self.parts}" if self.parts > 1 else "")


class Phases:
    """The phases of one command: the seconds of each, in order, and what is shown."""

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown and sys.stderr.isatty()
        self.seconds: dict[str, float] = {}
        self._open: list[_OpenPhase] = []
        self._lock = threading.Lock()
        self._status: Status | None = None

    @contextmanager
    def phase(self, what: str, parts: int) -> Iterator[Callable[[], None]]:
        """Time a block as the phase `what`; yield the function to call after each part."""
        began, inside = time.perf_counter(), sum(self.seconds.values())
        opened = _OpenPhase(what, parts)

        def count_part() -> None:
            opened.done += 1
            self._update()

        self._open.append(opened)
        timer = self._timer(opened)
        self._update()
        try:
            yield count_part
        finally:
            self._close(timer)
            whole = time.perf_counter() - began
            own = whole - (sum(self.seconds.values()) - inside)
            self.seconds[what] = self.seconds.get(what, 0.0) + own
            _log.info("%s: %.3f s", what, whole)

    def text(self) -> str:
        """Return the seconds of each phase, in the order in which they ended."""
        return ", ".join(f"{what} {seconds:.3f} s" for what, seconds in self.seconds.items())

    def _timer(self, opened: _OpenPhase) -> threading.Timer | None:
        """Start the clock of the outermost phase, if a terminal shows it."""
        if len(self._open) > 1 or not self._shown:
            return None
        timer = threading.Timer(SHOWN_AFTER, self._show, [opened])
        timer.daemon = True
        timer.start()
        return timer

    def _show(self, outermost: _OpenPhase) -> None:
        from rich.console import Console

        with self._lock:
            if self._open[:1] == [outermost]:
                self._status = Console(stderr=True).status(self._open[-1].text())
                self._status.start()

    def _update(self) -> None:
        if self._status is not None:
            with self._lock:
                if self._status is not None and self._open:
                    self._status.update(self._open[-1].text())

    def _close(self, timer: threading.Timer | None) -> None:
        with self._lock:
            self._open.pop()
            if timer is not None:
                timer.cancel()
            if self._status is not None and not self._open:
                self._status.stop()
                self._status = None
        self._update()


_PHASES: ContextVar[Phases | None] = ContextVar("phases", default=None)


@contextmanager
def phases(*, shown: bool) -> Iterator[Phases]:
    """Collect the phases of the block; `shown`: show long ones on a terminal."""
    collected = Phases(shown=shown)
    token = _PHASES.set(collected)
    try:
        yield collected
    finally:
        _PHASES.reset(token)


@contextmanager
def phase(what: str, parts: int = 1) -> Iterator[Callable[[], None]]:
    """Run a block as a phase of the command; outside of a command, just run it.

    It yields a function to call after each of its `parts`, whose number a terminal shows.
    """
    collected = _PHASES.get()
    if collected is None:
        yield lambda: None
    else:
        with collected.phase(what, parts) as count_part:
            yield count_part


@contextmanager
def logging_to_stderr(verbose: int, escape: Callable[[str], str]) -> Iterator[None]:
    """Print log records of Stitch on standard error, by the number of `-v` or by STITCH_LOG.

    `escape` replaces control characters, which terminals would interpret. Raises `UsageError` for
    an unknown level in STITCH_LOG.
    """
    asked = os.environ.get("STITCH_LOG", "").strip().lower()
    if asked and asked not in LEVELS:
        raise UsageError(
            f"STITCH_LOG={asked!r} is no level of a log",
            expected=" or ".join(LEVELS), remedy=closest(asked, LEVELS) or "unset STITCH_LOG",
        )  # fmt: skip
    level = ("info", "debug")[min(verbose, 2) - 1] if verbose else asked
    if not level:
        yield
        return
    logger, handler = logging.getLogger("stitch"), logging.StreamHandler()
    handler.setFormatter(_Escaped("%(levelname)s %(name)s: %(message)s", escape))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Escaped(logging.Formatter):
    """A formatter that escapes its text."""

    def __init__(self, form: str, escape: Callable[[str], str]) -> None:
        super().__init__(form)
        self._escape = escape

    def format(self, record: logging.LogRecord) -> str:
        return self._escape(super().format(record))
