"""Straight-line code: the steps of a bound plan as one function, written out call by call.

A loop over prepared calls pays for the loop and for every `partial`; written out, a step costs what
a programmer's own line would. Comes in: thunks. Goes out: a function of the host arrays. Must not
know records or handles. All names in the source are generated; objects reach it as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import numpy as np

from stitch.program import Array
from stitch.runtime.backends import Thunk, enter, stage
from stitch.runtime.history import Tally

#: The type and shape that an array must have.
Kind = tuple[np.dtype[Any], tuple[int, ...]]
#: Steps that are written out; the rest of a long plan is looped over, where calls weigh little.
MAX_LINES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Straight:
    """`run(arrays)` is False, with nothing done, where one of the arrays is of another kind.

    The steps are the lines of `code` from `first_line` on.
    """

    run: Callable[[Sequence[Any]], bool]
    code: CodeType
    first_line: int

    def steps_done(self, error: BaseException) -> int:
        """How many steps were finished when one of them raised; 0 if the error is another's."""
        traceback = error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is self.code:
                return max(0, traceback.tb_lineno - self.first_line)
            traceback = traceback.tb_next
        return 0


def straight_code(
    thunks: Sequence[Thunk], kinds: Sequence[Kind | None], order: Sequence[int], tally: Tally,
) -> Straight:  # fmt: skip
    """One function that checks its arrays' kinds (None: not this one) and calls all steps.

    `order[p]` tells which array takes position p among the arguments of `enter` and `stage`;
    `tally` counts the runs.
    """
    source = _Source(order, len(kinds))
    for i, kind in enumerate(kinds):
        if kind is not None:
            source.check(i, *kind)
    first_line = source.next_line
    for thunk in thunks[:MAX_LINES]:
        source.step(thunk)
    if len(thunks) > MAX_LINES:
        source.loop(tuple(thunks[MAX_LINES:]))
    source.count(tally)
    return source.made(first_line)


@lru_cache(maxsize=256)
def _compiled(text: str) -> CodeType:
    """The same steps at other places are the same text: only the objects are others."""
    return compile(text, "<stitched plan>", "exec")


class _Source:
    """The lines so far, and the names of the objects in them."""

    def __init__(self, order: Sequence[int], arrays: int) -> None:
        self._order = order
        self._lines = ["def run(arrays):"]
        if arrays:
            self._lines.append("".join(f"a{i}, " for i in range(arrays)) + "= arrays")
        self._names: dict[int, str] = {}
        self._objects: list[object] = []

    @property
    def next_line(self) -> int:
        """The number of the next line; the function around it has the first."""
        return len(self._lines) + 2

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
            count = self.name(counter)
            self._lines.append(
                f"{self._entry(into, position)};"
                f" {count}.writes += 1; {count}.nbytes += {int(into.nbytes)}"
            )
        elif thunk.func is stage:
            into, _, position = thunk.args
            self._lines.append(self._entry(into, position))
        else:
            given = [self.name(argument) for argument in thunk.args]
            given += [f"{key}={self.name(value)}" for key, value in thunk.keywords.items()]
            self._lines.append(f"{self.name(thunk.func)}({', '.join(given)})")

    def _entry(self, into: Array, position: int) -> str:
        return f"{self.name(into)}[...] = a{self._order[position]}"

    def loop(self, rest: tuple[Thunk, ...]) -> None:
        self._lines.append(f"for step in {self.name(rest)}: step()")

    def count(self, tally: Tally) -> None:
        self._lines.append(f"{self.name(tally)}.runs += 1")

    def made(self, first_line: int) -> Straight:
        body = "\n        ".join([*self._lines, "return True"])
        objects = ", ".join(f"v{i}" for i in range(len(self._objects)))
        text = f"def make({objects}):\n    {body}\n    return run"
        space: dict[str, Any] = {}
        exec(_compiled(text), space)
        run = space["make"](*self._objects)
        return Straight(run, run.__code__, first_line)
