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
from stitch.compiler.loops.lanes import in_lanes, lifted_scan
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.compiler.loops.schedules import Loop, least_seconds, written_rounds
from stitch.graph import SymbolicTensor, lift, scan
from stitch.program import Body, Operation, ScanForm, is_scan

#: Writes a loop to a builder: its body, form, operands and the line where it was written.
WriteLoop = Callable[[Any, Body, ScanForm, Sequence[Any], str], Sequence[Any]]


class Writing:
    """Writes operations for lanes, in which others may be; `write_loop` is for loops that are
    wanted once."""

    def __init__(
        self, bodies: Sequence[Body], estimate: LoopCosts, write_loop: WriteLoop | None = None
    ) -> None:
        self.bodies, self.estimate = bodies, estimate
        self._write_loop = write_loop or self.unscheduled
        #: How many rounds of loops that are written out are being written, one by one.
        self.copies = 1

    def written(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """An operation with a body, or without a rule, for the lanes of a context."""
        builder: Any = context.builder
        builder = builder.innermost(context.operands)
        if not is_scan(operation):
            return self._by_itself(builder, operation, context)
        form, body = ScanForm.of(operation), self.bodies[operation.body]
        if any(context.batched):
            return lifted_scan(builder, body, form, context, self.written)
        return self._write_loop(builder, body, form, context.operands, context.location)

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

    def _by_itself(
        self, builder: Any, operation: Operation, context: ops.BatchingContext
    ) -> Sequence[Any]:
        """An operator without a rule: a loop over the lanes; a body that is no loop: what it is."""
        if operation.body >= 0:
            body = self.bodies[operation.body]
            made = lift(
                body, context.operands, context.batched, context.lanes, builder, self.written
            ).results
            if not any(context.batched):
                return [r.tensor for r in made]
            return [in_lanes(builder, r.tensor, r.is_batched, context.lanes) for r in made]
        lanes = [o for o, batched in zip(context.operands, context.batched, strict=True) if batched]

        def lane(_: Any, elements: Sequence[SymbolicTensor]) -> Any:
            inside: Any = elements[0].builder
            rest = iter(elements)
            operands = [
                next(rest) if batched else o
                for o, batched in zip(context.operands, context.batched, strict=True)
            ]
            return [], inside.apply(
                operation.op, operands, len(operation.outputs), operation.attributes,
                operation.domain,
            )  # fmt: skip

        _, results = scan(builder, lane, [], lanes)
        return results
