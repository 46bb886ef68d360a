"""The thunks of a bound plan with hooks around its programs and operations.

Comes in: a bound plan, a device's hooks. Goes out: the thunks of each step of the plan, with calls
between them. Must not know how thunks are run, or when.
"""

from __future__ import annotations

from functools import partial

from stitch.linker import expanded
from stitch.program import ABSENT, Program, as_read_only
from stitch.runtime.backends import BoundPlan, BoundStep, Thunk
from stitch.runtime.executors import BoundProgram
from stitch.runtime.hooks import HookContext, Hooks, MomentHooks, call_hooks


def observed(bound: BoundPlan, hooks: Hooks) -> list[list[Thunk]]:
    """The thunks of each step for the moments that have hooks now."""
    between = _Between(bound, hooks)
    return [between.step(step) for step in bound.steps]


class _Between:
    """The thunks of a step so far; the contexts of hooks are made with them, once for all runs."""

    def __init__(self, bound: BoundPlan, hooks: Hooks) -> None:
        self._bound = bound
        at = {name: moment if moment.hooks else None for name, moment in hooks.moments.items()}
        self._around_program = at["before_program"], at["after_program"]
        self._around_operation = at["before_operation"], at["after_operation"]
        self.thunks: list[Thunk] = []

    def step(self, step: BoundStep) -> list[Thunk]:
        """Those of one step."""
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
        # Seen by itself is what an operation is computed by: its body, where it carries one.
        program, arrays = expanded(program), bound.arrays
        for index, first, stop in bound.operations:
            operation = program.operations[index]
            inputs = tuple(
                None if i == ABSENT else as_read_only(arrays[i]) for i in operation.inputs
            )
            outputs = tuple(as_read_only(arrays[i]) for i in operation.outputs if i != ABSENT)
            context = HookContext(program, operation, inputs, outputs)
            self._call(before, context)
            self.thunks += bound.steps[first:stop]
            self._call(after, context)

    def _call(self, moment: MomentHooks | None, context: HookContext) -> None:
        if moment is not None:
            self.thunks.append(partial(call_hooks, moment, context))
