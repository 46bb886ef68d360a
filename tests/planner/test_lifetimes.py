"""A whole plan's lifetimes say where its tensors lie: known work moves less than work unknown."""

from __future__ import annotations

from random import Random

import pytest

from stitch.planner import (
    Buffer,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    Resident,
    check_plan,
    plan,
)
from stitch.planner import planner as planning
from stitch.program import Space
from stitch.tasks import NumberedTask
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.small_requests import desc_of, machine_with, program

#: Value, bytes per bank, the task that makes it (-1: there before), the last that reads it.
Tensor = tuple[int, int, int, int]


def request_of(tensors: list[Tensor], tasks: int, scratch: dict[int, int] | None = None,
               kept: frozenset[int] = frozenset()) -> PlanRequest:  # fmt: skip
    """Tasks that make and read tensors at their times, in an L1 that holds what lives at once."""
    scratch = scratch or {}
    load = max(
        scratch.get(t, 0) + sum(n for _, n, first, last in tensors if first <= t <= last)
        for t in range(tasks)
    )
    machine = machine_with(l1_nbytes=load)
    made = []
    for t in range(tasks):
        reads = [(v, n) for v, n, _, last in tensors if last == t]
        makes = [(v, n) for v, n, first, _ in tensors if first == t]
        what = program(
            f"task {t}", [desc_of(n) for _, n in reads], [desc_of(n) for _, n in makes],
            scratch=scratch.get(t, 0),
        )  # fmt: skip
        made.append(NumberedTask(what, tuple(v for v, _ in reads), tuple(v for v, _ in makes)))
    assert machine.shape.l1 is not None
    at, buffers, residents = machine.shape.l1.limit, [], []
    for v, n, first, _ in tensors:
        if first < 0:
            at -= n
            buffers.append(Buffer(v, Space.L1, at, n, desc_of(n), f"tensor {v}"))
            residents.append(Resident(v, (Instance(v, 0, desc_of(n)),)))
    return PlanRequest(machine, tuple(made), tuple(buffers), tuple(residents), kept)


def drawn(seed: int, *, scratch: bool = False, before: int = 0) -> PlanRequest:
    """A chain of 24 tasks with tensors of all sizes and lifetimes."""
    dice, tasks = Random(seed), 24
    tensors: list[Tensor] = []
    for value in range(48):
        first = -1 if value < before else dice.randrange(tasks - 1)
        last = min(tasks - 1, max(first, 0) + dice.choice((1, 2, 3, 5, 8, 13)))
        last = tasks - 1 if value % 16 == 5 else last
        tensors.append((value, 16 * dice.choice((1, 2, 3, 5, 8, 12)), first, last))
    regions = {t: 32 * dice.randrange(1, 6) for t in range(0, tasks, 5)} if scratch else {}
    return request_of(tensors, tasks, regions, frozenset(v for v, *_ in tensors if v % 16 == 5))


def moved(made: Plan) -> int:
    return sum(step.nbytes for step in made.steps if isinstance(step, Relocate))


def without_a_look(request: PlanRequest, patch: pytest.MonkeyPatch) -> Plan:
    with patch.context() as context:
        context.setattr(planning, "find_static_layout", lambda made: None)
        return plan(request)


def test_a_tensor_that_lives_on_is_made_where_nothing_wants_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Best fit puts the small one that stays between two that go: a large one finds no hole."""
    tensors = [(0, 256, 0, 3), (1, 64, 1, 6), (2, 256, 2, 3), (3, 512, 4, 6)]
    request = request_of(tensors, 7)
    made, blind = plan(request), without_a_look(request, monkeypatch)
    assert moved(blind) > 0 and moved(made) == 0
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []


@pytest.mark.parametrize(
    ("scratch", "before", "share"), [(False, 0, 0.02), (True, 0, 0.22), (False, 8, 0.14)]
)
def test_bytes_moved_of_drawn_chains(
    scratch: bool, before: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = blindly = 0
    for seed in range(12):
        request = drawn(seed, scratch=scratch, before=before)
        made, blind = plan(request), without_a_look(request, monkeypatch)
        assert check_plan(made) == () and ByteMachine(made, seed).run() == []
        assert made.seconds <= blind.seconds and made.least_seconds <= made.seconds
        ours, blindly = ours + moved(made), blindly + moved(blind)
    print(f"{ours} of {blindly} B, {ours / blindly:.3f}")
    assert ours <= share * blindly
