"""Writing: what the operations of a graph that carry bodies, or have no batching rule, become.

Comes in: an operation, operands of which some have a lane axis in front. Goes out: its results. A
loop is what a function given makes of it, or stays one. Must not know: costs, which schedule is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stitch import ops
from stitch.compiler.loops.lane_scans import lane_scan_of, lanes_of_lanes
from stitch.compiler.loops.lanes import by_itself, lane_by_lane, lifted_scan
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.compiler.loops.schedules import Loop, least_seconds, written_rounds
from stitch.program import Body, Operation, ScanForm, is_scan

#: Writes a loop to a builder: its body, form, operands and the line where it was written.
WriteLoop = Callable[[Any, Body, ScanForm, Sequence[Any], str], Sequence[Any]]


class Writing:
    """Writes operations for lanes, in which others may be; `write_loop` is for loops that are
    wanted once. `lane_bodies` takes up the bodies of loops over lanes, each no more than a scan
    that is for all of them, until it is said how such run together; None: it is said."""

    def __init__(
        self, bodies: Sequence[Body], estimates: Sequence[LoopCosts],
        write_loop: WriteLoop | None = None,
        lane_bodies: set[int] | None = None,
    ) -> None:  # fmt: skip
        self.bodies, self.lane_bodies = bodies, lane_bodies
        #: By the rates of each executor that may compute; and the one that is being asked.
        self.estimates, self.estimate = estimates, estimates[0]
        self._write_loop = write_loop or self.unscheduled
        #: How many rounds of loops that are written out are being written, one by one.
        self.copies = 1

    def written(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """An operation with a body, or without a rule, for the lanes of a context."""
        builder: Any = context.builder
        builder = builder.innermost(context.operands)
        bodies, kept = self.bodies, self.lane_bodies
        if not is_scan(operation):
            return by_itself(builder, operation, bodies, context, self.written)
        form, body = ScanForm.of(operation), bodies[operation.body]
        if kept is not None and operation.body in kept:
            if any(context.batched):
                scan = lane_scan_of(operation, bodies, kept)
                return lanes_of_lanes(builder, scan, bodies, operation, context, self.written)
            results = self.unscheduled(builder, body, form, context.operands)
        elif not any(context.batched):
            return self._write_loop(builder, body, form, context.operands, context.location)
        elif form.has_condition:
            return lane_by_lane(
                builder, context,
                lambda operands, inside: self.unscheduled(inside, body, form, operands),
            )  # fmt: skip
        elif kept is None or not form.states or not form.count:
            return lifted_scan(builder, body, form, context, self.written)
        else:
            results = lane_by_lane(
                builder, context,
                lambda operands, inside: self.unscheduled(inside, body, form, operands),
            )  # fmt: skip
        kept.add(builder.operations[-1].body)
        return results

    def unscheduled(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], where: str = ""
    ) -> Sequence[Any]:
        """A loop that stays one."""
        return written_rounds(builder, body, form, operands, self)

    def least_seconds(self, loop: Loop) -> float:
        """What a loop costs that is scheduled as it will be."""
        return least_seconds(loop, self)

    @contextmanager
    def copied(self, times: int) -> Iterator[None]:
        """What is written meanwhile is written so many times."""
        copies, self.copies = self.copies, self.copies * times
        try:
            yield
        finally:
            self.copies = copies
