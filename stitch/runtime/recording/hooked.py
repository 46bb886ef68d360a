"""Running a plan step by step, with hooks around programs and operations."""

from __future__ import annotations

from stitch.program import ABSENT, Array
from stitch.runtime.backends import BoundPlan, BoundStep
from stitch.runtime.hooks import HookContext, Hooks


def run_hooked(bound: BoundPlan, hooks: Hooks) -> None:
    """Run all steps; an exception carries how many were done, for the clean-up."""
    done = 0
    try:
        for step in bound.steps:
            if step.program is None:
                for thunk in bound.thunks[step.first : step.stop]:
                    thunk()
            else:
                _run_program(bound, step, hooks)
            done += 1
    except BaseException as error:
        error.__dict__["stitch_steps_done"] = done
        raise


def _run_program(bound: BoundPlan, step: BoundStep, hooks: Hooks) -> None:
    assert step.program is not None
    context = HookContext(step.program)
    hooks.call("before_program", context)
    if step.bound is None or not hooks.on_operations:
        for thunk in bound.thunks[step.first : step.stop]:
            thunk()
    else:
        # Thunks of the step that precede the program's own (debug mode) come first.
        own = step.stop - len(step.bound.steps)
        for thunk in bound.thunks[step.first : own]:
            thunk()
        bound_program = step.bound if step.bound.one_by_one is None else step.bound.one_by_one()
        arrays = bound_program.arrays
        for index, first, stop in bound_program.operations:
            operation = step.program.operations[index]
            inputs = tuple(None if i == ABSENT else _read_only(arrays[i]) for i in operation.inputs)
            outputs = tuple(_read_only(arrays[i]) for i in operation.outputs if i != ABSENT)
            around = HookContext(step.program, operation, inputs, outputs)
            hooks.call("before_operation", around)
            for thunk in bound_program.steps[first:stop]:
                thunk()
            hooks.call("after_operation", around)
    hooks.call("after_program", context)


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
