"""Forks and their places follow from the plan alone, and are right for any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest

from stitch.planner import (
    Allocate,
    Buffer,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Resident,
    Step,
    ThreadAssignment,
    assign_threads,
    touched_by,
)
from stitch.planner.inter_op_threads import HANDING, LEAST
from stitch.program import DataType, Layout, Space, TensorDesc
from tests.support.grids import every
from tests.support.planner.small_requests import machine_with

MACHINE = machine_with(l1_nbytes=1 << 16)
DESC = TensorDesc((4, 4), Layout(DataType.FLOAT32, Space.L1))
SIZE = 16


def buffer(number: int, address: int) -> Buffer:
    return Buffer(number, Space.L1, address, SIZE, DESC, f"buffer {number}")


def run(task: int, reads: Sequence[int], writes: Sequence[int], *, scratch: bool = False) -> Step:
    return Execute(
        task,
        tuple([Instance(number, 0, DESC) for number in reads]),
        tuple([Instance(number, 0, DESC) for number in writes]),
        (Space.L1, 0, 64) if scratch else None,
    )


def plan(steps: Sequence[Step], results: Sequence[int], sources: int = 1) -> Plan:
    """A plan of these steps; the first buffers are there before."""
    there = tuple([buffer(number, 32768 + 1024 * number) for number in range(sources)])
    made = {s.buffer.number: s.buffer for s in steps if isinstance(s, Allocate)}
    final = (*there, *[made[number] for number in results])
    residents = tuple([Resident(b.number, (Instance(b.number, 0, DESC),)) for b in there])
    request = PlanRequest(MACHINE, (), there, residents, frozenset())
    return Plan(request, tuple(steps), final, (), (), frozenset())


def lanes(made: Plan, costs: Mapping[int, float | None], most: int = 2) -> ThreadAssignment:
    return assign_threads(made, [costs.get(i, 0.0) for i in range(len(made.steps))], most)


def two(cost: float, *, most: int = 2) -> ThreadAssignment:
    """Two programs that read the same and write apart."""
    steps = [Allocate(buffer(1, 0)), run(0, [0], [1]), Allocate(buffer(2, 64)), run(1, [0], [2])]
    return lanes(plan(steps, [1, 2]), {1: cost, 3: cost}, most)


def test_two_programs_run_beside_each_other_if_both_take_long_enough() -> None:
    (fork,) = two(LEAST).forks
    assert fork.threads == ((0, 1), (2, 3))
    assert (fork.start, fork.stop) == (0, 4)
    assert two(LEAST, most=7).forks == (fork,)
    assert two(LEAST - 0.01) == ThreadAssignment()
    assert two(LEAST, most=1) == ThreadAssignment()
    assert two(1e9).count == 2
    assert LEAST > HANDING


@pytest.mark.parametrize(
    ("reads", "writes"),
    [([1], [2]), ([0], [1]), ([0], [0])],
    ids=["reads what it made", "writes over it", "writes over what it reads"],
)
def test_what_depends_on_the_other_waits(reads: list[int], writes: list[int]) -> None:
    steps = [
        Allocate(buffer(1, 0)), Allocate(buffer(2, 64)), run(0, [0], [1]), run(1, reads, writes)
    ]  # fmt: skip
    assert not lanes(plan(steps, [1, 2]), {2: 1000.0, 3: 1000.0}).forks


def test_one_address_after_the_other_makes_no_order() -> None:
    steps: list[Step] = []
    for task in range(4):
        passing, result = 10 + task, 20 + task
        steps += [
            Allocate(buffer(passing, 0)), run(2 * task, [0], [passing], scratch=True),
            Allocate(buffer(result, 64 * (1 + task))), run(2 * task + 1, [passing], [result]),
            Free(passing),
        ]  # fmt: skip
    costs = {i: 200.0 for i, step in enumerate(steps) if isinstance(step, Execute)}
    found = lanes(plan(steps, [20, 21, 22, 23]), costs)
    assert len(found.forks) == 1
    assert set(found.buffers) == {10, 11, 12, 13}
    # Each lane's own come one after the other to the same bytes.
    assert {place.offset for place in found.buffers.values()} == {0}
    assert {place.thread for place in found.buffers.values()} == {0, 1}
    assert set(found.scratch) == {0, 2, 4, 6}


def drawn(draw: Random) -> tuple[Plan, list[float | None]]:
    """Any plan: programs that read what there is, write over it or make something new."""
    steps: list[Step] = []
    costs: list[float | None] = []
    there = [0, 1]
    addresses = [64 * i for i in range(1, 41)]
    places: dict[int, int] = {}
    for task in range(draw.randrange(4, 24)):
        number = 2 + task
        reads = draw.sample(there, min(len(there), draw.randrange(3)))
        writes = [number]
        if not draw.randrange(5) and reads:
            writes = [reads[0]]
        else:
            places[number] = addresses.pop(0)
            steps.append(Allocate(buffer(number, places[number])))
            costs.append(0.0)
            there.append(number)
        steps.append(run(task, reads, writes, scratch=not draw.randrange(3)))
        cost = draw.choice([0.0, 5.0, 40.0, 150.0, 400.0])
        costs.append(cost if draw.randrange(12) else None)
        if draw.randrange(2):
            gone = draw.choice(there)
            if gone > 1:
                there.remove(gone)
                addresses.insert(0, places[gone])
                steps.append(Free(gone))
                costs.append(0.0)
    results = [number for number in there if number > 1]
    return plan(steps, results, 2), costs


@pytest.mark.parametrize("most", every(3, [2, 3, 5]))
def test_any_order_of_the_lanes_gives_what_the_plan_gives(most: int) -> None:
    forked = 0
    for seed in range(100):
        draw = Random(seed)
        made, costs = drawn(draw)
        found = assign_threads(made, costs, most)
        assert found == assign_threads(made, costs, most)
        forked += len(found.forks)
        before = -1
        for fork in found.forks:
            assert before <= fork.start
            before = fork.stop
            assert sorted(i for lane in fork.threads for i in lane) == [
                *range(fork.start, fork.stop)
            ]
            loads = [sum(costs[i] or 0.0 for i in lane) for lane in fork.threads]
            assert min(loads) >= LEAST
            assert max(loads) == loads[0]
            assert None not in costs[fork.start : fork.stop]
        expected = bytes_after(made, ThreadAssignment(), [*range(len(made.steps))])
        for _ in range(4):
            assert bytes_after(made, found, shuffled(made, found, draw)) == expected, seed
    assert forked > 25


def shuffled(made: Plan, found: ThreadAssignment, draw: Random) -> list[int]:
    """An order of all steps in which those of one lane keep theirs."""
    order: list[int] = []
    at = 0
    for fork in found.forks:
        order += range(at, fork.start)
        left = [list(lane) for lane in fork.threads]
        while any(left):
            order.append(draw.choice([lane for lane in left if lane]).pop(0))
        at = fork.stop
    return [*order, *range(at, len(made.steps))]


def bytes_after(made: Plan, found: ThreadAssignment, order: Sequence[int]) -> dict[int, object]:
    """What lies in the results when steps have run in this order: each writes what it is and what
    it read, in the bytes where buffers lie, byte by byte."""
    memory: dict[tuple[object, int], object] = {}
    places: dict[int, tuple[object, int, int]] = {}
    for b in (*made.request.buffers, *[s.buffer for s in made.steps if isinstance(s, Allocate)]):
        own = found.buffers.get(b.number)
        assert b.address is not None
        banks = MACHINE.shape.space(b.space).banks
        there = (b.space, b.address * banks, b.size_per_bank * banks)
        places[b.number] = there if own is None else (own.thread, own.offset, own.nbytes)

    def cells(number: int) -> list[tuple[object, int]]:
        where, start, size = places[number]
        return [(where, at) for at in range(start, start + size)]

    for index in order:
        step = made.steps[index]
        if isinstance(step, Execute):
            reads, writes = touched_by(step)
            read = tuple([tuple([memory.get(cell) for cell in cells(n)[:2]]) for n in reads])
            own = found.scratch.get(step.task)
            if step.scratch is not None:
                space, start, size = step.scratch
                banks = MACHINE.shape.space(space).banks
                where: object = space
                start, size = start * banks, size * banks
                if own is not None:
                    where, start, size = own.thread, own.offset, own.nbytes
                memory |= {(where, at): ("rubbish", index) for at in range(start, start + size)}
            for number in writes:
                memory |= dict.fromkeys(cells(number), hash((step.task, read)))
        else:
            assert not isinstance(step, Copy)
    results = [b.number for b in made.final_buffers]
    return {n: tuple([memory.get(cell) for cell in cells(n)]) for n in results}
