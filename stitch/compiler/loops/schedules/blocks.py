"""`blocks`: a loop without states, so many of its rounds at a time as cost least; those that are
left over by themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stitch.compiler.loops.lanes import elements_in_order, in_lanes, results_in_order
from stitch.compiler.loops.schedules.loop import Candidate, Loop, Surroundings, WrittenLoop
from stitch.graph import BodyBuilder, Lifted, lift, scan_in_body
from stitch.program import ScanForm


def blocks(loop: Loop, around: Surroundings) -> Candidate | None:
    """None for loops with states, or of the same in all rounds, or of too few."""
    form = loop.form
    if form.states or not form.sequences or form.count < 3:
        return None
    costs = {lanes: _seconds(loop, lanes, around) for lanes in _sizes(form.count)}
    # Of two that cost the same, the one that needs less memory.
    lanes = min(costs, key=lambda each: (costs[each], each))
    return Candidate(costs[lanes], lambda b, o: written_blocks(b, loop, lanes, o, around), lanes)


def _sizes(count: int) -> Sequence[int]:
    """Powers of two, and for each the divisors of a count that are nearest to it: they leave no
    rest."""
    low = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    divisors = [n for n in (*low, *(count // n for n in low)) if 1 < n < count]
    sizes = set()
    for power in range(1, (count - 1).bit_length()):
        size = 1 << power
        near = [n for n in divisors if size <= n * math.sqrt(2) and n <= size * math.sqrt(2)]
        sizes.update([size, *sorted(near, key=lambda n: abs(n - size))[:2]])
    return sorted(sizes)


def _seconds(loop: Loop, lanes: int, around: Surroundings) -> float:
    """What a loop costs that is computed so many rounds at a time."""
    form, estimate = loop.form, around.estimate
    takes = loop.body.inputs[: form.sequences]
    groups, rest = divmod(form.count, lanes)
    scan = ScanForm(groups, 0, form.sequences, form.collected, (), ())
    seconds = estimate.scan(loop.body, scan, lanes, takes, loop.fixed)
    if rest:
        seconds += estimate.round(loop.body, rest, takes, loop.fixed)
    return seconds


def written_blocks(
    builder: Any, loop: Loop, lanes: int, operands: Sequence[Any], around: Surroundings
) -> WrittenLoop:
    """A loop over groups of rounds, and what is left."""
    body, form = loop.body, loop.form
    groups, rest = divmod(form.count, lanes)
    sequences, shared = elements_in_order(builder, form, operands), operands[form.sequences :]
    flags = [*[True] * len(sequences), *[False] * len(shared)]
    without: set[str] = set()

    def lifted(inside: Any, elements: Sequence[Any], count: int) -> list[Any]:
        made: Lifted = lift(body, [*elements, *shared], flags, count, inside, around.written)
        without.update(o.op for o in made.without_rule if o.body < 0)
        return [in_lanes(inside, r.tensor, r.is_batched, count) for r in made.results]

    def group(inside: BodyBuilder, _: Any, elements: Sequence[Any]) -> Any:
        return [], lifted(inside, elements, lanes)

    whole = groups * lanes
    heads = [builder.index(s, slice(0, whole)) if rest else s for s in sequences]
    grouped = [builder.reshape(s, (groups, lanes, *s.shape[1:])) for s in heads]
    _, collected = scan_in_body(builder, group, [], grouped)
    results = [builder.reshape(r, (whole, *r.shape[2:])) for r in collected]
    if rest:
        left = [builder.index(s, slice(whole, None)) for s in sequences]
        tails = lifted(builder, left, rest)
        results = [builder.concat(pair, 0) for pair in zip(results, tails, strict=True)]
    return WrittenLoop(tuple(results_in_order(builder, form, results)), tuple(sorted(without)))
