"""Run scans of one cell with different lengths as segments: ranges of rounds with the same rows.

Rows are numbered longest first, so that the running ones are the first. A segment may run past the
end of some rows; these results are not read. Elements are reordered once so that those of a round
are contiguous, and results are reordered back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.compiler.loops.batch_axes import BatchedScan, add_batch_axis, states_that_vary
from stitch.graph import BodyBuilder, WriteUnbatched, scan_in_body, vmap
from stitch.program import ABSENT, Array, Body, ScanForm

#: Maximum number of lengths considered as ends of segments.
MOST_LENGTHS = 256


@dataclass(frozen=True, slots=True)
class RowSegment:
    """A range of rounds of the first `rows` rows.

    Attributes:
        first: The first round.
        count: The number of rounds.
        rows: The number of rows.
        going_on: How many of the rows continue after the segment.
        is_exact: Whether the others end exactly with the segment.
    """

    first: int
    count: int
    rows: int
    going_on: int
    is_exact: bool


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """The lengths of the rows, longest first, and the segments."""

    lengths: tuple[int, ...]
    segments: tuple[RowSegment, ...]

    @property
    def size(self) -> int:
        """Number of computed rounds of rows, including those past the end of a row."""
        return sum(s.count * s.rows for s in self.segments)

    def round_of(self) -> tuple[Array, Array]:
        """Return the row and round of each computed round of a row, in execution order.

        >>> plan = SegmentPlan((3, 1), (RowSegment(0, 1, 2, 1, True), RowSegment(1, 2, 1, 0, True)))
        >>> [each.tolist() for each in plan.round_of()]
        [[0, 1, 0, 0], [0, 0, 1, 2]]
        """
        rows = [np.tile(np.arange(s.rows), s.count) for s in self.segments]
        rounds = [s.first + np.repeat(np.arange(s.count), s.rows) for s in self.segments]
        return np.concatenate(rows), np.concatenate(rounds)

    def places(self, rows: Array, rounds: Array) -> Array:
        """Return the positions of rounds of rows in execution order."""
        firsts = np.array([s.first for s in self.segments])
        widths = np.array([s.rows for s in self.segments])
        sizes = np.array([s.count * s.rows for s in self.segments])
        at = np.searchsorted(firsts, rounds, side="right") - 1
        found: Array = (np.cumsum(sizes) - sizes)[at] + (rounds - firsts[at]) * widths[at] + rows
        return found


def plan_segments(
    lengths: Sequence[int], round_seconds: Callable[[int], float], segment_seconds: float,
    kept_seconds: float, most: int, *, may_run_on: bool,
) -> tuple[SegmentPlan, float] | None:  # fmt: skip
    """Return the cheapest plan of at most `most` segments and its seconds, or None.

    Args:
        lengths: The rounds of each row, longest first.
        round_seconds: Seconds of a round of some number of rows.
        segment_seconds: Seconds of a segment apart from its rounds.
        kept_seconds: Extra seconds per row and round in a segment in which some rows end early.
        most: Maximum number of segments.
        may_run_on: Whether segments may run past the end of rows.
    """
    ends = np.unique(np.array(lengths))
    if len(ends) > most and not may_run_on:
        return None
    if len(ends) > MOST_LENGTHS:
        ends = ends[np.linspace(0, len(ends) - 1, MOST_LENGTHS).round().astype(int)]
    if ends[0] <= 0:
        return None
    falling = np.array(lengths)
    begins = np.concatenate([[0], ends[:-1]])
    running = [int(np.sum(falling > begin)) for begin in begins]
    each = np.array([round_seconds(n) for n in running])
    inexact = np.array([len(np.unique(falling[falling > begin])) for begin in begins])
    # cost[i, j]: seconds of a segment from begin i to end j; infinite if j is before i.
    spans = (ends[None, :] - begins[:, None]).astype(float)
    after = np.array([len(np.unique(falling[falling > end])) for end in ends])
    ending = inexact[:, None] - after[None, :]
    cost = spans * (each[:, None] + kept_seconds * np.array(running)[:, None] * (ending > 1))
    cost = np.where((spans > 0) & ((ending <= 1) | may_run_on), cost + segment_seconds, np.inf)
    chosen = _cheapest(cost, most)
    if chosen is None:
        return None
    segments, total, at = [], 0.0, 0
    for end in chosen:
        total += float(cost[at, end])
        going_on = running[end + 1] if end + 1 < len(ends) else 0
        segments.append(
            RowSegment(
                int(begins[at]), int(spans[at, end]), running[at], going_on,
                bool(ending[at, end] <= 1),
            )
        )  # fmt: skip
        at = end + 1
    return SegmentPlan(tuple(map(int, lengths)), tuple(segments)), total


def _cheapest(cost: Array, most: int) -> list[int] | None:
    """Return the ends of the cheapest sequence of at most `most` segments.

    `cost[i, j]` is the cost of a segment from begin i to end j.
    """
    many = len(cost)
    best = np.full(many + 1, np.inf)
    best[0] = 0.0
    ways: list[Array] = []
    found: tuple[float, int] = (np.inf, 0)
    for number in range(1, min(most, many) + 1):
        whole = best[:many, None] + cost
        ways.append(np.argmin(whole, axis=0))
        best = np.concatenate([[np.inf], np.min(whole, axis=0)])
        found = min(found, (float(best[many]), number))
    if not np.isfinite(found[0]):
        return None
    ends, at = [], many
    for way in reversed(ways[: found[1]]):
        ends.append(at - 1)
        at = int(way[at - 1])
    return ends[::-1]


@dataclass(frozen=True, slots=True)
class MergedGroup:
    """Scans of one body to merge, longest first.

    Attributes:
        scans: The scans.
        body: Their body.
        same: Operands that are one value in all scans.
        batched: Inputs of the body that differ between rows.
        plan: The segments.
    """

    scans: tuple[BatchedScan, ...]
    body: Body
    same: tuple[bool, ...]
    batched: tuple[bool, ...]
    plan: SegmentPlan

    @property
    def form(self) -> ScanForm:
        """The form of the longest scan."""
        return self.scans[0].form

    def starts(self) -> list[int]:
        """Return the number of the first row of each scan, and the number of rows."""
        return [0, *np.cumsum([scan.rows for scan in self.scans]).tolist()]


def rows_that_vary(
    scans: Sequence[BatchedScan], body: Body, same: Sequence[bool]
) -> tuple[bool, ...]:
    """Return which inputs of the body differ between rows; see `MergedGroup` for `same`."""
    form = scans[0].form
    first = form.states + form.sequences
    differs = [not each for each in same]
    differs[form.states : first] = [True] * form.sequences
    return (*states_that_vary(body, form, differs), *differs[form.states :])


class SegmentWriter:
    """A group of scans being written."""

    def __init__(
        self, builder: Any, merging: MergedGroup, operands: Sequence[Sequence[Any]],
        write_unbatched: WriteUnbatched,
    ) -> None:  # fmt: skip
        self.builder, self.merging, self.write_unbatched = builder, merging, write_unbatched
        self.operands = operands
        self.scans, self.plan, self.form = merging.scans, merging.plan, merging.form
        self.starts = merging.starts()
        self.rows = self.starts[-1]
        self.lengths = np.array(self.plan.lengths)
        wanted = [
            any(scan.results[i] != ABSENT for scan in self.scans)
            for i in range(self.form.states + self.form.collected)
        ]
        self.wants_last, self.wants = wanted[: self.form.states], wanted[self.form.states :]
        self.kept = _kept_states(merging.body, self.form)

    def run(self) -> list[list[Any]]:
        """Write the scans; return the results of each, None for results without readers."""
        form = self.form
        first = form.states + form.sequences
        states = [self._row_operand(i) for i in range(form.states)]
        elements = [self._packed(i) for i in range(form.states, first)]
        shared = [self._row_operand(i) for i in range(first, len(self.merging.batched))]
        given: list[Mapping[int, Any]] = []
        ends: list[list[Any]] = []
        at = 0
        for segment in self.plan.segments:
            size = segment.count * segment.rows
            taken = [self._part(e, at, at + size, segment) for e in elements]
            after, collected = self._segment(segment, states, taken, shared)
            at += size
            given.append(collected)
            ends.append(self._ends(segment, after, collected))
            states = [self._first(s, i, segment.going_on) for i, s in enumerate(after)]
            shared = [self._first(s, first + i, segment.going_on) for i, s in enumerate(shared)]
        lasts = [self._lasts(i, ends) for i in range(form.states)]
        results = [self._unpacked(j, given) for j in range(form.collected)]
        return [
            [self._of_scan(lasts[i], n, scan) for i in range(form.states)]
            + [result[n] for result in results]
            for n, scan in enumerate(self.scans)
        ]

    # What rounds take --------------------------------------------------------------------------

    def _row_operand(self, index: int) -> Any:
        """Return a shared operand or an initial state for all rows."""
        if not self.merging.batched[index]:
            return self.operands[0][index]
        if self.merging.same[index]:
            return add_batch_axis(self.builder, self.operands[0][index], False, self.rows)
        rows = [
            add_batch_axis(self.builder, given[index], scan.batched[index], scan.rows)
            for scan, given in zip(self.scans, self.operands, strict=True)
        ]
        return self.builder.concat(rows, 0) if len(rows) > 1 else rows[0]

    def _packed(self, index: int) -> Any:
        """Return a sequence of all rows, its elements in the order in which rounds take them."""
        rows, rounds = self.plan.round_of()
        # Past its end, a row takes its last element again.
        rounds = np.minimum(rounds, self.lengths[rows] - 1)
        begins, parts, base = np.zeros(self.rows, np.int64), [], 0
        is_backward = np.zeros(self.rows, bool)
        for number, scan in enumerate(self.scans):
            own_rows = slice(self.starts[number], self.starts[number + 1])
            given, count = self.operands[number][index], scan.form.count
            is_backward[own_rows] = scan.form.taken_backward[index - self.form.states]
            if scan.batched[index]:
                given = self.builder.reshape(given, (scan.batch_size * count, *given.shape[2:]))
                begins[own_rows] = base + np.arange(scan.batch_size) * count
            else:
                begins[own_rows] = base
            parts.append(given)
            base += given.shape[0]
        numbers = begins[rows] + np.where(
            is_backward[rows], self.lengths[rows] - 1 - rounds, rounds
        )  # fmt: skip
        whole = self.builder.concat(parts, 0) if len(parts) > 1 else parts[0]
        return self._taken(whole, numbers)

    def _part(self, packed: Any, first: int, end: int, segment: RowSegment) -> Any:
        """Return the elements of a segment: `[rounds, rows, *element]`."""
        part = packed if end - first == packed.shape[0] else packed[first:end]
        return self.builder.reshape(part, (segment.count, segment.rows, *packed.shape[1:]))

    def _first(self, tensor: Any, index: int, rows: int) -> Any:
        """Return the first rows of a value that differs between rows."""
        if not self.merging.batched[index] or tensor.shape[0] == rows:
            return tensor
        return self.builder.index(tensor, slice(0, rows))

    # Rounds ------------------------------------------------------------------------------------

    def _segment(
        self, segment: RowSegment, states: Sequence[Any], elements: Sequence[Any],
        shared: Sequence[Any],
    ) -> tuple[Sequence[Any], Mapping[int, Any]]:  # fmt: skip
        """Write a segment; return its last states, and what is read of its rounds by result."""
        form, batched = self.form, self.merging.batched
        many = form.states
        flags = [*batched[:many], *[True] * len(elements), *batched[many + form.sequences :]]
        read = [many + j for j, wanted in enumerate(self.wants) if wanted]
        if not segment.is_exact:
            read += [self.kept[i] for i, wanted in enumerate(self.wants_last) if wanted]
        read = sorted(set(read))

        def round_(inside: BodyBuilder, before: Sequence[Any], taken: Sequence[Any]) -> Any:
            results = vmap(
                self.merging.body, [*before, *taken, *shared], flags, segment.rows, inside,
                self.write_unbatched,
            ).results  # fmt: skip
            every = [add_batch_axis(inside, r.tensor, r.is_batched, segment.rows) for r in results]
            after = [
                whole if varies else r.tensor
                for whole, r, varies in zip(every, results, batched[:many], strict=False)
            ]
            return after, [every[number] for number in read]

        after, given = scan_in_body(self.builder, round_, states, elements, count=segment.count)
        return after, dict(zip(read, given, strict=True))

    # What comes out ----------------------------------------------------------------------------

    def _ends(
        self, segment: RowSegment, after: Sequence[Any], given: Mapping[int, Any]
    ) -> list[Any]:  # fmt: skip
        """Return the last states of the rows that end in a segment, None without readers."""
        found: list[Any] = []
        ended = np.arange(segment.going_on, segment.rows)
        for i, state in enumerate(after):
            if not self.wants_last[i]:
                found.append(None)
            elif segment.is_exact:
                whole = add_batch_axis(self.builder, state, self.merging.batched[i], segment.rows)
                found.append(whole[segment.going_on :] if segment.going_on else whole)
            else:
                each = given[self.kept[i]]
                flat = self.builder.reshape(
                    each, (segment.count * segment.rows, *each.shape[2:])
                )  # fmt: skip
                rounds = self.lengths[ended] - 1 - segment.first
                found.append(self._taken(flat, rounds * segment.rows + ended))
        return found

    def _lasts(self, state: int, ends: Sequence[Sequence[Any]]) -> Any:
        """Return a last state of all rows, in the order of rows."""
        if not self.wants_last[state]:
            return None
        parts = [each[state] for each in reversed(ends)]
        return self.builder.concat(parts, 0) if len(parts) > 1 else parts[0]

    def _of_scan(self, rows: Any, number: int, scan: BatchedScan) -> Any:
        """Select the rows of one scan from a tensor of all rows."""
        if rows is None:
            return None
        first, end = self.starts[number], self.starts[number + 1]
        part = rows if end - first == self.rows else rows[first:end]
        return part if scan.batch_size else self.builder.reshape(part, part.shape[1:])

    def _unpacked(self, collected: int, given: Sequence[Mapping[int, Any]]) -> list[Any]:
        """Return a collected result by scan, in the order in which each scan collects it."""
        if not self.wants[collected]:
            return [None] * len(self.scans)
        each_part = [each[self.form.states + collected] for each in given]
        parts = [
            self.builder.reshape(part, (s.count * s.rows, *part.shape[2:]))
            for s, part in zip(self.plan.segments, each_part, strict=True)
        ]
        whole = self.builder.concat(parts, 0) if len(parts) > 1 else parts[0]
        places = []
        for number, scan in enumerate(self.scans):
            rows = np.arange(self.starts[number], self.starts[number + 1])
            rounds = np.arange(scan.form.count)
            if scan.form.given_backward[collected]:
                rounds = rounds[::-1]
            places.append(
                self.plan.places(np.repeat(rows, len(rounds)), np.tile(rounds, len(rows)))
            )
        found = self._taken(whole, np.concatenate(places))
        results, at = [], 0
        for scan, each in zip(self.scans, places, strict=True):
            part = found if len(each) == found.shape[0] else found[at : at + len(each)]
            at += len(each)
            batch = (scan.batch_size,) if scan.batch_size else ()
            results.append(
                self.builder.reshape(part, (*batch, scan.form.count, *found.shape[1:]))
            )  # fmt: skip
        return results

    def _taken(self, whole: Any, numbers: Array) -> Any:
        """Select along the first axis."""
        if np.array_equal(numbers, np.arange(whole.shape[0])):
            return whole
        return self.builder.gather(whole, numbers.astype(np.int64), 0)


def _kept_states(body: Body, form: ScanForm) -> list[int]:
    """Return, for each state, the collected result that equals it, or else the state itself."""
    same = {
        o.outputs[0]: o.inputs[0] for o in body.operations if o.op == "Identity" and not o.domain
    }

    def source(result: int) -> int:
        value = body.outputs[result]
        while value in same:
            value = same[value]
        return value

    collected = {source(j): j for j in range(form.states, len(body.outputs))}
    return [collected.get(source(i), i) for i in range(form.states)]
