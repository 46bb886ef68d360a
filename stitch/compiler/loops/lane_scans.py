"""Loops over lanes that are no more than a scan for each: such a scan for all lanes, by itself or
for the lanes of others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stitch import ops
from stitch.compiler.loops.lanes import in_lanes, lifted_scan
from stitch.graph import BodyBuilder, Unliftable, lift
from stitch.program import ABSENT, Array, Body, Operation, ScanForm, is_scan

#: An operand of a scan: a value of the list that the scan stands in, or data.
Source = int | Array


@dataclass(frozen=True, slots=True)
class LaneScan:
    """A scan for so many lanes; none where it has no lane axis. `batched` operands have one in
    front, and so have all results: `results` are their values, `ABSENT` where they are unread."""

    operation: Operation
    body: int
    form: ScanForm
    lanes: int
    operands: tuple[Source, ...]
    batched: tuple[bool, ...]
    results: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many scans of the cell it is."""
        return max(1, self.lanes)


def lane_scan_of(
    operation: Operation, bodies: Sequence[Body], lane_bodies: Collection[int]
) -> LaneScan:
    """The scan that an operation is: as such, or the one for the lanes of a loop whose body is
    among `lane_bodies`."""
    form = ScanForm.of(operation)
    if operation.body not in lane_bodies:
        return LaneScan(
            operation, operation.body, form, 0, operation.inputs, (False,) * len(operation.inputs),
            operation.outputs,
        )  # fmt: skip
    around = bodies[operation.body]
    (inner,) = [o for o in around.operations if is_scan(o)]
    data = {c.value: c.data for c in around.constants}
    places = {v: i for i, v in enumerate(around.inputs)}
    renamed = {o.inputs[0]: o.outputs[0] for o in around.operations if o is not inner}
    given = dict(zip(around.outputs, operation.outputs, strict=True))
    return LaneScan(
        operation, inner.body, ScanForm.of(inner), form.count,
        tuple([operation.inputs[places[v]] if v in places else data[v] for v in inner.inputs]),
        tuple([places.get(v, form.sequences) < form.sequences for v in inner.inputs]),
        tuple([given.get(renamed.get(v, v), given.get(v, ABSENT)) for v in inner.outputs]),
    )  # fmt: skip


def scan_of_lanes(
    builder: Any, scan: LaneScan, bodies: Sequence[Body], operation: Operation,
    context: ops.BatchingContext, unliftable: Unliftable,
) -> Sequence[Any]:  # fmt: skip
    """The results of a loop over lanes, which `scan` is, from that one; None for what is unread."""
    at = dict(zip(operation.inputs, context.operands, strict=True))
    body = bodies[scan.body]
    inner = replace(
        context,
        input_types=tuple(scan.form.operand_types(body.input_types)),
        output_types=tuple(scan.form.result_types(body.output_types)),
        operands=tuple([
            at[v] if isinstance(v, int) else builder.constant(v) for v in scan.operands
        ]),
        batched=scan.batched, batch_size=scan.lanes, constants=(None,) * len(scan.operands),
    )  # fmt: skip
    results = lifted_scan(builder, body, scan.form, inner, unliftable)
    made = dict(zip(scan.results, results, strict=True))
    return [made[v] if v != ABSENT else None for v in operation.outputs]


def lanes_of_lanes(
    builder: Any, scan: LaneScan, bodies: Sequence[Body], operation: Operation,
    context: ops.BatchingContext, unliftable: Unliftable,
) -> Sequence[Any]:  # fmt: skip
    """The results of a loop over lanes for the lanes of a context: from one scan for its own lanes,
    which is then for those."""
    within = BodyBuilder("body", builder)
    types = [kind for kind in context.input_types if kind is not None]
    inner = replace(
        context, builder=within, batched=(False,) * len(types), batch_size=1,
        operands=tuple([within.input(f"input_{i}", kind) for i, kind in enumerate(types)]),
    )  # fmt: skip
    alone = scan_of_lanes(within, scan, bodies, operation, inner, unliftable)
    body = within.build([result for result in alone if result is not None])
    operands, batched, lanes = context.operands, context.batched, context.batch_size
    made = iter(lift(body, operands, batched, lanes, builder, unliftable).results)
    return [
        None if result is None
        else in_lanes(builder, (given := next(made)).tensor, given.is_batched, lanes)
        for result in alone
    ]  # fmt: skip
