"""One case measured: all ways give the same numbers, then take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from fractal_ways import ours
from fractal_ways.cases import Absent, Case, NotAvailableError, Way, check_alike, numbers, reason_of
from fractal_ways.measuring import interleaved
from fractal_ways.results import NAMED, OURS, PEER, Figure, Result, Row
from stitch.program import Array

#: The schedule that is chosen / the best one by name, by one executor.
SCHEDULE_GOAL = 1.05


def measured(
    case: Case, executors: Sequence[str], rounds: int, more: Sequence[Figure] = ()
) -> Result:
    """All ways of a case; raises `AssertionError` where results differ, before anything is
    timed."""
    absent: list[Absent] = []
    with ExitStack() as stack:
        found: list[tuple[Way, Array]] = []
        for peer in case.peers:
            try:
                run = peer.make()
            except (ImportError, NotAvailableError) as error:
                absent.append(Absent(peer.name, reason_of(error)))
                continue
            found.append((Way(peer.name, PEER, run), numbers(run())))
        for each in ours.ways_of(case, executors, stack):
            if isinstance(each, Absent):
                absent.append(each)
            else:
                found.append(each)
        for way, result in found:
            check_alike(f"{case.name}, {way.name}", result, found[0][1])
        ways = [way for way, _ in found]
        spent = interleaved([way.run for way in ways], rounds)
    rows = [Row.of(w.name, w.side, s, w.note) for w, s in zip(ways, spent, strict=True)]
    figures = [*_choices(rows, executors), *more]
    if case.small is not None:
        slow, figure = ours.beside_sequential(case.small, rounds)
        rows += slow
        figures.append(figure)
    return Result(case.name, case.text, tuple(rows), tuple(absent), case.goals, tuple(figures))


def _choices(rows: Sequence[Row], executors: Sequence[str]) -> Iterator[Figure]:
    """How well schedules are chosen: of each executor what is chosen, over the best by name."""
    ratios = []
    for executor in executors:
        chosen = f"stitch {executor}, {ours.CHOSEN}"
        mine = {
            row.way: row.processor_ms
            for row in rows
            if row.side in (OURS, NAMED) and row.way.startswith(f"stitch {executor}, ")
        }  # fmt: skip
        if chosen in mine and len(mine) > 1:
            ratios.append((mine[chosen] / max(min(mine.values()), 1e-9), executor))
    if ratios:
        ratio, executor = max(ratios)
        name = "schedule chosen / best of all, worst executor (SCHEDULE_GOAL)"
        yield Figure(name, ratio, "x", SCHEDULE_GOAL, executor)
