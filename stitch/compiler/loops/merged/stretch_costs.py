"""What scans of one cell cost, each length by itself and in stretches.

Comes in: the cell, which of its inputs differ from row to row, lengths of rows, rates. Goes out:
seconds by schedule, the cheapest plan of stretches. Must not know how stretches are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from stitch.compiler.loops.hoisting import hoisted, hoisted_form
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.compiler.loops.merged.stretch_plan import StretchPlan, planned
from stitch.program import Body, ScanForm

#: The most stretches of one group, and the most operations that they may be written as.
MOST_STRETCHES, MOST_WRITTEN = 32, 2048
#: Operations beside its body that a stretch is, for each state, sequence and result.
_BESIDE = 2


@dataclass(frozen=True, slots=True)
class CellCosts:
    """Seconds of a cell for many rows; `fixed`: its inputs that are constants."""

    estimate: LoopCosts
    body: Body
    form: ScanForm
    batched: tuple[bool, ...]
    fixed: tuple[int, ...]

    def by_schedule(self, scans: Iterable[tuple[int, int]]) -> dict[str, float]:
        """What scans of so many rounds and rows each cost, as they are and, if that can be, with
        what reads no state computed before."""
        form = self.form
        parts = hoisted(self.body, form) if form.sequences else None
        costs = {"rounds": 0.0} | ({} if parts is None else {"hoisted": 0.0})
        for count, rows in scans:
            its = replace(form, count=count)
            costs["rounds"] += self._scan(self.body, its, rows)
            if parts is not None:
                takes = parts.before.inputs[: form.sequences]
                costs["hoisted"] += self.estimate.round(
                    parts.before, count * rows, takes, self.fixed
                ) + self._scan(parts.rest, hoisted_form(parts, its), rows)
        return costs

    def stretches(
        self, lengths: Sequence[int], read: Collection[int], *, may_run_on: bool
    ) -> tuple[StretchPlan, float] | None:
        """The cheapest plan for rows of these lengths, longest first, and what it costs; None where
        there is none. `read`: the results of the body that somebody reads of all rounds."""
        rates, body = self.estimate.rates, self.body
        sides = len(body.inputs) + len(body.outputs)
        most = MOST_WRITTEN // (len(body.operations) + _BESIDE * sides)
        kept = sum(body.values[v].type.nbytes for v in body.outputs[: self.form.states])
        found = planned(
            lengths,
            lambda rows: self.estimate.turn(body, self.form, rows, self._varies(body), self.fixed),
            rates.loop_seconds + _BESIDE * sides * rates.movement_seconds,
            kept / rates.near_bytes_per_second,
            max(1, min(MOST_STRETCHES, most)),
            may_run_on=may_run_on,
        )
        if found is None:
            return None
        plan, seconds = found
        for each in plan.stretches:
            costs = self.by_schedule([(each.count, each.rows)])
            seconds += min(costs.values()) - costs["rounds"]
        return plan, seconds + self._moving(plan, read)

    def _scan(self, cell: Body, form: ScanForm, rows: int) -> float:
        return self.estimate.scan(cell, form, rows, self._varies(cell), self.fixed)

    def _varies(self, cell: Body) -> list[int]:
        """What of a cell differs from row to row; it takes elements more than the body does,
        perhaps, after the others."""
        first = self.form.states + self.form.sequences
        more = len(cell.inputs) - len(self.batched)
        flags = [*self.batched[:first], *[True] * more, *self.batched[first:]]
        return [v for v, flag in zip(cell.inputs, flags, strict=True) if flag]

    def _moving(self, plan: StretchPlan, read: Collection[int]) -> float:
        """What it takes to bring elements into the order of rounds, and results back."""
        body, form = self.body, self.form
        moved = [*body.inputs[form.states : form.states + form.sequences]]
        moved += [body.outputs[result] for result in read]
        nbytes = sum(body.values[v].type.nbytes for v in moved) * plan.size
        return 2 * nbytes / self.estimate.rates.far_bytes_per_second
