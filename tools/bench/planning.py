"""What planning takes: microseconds a task, cold (planning and binding apart) and replayed.

Chains are queued on a device with the null executor, each as one window: tasks whose results are
all dropped, or all kept; weights in turn under pressure, in room for two thirds of them; a chain
beside live tensors; results kept in an L1 so fragmented that each needs moves; one allocation into
such an L1 of all that is free (`full`), or of more while DRAM is full too (`evicting`); and, where
all fits without moves, a chain, a tree and independent tasks, all kept, of twice as many tasks each
time (`--doubled`). `planning`: what the device takes to find a plan (it may make several);
`binding`: to bind it; `elsewhere`: to bind the same work at other addresses, as what it gave the
first time is held (where all fits); `replayed`: to run the same work once more, when it is queued
again (its recording, guards, records of results). `--traces` plans the requests of records
(`stitch-run --record`). Least of `--rounds`, time of this thread.

`--check` exits 1 where a goal is missed: planning at most 1 ms a task up to 64 live tensors, 5 ms
beside more and fragmented, 10 ms for one allocation that needs it all, beside 200 at most 3.5 times
what it takes beside 64; the longest chain of a kind at most 1.3 times what 100 tasks take, for
each; where all fits at most 0.5 ms, and a task of twice as many takes at most 1.2 times as long;
bound elsewhere at most 20 us a task, replayed at most 1 us, both from 100 tasks on.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from command_line import bench_parser, exit_code_for, from_one, refused

import stitch
from stitch.cli.module_files import read_document
from stitch.errors import StitchError
from stitch.machine import Machine, load_machine
from stitch.planner import plan
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.report import read_record

TASKS, LIVE = (10, 100, 1_000, 10_000), (10, 64, 200, 2_000)
DOUBLED = (64, 128, 256, 512, 1_024, 2_048, 4_096)
#: Up to so many live tensors a task is planned in so many microseconds, and beyond.
FEW_LIVE, FEW_GOAL_US, MANY_GOAL_US = 64, 1e3, 5e3
ALONE_GOAL_US, ALONE_GROWTH_GOAL = 10e3, 3.5
GROWTH_GOAL, ELSEWHERE_GOAL_US, REPLAYED_GOAL_US = 1.3, 20.0, 1.0
#: The same for kinds that grow by doubling, a doubling each.
FITTING_GOAL_US, DOUBLING_GOAL = 500.0, 1.2
#: What longer chains are compared with; what fixed costs are spread over.
SHORT = 100
#: What tensors in L1 take whole ones of, on the machine that is planned for.
GRANULE = 32
#: Bytes of a chain's tensors, which lie in one bank; weights that come in turn; tasks of a chain
#: beside live tensors, and of one that needs moves.
NBYTES, WEIGHTS, BESIDE, MOVING = 32, 9, 100, 10
#: Live tensors among which moves are searched, at most.
MOST_FRAGMENTS = 200
#: What fills DRAM where it is full.
DRAM_NBYTES, DRAM_TENSORS = 64, 64
#: How often work is run again, and how often where it is bound anew each time.
AGAIN, PATIENCE = 40, 12


@dataclass(frozen=True, slots=True)
class Row:
    """One point: `live` tensors lie in L1 besides; microseconds a task, None: not run."""

    kind: str
    tasks: int
    live: int
    planning_us: float
    binding_us: float | None = None
    elsewhere_us: float | None = None
    replayed_us: float | None = None


class Clock:
    """A method of an object, and the seconds that it took."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self._method = 0.0, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return self._method(*arguments)
        finally:
            self.seconds += time.thread_time() - began


class Work:
    """A device, and programs of one operator with inputs and outputs in L1."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._programs: dict[tuple[str, int, int], Any] = {}

    def tensor(self, nbytes: int, space: Space = Space.L1) -> Any:
        """A tensor that lies in one bank."""
        return self.device.empty(TensorDesc((1, nbytes // 4), Layout(DataType.FLOAT32, space)))

    def run(self, what: str, *inputs: Any) -> Any:
        key = what, len(inputs), inputs[0].shape[1]
        if key not in self._programs:
            builder = stitch.ComputationGraphBuilder(what.lower())
            names = [builder.input(f"x{i}", x.shape, "float32") for i, x in enumerate(inputs)]
            builder.output("y", builder.op(what, *names))
            placement = [*(f"input.x{i}.space=l1" for i in range(len(inputs))), "output.0.space=l1"]
            binary = stitch.compile(
                builder.build(), target=self.device.machine, placement=placement
            )
            self._programs[key] = self.device.load(binary)
        return self._programs[key](*inputs)


#: What a chain keeps alive meanwhile, and what queues so many of its tasks and gives what is held.
Chain = tuple[Any, Callable[[int], Any]]


def dropped(work: Work, live: int) -> Chain:
    """Every result is read by the next task only."""
    beside = [work.tensor(32 * (1 + i % 16)) for i in range(live)]
    x = work.tensor(NBYTES)

    def queue(tasks: int) -> Any:
        y = x
        for _ in range(tasks):
            y = work.run("Relu", y)
        return y

    return (beside, x), queue


def kept(work: Work, live: int) -> Chain:
    """Every result is held."""
    x = work.tensor(NBYTES)

    def queue(tasks: int) -> Any:
        results = [x]
        for _ in range(tasks):
            results.append(work.run("Relu", results[-1]))
        return results

    return x, queue


def pressed(work: Work, live: int) -> Chain:
    """Weights in turn."""
    x = work.tensor(NBYTES)
    weights = [work.tensor(NBYTES, Space.DRAM) for _ in range(WEIGHTS)]

    def queue(tasks: int) -> Any:
        y = x
        for i in range(tasks):
            y = work.run("Add", y, weights[i % WEIGHTS])
        return y

    return (x, weights), queue


def fragments(live: int) -> list[int]:
    """The sizes of tensors that fill L1; every other one stays."""
    dice = Random(live)
    return [GRANULE * dice.randrange(1, 16) for _ in range(2 * live)]


def fragmented(work: Work, live: int) -> Chain:
    """Each result is larger than any hole."""
    full = [work.tensor(nbytes) for nbytes in fragments(live)]
    beside, size = full[::2], GRANULE * 40
    x = work.tensor(size, Space.HOST)
    del full

    def queue(tasks: int) -> Any:
        results: list[Any] = []
        for _ in range(tasks):
            results.append(work.run("Relu", results[-1] if results else x))
        return results

    return (beside, x), queue


def full(work: Work, live: int, more: int = 0) -> Chain:
    """One result takes all that is free in L1, and `more` bytes per bank."""
    sizes = fragments(live)
    tensors = [work.tensor(nbytes) for nbytes in sizes]
    beside, x = tensors[::2], work.tensor(sum(sizes[1::2]) + more, Space.HOST)
    del tensors
    layout = Layout(DataType.FLOAT32, Space.L1)
    return (beside, x), lambda tasks: [work.device.to_layout(x, layout) for _ in range(tasks)]


def evicting(work: Work, live: int) -> Chain:
    """A tensor has to leave L1 for the host, as DRAM is full."""
    in_dram = [work.tensor(DRAM_NBYTES, Space.DRAM) for _ in range(DRAM_TENSORS)]
    beside, queue = full(work, live, GRANULE)
    return (in_dram, beside), queue


def tree(work: Work, live: int) -> Chain:
    """Each result is of two others, all of which are held; the first ones are of one tensor."""
    x = work.tensor(NBYTES)

    def queue(tasks: int) -> Any:
        leaves = tasks // 2 + 1
        results = [work.run("Relu", x) for _ in range(leaves)]
        for i in range(tasks - leaves):
            results.append(work.run("Add", results[2 * i], results[2 * i + 1]))
        return results

    return x, queue


def independent(work: Work, live: int) -> Chain:
    """All results are of one tensor, and are held."""
    x = work.tensor(NBYTES)
    return x, lambda tasks: [work.run("Relu", x) for _ in range(tasks)]


KINDS: dict[str, Callable[[Work, int], Chain]] = {
    "dropped": dropped, "kept": kept, "pressed": pressed, "beside": dropped,
    "fragmented": fragmented, "full": full, "evicting": evicting,
    "chain": kept, "tree": tree, "independent": independent,
}  # fmt: skip
GROWING = ("chain", "tree", "independent")
#: Where what is held changes what has to move.
ALONE = ("full", "evicting")
TIGHT = ("pressed", "fragmented", *ALONE)


def machine_for(kind: str, live: int) -> Machine:
    """`wormhole_n150`, with as much L1 as the chain leaves it."""
    machine = load_machine("wormhole_n150")
    nbytes = dict.fromkeys(("fragmented", *ALONE), sum(fragments(live)))
    nbytes["pressed"] = NBYTES * (2 * WEIGHTS // 3 + 2)
    l1, dram = machine.shape.l1, machine.shape.dram
    assert l1 is not None and dram is not None
    l1 = replace(l1, limit=l1.base + nbytes[kind]) if kind in nbytes else l1
    if kind == "evicting":
        dram = replace(dram, limit=dram.base + DRAM_NBYTES * DRAM_TENSORS)
    return replace(machine, shape=replace(machine.shape, l1=l1, dram=dram))


def measure(kind: str, tasks: int, live: int, rounds: int) -> Row:
    """One chain on a new device each round, queued and run again and again."""
    planning = binding = float("inf")
    elsewhere: list[float] = []
    again: list[float] = []
    for _ in range(rounds):
        with stitch.open_device(
            machine_for(kind, live), executor="null", window=tasks + 1
        ) as device:
            work = Work(device)
            alive, queue = KINDS[kind](work, live)
            if kind not in ALONE:
                queue(1)
                device.run_queue()
            made, found = Clock(device.maker, "planned"), Clock(device.maker, "binding")
            for number in range(1 + AGAIN):
                made.seconds = found.seconds = 0.0
                held = queue(tasks)
                if not number:
                    # Collections look at what planning makes, not at all that was there before.
                    gc.collect()
                    gc.freeze()
                bound = device.statistics().bindings_made
                began = time.thread_time()
                device.run_queue()
                whole = time.thread_time() - began
                is_bound = device.statistics().bindings_made > bound
                if number == 1 and is_bound and not made.seconds and kind not in TIGHT:
                    elsewhere.append(found.seconds)
                if not number:
                    planning = min(planning, made.seconds)
                    binding = min(binding, found.seconds - made.seconds)
                elif not is_bound:
                    again.append(whole)
                elif number >= PATIENCE and not again:
                    break
                # The second time what the first one gave is held: it has to lie elsewhere.
                earlier = None if number or kind in TIGHT else held
                del held
            del alive, queue, earlier
            gc.unfreeze()
    scale = 1e6 / tasks
    moved, replayed = (min(times) * scale if times else None for times in (elsewhere, again))
    return Row(kind, tasks, live, planning * scale, binding * scale, moved, replayed)


def points(
    tasks: Sequence[int], live: Sequence[int], doubled: Sequence[int]
) -> Iterator[tuple[str, int, int]]:
    """What is measured."""
    for kind in ("dropped", "kept", "pressed"):
        yield from ((kind, n, 0) for n in tasks)
    yield from (("beside", BESIDE, n) for n in live)
    yield from (("fragmented", MOVING, n) for n in live if n <= MOST_FRAGMENTS)
    for kind in ALONE:
        yield from ((kind, 1, n) for n in live if n <= MOST_FRAGMENTS)
    for kind in GROWING:
        yield from ((kind, n, 0) for n in doubled)


def row_of(path: Path, rounds: int) -> Row:
    """All plans of a record, made again."""
    record = read_document(str(path), read_record)
    requests = [made.request for made in record.plans.values()]
    least = 0.0
    for request in requests:
        times = []
        for _ in range(rounds):
            began = time.thread_time()
            plan(request)
            times.append(time.thread_time() - began)
        least += min(times)
    tasks = sum(len(request.tasks) for request in requests)
    live = max((len(request.buffers) for request in requests), default=0)
    return Row(str(path), tasks, live, least * 1e6 / max(1, tasks))


def misses(rows: Sequence[Row]) -> list[str]:
    """The goals that these rows miss."""
    found = []
    short = {r.kind: r.planning_us for r in rows if r.tasks == SHORT and not r.live}
    alone = {(r.kind, r.live): r.planning_us for r in rows if r.kind in ALONE}
    half = {(r.kind, 2 * r.tasks): r.planning_us for r in rows if r.kind in GROWING}
    for r in rows:
        name = f"{r.kind}, {r.tasks} tasks, {r.live} live"
        goal = MANY_GOAL_US if r.live > FEW_LIVE or r.kind == "fragmented" else FEW_GOAL_US
        goal = FITTING_GOAL_US if r.kind in GROWING else goal
        goal = ALONE_GOAL_US if r.kind in ALONE else goal
        if r.planning_us > goal:
            found.append(f"{name}: {r.planning_us:.0f} us of planning a task")
        if r.tasks > SHORT and r.kind in short and r.planning_us > GROWTH_GOAL * short[r.kind]:
            found.append(f"{name}: {r.planning_us / short[r.kind]:.2f} of what {SHORT} tasks take")
        few = alone.get((r.kind, FEW_LIVE), r.planning_us)
        if r.kind in ALONE and r.live > FEW_LIVE and r.planning_us > ALONE_GROWTH_GOAL * few:
            found.append(f"{name}: {r.planning_us / few:.2f} of what {FEW_LIVE} live take")
        before = half.get((r.kind, r.tasks))
        if before is not None and r.planning_us > DOUBLING_GOAL * before:
            found.append(f"{name}: {r.planning_us / before:.2f} of what half as many take")
        if r.binding_us is not None and r.replayed_us is None:
            found.append(f"{name}: planned or bound anew each time")
        elif r.replayed_us is not None and r.tasks >= SHORT and r.replayed_us > REPLAYED_GOAL_US:
            found.append(f"{name}: {r.replayed_us:.2f} us a task replayed")
        if r.binding_us is not None and r.elsewhere_us is None and r.kind not in TIGHT:
            found.append(f"{name}: never bound at other addresses")
        elif r.tasks >= SHORT and (r.elsewhere_us or 0.0) > ELSEWHERE_GOAL_US:
            found.append(f"{name}: {r.elsewhere_us:.1f} us a task bound at other addresses")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--tasks", nargs="*", type=from_one, default=TASKS, metavar="N", help="lengths"
    )
    parser.add_argument(
        "--live", nargs="*", type=from_one, default=LIVE, metavar="N", help="beside"
    )
    parser.add_argument(
        "--doubled", nargs="*", type=from_one, default=DOUBLED, metavar="N", help="where all fits"
    )
    parser.add_argument("--traces", nargs="*", type=Path, default=[], metavar="FILE")
    parser.add_argument("--rounds", type=from_one, default=2, help="the least counts")
    options = parser.parse_args(arguments)
    try:
        rows = [row_of(path, options.rounds) for path in options.traces]
        at = points(options.tasks, options.live, options.doubled)
        rows += [measure(*point, options.rounds) for point in at]
    except StitchError as error:
        return refused("planning.py", error)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("chain         tasks   live  us a task: planning   binding elsewhere  replayed")
        for r in rows:
            taken = (r.planning_us, r.binding_us, r.elsewhere_us, r.replayed_us)
            times = (f"{us:9.2f}" if us is not None else f"{'-':>9}" for us in taken)
            print(f"{r.kind:<12} {r.tasks:>6} {r.live:>6}            {' '.join(times)}")
    return exit_code_for(misses(rows), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
