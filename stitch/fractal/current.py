"""Execution modes of functions over nests, the current one, and reports of calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stitch.fractal.zipped import Nest


@dataclass(frozen=True, slots=True)
class NestCall:
    """A call of a function over nests.

    Attributes:
        name: The name of the called function.
        function: The user's function.
        arguments: Its further arguments.
        named: Its further arguments by name.
        xs: The nest.
        kind: Whether the results of all elements are computed, all states, the last state, or the
            numbers of the elements for which a predicate is true.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    xs: Nest
    kind: Literal["map", "scan", "fold", "select"] = "map"
    initializer: Any = None
    from_right: bool = False
    is_associative: bool = False


class ExecutionMode(Protocol):
    """How calls are computed; `builder` applies operations to tensors without a builder."""

    builder: Any

    def as_leaf(self, data: Any) -> Any:
        """Return a leaf as user functions receive it."""

    def run(self, call: NestCall) -> Any:
        """Compute a call over at least one element."""


class CallReport:
    """How recent calls ran; `with mode("parallel") as report:` returns one.

    >>> report = CallReport()
    >>> report.add("map", "one program; loop of 3 rounds at net.py:1: batch")
    >>> print(report.explain())
    map: one program; loop of 3 rounds at net.py:1: batch
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_REPORTED)

    def add(self, call: str, how: str) -> None:
        self._lines.append(f"{call}: {how}")

    def explain(self) -> str:
        """Return a line per call: its loop schedules, or why it ran element by element."""
        return "\n".join(self._lines) or "no calls in parallel"


#: Maximum number of calls in a report.
MAX_REPORTED = 256
_current: ContextVar[ExecutionMode | None] = ContextVar("fractal mode", default=None)
_report: ContextVar[CallReport | None] = ContextVar("fractal report", default=None)


@contextmanager
def collect_reports(report: CallReport) -> Iterator[None]:
    """Collect reports of the calls within the block."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def report_call(call: str, how: Callable[[], str]) -> None:
    """Report how a call ran, if a report is being collected."""
    report = _report.get()
    if report is not None:
        report.add(call, how())


@contextmanager
def use_mode(execution: ExecutionMode) -> Iterator[None]:
    """Run calls within the block in this mode."""
    token = _current.set(execution)
    try:
        yield
    finally:
        _current.reset(token)


def selected_mode() -> ExecutionMode | None:
    """Return the mode of the innermost `use_mode`, or None."""
    return _current.get()
