"""Runs of plans that overwrite existing values: parameters, optimizer states, loop-carried values.

Once such a run has begun to overwrite, it is completed whatever is raised, and then the exception
propagates.

C code calls the thunks in sequence, so neither a signal handler nor an asynchronous exception can
come between two of them: a thunk raised. It is called again, with those after it, unless it may
have overwritten part of its input. Only then are values lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import call, length_hint, setitem
from time import perf_counter
from typing import Any

import numpy as np

from stitch.memory import Arrivals
from stitch.planner import Execute, Plan
from stitch.program import Array
from stitch.runtime.backends import BoundPlan, LocalBackend, Thunk
from stitch.runtime.executors import call_in_turn, prepared_context_run, with_fp_errors_ignored
from stitch.runtime.history import Tally
from stitch.runtime.hooks import call_hooks
from stitch.runtime.locks import InterruptDeferred
from stitch.runtime.recording.code import Ran
from stitch.runtime.recording.code_text import is_plain_copy, shortest
from stitch.runtime.recording.forked import Stopped
from stitch.runtime.recording.observed import is_hook

#: Values of `BoundPlan.progress[1]`: nothing overwritten yet; perhaps partly; completely. The
#: caller sets UNTOUCHED before a run.
UNTOUCHED, BEGUN, COMPLETE = 0, 1, 2


class OverwritingRun:
    """Runs a bound plan that overwrites values; `observers` as in `GeneratedRunner`."""

    def __init__(
        self, plan: Plan, bound: BoundPlan, steps: Sequence[Sequence[Thunk]], order: Sequence[int],
        tally: Tally, backend: LocalBackend, observers: int, *, is_timed: bool, calls_others: bool,
    ) -> None:  # fmt: skip
        """Initialize.

        Args:
            plan: The plan with actual addresses.
            bound: The bound plan.
            steps: The thunks of each step.
            order: `order[p]` is the array of a run at argument position p of the bound plan.
            tally: Counts the runs.
            backend: The backend of the plan.
            observers: Bits of the observers.
            is_timed: Whether a run returns the times of its steps.
            calls_others: Whether it calls hooks, host functions or user kernels.
        """
        self.observers, self._tally = observers, tally
        self._arguments, self._order, self._progress = bound.arguments, order, bound.progress
        begin: Thunk = partial(setitem, self._progress, 1, BEGUN)
        end: Thunk = partial(setitem, self._progress, slice(None), (len(steps), COMPLETE))
        overwritten = _overwritten_regions(backend, plan)
        #: Position of the first thunk that overwrites a value.
        self._first = -1
        thunks: list[Thunk] = [perf_counter] if is_timed else []
        #: For each step the position of the first thunk after it, and of its time.
        self._ends: list[int] = []
        self._moments = [0]
        for step, regions in zip(steps, overwritten, strict=True):
            for thunk in step:
                if self._first < 0 and regions and _may_write(thunk, regions):
                    thunks.append(begin)
                    self._first = len(thunks)
                thunks.append(_in_short(thunk))
            self._ends.append(len(thunks))
            if is_timed:
                if step:
                    thunks.append(perf_counter)
                self._moments.append(len(thunks) - 1 if step else self._moments[-1])
        self._thunks = (*thunks, end)
        nothing: deque[object] = deque(maxlen=0)
        collect: Callable[..., Any] = list if is_timed else nothing.extend
        is_alone = not (observers or calls_others)
        in_context: Callable[..., Any] = with_fp_errors_ignored
        if is_alone:
            in_context = prepared_context_run()
        #: Calls all thunks of an iterator; returns their results if timed, else None.
        self._exhaust = partial(in_context, collect)

    def run(self, arrays: Sequence[Any], sure: bool = True) -> Ran:
        """Run all steps on checked arrays; returns their times if timed."""
        loop = iter(self._thunks)
        try:
            if self._order:
                self._arguments[:] = [arrays[rank] for rank in self._order]
            moments = self._exhaust(map(call, loop))
        except BaseException as error:
            at = len(self._thunks) - length_hint(loop) - 1
            if self._progress[1] == BEGUN:
                with InterruptDeferred():
                    at = self._complete(at)
            error.__dict__["stitch_stopped"] = self._stopped_at(at)
            raise
        finally:
            if self._order:
                self._arguments[:] = [None] * len(self._order)
        self._tally.runs += 1
        return tuple([moments[at] for at in self._moments]) if moments is not None else True

    def stopped(self, error: BaseException) -> Stopped:
        """Return the steps completed before a run raised."""
        stopped: Stopped | None = error.__dict__.pop("stitch_stopped", None)
        return stopped or self._stopped_at(-1)

    def _stopped_at(self, at: int) -> Stopped:
        if self._progress[1] == COMPLETE:
            return Stopped(range(len(self._ends)))
        return Stopped(range(sum(1 for end in self._ends if end <= at)))

    def _complete(self, at: int) -> int:
        """Call the thunk that raised again, and those after it, without hooks.

        Returns the position of the thunk that raises again. If that is the first one that
        overwrites, nothing has been overwritten.
        """
        thunks = [tuple if is_hook(thunk) else thunk for thunk in self._thunks]
        tried = -1
        while self._progress[1] == BEGUN and at != tried and _is_repeatable(thunks[at]):
            tried = at
            loop = iter(thunks[at:])
            try:
                with_fp_errors_ignored(deque, map(call, loop), 0)
            except BaseException:
                # The caller raises the first exception.
                at = len(thunks) - length_hint(loop) - 1
        if self._progress[1] == BEGUN and at == self._first and _is_repeatable(thunks[at]):
            self._progress[1] = UNTOUCHED
        return at


def _overwritten_regions(backend: LocalBackend, plan: Plan) -> list[list[Array]]:
    """Return for each step the bytes of existing values that are donated to it."""
    request = plan.request
    buffers = {buffer.number: buffer for buffer in request.buffers}
    lying = {resident.value: resident.instances for resident in request.residents}
    regions: list[list[Array]] = []
    for step in plan.steps:
        found: list[Array] = []
        if isinstance(step, Execute):
            task = request.tasks[step.task]
            for position in task.transformation.donated:
                for instance in lying.get(task.inputs[position], ()):
                    buffer = buffers[instance.buffer]
                    if buffer.address is not None:
                        found.append(
                            backend.region(buffer.space, buffer.address, buffer.size_per_bank)
                        )
        regions.append(found)
    return regions


def _in_short(thunk: Thunk) -> Thunk:
    """Return the fastest equivalent call, without Python code in it."""
    if type(thunk) is not partial:
        return thunk
    if is_plain_copy(thunk):
        return partial(thunk.args[0].__setitem__, ..., thunk.args[1])
    func, arguments, keywords = shortest(thunk)
    return partial(func, *arguments, **keywords)


def _arrays(things: Iterable[object]) -> list[Array]:
    return [thing for thing in things if isinstance(thing, np.ndarray)]


def _written(thunk: Thunk) -> list[Array] | None:
    """Return the arrays that a thunk writes, or None if unknown."""
    if type(thunk) is partial:
        func, arguments = thunk.func, thunk.args
        if isinstance(func, np.ufunc):
            out = thunk.keywords.get("out", ())
            return _arrays([*arguments[func.nin :], *(out if isinstance(out, tuple) else (out,))])
        if func is np.copyto or func is setitem:
            return _arrays(arguments[:1])
    return [] if getattr(thunk, "is_repeatable", False) else None


def _may_write(thunk: Thunk, regions: Sequence[Array]) -> bool:
    written = _written(thunk)
    return written is None or any(
        np.may_share_memory(array, region) for array in written for region in regions
    )


def _is_repeatable(thunk: Thunk) -> bool:
    """Return whether a thunk that raised may be called again, because its inputs are unchanged.

    A C function raises before it writes. A Python function may have written, so its outputs must
    not overlap its inputs.
    """
    if type(thunk) is not partial:
        return isinstance(thunk, type | Arrivals) or getattr(thunk, "is_repeatable", False)
    func = thunk.func
    if func is call_in_turn or func is call_hooks:
        return False
    if isinstance(func, np.ufunc):
        return True
    arrays = _arrays([*thunk.args, *thunk.keywords.values()])
    return not any(np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
