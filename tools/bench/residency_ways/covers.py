"""Other ways to choose who gives way over a chain, what a choice costs, and the exact optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from stitch.machine import Machine, room_per_bank
from stitch.planner.plan import PlanRequest, copy_cost, evicted_desc
from stitch.planner.residency import Stay, StayChain
from stitch.program import Space

#: Bytes and seconds.
Cost = tuple[int, float]
#: Of the stays over a task that lacks room the one of the greatest rank gives way.
RULES: dict[str, Callable[[StayChain, Stay], int]] = {
    "lru": lambda chain, stay: -stay.first,
    "belady": lambda chain, stay: stay.end,
    "farthest_last": lambda chain, stay: max(
        s.end for s in chain.stays if s.holder == stay.holder
    ),
}  # fmt: skip


def costs(machine: Machine, chain: StayChain) -> tuple[list[Cost], list[Cost]]:
    """(Bytes and seconds for each stay to come back, and for each holder to be written)."""
    ways = [(h.desc, evicted_desc(h.desc)) for h in chain.holders]
    back = [
        (copy_cost(machine, *ways[s.holder][::-1])[0] if s.back_seconds else 0, s.back_seconds)
        for s in chain.stays
    ]
    written = [
        (copy_cost(machine, *way)[0], h.write_seconds)
        for way, h in zip(ways, chain.holders, strict=True)
    ]
    return back, written


def total(machine: Machine, chain: StayChain, away: Sequence[int]) -> Cost:
    """What it costs that these stays (by number) give way."""
    back, written = costs(machine, chain)
    parts = [back[i] for i in away]
    parts += [written[h] for h in {chain.stays[i].holder for i in away if chain.stays[i].is_dirty}]
    return sum(n for n, _ in parts), sum(s for _, s in parts)


def while_held(chain: StayChain, request: PlanRequest, held: Sequence[int]) -> StayChain:
    """The chain of a request whose results must not be lost before they are let go of: in L1, or
    written, until the last task that was queued while they were `held`."""
    last = {v: t for t, task in enumerate(request.tasks) for v in (*task.inputs, *task.outputs)}
    stays, excess = list(chain.stays), list(chain.excess)
    for task, until in zip(request.tasks, held, strict=True):
        (value,), (desc,) = task.outputs, task.transformation.outputs
        if desc.layout.space is not Space.L1 or value in request.kept:
            continue
        # The first that it lies in; others are copies of it.
        holder = next(h for h, those in enumerate(chain.holders) if those.values == {value})
        is_dirty = all(stay.is_dirty for stay in chain.stays if stay.holder == holder)
        start, end = last[value] + 1, until + 1
        if is_dirty and start < end:
            nbytes = room_per_bank(desc, request.machine.shape)
            stays.append(Stay(holder, start, end, nbytes, 0.0, is_dirty))
            for t in range(start, end):
                excess[t] += nbytes
    return replace(chain, stays=tuple(stays), excess=tuple(excess))


def by_rule(chain: StayChain, rank: Callable[[StayChain, Stay], int]) -> list[int]:
    """Task by task, the stay of the greatest rank gives way until there is room."""
    away: list[int] = []
    for task, excess in enumerate(chain.excess):
        over = [i for i, s in enumerate(chain.stays) if s.first <= task < s.end]
        left = excess - sum(chain.stays[i].nbytes for i in away if i in over)
        while left > 0:
            away.append(
                max((i for i in over if i not in away), key=lambda i: rank(chain, chain.stays[i]))
            )
            left -= chain.stays[away[-1]].nbytes
    return away


def optimum(back: Sequence[float], written: Sequence[float], chain: StayChain) -> float | None:
    """The least cost of any cover, by HiGHS; None where it is not installed."""
    try:
        import highspy
    except ImportError:
        return None
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("mip_rel_gap", 1e-9)
    # HiGHS takes what is below 1e-6 as nothing.
    unit = max([*back, *written, 1e-30]) / 1000
    gone = [solver.addBinary(obj=cost / unit) for cost in back]
    writes = [solver.addBinary(obj=cost / unit) for cost in written]
    for x, stay in zip(gone, chain.stays, strict=True):
        if stay.is_dirty:
            solver.addConstr(x <= writes[stay.holder])
    for task, over in chain.spanning().items():
        solver.addConstr(sum(chain.stays[i].nbytes * gone[i] for i in over) >= chain.excess[task])
    solver.minimize()
    return float(solver.getObjectiveValue()) * unit
