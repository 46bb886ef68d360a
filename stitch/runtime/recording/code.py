"""GeneratedRunner-line code: the steps of a bound plan as one function, written out call by call.

A loop over prepared calls pays for the loop and for every `partial`; written out, a step costs what
a programmer's own line would. There is a bare form and one for each kind of observers: the same
steps with calls around them. All names in the source are generated; objects reach it as arguments.
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

#: The type and shape that an array must have.
Kind = tuple[np.dtype[Any], tuple[int, ...]]
#: What a run gives: when it began and when each step had ended where somebody wants the times,
#: else True.
Ran: TypeAlias = "tuple[float, ...] | bool"


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedRunner:
    """`run(arrays)` is False, with nothing done, where one of the arrays is of another kind;
    `run(arrays, True)` does not look. It runs in a context in which NumPy ignores errors: its own,
    where there are only kernels in it, else a copy of the caller's.

    `observers`: for whom it was written. `ends`: the last line of each step of the plan, from the
    function's first on.
    """

    run: Callable[..., Ran]
    observers: int
    code: CodeType
    ends: tuple[int, ...]

    def stopped(self, error: BaseException) -> Stopped:
        """The steps that were finished when one of them raised; none if the error is another's."""
        return Stopped.at(steps_before(error, self.code, self.ends), error)


@dataclass(frozen=True, slots=True, eq=False)
class Code:
    """The steps of a recording written out, for all its bindings: steps at other places are the
    same text with other objects."""

    #: Gives the function; takes the objects of the steps that differ from binding to binding.
    bind: Callable[..., Callable[..., Ran]]
    #: The lines of these steps.
    own_lines: tuple[str, ...]
    order: tuple[int, ...]
    observers: int
    ends: tuple[int, ...]
    #: Calls it in a context in which NumPy ignores errors.
    in_context: Callable[..., Any]
    #: What it is given for any binding, where that can be told without binding a kernel.
    placed: PlacedObjects | None = None

    def objects(self, own: Iterable[Sequence[Thunk]]) -> list[list[object]] | None:
        """What the function is given for a binding, by steps: `own` are the thunks of those that
        differ, in order. None where they have another text."""
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
        """The function for a binding with these objects; `tally` counts its runs."""
        run = self.bind(*objects, tally)
        code = run.__code__
        return GeneratedRunner(partial(self.in_context, run), self.observers, code, self.ends)


def written(
    steps: Iterable[tuple[Sequence[Thunk], bool]], kinds: Sequence[Kind],
    order: Sequence[int], tally: Tally, observers: int = 0, *,
    is_timed: bool = False, calls_others: bool = False,
    forks: Sequence[Fork] = (), threads: ThreadPool | None = None,
) -> Code:  # fmt: skip
    """Code that checks its arrays' kinds and calls all steps.

    `steps`: the thunks of each step of the plan, and whether they differ from binding to binding.
    `order[p]` tells which array takes position p among the arguments of `stage`; `tally` stands for
    those that count. `is_timed`: it gives when it began, and when each step had ended; then, for
    each fork, when all had ended, and when each thread began. `calls_others`: there are hooks or
    another's kernels in it. `forks`: their threads are functions, run on these `threads`.
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
