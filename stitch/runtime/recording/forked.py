"""Forks in generated code: parallel thread functions, and recovery if one fails."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeAlias

from stitch.planner import Allocate, Buffer, Free, Plan, Region, after_steps, touched_by
from stitch.runtime.backends import ThreadFunction, ThreadPool, ThreadRun

#: Finds a free address for a buffer outside the given regions.
FindPlace: TypeAlias = Callable[[Buffer, Sequence[Region]], int | None]


@dataclass(slots=True, eq=False)
class WrittenFork:
    """A fork in generated code: for each thread its steps, and their last lines relative to its
    function."""

    threads: ThreadPool
    steps: list[tuple[int, ...]] = field(default_factory=list)
    ends: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, functions: Sequence[ThreadFunction], arrays: Sequence[Any]) -> list[Any]:
        """Run the thread functions in parallel and return their results.

        If some fail, wait for all, and raise the error of the earliest step.
        """
        runs = self.threads.beside(functions, arrays)
        for run in runs:
            if run.error is not None:
                self._fail(runs)
        return [run.result for run in runs]

    def _fail(self, runs: Sequence[ThreadRun]) -> None:
        done: list[int] = []
        failures: list[ThreadFailure] = []
        for run, steps, ends in zip(runs, self.steps, self.ends, strict=True):
            error, run.error = run.error, None
            count = len(steps)
            if not run.is_done:
                code: CodeType = run.function.__code__
                count = 0 if error is None else steps_before(error, code, ends)
            done += steps[:count]
            if error is not None:
                failures.append(ThreadFailure(steps[count:] or steps[-1:], error))
        # Interrupts come before failures.
        failures.sort(key=lambda each: (isinstance(each.error, Exception), each.steps[0]))
        try:
            error = failures[0].error
            error.__dict__["stitch_beside"] = tuple(done), tuple(failures)
            raise error
        finally:
            # Break the cycle: the traceback references this frame.
            del error, failures, run, runs


@dataclass(frozen=True, slots=True, eq=False)
class ThreadFailure:
    """The exception of a thread, and its steps from the failed one on."""

    steps: tuple[int, ...]
    error: BaseException


@dataclass(frozen=True, slots=True, eq=False)
class Stopped:
    """An incomplete run: the completed steps in plan order, and the thread failures, the raised one
    first."""

    steps: Sequence[int] = ()
    failures: tuple[ThreadFailure, ...] = ()

    @classmethod
    def at(cls, count: int, error: BaseException) -> Stopped:
        """Create from `count` steps outside forks, and those that the error recorded inside
        forks."""
        beside = error.__dict__.pop("stitch_beside", None)
        if beside is None:
            return cls(range(count))
        done, failures = beside
        return cls(sorted([*range(count), *done]), failures)

    def plan(self, plan: Plan) -> tuple[Plan, int]:
        """Return the plan reordered so that the completed steps come first, and their number.

        The order is valid: steps of one thread keep their order, and threads are independent.
        Buffers that remaining steps read are not freed yet.
        """
        if isinstance(self.steps, range):
            return plan, len(self.steps)
        done = set(self.steps)
        left = [i for i in range(len(plan.steps)) if i not in done]
        needed = {b for i in left for side in touched_by(plan.steps[i]) for b in side}
        early = {i for i in done if isinstance(s := plan.steps[i], Free) and s.buffer in needed}
        order = [*[i for i in self.steps if i not in early], *sorted([*left, *early])]
        steps = tuple([plan.steps[i] for i in order])
        return replace(plan, steps=steps), len(done) - len(early)


def steps_before(error: BaseException, code: CodeType, ends: Sequence[int]) -> int:
    """Return the number of completed steps of a generated function when it raised; 0 if another
    function raised `error`.

    `ends`: the last line of each step, relative to the function.
    """
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return bisect_left(ends, traceback.tb_lineno - code.co_firstlineno)
        traceback = traceback.tb_next
    return 0


def without_own_places(
    plan: Plan, steps_done: int, own: Collection[int], wanted: Collection[int], find: FindPlace
) -> tuple[Plan, int, list[Buffer]]:
    """Remove the buffers in thread arenas from a stopped plan, except those that tasks in `wanted`
    still read.

    The remaining ones get an address in their space: the plan's if it is free, else one from
    `find`. Those without a free address are freed.
    """
    buffers, values = after_steps(plan, steps_done)
    passing = [number for number in buffers if number in own]
    needed = set()
    for value in wanted:
        lying = [instance.buffer for instance in values.get(value, ())]
        if lying and all(number in own for number in lying):
            needed.update(lying)
    taken = [_region_of(buffers[number]) for number in buffers if number not in own]
    kept: dict[int, Buffer] = {}
    for number in passing:
        buffer = buffers[number]
        if number not in needed:
            continue
        region = _region_of(buffer)
        if any(overlap(region, other) for other in taken):
            address = find(buffer, taken)
            if address is None:
                continue
            buffer = buffer.where({number: address})
        kept[number] = buffer
        taken.append(_region_of(buffer))
    steps = [
        Allocate(kept[step.buffer.number])
        if isinstance(step, Allocate) and step.buffer.number in kept
        else step
        for step in plan.steps
    ]
    frees = [Free(number) for number in passing if number not in kept]
    steps[steps_done:steps_done] = frees
    return replace(plan, steps=tuple(steps)), steps_done + len(frees), [*kept.values()]


def _region_of(buffer: Buffer) -> Region:
    if buffer.address is None:
        return buffer.space, 0, 0
    return buffer.space, buffer.address, buffer.size_per_bank


def overlap(a: Region, b: Region) -> bool:
    """Return whether two regions share bytes."""
    return a[0] is b[0] and a[1] < b[1] + b[2] and b[1] < a[1] + a[2]
