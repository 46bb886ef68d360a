"""Ways in which functions over nests run, and the one in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from stitch.fractal.zipped import Nest


@dataclass(frozen=True, slots=True)
class NestCall:
    """A function as one over nests was given it: the name of that, the function, what it gets
    beside elements."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class ExecutionMode(Protocol):
    """How calls are computed; `builder` applies operations to tensors that have none."""

    builder: Any

    def given(self, data: Any) -> Any:
        """A leaf as functions are given it."""

    def mapped(self, call: NestCall, xs: Nest) -> Any:
        """The results for all elements, of which there are some: a nest, or several."""

    def scanned(self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool) -> Any:
        """All states, each at the place of its element, of which there are some."""

    def folded(
        self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool, is_associative: bool
    ) -> Any:
        """The last state; there are some elements."""

    def kept(self, call: NestCall, xs: Nest) -> Any:
        """The numbers of the elements for which a predicate is true, of which there are some."""


class CallReport:
    """How calls ran, the last ones; `with mode("parallel") as report:` gives one.

    >>> report = CallReport()
    >>> report.add("map", "one program; loop of 3 rounds at net.py:1: batch")
    >>> print(report.explain())
    map: one program; loop of 3 rounds at net.py:1: batch
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_REPORTED)

    def add(self, call: str, how: str) -> None:
        """One call, and how it ran."""
        self._lines.append(f"{call}: {how}")

    def explain(self) -> str:
        """A line for each call: its loops and what was not taken, or why it went element by
        element."""
        return "\n".join(self._lines) or "no calls in parallel"


#: Calls that a report has, the last of them.
MAX_REPORTED = 256
_current: ContextVar[ExecutionMode | None] = ContextVar("fractal mode", default=None)
_report: ContextVar[CallReport | None] = ContextVar("fractal report", default=None)


@contextmanager
def reporting(report: CallReport) -> Iterator[None]:
    """Calls within are reported there."""
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
def using(way: ExecutionMode) -> Iterator[None]:
    """What runs within runs this way."""
    token = _current.set(way)
    try:
        yield
    finally:
        _current.reset(token)


def mode_set() -> ExecutionMode | None:
    """The way that was chosen, if one was."""
    return _current.get()
