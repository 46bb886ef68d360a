"""Residency: what plans carry out of L1 and back, beside other rules and the exact optimum.

Chains are planned through a device with the null executor: layers as programs of their own that
take their weights as inputs (a transformer, a CNN, a U-net, training steps, loops over weights,
weights in random order by seed), on a machine with little L1. Counted is what evictions carry and
what comes back for another use: first copies are the same in every plan. LRU, Belady (farthest next
use) and tt-mlir's rule (farthest last use) choose among the same stays; the optimum is an integer
program by HiGHS (`highspy`, of the dependency group `bench`; a row says where it is missing).

Plans save simulated seconds, in which the host's link, the start of a copy and its pages count as
well as its bytes; of what takes as long they carry the fewest bytes. So each chain is planned
twice: with copies that cost their bytes and nothing else (DRAM bytes: plans and optimum have the
same aim), and as the machine is described (seconds; `B/best` are its bytes over the fewest, and
`s/ours` what the choice with the fewest takes there, over ours). The tensors that a chain starts
with lie in DRAM, or (rows "host") are arrays of the host that come back over its link. `learned`:
loops in which each task is planned by itself, so that the next uses are learned; DRAM bytes from
the fourth round on, over those of the optimum that knows all rounds. As these plans must, it keeps
what the chain holds while a task is queued, read again or not.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from command_line import bench_parser, exit_code_for, from_zero, refused
from residency_ways.chains import (
    Chain,
    Work,
    cnn,
    in_any_order,
    loop,
    priced_by_bytes,
    small_machine,
    training,
    transformer,
    unet,
)
from residency_ways.covers import RULES, Cost, by_rule, costs, optimum, total, while_held

import stitch
from stitch.cli.module_files import read_document
from stitch.errors import StitchError
from stitch.machine import Machine
from stitch.planner import Copy, Execute, Plan, PlanRequest, Relocate, plan
from stitch.planner.residency import StayChain, chain_of, choose
from stitch.program import Space
from stitch.report import read_record
from stitch.runtime.events import Event, PlanRun

RATIO_MEAN, RATIO_WORST, BOUND_MEAN, LEARNED_WORST = 1.02, 1.05, 0.97, 1.10
#: Sums of the same costs in another order.
SAME = 1 + 1e-6
#: Rounds of a loop in which next uses are learned, and rounds that count.
LEARNING, COUNTED = 3, 12
TRACES = """
--traces FILE: records as `stitch-run PIPELINE --record FILE` writes them (JSON,
see docs/observing.md); each plan in it in which something has to leave L1 is a row FILE:NUMBER,
planned anew from its request: machine, tasks, what lies where, what is kept, and predicted uses.
Another format is one error that names the place in the file; exit code 3.

--check exits 1 where a goal is missed. In bytes and in seconds: over the optimum at most 1.02 in
the mean and 1.05 on every chain, never above Belady, our bound at least 0.97 of the optimum in the
mean (without HiGHS: of what our cover costs) and the whole of it where the search has ended. Where
next uses are learned: at most 1.10 of the optimum; in a random order nothing can be learned, so
that goal may be missed there.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One chain: DRAM bytes where copies cost bytes, simulated seconds as the machine is described.

    `ratio` and `ratio_seconds`: ours ÷ best; `bound` and `bound_seconds`: what our search proves ÷
    best; `ended`: whether the searches have proved their answers. `gap`: what the plan in seconds
    says of itself; `carried_bytes`: its bytes, and `fewest_seconds`: what the choice with the
    fewest bytes takes on its machine. None: no HiGHS, or no loop.
    """

    chain: str
    tasks: int
    ours_bytes: int
    lru_bytes: int
    belady_bytes: int
    farthest_last_bytes: int
    best_bytes: int | None
    ratio: float | None
    bound: float
    ours_seconds: float
    lru_seconds: float
    belady_seconds: float
    farthest_last_seconds: float
    best_seconds: float | None
    ratio_seconds: float | None
    bound_seconds: float
    ended: bool
    gap: float | None
    carried_bytes: int
    fewest_seconds: float
    planning_ms: float
    learned: float | None


#: Bytes of L1 in each bank, what runs, and rounds of it that are known at once.
CHAINS: dict[str, tuple[int, Chain, int]] = {
    "transformer": (9_216, transformer, 2), "cnn": (7_168, cnn, 3), "unet": (8_192, unet, 2),
    "training": (9_216, training, 3), "loop": (7_168, loop, 5),
}  # fmt: skip


def planned(
    machine: Machine, chain: Chain, rounds: int, held: int, home: Space
) -> tuple[PlanRequest, list[int]]:
    """What a device is asked to plan for a chain that is known as a whole; the results of so many
    rounds are held. With it, the last task that was queued while the result of each was held."""
    with stitch.open_device(machine, executor="null", window=4096) as device:
        work = Work(device, home)
        results = deque(chain(work, rounds), maxlen=held)
        device.run_queue()
        ((made, _),) = device.history.plans
        del results
    # Nothing comes after what is known.
    return replace(made.request, later=()), work.held


# -- what it costs ------------------------------------------------------------------------------


def through_dram(made: Plan) -> int:
    """Bytes that a plan carries from L1 to DRAM and back."""
    nbytes = 0
    for step in made.copies:
        if isinstance(step, Relocate):
            nbytes += 2 * step.bounced_nbytes
        elif (step.source.desc.layout.space is Space.L1) != (
            step.target.desc.layout.space is Space.L1
        ):
            nbytes += step.nbytes
    return nbytes


def paid(made: Plan) -> Cost:
    """Bytes and seconds of evictions, of bounces, and of copies that bring back what has been in L1
    before."""
    places = {b.number: b.space for b in made.request.buffers}
    known = {
        (r.value, i.desc) for r in made.request.residents for i in r.instances
        if places[i.buffer] is Space.L1
    }  # fmt: skip
    nbytes, seconds = 0, 0.0
    for step in made.steps:
        if isinstance(step, Execute):
            outputs = made.request.tasks[step.task].outputs
            known |= set(zip(outputs, (i.desc for i in step.outputs), strict=True))
        elif isinstance(step, Copy):
            if step.kind == "evict" or (step.made, step.target.desc) in known:
                nbytes, seconds = nbytes + step.nbytes, seconds + step.seconds
            known.add((step.made, step.target.desc))
        elif isinstance(step, Relocate) and step.bounced_nbytes:
            nbytes, seconds = nbytes + 2 * step.bounced_nbytes, seconds + step.seconds
    return nbytes, seconds


def best_of(machine: Machine, chain: StayChain, which: int) -> float | None:
    """The optimum of bytes (0) or of seconds (1)."""
    back, written = costs(machine, chain)
    return optimum([cost[which] for cost in back], [cost[which] for cost in written], chain)


def measure(name: str, request: PlanRequest, learned: float | None = None) -> Row | None:
    """One request; None where nothing has to leave."""
    found = []
    for which, machine in enumerate((priced_by_bytes(request.machine), request.machine)):
        asked = replace(request, machine=machine)
        chain = chain_of(asked)
        choice = choose(chain)
        if choice is None or not choice.away:
            return None
        started = time.process_time()
        made = plan(asked)
        planning = 1e3 * (time.process_time() - started)
        ways = [by_rule(chain, rank) for rank in RULES.values()]
        ours = [cost[which] for cost in (paid(made), *(total(machine, chain, w) for w in ways))]
        best = best_of(machine, chain, which)
        least = choice.least_seconds / (best_seconds(choice.seconds, best, which) or 1.0)
        found.append((ours, best, least, choice.is_best, made, planning))
        if not which:
            fewest = [i for i, stay in enumerate(chain.stays) if stay in set(choice.away)]
    (nbytes, best, bound, ended, _, _), (seconds, soonest, bound_s, ended_s, made, ms) = found
    return Row(
        name, len(request.tasks), round(nbytes[0]), round(nbytes[1]), round(nbytes[2]),
        round(nbytes[3]),
        None if best is None else round(best), over(nbytes[0], best), bound,
        seconds[0], seconds[1], seconds[2], seconds[3], soonest, over(seconds[0], soonest), bound_s,
        ended and ended_s, made.gap, paid(made)[0], total(request.machine, chain, fewest)[1], ms,
        learned,
    )  # fmt: skip


def best_seconds(cover: float, best: float | None, which: int) -> float:
    """The optimum in the seconds of its machine; what our cover costs where it is not known."""
    if best is None:
        return cover
    return best if which else best / 1e9


def over(a: float, b: float | None) -> float | None:
    return None if b is None else a / b if b else 1.0


def learned(machine: Machine, chain: Chain, home: Space) -> float | None:
    """DRAM bytes of a loop whose tasks are planned one by one, from the fourth round on, over the
    optimum's of so many rounds more."""
    machine = priced_by_bytes(machine)
    least = [_least(machine, chain, rounds, home) for rounds in (LEARNING, LEARNING + COUNTED)]
    if least[0] is None or least[1] is None or least[0] == least[1]:
        return None
    ran: list[int] = []

    def hear(event: Event) -> None:
        if isinstance(event, PlanRun):
            ran.append(through_dram(event.plan))

    with stitch.open_device(machine, executor="null", window=1) as device:
        device.events.subscribe(hear)
        began = 0
        rounds = chain(Work(device, home), LEARNING + COUNTED)
        for number in range(LEARNING + COUNTED):
            if number == LEARNING:
                began = len(ran)
            # Not held: what a round gives is not wanted while the next one runs.
            next(rounds)
    return over(sum(ran[began:]), least[1] - least[0])


def _least(machine: Machine, chain: Chain, rounds: int, home: Space) -> float | None:
    """DRAM bytes of the optimum that knows all rounds and keeps what is held as they are queued,
    first copies among them; None: no HiGHS."""
    request, held = planned(machine, chain, rounds, 0, home)
    best = best_of(machine, while_held(chain_of(request), request, held), 0)
    made = plan(request)
    return None if best is None else through_dram(made) - paid(made)[0] + best


def misses(rows: Sequence[Row]) -> list[str]:
    """The goals that these rows miss."""
    found = []
    for row in rows:
        if row.ours_bytes > row.belady_bytes * SAME:
            found.append(f"{row.chain}: bytes above Belady")
        if row.ours_seconds > row.belady_seconds * SAME:
            found.append(f"{row.chain}: seconds above Belady")
        if row.learned is not None and row.learned > LEARNED_WORST:
            found.append(f"{row.chain}: learned, {row.learned:.3f} of the optimum")
        if row.ended and min(row.bound, row.bound_seconds) < 1 / SAME:
            found.append(f"{row.chain}: a search that ended and a bound below the optimum")
    for what, ratios in (
        ("bytes", [(r.chain, r.ratio) for r in rows if r.ratio is not None]),
        ("seconds", [(r.chain, r.ratio_seconds) for r in rows if r.ratio_seconds is not None]),
    ):
        mean = statistics.mean([ratio for _, ratio in ratios] or [1.0])
        if mean > RATIO_MEAN:
            found.append(f"{what}: {mean:.3f} of the optimum in the mean")
        found += [f"{name}: {what} {r:.3f} of the optimum" for name, r in ratios if r > RATIO_WORST]
    for what, bounds in (
        ("bytes", [row.bound for row in rows]), ("seconds", [row.bound_seconds for row in rows]),
    ):  # fmt: skip
        if statistics.mean(bounds or [1.0]) < BOUND_MEAN:
            found.append(f"{what}: a bound of {statistics.mean(bounds):.3f} in the mean")
    return found


def rows_of(traces: Sequence[Path], seeds: int) -> Iterator[Row]:
    """Our chains, then those of records, which are all read before anything is planned."""
    records = [(path, read_document(str(path), read_record)) for path in traces]
    random = {f"random {s}": (4_608, in_any_order(s, 56), 1) for s in range(seeds)}
    chains = [(*chain, Space.DRAM) for chain in (CHAINS | random).items()]
    chains += [(*chain, Space.HOST) for chain in CHAINS.items()]
    for name, (l1_nbytes, chain, rounds), home in chains:
        machine = small_machine(l1_nbytes)
        again = in_any_order(int(name.split()[1]), 28) if rounds == 1 else chain
        ratio = learned(machine, again, home)
        request, _ = planned(machine, chain, rounds, rounds, home)
        row = measure(name if home is Space.DRAM else f"{name}, host", request, ratio)
        if row is not None:
            yield row
    for path, record in records:
        for number, made in record.plans.items():
            row = measure(f"{path}:{number}", made.request)
            if row is not None:
                yield row


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__, epilog=TRACES)
    parser.add_argument("--traces", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--seeds", type=from_zero, default=6, help="how many random chains")
    options = parser.parse_args(arguments)
    try:
        rows = list(rows_of(options.traces, options.seeds))
    except StitchError as error:
        return refused("residency.py", error)
    missed = misses(rows)
    if all(row.ratio is None for row in rows):
        missed.append(
            "not compared: no HiGHS, whose optimum the goals are about (pip install highspy)"
        )
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _show(rows)
    return exit_code_for(missed, check=options.check)


def _show(rows: Sequence[Row]) -> None:
    print("chain              tasks  bytes: ours     LRU  Belady  last use    best  ÷ best  bound"
          "   s ÷ best  bound   gap  B/best  s/ours  ended     ms  learned")  # fmt: skip
    for r in rows:
        print(
            f"{r.chain:<18} {r.tasks:>5} {r.ours_bytes:>12} {r.lru_bytes:>7} {r.belady_bytes:>7} "
            f"{r.farthest_last_bytes:>9} {'-' if r.best_bytes is None else r.best_bytes:>7} "
            f"{_ratio(r.ratio, 'no HiGHS'):>7} {r.bound:6.3f} "
            f"{_ratio(r.ratio_seconds, 'no HiGHS'):>10} {r.bound_seconds:6.3f} "
            f"{'-' if r.gap is None else f'{r.gap:.1%}':>5} "
            f"{r.carried_bytes / (r.best_bytes or r.ours_bytes):7.3f} "
            f"{r.fewest_seconds / r.ours_seconds:7.3f} "
            f"{'yes' if r.ended else 'no':>6} {r.planning_ms:6.1f} {_ratio(r.learned, '-'):>8}"
        )


def _ratio(ratio: float | None, otherwise: str) -> str:
    return otherwise if ratio is None else f"{ratio:.3f}"


if __name__ == "__main__":
    sys.exit(main())
