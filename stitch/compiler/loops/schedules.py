"""The schedules of a loop: whether each applies, its cost, and how it is written.

`rounds`: keep the loop; schedule the loops in its body.
`batch`: compute all rounds of a stateless loop at once, by batching rules; operators without one
become loops.
`blocks`: compute a stateless loop in batches of rounds; the remainder separately.
`hoisted`: compute what reads no state before the loop, for all rounds.
`wave`: run two nested loops, each layer over the results of the layer before, as one loop over
anti-diagonals. Layers wait in the first rounds; results past the end of the sequence are not read,
so no operation of the body may fail on them.
`rows`: unroll a short loop around loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from stitch import ops
from stitch.compiler.dependence import reachable_from
from stitch.compiler.loops.batch_axes import (
    add_batch_axis,
    batched_scan_of,
    expand_operation,
    loop_over_batch,
    nested_batch,
    ordered_elements,
    ordered_results,
    reverse_first_axis,
    vmap_scan,
    write_scan,
)
from stitch.compiler.loops.hoisting import Hoisted, form_of_rest, hoist
from stitch.compiler.loops.loop_costs import LoopCosts
from stitch.graph import (
    BodyBuilder,
    ComputationGraph,
    VmapResult,
    WriteUnbatched,
    inline,
    scan,
    scan_in_body,
    vmap,
)
from stitch.ops import RESHAPING, definition_of
from stitch.program import ABSENT, Body, Operation, ScanForm, is_scan


@dataclass(frozen=True, slots=True)
class Loop:
    """A scan to be scheduled.

    Attributes:
        body: Its body.
        form: Its form.
        fixed: Inputs of the body that are constants.
        copies: How often the loop is written because surrounding loops are unrolled.
    """

    body: Body
    form: ScanForm
    fixed: tuple[int, ...] = ()
    copies: int = 1


@dataclass(frozen=True, slots=True)
class WrittenLoop:
    """The results of a loop, and its operators without a batching rule."""

    results: tuple[Any, ...]
    without_rule: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """An applicable schedule: estimated seconds, a function that writes it to a builder for some
    operands, and the number of rounds computed at once, if that is a choice."""

    seconds: float
    write: Callable[[Any, Sequence[Any]], WrittenLoop]
    batch_size: int = 0


@dataclass(frozen=True, slots=True)
class LoopNote:
    """The schedule of a loop, for `explain`.

    Attributes:
        where: Source location of the loop.
        count: Number of rounds.
        schedule: Name of the schedule.
        costs: Estimated seconds of all applicable schedules, by name.
        without_rule: Operators without a batching rule.
        batch_size: Rounds computed at once, for the schedule `blocks`.
        merged: Description of the loops that run together.
        executor: Executor whose rates decided.
    """

    where: str
    count: int
    schedule: str
    costs: tuple[tuple[str, float], ...] = ()
    without_rule: tuple[str, ...] = ()
    batch_size: int = 0
    merged: str = ""
    executor: str = ""

    def text(self) -> str:
        """One line.

        >>> costs = (("hoisted", 1e-3), ("rounds", 2e-3))
        >>> LoopNote("net.py:3", 64, "hoisted", costs, executor="numpy").text()
        'loop of 64 rounds at net.py:3: hoisted (1 ms by numpy); not rounds (2 ms)'
        >>> LoopNote("net.py:3", 64, "blocks", (("blocks", 1e-3),), batch_size=16).text()
        'loop of 64 rounds at net.py:3: blocks of 16 (1 ms)'
        """
        costs = {name: f"{seconds * 1e3:.3g} ms" for name, seconds in self.costs}
        size = f" of {self.batch_size}" if self.batch_size else ""
        by = f" by {self.executor}" if self.executor else ""
        taken = f" ({costs.pop(self.schedule)}{by})" if self.schedule in costs else ""
        others = ", ".join(f"{name} ({text})" for name, text in costs.items())
        rules = ", ".join(self.without_rule)
        rounds = f"{self.count} round{'s' * (self.count != 1)}"
        return (
            f"loop of {rounds} at {self.where or 'an unknown line'}: {self.schedule}{size}"
            f"{self.merged and f', {self.merged}'}{taken}{f'; not {others}' if others else ''}"
            f"{f'; without a batching rule, one by one: {rules}' if rules else ''}"
        )


#: Writes a loop to a builder: body, form, operands, source location.
WriteLoop = Callable[[Any, Body, ScanForm, Sequence[Any], str], Sequence[Any]]


class LoopWriter:
    """Writes operations for a batch, including nested loops.

    `write_loop` writes loops whose operands are not batched. `batched_bodies` collects the bodies
    of loops over a batch that contain one scan; None once these have been merged.
    """

    def __init__(
        self, bodies: Sequence[Body], estimates: Sequence[LoopCosts],
        write_loop: WriteLoop | None = None,
        batched_bodies: set[int] | None = None,
    ) -> None:  # fmt: skip
        self.bodies, self.batched_bodies = bodies, batched_bodies
        #: One per executor that may compute; `estimate` is the current one.
        self.estimates, self.estimate = estimates, estimates[0]
        self._write_loop = write_loop or self.unscheduled
        #: The product of the counts of the surrounding unrolled loops.
        self.copies = 1

    def write(self, operation: Operation, context: ops.BatchingContext) -> Sequence[Any]:
        """Write an operation with a body or without a batching rule, for a batch."""
        builder: Any = context.builder
        builder = builder.innermost(context.operands)
        bodies, kept = self.bodies, self.batched_bodies
        if not is_scan(operation):
            return expand_operation(builder, operation, bodies, context, self.write)
        form, body = ScanForm.of(operation), bodies[operation.body]
        if kept is not None and operation.body in kept:
            if any(context.batched):
                scan = batched_scan_of(operation, bodies, kept)
                return nested_batch(builder, scan, bodies, operation, context, self.write)
            results = self.unscheduled(builder, body, form, context.operands)
        elif not any(context.batched):
            return self._write_loop(builder, body, form, context.operands, context.location)
        elif form.has_condition:
            return loop_over_batch(
                builder, context,
                lambda operands, inside: self.unscheduled(inside, body, form, operands),
            )  # fmt: skip
        elif kept is None or not form.states or not form.count:
            return vmap_scan(builder, body, form, context, self.write)
        else:
            results = loop_over_batch(
                builder, context,
                lambda operands, inside: self.unscheduled(inside, body, form, operands),
            )  # fmt: skip
        kept.add(builder.operations[-1].body)
        return results

    def unscheduled(
        self, builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], where: str = ""
    ) -> Sequence[Any]:
        """Write a loop without choosing a schedule."""
        return write_rounds(builder, body, form, operands, self)

    @contextmanager
    def count_copies(self, times: int) -> Iterator[None]:
        """Count everything written in this context `times` times."""
        copies, self.copies = self.copies, self.copies * times
        try:
            yield
        finally:
            self.copies = copies


@dataclass(frozen=True, slots=True)
class ScheduledLoops:
    """A graph with scheduled loops, and one note per loop."""

    graph: ComputationGraph
    notes: tuple[LoopNote, ...]


def rounds(loop: Loop, writer: LoopWriter) -> Candidate:
    """Return the candidate that keeps the loop; it always applies."""
    return Candidate(
        writer.estimate.scan(loop.body, loop.form, fixed=loop.fixed),
        lambda builder, operands: WrittenLoop(
            write_rounds(builder, loop.body, loop.form, operands, writer)
        ),
    )


def write_rounds(
    builder: Any, body: Body, form: ScanForm, operands: Sequence[Any], writer: LoopWriter
) -> tuple[Any, ...]:
    """Write a loop as it is; return its results."""

    def write_body(given: Sequence[Any], inside: BodyBuilder) -> Sequence[Any]:
        return inline(body, given, inside, writer.write)

    return tuple(write_scan(builder, body, form, operands, write_body))


def batch(loop: Loop, writer: LoopWriter) -> Candidate | None:
    """Compute all rounds at once; None for loops with states."""
    body, form = loop.body, loop.form
    if form.states:
        return None

    def write(builder: Any, operands: Sequence[Any]) -> WrittenLoop:
        ordered = ordered_elements(builder, form, operands)
        shared = operands[form.sequences :]
        flags = [*[True] * len(ordered), *[False] * len(shared)]
        vmapped = vmap(body, [*ordered, *shared], flags, form.count, builder, writer.write)
        results = [
            add_batch_axis(builder, r.tensor, r.is_batched, form.count) for r in vmapped.results
        ]
        return WrittenLoop(
            tuple(ordered_results(builder, form, results)),
            tuple(sorted({o.op for o in vmapped.without_rule if o.body < 0})),
        )

    takes = body.inputs[: form.sequences]
    return Candidate(writer.estimate.round(body, form.count, takes, loop.fixed), write)


def blocks(loop: Loop, writer: LoopWriter) -> Candidate | None:
    """Compute several rounds at once; None for loops with states, equal rounds or few rounds."""
    form = loop.form
    if form.states or not form.sequences or form.count < 3:
        return None
    costs = {batch_size: _seconds(loop, batch_size, writer) for batch_size in _sizes(form.count)}
    # Of equal costs, take the one that needs less memory.
    batch_size = min(costs, key=lambda each: (costs[each], each))
    return Candidate(
        costs[batch_size], lambda b, o: write_blocks(b, loop, batch_size, o, writer), batch_size
    )


def _sizes(count: int) -> Sequence[int]:
    """Return candidate sizes: powers of two, and for each the nearest divisors of the count."""
    low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    divisors = [n for n in (*low, *(count // n for n in low)) if 1 < n < count]
    sizes = set()
    for power in range(1, (count - 1).bit_length()):
        size = 1 << power
        near = [n for n in divisors if size <= n * math.sqrt(2) and n <= size * math.sqrt(2)]
        sizes.update([size, *sorted(near, key=lambda n: abs(n - size))[:2]])
    return sorted(sizes)


def _seconds(loop: Loop, batch_size: int, writer: LoopWriter) -> float:
    """Return the seconds of a loop that computes `batch_size` rounds at a time."""
    form, estimate = loop.form, writer.estimate
    takes = loop.body.inputs[: form.sequences]
    groups, rest = divmod(form.count, batch_size)
    scan = ScanForm(groups, 0, form.sequences, form.collected, (), ())
    seconds = estimate.scan(loop.body, scan, batch_size, takes, loop.fixed)
    if rest:
        seconds += estimate.round(loop.body, rest, takes, loop.fixed)
    return seconds


def write_blocks(
    builder: Any, loop: Loop, batch_size: int, operands: Sequence[Any], writer: LoopWriter
) -> WrittenLoop:
    """Write a loop over groups of rounds, and the remaining rounds as one batch."""
    body, form = loop.body, loop.form
    groups, rest = divmod(form.count, batch_size)
    sequences, shared = ordered_elements(builder, form, operands), operands[form.sequences :]
    flags = [*[True] * len(sequences), *[False] * len(shared)]
    without: set[str] = set()

    def vmapped(inside: Any, elements: Sequence[Any], count: int) -> list[Any]:
        made: VmapResult = vmap(body, [*elements, *shared], flags, count, inside, writer.write)
        without.update(o.op for o in made.without_rule if o.body < 0)
        return [add_batch_axis(inside, r.tensor, r.is_batched, count) for r in made.results]

    def group(inside: BodyBuilder, _: Any, elements: Sequence[Any]) -> Any:
        return [], vmapped(inside, elements, batch_size)

    whole = groups * batch_size
    heads = [builder.index(s, slice(0, whole)) if rest else s for s in sequences]
    grouped = [builder.reshape(s, (groups, batch_size, *s.shape[1:])) for s in heads]
    _, collected = scan_in_body(builder, group, [], grouped)
    results = [builder.reshape(r, (whole, *r.shape[2:])) for r in collected]
    if rest:
        left = [builder.index(s, slice(whole, None)) for s in sequences]
        tails = vmapped(builder, left, rest)
        results = [builder.concat(pair, 0) for pair in zip(results, tails, strict=True)]
    return WrittenLoop(tuple(ordered_results(builder, form, results)), tuple(sorted(without)))


def hoist_before(loop: Loop, writer: LoopWriter) -> Candidate | None:
    """Hoist state-independent operations; None if every product reads a state."""
    form, estimate = loop.form, writer.estimate
    if not form.states or form.count < 2 or not form.sequences:
        return None
    parts = hoist(loop.body, form)
    if parts is None:
        return None
    takes = parts.before.inputs[: form.sequences]
    return Candidate(
        estimate.round(parts.before, form.count, takes, loop.fixed)
        + estimate.scan(parts.rest, form_of_rest(parts, form), fixed=loop.fixed),
        lambda builder, operands: WrittenLoop(_written(builder, parts, form, operands, writer)),
    )


def _written(
    builder: Any, parts: Hoisted, form: ScanForm, operands: Sequence[Any], writer: LoopWriter
) -> tuple[Any, ...]:
    """Write the hoisted operations for all rounds, then the rest of the loop."""
    states, first = operands[: form.states], form.states + form.sequences
    sequences, shared = operands[form.states : first], operands[first:]
    ordered = [
        reverse_first_axis(builder, s) if back else s
        for s, back in zip(sequences, form.taken_backward, strict=True)
    ]
    flags = [*[True] * len(ordered), *[False] * len(shared)]
    before = vmap(
        parts.before, [*ordered, *shared], flags, form.count, builder, writer.write
    ).results
    passed = [add_batch_axis(builder, r.tensor, r.is_batched, form.count) for r in before]
    taken = [*states, *ordered, *passed, *shared]
    return write_rounds(builder, parts.rest, form_of_rest(parts, form), taken, writer)


# Wavefronts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wave:
    """Two nested scans that form a wavefront.

    Attributes:
        inner: The inner scan.
        form: Its form.
        taken: Index of its operand that is the sequence from the layer before.
        given: Index of its collected result that is the sequence for the next layer.
        rest: Computes its other operands.
        turned: Axis order that makes the sequence of the outer state; empty if they are equal.
    """

    inner: Operation
    form: ScanForm
    taken: int
    given: int
    rest: Body
    turned: tuple[int, ...] = ()


def wave_of(body: Body, form: ScanForm) -> Wave | None:
    """Return the wavefront of an outer scan, or None if it is none."""
    scans = [o for o in body.operations if is_scan(o) and ScanForm.of(o).states]
    if form.states != 1 or form.count < 2 or len(scans) != 1 or any(form.taken_backward):
        return None
    inner, inside = scans[0], ScanForm.of(scans[0])
    same, first = _same_values(body), inside.states
    state, final = body.inputs[0], same.get(body.outputs[0], body.outputs[0])
    if (
        inside.sequences != 1 or any(inside.taken_backward) or any(inside.given_backward)
        or any(form.given_backward) or not inside.count or inside.has_condition
    ):  # fmt: skip
        return None
    read, after = same.get(inner.inputs[first], inner.inputs[first]), final
    turned: tuple[int, ...] = ()
    if read != state:
        ways = _there_and_back(body, same, read, final)
        if ways is None or ways[0] != state:
            return None
        _, after, turned = ways
    # The outer results must be the sequence, and no other result of the inner scan may be read.
    if after not in inner.outputs[first:] or any(same.get(v, v) != final for v in body.outputs):
        return None
    depends, handed = {state}, {state, read, after, final}
    others = []
    for operation in body.operations:
        if operation is inner:
            depends.update(v for v in operation.outputs if v != ABSENT)
        elif depends.isdisjoint(operation.inputs):
            others.append(operation)
        elif all(same.get(v, v) in handed for v in operation.outputs):
            depends.update(operation.outputs)
        else:
            return None
    wanted = [v for i, v in enumerate(inner.inputs) if i != first]
    if not depends.isdisjoint(wanted):
        return None
    made = {v for o in others for v in o.outputs}
    rest = Body(
        body.inputs[1:], tuple(dict.fromkeys(v for v in wanted if v in made)), body.values,
        tuple(others), body.constants,
    )  # fmt: skip
    return Wave(inner, inside, first, inner.outputs.index(after) - first, rest, turned)


def _there_and_back(
    body: Body, same: dict[int, int], read: int, final: int
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the operand of a transpose, the value transposed back, and the axis order.

    None if there is no such pair. The batch axis is outside of sequences, but inside of elements.
    """
    makers = {v: o for o in body.operations for v in o.outputs}
    there, back = makers.get(read), makers.get(final)
    if (
        there is None
        or back is None
        or {(there.domain, there.op), (back.domain, back.op)} != {("", "Transpose")}
    ):
        return None
    order, other = (o.attributes.get("perm") for o in (there, back))
    if not isinstance(order, tuple) or not isinstance(other, tuple):
        return None
    if [order[int(axis)] for axis in other] != list(range(len(order))):
        return None
    source, made = there.inputs[0], back.inputs[0]
    return same.get(source, source), same.get(made, made), tuple(map(int, order))


def _same_values(body: Body) -> dict[int, int]:
    """Return values that equal others: by another name, or reshaped and reshaped back."""
    same: dict[int, int] = {}
    for operation in body.operations:
        if operation.domain or operation.op not in RESHAPING:
            continue
        source = operation.inputs[0]
        source, result = same.get(source, source), operation.outputs[0]
        if body.values[source].type == body.values[result].type:
            same[result] = source
    return same


def can_fail(inner: Body, form: ScanForm, bodies: Sequence[Body], *, elements: bool = True) -> bool:
    """Whether a round of an inner scan may raise past the end of the sequence.

    That is so if an operation checks data, such as indices, that vary between rounds. With
    `elements=False`, only data that depend on states count.
    """
    differs = inner.inputs[: form.states + form.sequences * elements]
    return _looks(inner, set(differs), bodies)


def _looks(body: Body, differs: set[int], bodies: Sequence[Body]) -> bool:
    """Whether an operation checks data that depend on `differs`."""
    differs = reachable_from(body.operations, differs)
    for operation in body.operations:
        if differs.isdisjoint(operation.inputs):
            continue
        if operation.body != ABSENT:
            inside = bodies[operation.body]
            if _looks(inside, set(inside.inputs), bodies):
                return True
        # No operator checks the contents of its first operand.
        elif definition_of(operation).checks and not differs.isdisjoint(operation.inputs[1:]):
            return True
    return False


def write_wave(
    builder: Any, wave: Wave, inner: Body, form: ScanForm, operands: Sequence[Any],
    write_unbatched: WriteUnbatched,
) -> list[Any]:  # fmt: skip
    """Write a wavefront; return the results of the outer scan."""
    depth, length = form.count, wave.form.count
    sequence, elements = operands[0], operands[1 : 1 + form.sequences]
    if wave.turned:
        sequence = builder.transpose(sequence, wave.turned)
    back = [int(axis) for axis in np.argsort(wave.turned)]
    shared = operands[1 + form.sequences :]
    flags = [*[True] * len(elements), *[False] * len(shared)]
    made = vmap(wave.rest, [*elements, *shared], flags, depth, builder, write_unbatched).results
    known: dict[int, tuple[Any, bool]] = {
        v: (r.tensor, r.is_batched) for v, r in zip(wave.rest.outputs, made, strict=True)
    }
    for value, tensor, flag in zip(wave.rest.inputs, [*elements, *shared], flags, strict=True):
        known[value] = (tensor, flag)
    for constant in wave.rest.constants:
        known.setdefault(constant.value, (constant.data, False))
    inputs = [
        known[v] for i, v in enumerate(wave.inner.inputs) if i != wave.taken
    ]  # fmt: skip
    states = [add_batch_axis(builder, *each, depth) for each in inputs[: wave.form.states]]
    weights = inputs[wave.form.states :]
    leaf = sequence.shape[1:]
    register = add_batch_axis(builder, builder.index(sequence, 0), False, depth)
    padding = add_batch_axis(builder, builder.index(sequence, length - 1), False, depth - 1)
    padded = builder.concat([sequence, padding], 0)
    body_flags = [*[True] * (wave.form.states + 1), *[batched for _, batched in weights]]
    everything = form.collected > 0

    def cells(before: Sequence[Any], x: Any, mask: Any | None) -> Any:
        inside: Any = before[0].builder
        *held, made_before = before
        shifted = inside.concat([inside.unsqueeze(x, 0), inside.index(
            made_before, slice(0, depth - 1))], 0)  # fmt: skip
        results = vmap(
            inner, [*held, shifted, *[w for w, _ in weights]], body_flags, depth, inside,
            write_unbatched,
        ).results  # fmt: skip
        tensors = [add_batch_axis(inside, r.tensor, r.is_batched, depth) for r in results]
        after = tensors[: wave.form.states]
        if mask is not None:
            after = [
                inside.where(inside.reshape(mask, (depth, *[1] * (len(t.shape) - 1))), t, old)
                for t, old in zip(after, held, strict=True)
            ]
        made_now = tensors[wave.form.states + wave.given]
        given = [made_now] if everything or mask is not None else [inside.index(made_now, -1)]
        return [*after, made_now], given

    held = [*states, register]
    indices = np.arange(depth)
    masks = builder.constant(indices[None, :] <= np.arange(depth - 1)[:, None])
    after_ramp, ramp = scan(
        builder, lambda s, x: cells(s, x[0], x[1]), held,
        [builder.index(padded, slice(0, depth - 1)), masks],
    )  # fmt: skip
    _, main = scan(
        builder, lambda s, x: cells(s, x[0], None), list(after_ramp),
        [builder.index(padded, slice(depth - 1, None))],
    )  # fmt: skip
    if not everything:
        return [builder.transpose(main[0], back) if back else main[0]]
    rows = builder.reshape(builder.concat([ramp[0], main[0]], 0), (-1, *leaf))
    places = (np.arange(length)[None, :] + indices[:, None]) * depth + indices[:, None]
    layers = builder.reshape(builder.gather(rows, places.ravel(), 0), (depth, length, *leaf))
    if back:
        layers = builder.transpose(layers, [0, *(axis + 1 for axis in back)])
    return [builder.index(layers, -1), *[layers] * form.collected]


def wave(loop: Loop, writer: LoopWriter) -> Candidate | None:
    """Run nested loops along anti-diagonals; None unless they form a wavefront."""
    found = wave_of(loop.body, loop.form)
    if found is None:
        return None
    cell, depth = writer.bodies[found.inner.body], loop.form.count
    if can_fail(cell, found.form, writer.bodies):
        return None
    diagonals = replace(found.form, count=found.form.count + depth - 1)
    return Candidate(
        writer.estimate.scan(cell, diagonals, depth),
        lambda builder, operands: WrittenLoop(
            tuple(write_wave(builder, found, cell, loop.form, operands, writer.write))
        ),
    )


#: Maximum number of rounds to unroll, including those of surrounding unrolled loops.
MOST_ROWS = 64
#: Maximum number of unrolled operations; a nested loop counts as one.
MOST_WRITTEN = 2048


def rows(loop: Loop, writer: LoopWriter) -> Candidate | None:
    """Unroll the loop; None for loops without nested loops or states, and for long loops."""
    body, form = loop.body, loop.form
    copies = form.count * loop.copies
    if (
        not form.states or not 0 < copies <= MOST_ROWS
        or copies * len(body.operations) > MOST_WRITTEN
        or not any(is_scan(o) for o in body.operations)
    ):  # fmt: skip
        return None
    return Candidate(
        form.count * _row_seconds(loop, copies, writer),
        lambda builder, operands: WrittenLoop(_write_rows(builder, loop, operands, writer)),
    )


def _row_seconds(loop: Loop, copies: int, writer: LoopWriter) -> float:
    """Return the seconds of one unrolled round: nested loops scheduled, weights constant."""
    body = loop.body
    beside = replace(body, operations=tuple(o for o in body.operations if not is_scan(o)))
    seconds = writer.estimate.round(beside, fixed=body.inputs[1:])
    for operation in body.operations:
        if is_scan(operation):
            inner, form = writer.bodies[operation.body], ScanForm.of(operation)
            shared = inner.inputs[form.states + form.sequences :]
            seconds += least_seconds(Loop(inner, form, shared, copies), writer)
    return seconds


def _write_rows(
    builder: Any, loop: Loop, operands: Sequence[Any], writer: LoopWriter
) -> tuple[Any, ...]:
    """Write an unrolled loop."""
    form = loop.form
    states, first = list(operands[: form.states]), form.states + form.sequences
    sequences, shared = operands[form.states : first], list(operands[first:])
    known = [builder.known_data(sequence) for sequence in sequences]
    given: list[list[Any]] = []
    with writer.count_copies(form.count):
        for round_ in range(form.count):
            elements = []
            for sequence, data, back in zip(sequences, known, form.taken_backward, strict=True):
                at = form.count - 1 - round_ if back else round_
                # Keep constants constant, so that they can be folded.
                elements.append(
                    builder.index(sequence, at) if data is None
                    else builder.parameter(f"{sequence.name}_{at}", data[at])
                )  # fmt: skip
            inside = [*states, *elements, *shared]
            tensors = inline(loop.body, inside, builder, writer.write)
            states = tensors[: form.states]
            given.append(tensors[form.states :])
    collected = [
        builder.stack([each[i] for each in (given[::-1] if back else given)])
        for i, back in enumerate(form.given_backward)
    ]
    return (*states, *collected)


#: Returns a candidate, or None if the schedule does not apply to the loop.
Schedule = Callable[[Loop, LoopWriter], Candidate | None]
TABLE: Mapping[str, Schedule] = MappingProxyType({
    "batch": batch, "blocks": blocks, "hoisted": hoist_before, "rounds": rounds, "rows": rows,
    "wave": wave,
})  # fmt: skip


def candidates_for(loop: Loop, writer: LoopWriter) -> dict[str, Candidate]:
    """Return the applicable schedules by name.

    A loop with a condition only runs as `rounds`: others would compute rounds past its end.
    """
    if loop.form.has_condition:
        return {"rounds": rounds(loop, writer)}
    found = {name: schedule(loop, writer) for name, schedule in TABLE.items()}
    return {name: candidate for name, candidate in found.items() if candidate is not None}


def least_seconds(loop: Loop, writer: LoopWriter) -> float:
    """Return the seconds of a loop under its cheapest schedule."""
    return min(candidate.seconds for candidate in candidates_for(loop, writer).values())
