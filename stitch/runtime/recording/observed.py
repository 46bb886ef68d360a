"""Insert hooks between the thunks of a bound plan's programs and operations."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.linker import expanded
from stitch.program import ABSENT, Array, Ownership, Program, as_read_only
from stitch.runtime.backends import BoundPlan, BoundStep, Thunk
from stitch.runtime.executors import BoundProgram
from stitch.runtime.hooks import HookContext, Hooks, MomentHooks, call_hooks, not_just_made


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
