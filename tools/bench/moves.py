"""Moves inside L1: tensors of random places, swapped, rotated or laid out anew, as plans.

A program wants its inputs at given addresses; the plan's one step of moves is compared with the
best of some fixed ways, written apart from the mover (`moves_ways`): pieces of every size of a fine
ladder, inside and through DRAM; every tensor out to DRAM and back; the cheapest set of whole
tensors set aside. Machines `tiny` and `wormhole_n150`,
utilisations from 50 to 100 %, sizes without a common divisor at odd bases. Every plan is confirmed
by the checker. A row per case: simulated time over the best, bytes through DRAM, operations per
tensor and piece, planning milliseconds (processor time) per tensor. `--check` exits 1 where a goal
is missed: time over the best at most 1.1; bytes through DRAM only where nothing is free, then those
of the one piece, or with both prices as certificate; at most 4 operations for every tensor and
piece; at most 1 ms of planning for every tensor, in the median of each machine.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise

from command_line import bench_parser, exit_code_for, from_one, from_zero, refused
from moves_ways.plain import best_way, lands

from stitch.errors import StitchError
from stitch.machine import Machine, load_machine
from stitch.planner import (
    Buffer,
    CostCertificate,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    Resident,
    check_plan,
    plan,
)
from stitch.planner.checker.relocations import MoveSequence, TransferCosts
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.tasks import NumberedTask, Transformation, TransformationKind

MACHINES = ("tiny", "wormhole_n150")
UTILISATIONS = (0.5, 0.75, 0.9, 0.98, 1.0)
KINDS = ("swap", "rotation", "relayout")
TIME_GOAL, OPERATIONS_GOAL, PLANNING_GOAL_MS = 1.1, 4.0, 1.0


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor's bytes per bank, where they lie and where they are wanted."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class Case:
    """Tensors of L1."""

    machine: Machine
    kind: str
    utilisation: float
    moves: tuple[Move, ...]


def random_case(machine: Machine, kind: str, utilisation: float, dice: random.Random) -> Case:
    """Unequal sizes at odd multiples of the alignment."""
    shape = machine.shape.space(Space.L1)
    granule = shape.granule
    count = {"swap": 2, "rotation": dice.randrange(3, 7), "relayout": dice.randrange(4, 13)}[kind]
    granules = shape.capacity // granule
    used = granules if utilisation == 1 else int(granules * utilisation)
    cuts = [0, *sorted(dice.sample(range(1, used), count - 1)), used]
    sizes = [b - a for a, b in pairwise(cuts)]
    order = list(range(count))
    after = {"swap": order[::-1], "rotation": [*order[1:], 0], "relayout": order[:]}[kind]
    if kind == "relayout":
        dice.shuffle(after)
    places: list[dict[int, int]] = []
    for ranks in (order, after):
        room = granules - used
        gaps = sorted(dice.randrange(room + 1) for _ in order)
        at, starts = 0, {}
        for gap, rank in zip(gaps, ranks, strict=True):
            starts[rank] = shape.base + (at + gap) * granule
            at += sizes[rank]
        places.append(starts)
    moves = [Move(places[0][i], places[1][i], sizes[i] * granule) for i in order]
    return Case(machine, kind, utilisation, tuple(moves))


def request_of(case: Case) -> PlanRequest:
    """One program that wants all the tensors at their new addresses."""
    banks = case.machine.shape.space(Space.L1).banks

    def desc(size: int, address: int | None = None) -> TensorDesc:
        return TensorDesc((banks, size), Layout(DataType.UINT8, Space.L1, address=address))

    buffers, residents, wanted = [], [], []
    for number, move in enumerate(case.moves):
        bare = desc(move.size)
        buffers.append(Buffer(number, Space.L1, move.source, move.size, bare, f"tensor {number}"))
        residents.append(Resident(number, (Instance(number, 0, bare),)))
        wanted.append(desc(move.size, move.target))
    out = TensorDesc((1, 32), Layout(DataType.UINT8, Space.DRAM))
    what = Transformation("p", TransformationKind.PROGRAM, tuple(wanted), (out,))
    values = tuple(range(len(buffers)))
    task = NumberedTask(what, values, (len(values),))
    return PlanRequest(
        case.machine, (task,), tuple(buffers), tuple(residents), frozenset((*values, len(values)))
    )


# -- the best of everything ------------------------------------------------------------------------


def best_of(case: Case) -> MoveSequence:
    """The fastest of the plain ways."""
    shape = case.machine.shape.space(Space.L1)
    parts = [(move.source, move.target, move.size) for move in case.moves]
    best = best_way(parts, shape.base, shape.limit, shape.granule, TransferCosts(case.machine))
    assert lands(parts, best.transfers), "a way that loses bytes judges nothing"
    return best


# -- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One case; `certificate` is empty where nothing left L1."""

    machine: str
    kind: str
    utilisation: float
    tensors: int
    time_us: float
    time_over_best: float
    dram_bytes: int
    piece_bytes: int
    certificate: str
    operations_per_tensor_and_piece: float
    planning_ms_per_tensor: float
    problems: int


def row_of(case: Case) -> Row:
    """The plan of a case beside the best way."""
    request = request_of(case)
    made, seconds = plan(request), float("inf")
    for _ in range(3):
        started = time.thread_time()
        made = plan(request)
        seconds = min(seconds, time.thread_time() - started)
    best = best_of(case).seconds
    step = _moves_of(made)
    tensors = len(case.moves)
    if step is None:
        return Row(case.machine.name, case.kind, case.utilisation, tensors, 0.0, 1.0, 0, 0, "", 0.0,
                   seconds * 1e3 / tensors, len(check_plan(made)))  # fmt: skip
    room = 0
    if step.stage is not None:
        room = step.stage[1] * case.machine.shape.space(step.stage_space).banks
    widest = max(t.nbytes for t in step.transfers)
    pieces = -(-sum(t.nbytes for t in step.transfers) // widest)
    return Row(
        case.machine.name, case.kind, case.utilisation, tensors, step.seconds * 1e6,
        step.seconds / best, step.bounced_nbytes, room,
        "" if step.certificate is None else step.certificate.kind,
        len(step.transfers) / (step.count + pieces), seconds * 1e3 / tensors,
        len(check_plan(made)),
    )  # fmt: skip


def _moves_of(made: Plan) -> Relocate | None:
    steps = [step for step in made.copies if isinstance(step, Relocate)]
    assert len(steps) == len(made.copies) <= 1, "one step of moves was expected"
    assert not steps or isinstance(steps[0].certificate, CostCertificate) or (
        steps[0].stage is None or steps[0].certificate is not None
    )  # fmt: skip
    return steps[0] if steps else None


def missed(row: Row) -> list[str]:
    """The goals that a case misses."""
    misses = []
    if row.problems:
        misses.append(f"{row.problems} problems in the plan")
    if row.time_over_best > TIME_GOAL:
        misses.append(f"{row.time_over_best:.2f} of the best time")
    if row.dram_bytes > row.piece_bytes:
        misses.append(f"{row.dram_bytes} B leave L1, more than one piece of {row.piece_bytes} B")
    if row.dram_bytes and row.utilisation < 1 and row.certificate != "cost":
        misses.append(f"{row.dram_bytes} B leave L1 although some is free")
    if row.operations_per_tensor_and_piece > OPERATIONS_GOAL:
        misses.append(f"{row.operations_per_tensor_and_piece:.1f} operations per tensor and piece")
    return misses


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--machines", nargs="+", default=MACHINES, help="names or YAML files")
    parser.add_argument(
        "--cases", type=from_one, default=4, help="cases of each kind and utilisation"
    )
    parser.add_argument("--seed", type=from_zero, default=0)
    options = parser.parse_args(arguments)
    try:
        for name in options.machines:
            load_machine(name)
    except StitchError as error:
        return refused("moves.py", error)
    rows = [
        row_of(random_case(load_machine(name), kind, used, random.Random(f"{options.seed} {i}")))
        for name in options.machines
        for kind in KINDS
        for used in UTILISATIONS
        for i in range(options.cases)
    ]
    slow = [
        f"{name}: {median:.2f} ms of planning a tensor in the median"
        for name in options.machines
        if (median := statistics.median(
            row.planning_ms_per_tensor for row in rows if row.machine == load_machine(name).name
        )) > PLANNING_GOAL_MS
    ]  # fmt: skip
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("machine         kind       used  tensors  time us  /best  DRAM B    ops/  ms/tensor")
        for row in rows:
            print(
                f"{row.machine:<15} {row.kind:<9} {row.utilisation:5.2f} {row.tensors:>8} "
                f"{row.time_us:8.1f} {row.time_over_best:6.3f} {row.dram_bytes:>8} "
                f"{row.operations_per_tensor_and_piece:6.2f} {row.planning_ms_per_tensor:9.2f}  "
                f"{row.certificate}"
            )
    missing = [
        f"{row.machine}, {row.kind} at {row.utilisation:.2f}: {text}"
        for row in rows
        for text in missed(row)
    ]
    return exit_code_for(missing + slow, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
