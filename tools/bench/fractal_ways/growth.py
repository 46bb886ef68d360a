"""How a stacked LSTM grows with its depth: rounds of its scans, and time, with each schedule.

A round is one call of all that a cell is made of; along diagonals there are depth + length - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import stitch
from fractal_ways.cases import check_alike, numbers
from fractal_ways.measuring import interleaved
from fractal_ways.ours import MACHINE, loops_of, schedules_for
from fractal_ways.recurrent_cases import lstm_network, lstm_weights, normal
from fractal_ways.results import Figure, Result, Row
from stitch import fractal as ops
from stitch.fractal import CompiledNest, FractalTensor
from stitch.program import Body, Program, ScanForm, is_scan

#: Rounds along diagonals, beyond depth + length - 1.
WAVE_ROUNDS_GOAL = 0.0
#: The schedule that runs along diagonals.
WAVE = "wave"


@dataclass(frozen=True, slots=True)
class Point:
    """One nest with one schedule."""

    hidden: int
    depth: int
    schedule: str
    rounds: int
    processor_ms: float
    clock_ms: float


def rounds_of(program: Program) -> int:
    """How many rounds of innermost loops a run has.

    A loop around loops has those of its body, each time.
    """

    def within(part: Program | Body) -> int:
        found = 0
        for operation in part.operations:
            if operation.body < 0:
                continue
            inner = within(program.bodies[operation.body])
            times = ScanForm.of(operation).count if is_scan(operation) else 1
            found += times * max(inner, int(is_scan(operation)))
        return found

    return within(program)


def points(
    hiddens: Sequence[int], depths: Sequence[int], length: int, batch: int, rounds: int
) -> Iterator[tuple[Point, str]]:
    """Each nest by each schedule, on NumPy, with how its loops run; raises `AssertionError` where
    results differ."""
    for hidden in hiddens:
        xs = FractalTensor(normal(length, batch, hidden))
        for depth in depths:
            network = lstm_network(*lstm_weights(depth, hidden), batch, hidden)
            chosen = ops.compile(network, xs, target=MACHINE)
            nests = {"chosen": chosen}
            nests |= {
                schedule: ops.compile(network, xs, target=MACHINE, schedule=schedule)
                for schedule in schedules_for(chosen, "numpy")
            }
            with ExitStack() as stack:
                for nest in nests.values():
                    nest.on(stack.enter_context(stitch.open_device(MACHINE, executor="numpy")))
                expected = numbers(chosen(xs))
                for name, nest in nests.items():
                    check_alike(f"depth {depth}, {name}", numbers(nest(xs)), expected)
                spent = interleaved([_run(nest, xs) for nest in nests.values()], rounds)
            for (name, nest), taken in zip(nests.items(), spent, strict=True):
                count = rounds_of(nest.binary.programs[0])
                processor, clock = taken.processor * 1e3, taken.clock * 1e3
                yield Point(hidden, depth, name, count, processor, clock), loops_of(nest)


def _run(nest: CompiledNest, xs: FractalTensor) -> Any:
    return lambda: numbers(nest(xs))


def result_of(found: Sequence[tuple[Point, str]], hidden: int, length: int, batch: int) -> Result:
    """The table of one hidden size."""
    mine = [(point, loops) for point, loops in found if point.hidden == hidden]
    rows = [
        Row(
            f"depth {p.depth}, {p.schedule}: {p.rounds} rounds", f"depth {p.depth}",
            p.processor_ms, p.clock_ms, loops,
        )
        for p, loops in mine
    ]  # fmt: skip
    figures = [
        _wave_rounds(mine, depth, length) for depth in dict.fromkeys(p.depth for p, _ in mine)
    ]
    text = f"stacked LSTM of {length} words, batch {batch}, on NumPy"
    return Result(f"growth, hidden {hidden}", text, tuple(rows), more=tuple(figures))


def _wave_rounds(found: Sequence[tuple[Point, str]], depth: int, length: int) -> Figure:
    """Of a depth: rounds along diagonals beyond the fewest that there can be. One layer has no
    diagonals, and as many rounds as words."""
    fewest = depth + length - 1
    here = [(point, loops) for point, loops in found if point.depth == depth]
    waves = [
        point for point, loops in here
        if WAVE in (point.schedule, *loops.split(", ")) or depth == 1
    ]  # fmt: skip
    name = f"depth {depth}: rounds along diagonals less {fewest} (WAVE_ROUNDS_GOAL)"
    if not waves:
        return Figure(name, None, "", WAVE_ROUNDS_GOAL, "no schedule takes them")
    least = min(point.rounds for point in waves)
    return Figure(name, least - fewest, "", WAVE_ROUNDS_GOAL, f"{least} rounds")
