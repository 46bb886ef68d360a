"""Straight-line code: the steps of a bound plan as one function, written out call by call.

A loop over prepared calls pays for the loop and for every `partial`; written out, a step costs what
a programmer's own line would. Comes in: thunks. Goes out: a function of the host arrays. Must not
know records or handles. All names in the source are generated; objects reach it as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.memory import WriteCounter
from stitch.program import Array
from stitch.runtime.history import Tally

Thunk = Callable[[], object]
#: Runs the steps on host arrays; False, and nothing done, where one of them is of another kind.
Straight = Callable[[tuple[Any, ...]], bool]
#: Steps that are written out; the rest of a long plan is looped over, where calls weigh little.
MAX_LINES = 1024


def enter(into: Array, arguments: list[Any], position: int, counter: WriteCounter) -> None:
    """A host array of this run goes into the bytes of a space."""
    into[...] = arguments[position]
    counter.writes += 1
    counter.nbytes += into.nbytes


def stage(into: Array, arguments: list[Any], position: int) -> None:
    """A host array of this run goes to where a conversion reads it."""
    into[...] = arguments[position]


def straight_code(
    thunks: Sequence[Thunk], kinds: Sequence[tuple[np.dtype[Any], tuple[int, ...]]],
    order: Sequence[int], tally: Tally,
) -> Straight:  # fmt: skip
    """One function that checks its arrays' `kinds` (dtype, shape) and calls all steps in order.

    `order[p]` tells which array takes position p among the arguments of `enter` and `stage`;
    `tally` counts the runs.
    """
    source = _Source(order)
    for i, (dtype, shape) in enumerate(kinds):
        source.check(i, dtype, shape)
    for thunk in thunks[:MAX_LINES]:
        source.step(thunk)
    rest = tuple(thunks[MAX_LINES:])
    if rest:
        source.loop(rest)
    source.count(tally)
    return source.function(len(kinds))


class _Source:
    """The lines so far, and the names of the objects in them."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._lines: list[str] = []
        self._names: dict[int, str] = {}
        self._objects: list[object] = []

    def name(self, thing: object) -> str:
        found = self._names.get(id(thing))
        if found is None:
            found = self._names[id(thing)] = f"v{len(self._objects)}"
            self._objects.append(thing)
        return found

    def check(self, index: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Types of built-in dtypes are singletons; anything else takes the careful way."""
        array = f"a{index}"
        self._lines.append(
            f"if (type({array}) is not {self.name(np.ndarray)}"
            f" or {array}.dtype is not {self.name(dtype)}"
            f" or {array}.shape != {self.name(shape)}): return False"
        )

    def step(self, thunk: Thunk) -> None:
        if type(thunk) is not partial:
            self._lines.append(f"{self.name(thunk)}()")
        elif thunk.func is enter:
            into, _, position, counter = thunk.args
            self._entry(into, position)
            count = self.name(counter)
            self._lines.append(f"{count}.writes += 1; {count}.nbytes += {int(into.nbytes)}")
        elif thunk.func is stage:
            into, _, position = thunk.args
            self._entry(into, position)
        else:
            given = [self.name(argument) for argument in thunk.args]
            given += [f"{key}={self.name(value)}" for key, value in thunk.keywords.items()]
            self._lines.append(f"{self.name(thunk.func)}({', '.join(given)})")

    def _entry(self, into: Array, position: int) -> None:
        self._lines.append(f"{self.name(into)}[...] = a{self._order[position]}")

    def loop(self, rest: tuple[Thunk, ...]) -> None:
        self._lines.append(f"for step in {self.name(rest)}: step()")

    def count(self, tally: Tally) -> None:
        self._lines.append(f"{self.name(tally)}.runs += 1")

    def function(self, arrays: int) -> Straight:
        names = "".join(f"a{i}, " for i in range(arrays))
        unpacked = [f"{names}= arrays"] if arrays else []
        body = "\n        ".join([*unpacked, *self._lines, "return True"])
        objects = ", ".join(f"v{i}" for i in range(len(self._objects)))
        text = f"def make({objects}):\n    def run(arrays):\n        {body}\n    return run"
        space: dict[str, Any] = {}
        exec(compile(text, "<stitched plan>", "exec"), space)
        made: Straight = space["make"](*self._objects)
        return made
