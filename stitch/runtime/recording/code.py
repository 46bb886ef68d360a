"""Generated code: the steps of a bound plan as one straight-line Python function.

A loop over prepared calls pays for the loop and each `partial`; generated code costs what a
handwritten line would. There is one version per combination of observers. All names in the source
are generated; objects are passed as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import CodeType
from typing import Any, TypeAlias

import numpy as np

from stitch.planner import Fork
from stitch.runtime.backends import ThreadPool, Thunk
from stitch.runtime.executors import prepared_context_run, with_fp_errors_ignored
from stitch.runtime.history import Tally
from stitch.runtime.recording.code_text import Source
from stitch.runtime.recording.forked import Stopped, steps_before
from stitch.runtime.recording.placed_objects import PlacedObjects

#: Required type and shape of an array.
Kind = tuple[np.dtype[Any], tuple[int, ...]]
#: Result of a run: the start and the end of each step if timed, else True.
Ran: TypeAlias = "tuple[float, ...] | bool"


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedRunner:
    """Generated code for one binding.

    `run(arrays)` returns False without running if an array has the wrong type or shape;
    `run(arrays, True)` skips the check. It runs in a context in which NumPy ignores errors: a
    private one if it only calls kernels, else a copy of the caller's. `observers`: the observers
    for which it was generated. `ends`: the last line of each step, relative to the function.
    """

    run: Callable[..., Ran]
    observers: int
    code: CodeType
    ends: tuple[int, ...]

    def stopped(self, error: BaseException) -> Stopped:
        """Return the steps completed before `error`; none if another function raised it."""
        return Stopped.at(steps_before(error, self.code, self.ends), error)


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """The generated code of an executable, for all bindings: they differ only in the objects."""

    #: Returns the function, given the objects of the varying steps.
    bind: Callable[..., Callable[..., Ran]]
    #: The lines of the varying steps.
    own_lines: tuple[str, ...]
    order: tuple[int, ...]
    observers: int
    ends: tuple[int, ...]
    #: Calls the function in a context in which NumPy ignores errors.
    in_context: Callable[..., Any]
    #: The objects for other addresses, if they can be recreated without binding kernels.
    placed: PlacedObjects | None = None

    def objects(self, own: Iterable[Sequence[Thunk]]) -> list[list[object]] | None:
        """Return the objects of a binding by varying step, or None if its text differs.

        `own`: the thunks of the varying steps.
        """
        source = Source(self.order)
        named = [0]
        for thunks in own:
            for thunk in thunks:
                source.step(thunk, is_own=True)
            named.append(len(source.own.objects))
        if tuple(source.own_lines) != self.own_lines:
            return None
        return [source.own.objects[start:end] for start, end in pairwise(named)]

    def straight(self, objects: Iterable[object], tally: Tally) -> GeneratedRunner:
        """Return the function for a binding with these objects; `tally` counts its runs."""
        run = self.bind(*objects, tally)
        code = run.__code__
        return GeneratedRunner(partial(self.in_context, run), self.observers, code, self.ends)


def written(
    steps: Iterable[tuple[Sequence[Thunk], bool]], kinds: Sequence[Kind],
    order: Sequence[int], tally: Tally, observers: int = 0, *,
    is_timed: bool = False, calls_others: bool = False,
    forks: Sequence[Fork] = (), threads: ThreadPool | None = None,
) -> Code:  # fmt: skip
    """Generate code that checks its arrays and calls all steps.

    Args:
        steps: The thunks of each step, and whether they vary between bindings.
        kinds: Required type and shape per array.
        order: `order[p]` is the array at argument position p of `stage`.
        tally: Counts the runs.
        observers: Bits of the observers.
        is_timed: Return the start and the end of each step; then for each fork when all threads had
            ended and when each began.
        calls_others: Whether it calls hooks, host functions or user kernels.
        forks: Sections that run in parallel; each of their threads becomes a function.
        threads: The thread pool for the forks.
    """
    source = Source(order)
    source.take_arrays(len(kinds))
    for i, kind in enumerate(kinds):
        source.check(i, *kind)
    source.begin(is_timed)
    starts = {fork.start: fork for fork in forks}
    fork: Fork | None = None
    for index, (thunks, is_own) in enumerate(steps):
        if index in starts:
            fork = starts[index]
            assert threads is not None, "forks have threads"
            source.fork(fork, threads)
        if fork is not None:
            source.enter(index)
        for thunk in thunks:
            source.step(thunk, is_own=is_own)
        source.step_ended(has_run=bool(thunks))
        if fork is not None and index + 1 == fork.stop:
            source.join()
            fork = None
    source.end(tally)
    # Runs of a device come one after another.
    is_alone = not (observers or calls_others)
    in_context = prepared_context_run() if is_alone else with_fp_errors_ignored
    bind, ends = source.function()
    return Code(bind, tuple(source.own_lines), tuple(order), observers, ends, in_context)
