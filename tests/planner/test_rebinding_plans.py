"""Plans bound to other places: the checker follows every byte, and what cannot serve is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import footprint
from stitch.memory import Allocator
from stitch.planner import (
    Allocate,
    Buffer,
    Copy,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    Resident,
    check_plan,
    plan,
    rebind_plan,
)
from stitch.program import Space
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.small_requests import (
    L1,
    MACHINES,
    Scene,
    desc_of,
    machine_with,
    program,
    random_request,
)


def elsewhere(request: PlanRequest, dice: Random) -> PlanRequest | None:
    """The same with what is not pinned at other places, or most of it where it lay, numbered in
    another order, and now and then beside one buffer more; None where that finds no room."""
    spaces = {s: request.machine.shape.space(s) for s in request.machine.shape.spaces}
    allocators = {s: Allocator.of(x) for s, x in spaces.items()}
    buffers: dict[int, Buffer] = {}
    stay = dice.choice((0.0, 0.7))
    for buffer in request.buffers:
        if buffer.address is None or buffer.pinned or dice.random() < stay:
            buffers[buffer.number] = buffer
            if buffer.address is not None:
                allocators[buffer.space].alloc_at(buffer.address, buffer.size_per_bank)
    others = [b for b in request.buffers if b.number not in buffers]
    dice.shuffle(others)
    for buffer in others:
        hole = allocators[buffer.space].try_alloc(16 * dice.choice((1, 4, 16)))
        address = allocators[buffer.space].try_alloc(buffer.size_per_bank)
        if hole is not None:
            allocators[buffer.space].free(hole)
        if address is None:
            return None
        buffers[buffer.number] = replace(buffer, address=address)
    order = [b.number for b in request.buffers]
    dice.shuffle(order)
    numbers = {old: new for new, old in enumerate(order)}
    lying = [replace(buffers[old], number=new) for new, old in enumerate(order)]
    if not dice.randrange(4):
        desc = desc_of(16 * dice.randrange(1, 9))
        address = allocators[L1].try_alloc(desc.shape[0] * 4)
        if address is not None:
            size = desc.shape[0] * 4
            lying.append(Buffer(len(lying), L1, address, size, desc, "another", pinned=True))
    residents = tuple(
        replace(r, instances=tuple(replace(i, buffer=numbers[i.buffer]) for i in r.instances))
        for r in request.residents
    )
    return replace(request, buffers=tuple(lying), residents=residents)


@pytest.mark.parametrize("count", [150, pytest.param(1200, marks=pytest.mark.campaign("planner"))])
def test_plans_at_other_places_are_sound(count: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(count):
        dice = Random(seed)
        request = random_request(dice, MACHINES[2] if seed % 2 else None)
        try:
            known = plan(request)
        except (OutOfMemoryError, LayoutError):
            continue
        other = elsewhere(request, dice)
        for asked in (request, *([] if other is None else [other])):
            bound = rebind_plan(known, asked)
            if bound is None:
                counts["refused"] += asked is other
                continue
            assert not any(isinstance(step, Relocate) for step in known.steps)
            assert check_plan(bound) == (), seed
            assert ByteMachine(bound, seed).run() == [], seed
            assert [type(step) for step in bound.steps] == [type(step) for step in known.steps]
            assert bound.seconds == known.seconds and bound.request is asked
            counts["placed"] += asked is other
            counts["evicts"] += asked is other and any(
                isinstance(s, Copy) and s.kind == "evict" for s in bound.steps
            )
    assert counts["placed"] > counts["refused"] / 2 and counts["evicts"] >= count // 400, counts


def bound_to(known: Plan, addresses: dict[int, int]) -> Plan | None:
    """A plan for the same with some buffers elsewhere."""
    buffers = tuple(
        replace(b, address=addresses.get(b.number, b.address)) for b in known.request.buffers
    )
    return rebind_plan(known, replace(known.request, buffers=buffers))


def made_at(made: Plan | None) -> list[int | None]:
    assert made is not None and check_plan(made) == ()
    return [step.buffer.address for step in made.steps if isinstance(step, Allocate)]


def test_what_a_plan_makes_goes_to_another_hole_where_its_own_is_taken() -> None:
    scene = Scene(machine_with(l1_nbytes=4096))
    desc = desc_of(1024)
    scene.tensor(desc, 1024, keep=True)
    x = scene.tensor(desc, 2048, keep=True)
    scene.run(program("p", [desc], [desc]), x, keep=True)
    known = plan(scene.request())
    (own,) = made_at(known)
    assert own is not None and own >= 3072
    assert made_at(bound_to(known, {0: own})) != [own], "something lies there now"
    assert made_at(bound_to(known, {0: 2048, 1: 1024})) == [own], "it stays where it can"
    assert bound_to(known, {0: 1728, 1: 3456}) is None, "no hole is large enough"


def test_what_a_program_wants_at_an_address_stays_there() -> None:
    scene = Scene(machine_with(l1_nbytes=4096))
    there = desc_of(1024, address=3072)
    x = scene.tensor(desc_of(1024), 1024, keep=True)
    y = scene.tensor(desc_of(1024), 3072, keep=True)
    scene.run(program("p", [desc_of(1024), there], [desc_of(512)]), x, y, keep=True)
    known = plan(scene.request())
    assert not known.copies
    made_at(bound_to(known, {0: 2048}))
    assert bound_to(known, {0: 3072, 1: 2048}) is None, "it would have to be moved"


def test_another_value_in_a_buffer_that_is_given_up_asks_for_a_new_plan() -> None:
    scene = Scene(machine_with(l1_nbytes=4096))
    desc = desc_of(1024)
    x = scene.tensor(desc, 1024)
    scene.run(program("p", [desc], [desc]), x, keep=True)
    known = plan(scene.request())
    made_at(rebind_plan(known, known.request))
    scene.kept.add(scene.value(known.request.residents[0].instances[0]))
    assert rebind_plan(known, scene.request()) is None


def test_what_kept_a_buffer_alive_may_be_gone() -> None:
    scene = Scene(machine_with(l1_nbytes=4096))
    desc = desc_of(1024)
    x = scene.tensor(desc, 1024)
    scene.run(program("p", [desc], [desc]), x, keep=True)
    (instance,) = plan(scene.request()).request.residents[0].instances
    alone = scene.request()
    scene.kept.add(scene.value(instance))
    known = plan(scene.request())
    assert check_plan(known) == () and known.final_buffers != plan(alone).final_buffers
    assert rebind_plan(known, alone) is None
    made_at(rebind_plan(known, known.request))


def test_what_came_to_lie_in_a_buffer_that_is_overwritten_is_not_lost() -> None:
    scene = Scene(machine_with(l1_nbytes=4096))
    desc = desc_of(1024)
    x = scene.tensor(desc, 1024)
    overwriting = replace(program("p", [desc], [desc]), donated=frozenset([0]), aliases=((0, 0),))
    scene.run(overwriting, x, keep=True)
    known = plan(scene.request())
    assert not any(isinstance(step, Allocate) for step in known.steps), "it lies where it lay"
    scene.kept.add(scene.value(known.request.residents[0].instances[0]))
    assert rebind_plan(known, scene.request()) is None


def test_what_another_tensor_kept_alive_is_freed_where_that_is_gone() -> None:
    """Of a source that dies; its copy in L1 is read, so the plan does not touch the other one."""
    scene = Scene(machine_with(l1_nbytes=4096))
    value = scene.tensor(desc_of(64), 1024, keep=False)
    scene.run(program("p", [desc_of(64)], [desc_of(64)]), value, keep=True)
    alone, waiting = scene.request(), desc_of(64, Space.DRAM)
    size = footprint(waiting, alone.machine.shape).size_per_bank
    number, other = len(alone.buffers), max(alone.kept) + 1
    lying = Instance(number, 0, waiting)
    (source,) = alone.residents
    source = replace(source, instances=(*source.instances, lying))
    buffer = Buffer(number, Space.DRAM, 0, size, waiting, "it")
    alone = replace(alone, buffers=(*alone.buffers, buffer), residents=(source,))
    shared = replace(
        alone, residents=(source, Resident(other, (lying,))), kept=alone.kept | {other}
    )
    for known, asked in ((shared, alone), (alone, shared)):
        assert check_plan(plan(known)) == ()
        bound = rebind_plan(plan(known), asked)
        assert bound is None or check_plan(bound) == ()
