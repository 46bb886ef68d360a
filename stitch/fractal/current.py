"""Ways in which functions over nests run, and the one in use.

Comes in: a way. Goes out: the way that the code within runs in. Must not know the ways.
"""

from __future__ import annotations

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


class Way(Protocol):
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


_current: ContextVar[Way | None] = ContextVar("fractal mode", default=None)


@contextmanager
def using(way: Way) -> Iterator[None]:
    """What runs within runs this way."""
    token = _current.set(way)
    try:
        yield
    finally:
        _current.reset(token)


def way_set() -> Way | None:
    """The way that was chosen, if one was."""
    return _current.get()
