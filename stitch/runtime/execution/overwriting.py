"""Runs of plans that overwrite existing values, and hooks between the thunks of a plan.

Parameters, optimizer states and loop-carried values are overwritten. Once such a run has begun to
overwrite, it is completed whatever is raised, and then the exception propagates. C code calls the
thunks in sequence, so neither a signal handler nor an asynchronous exception can come between two
of them: a thunk raised. It is called again, with those after it, unless it may have overwritten
part of its input. Only then are values lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import call, length_hint, setitem
from threading import get_ident
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.linker import expanded
from stitch.memory import Arrivals
from stitch.planner import Execute, Plan
from stitch.program import ABSENT, Array, Ownership, Program, as_read_only
from stitch.runtime.backends import BoundPlan, BoundStep, LocalBackend, Thunk
from stitch.runtime.execution.generated_code import Ran, Stopped, is_plain_copy, shortest
from stitch.runtime.executors import (
    BoundProgram,
    call_in_turn,
    prepared_context_run,
    with_fp_errors_ignored,
)
from stitch.runtime.history import Tally
from stitch.runtime.hooks import HookContext, Hooks, MomentHooks, call_hooks, not_just_made
from stitch.runtime.locks import InterruptDeferred


def observed(bound: BoundPlan, hooks: Hooks) -> list[list[Thunk]]:
    """Return the thunks of each step, with the current hooks."""
    between = _Between(bound, hooks)
    return [between.step(step) for step in bound.steps]


#: Work limit for NumPy's exact test for shared memory.
MOST_WORK = 10_000


class _Replacement:
    """Replaces the output of an operation while its hooks are called."""

    def __init__(self, program: Program, bound: BoundProgram, index: int) -> None:
        self._program = program
        self._bound = bound
        self._index = index
        #: The thread that calls the hooks now; at other times the bytes hold other values.
        self._thread: int | None = None

    def while_open(self, moment: MomentHooks, context: HookContext) -> None:
        """Call the hooks of a moment, which may replace outputs."""
        self._thread = get_ident()
        try:
            call_hooks(moment, context)
        finally:
            self._thread = None

    def __call__(self, output: int, array: Array) -> None:
        if self._thread != get_ident():
            raise not_just_made(self._program, self._index)
        operation = self._program.operations[self._index]
        value = [v for v in operation.outputs if v != ABSENT][output]
        place = self._bound.arrays[value]
        shared = self._shared_with(value)
        if shared is not None:
            name, other = (self._program.values[v].name for v in (value, shared))
            raise UsageError(
                f"{name!r} cannot be replaced: it lies in the bytes of {other!r}, which is still "
                "read",
                where=f"program {self._program.name!r}, operation {self._index} ({operation.op})",
                remedy=f"replace {other!r} where it is made, or what is computed from {name!r}",
            )
        kind = self._program.values[value].type.data_type
        with np.errstate(all="ignore"):
            np.copyto(place, array if kind.dtype == array.dtype else array.astype(kind.dtype))
        for step in self._bound.written.get(value, ()):
            step()

    def _shared_with(self, value: int) -> int | None:
        """Return a live value that shares bytes with this one, or None."""
        program, arrays = self._program, self._bound.arrays
        later = program.operations[self._index + 1 :]
        read = {v for operation in later for v in operation.inputs}
        read |= {slot.value for slot in program.outputs}
        own = {constant.value for constant in program.constants}
        own |= {s.value for s in program.inputs if s.ownership is Ownership.BORROW}
        own |= {s.value for s in program.inputs} & read
        earlier = program.operations[: self._index]
        made = {v for operation in earlier for v in operation.outputs if v != ABSENT} & read
        for other in (own | made) - {value}:
            if other in arrays and _overlap(arrays[other], arrays[value]):
                return other
        return None


def _overlap(one: Array, other: Array) -> bool:
    """Return whether two arrays share bytes; True if that is too hard to determine."""
    most: Any = MOST_WORK  # NumPy's own types know two numbers.
    try:
        return bool(np.shares_memory(one, other, max_work=most))
    except np.exceptions.TooHardError:
        return True


def is_hook(thunk: Thunk) -> bool:
    """Return whether a thunk was inserted by `observed`."""
    func = thunk.func if type(thunk) is partial else None
    return func is call_hooks or isinstance(getattr(func, "__self__", None), _Replacement)


class _Between:
    """Builds the thunks of a step with hooks; hook contexts are created once for all runs."""

    def __init__(self, bound: BoundPlan, hooks: Hooks) -> None:
        self._bound = bound
        at = {name: moment if moment.hooks else None for name, moment in hooks.moments.items()}
        self._around_program = at["before_program"], at["after_program"]
        self._around_operation = at["before_operation"], at["after_operation"]
        self.thunks: list[Thunk] = []

    def step(self, step: BoundStep) -> list[Thunk]:
        """Return the thunks of one step."""
        self.thunks = []
        self._step(step)
        return self.thunks

    def _step(self, step: BoundStep) -> None:
        own = step.thunks
        if step.program is None:
            self.thunks += own
            return
        before, after = self._around_program
        context = HookContext(step.program)
        self._call(before, context)
        if step.bound is None or self._around_operation == (None, None):
            self.thunks += own
        else:
            # Thunks of the step that precede the program's own (debug mode) come first.
            self.thunks += own[: len(own) - len(step.bound.steps)]
            one_by_one = step.bound.one_by_one
            self._operations(step.program, step.bound if one_by_one is None else one_by_one())
        self._call(after, context)

    def _operations(self, program: Program, bound: BoundProgram) -> None:
        before, after = self._around_operation
        # Operations with bodies are expanded: hooks see the inner operations.
        program, arrays = expanded(program), bound.arrays
        done = 0
        for index, first, stop in bound.operations:
            # Thunks that fill operands come before the hooks.
            self.thunks += bound.steps[done:first]
            done = stop
            operation = program.operations[index]
            inputs = tuple(
                None if i == ABSENT else as_read_only(arrays[i]) for i in operation.inputs
            )
            outputs = tuple(as_read_only(arrays[i]) for i in operation.outputs if i != ABSENT)
            self._call(before, HookContext(program, operation, inputs, outputs, index=index))
            self.thunks += bound.steps[first:stop]
            put = _Replacement(program, bound, index)
            if after is not None:
                context = HookContext(program, operation, inputs, outputs, put, index)
                self.thunks.append(partial(put.while_open, after, context))
        self.thunks += bound.steps[done:]

    def _call(self, moment: MomentHooks | None, context: HookContext) -> None:
        if moment is not None:
            self.thunks.append(partial(call_hooks, moment, context))


#: Values of `BoundPlan.progress[1]`: nothing overwritten yet; perhaps partly; completely. The
#: caller sets UNTOUCHED before a run.
UNTOUCHED, BEGUN, COMPLETE = 0, 1, 2


class OverwritingRun:
    """Runs a bound plan that overwrites values; `observers` as in `GeneratedRunner`."""

    def __init__(
        self, plan: Plan, bound: BoundPlan, steps: Sequence[Sequence[Thunk]], order: Sequence[int],
        tally: Tally, backend: LocalBackend, observers: int, *,
        clock: Callable[[], float] | None, calls_others: bool, is_captured: bool = False,
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
            clock: A run returns its times of the steps.
            calls_others: Whether it calls hooks, host functions or user kernels.
            is_captured: Whether the steps have graphs.
        """
        self.observers, self._tally = observers, tally
        self._arguments, self._order, self._progress = bound.arguments, order, bound.progress
        begin: Thunk = partial(setitem, self._progress, 1, BEGUN)
        end: Thunk = partial(setitem, self._progress, slice(None), (len(steps), COMPLETE))
        overwritten = _overwritten_regions(backend, plan)
        if is_captured:
            # The thunks of a graph are those of several steps.
            overwritten = [[r for regions in overwritten for r in regions]] * len(overwritten)
        #: Position of the first thunk that overwrites a value.
        self._first = -1
        thunks: list[Thunk] = [clock] if clock else []
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
            if clock:
                if step:
                    thunks.append(clock)
                self._moments.append(len(thunks) - 1 if step else self._moments[-1])
        self._thunks = (*thunks, end)
        nothing: deque[object] = deque(maxlen=0)
        collect: Callable[..., Any] = list if clock else nothing.extend
        is_alone = not (observers or calls_others)
        in_context: Callable[..., Any] = with_fp_errors_ignored
        if is_alone:
            in_context = prepared_context_run()
        #: Calls all thunks of an iterator; returns their results if timed, else None.
        self._exhaust = partial(in_context, collect)

    def run(self, arrays: Sequence[Any], sure: bool = True) -> Ran:
        """Run all steps on checked arrays; returns their times if timed."""
        # Of a run on arrays of the call alone, no caller keeps track.
        self._progress[1] = UNTOUCHED
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


def _calls_a_library(thunk: partial[object]) -> bool:
    """Return whether a thunk works on tensors of a library, whose bytes cannot be compared here."""
    owner = getattr(thunk.func, "__self__", None)
    things = (owner, *thunk.args, *thunk.keywords.values())
    return any(hasattr(thing, "__dlpack__") for thing in things if type(thing) is not np.ndarray)


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
        np.may_share_memory(array, region)
        for array in written for region in regions if isinstance(region, np.ndarray)
    )  # fmt: skip


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
    if _calls_a_library(thunk):
        return False
    arrays = _arrays([*thunk.args, *thunk.keywords.values()])
    return not any(np.may_share_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])
