"""What a later program wants at an address is made there at once, and the rest beside it."""

from __future__ import annotations

from random import Random

import pytest

from stitch.errors import StitchError
from stitch.machine import Machine
from stitch.planner import Allocate, Plan, PlanRequest, Relocate, check_plan, plan
from stitch.planner.addresses import RequiredAddresses
from stitch.program import Layout, TensorDesc
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.small_requests import (
    DRAM,
    F32,
    L1,
    Scene,
    desc_of,
    machine_with,
    program,
    random_request,
    to_layout,
)

SMALL = machine_with(l1_nbytes=4096)
#: An L1 of eight granules, for brute force.
GRANULES = 8
LEAST = machine_with(l1_nbytes=16 * GRANULES)


def moves(made: Plan) -> list[Relocate]:
    assert check_plan(made) == ()
    assert ByteMachine(made, 1).run() == []
    return [step for step in made.steps if isinstance(step, Relocate)]


def test_an_output_is_born_where_its_reader_wants_it() -> None:
    scene = Scene(SMALL)
    (y,) = scene.run(program("makes", [], [desc_of(512)]))
    scene.run(program("passes by", [], [desc_of(256)]), keep=True)
    scene.run(program("reads", [desc_of(512, address=2048)], [desc_of(64)]), y, keep=True)
    made = plan(scene.request())
    assert moves(made) == [] and made.copies == ()
    born = [s.buffer for s in made.steps if isinstance(s, Allocate)]
    assert born[0].address == 2048


def test_copies_for_inputs_and_conversions_are_born_as_well() -> None:
    scene = Scene(SMALL)
    x = scene.tensor(desc_of(512, DRAM), 1024, keep=True)
    (y,) = scene.run(to_layout(desc_of(256)), scene.tensor(desc_of(256, DRAM), 0))
    scene.run(program("reads", [desc_of(512)], []), x)
    wanted = [desc_of(512, address=2048), desc_of(256, address=3072)]
    scene.run(program("wants", wanted, []), x, y)
    made = plan(scene.request())
    assert moves(made) == [] and len(made.copies) == 2


@pytest.mark.parametrize("other", ["scratch", "output", "input"])
def test_nothing_is_born_in_bytes_that_a_task_wants_before(other: str) -> None:
    scene = Scene(SMALL)
    x = scene.tensor(desc_of(512, DRAM), 1024)
    (y,) = scene.run(program("makes", [], [desc_of(512)]))
    born = [scene.run(program(f"makes {at}", [], [desc_of(256)]))[0] for at in (3072, 4096)]
    there = [desc_of(512, address=1024)]
    scene.run({
        "scratch": program("between", [], [], scratch=512),
        "output": program("between", [], there),
        "input": program("between", there, []),
    }[other], *([x] if other == "input" else []))  # fmt: skip
    wanted = [desc_of(512, address=1280), *(desc_of(256, address=at) for at in (3072, 4096))]
    scene.run(program("reads", wanted, []), y, *born)
    # Were it born there, it would move twice, which the others' births would make up for.
    assert sum(step.count for step in moves(plan(scene.request()))) == 1


def test_what_has_to_make_way_later_makes_way_at_once() -> None:
    scene = Scene(SMALL)
    scene.tensor(desc_of(512), 2048, keep=True)
    (y,) = scene.run(program("makes", [], [desc_of(512)]))
    scene.run(program("reads", [desc_of(512, address=2048)], []), y)
    (move,) = moves(plan(scene.request()))
    assert len(move.targets) == 1


def test_nothing_makes_way_for_a_birth_that_is_gone_when_its_bytes_are_wanted() -> None:
    scene = Scene(SMALL)
    x = scene.tensor(desc_of(1024), 2048)
    (y,) = scene.run(program("makes", [], [desc_of(512)]))
    scene.run(program("ends", [desc_of(1024)], []), x)
    scene.run(program("reads", [desc_of(512, address=2048)], []), y)
    (move,) = moves(plan(scene.request()))
    assert move.nbytes == 4 * 512


def test_what_lies_anywhere_is_made_beside_the_scratch_and_the_addresses_of_later_tasks() -> None:
    scene = Scene(SMALL)
    # The best fit is the hole at the bottom, where a later task's scratch lies.
    scene.tensor(desc_of(512), 1536, keep=True)
    scene.run(program("makes", [], [desc_of(512)]), keep=True)
    scene.run(program("computes", [], [], scratch=512))
    assert moves(plan(scene.request())) == []


# -- drawn chains --------------------------------------------------------------------------------


def drawn(
    seed: int, machine: Machine, tasks: int, share: int = 4, moved: bool = True
) -> PlanRequest:
    """A chain of programs, half of whose inputs are wanted at addresses of L1; a tensor takes at
    most one `share`th of it, and is wanted at one address only if it is not `moved`."""
    dice = Random(seed)
    l1, scene = machine.shape.space(L1), Scene(machine)
    most = l1.capacity // l1.granule

    def place(granules: int) -> int:
        return l1.base + dice.randrange(most - granules + 1) * l1.granule

    def desc(granules: int, address: int | None) -> TensorDesc:
        shape = granules * l1.banks, l1.granule // 4
        return TensorDesc(shape, Layout(F32, L1, address=address))

    live: list[tuple[int, int, int]] = []
    for number in range(tasks):
        read = dice.sample(live, min(len(live), dice.randrange(1, 3)))
        made = [dice.randrange(1, max(2, most // share)) for _ in range(dice.choice((1, 1, 2)))]
        wanted = [
            desc(n, (place(n) if moved else at) if dice.random() < 0.5 else None)
            for _, n, at in read
        ]
        scratch = dice.choice((0, 0, 0, dice.randrange(1, most // share) * l1.granule))
        outputs = [desc(n, place(n) if moved and dice.random() < 0.1 else None) for n in made]
        what = program(f"p{number}", wanted, outputs, scratch=scratch)
        results = scene.run(what, *(value for value, _, _ in read))
        live += [(v, n, place(n)) for v, n in zip(results, made, strict=True)]
    scene.kept = {value for value, _, _ in live if dice.random() < 0.3}
    return scene.request()


def planned(request: PlanRequest) -> Plan | None:
    try:
        return plan(request)
    except StitchError:
        return None


def fits_unmoved(request: PlanRequest) -> bool:
    """Whether all that programs make has a place for good, by trying all places."""
    l1 = request.machine.shape.space(L1)
    end, rectangles = len(request.tasks), []
    for t, task in enumerate(request.tasks):
        what = task.transformation
        if what.scratch is not None:
            rectangles.append((t, t, what.scratch.size_per_bank, {l1.base}))
        for value, desc in zip(task.outputs, what.outputs, strict=True):
            reads = [
                (u, d)
                for u, other in enumerate(request.tasks)
                for v, d in zip(other.inputs, other.transformation.inputs, strict=True)
                if v == value
            ]
            last = end if value in request.kept else max([u for u, _ in reads], default=t)
            size = desc.shape[0] // l1.banks * l1.granule
            places = set(range(l1.base, l1.limit - size + 1, l1.granule))
            for d in (desc, *(d for _, d in reads)):
                places &= {d.layout.address} if d.layout.address is not None else places
            rectangles.append((t, last, size, places))
    rectangles.sort(key=lambda r: len(r[3]))
    return _places(rectangles, [])


def _places(
    rest: list[tuple[int, int, int, set[int]]], placed: list[tuple[int, int, int, int]]
) -> bool:
    if not rest:
        return True
    first, last, size, places = rest[0]
    return any(
        _places(rest[1:], [*placed, (first, last, size, at)])
        for at in places
        if not any(
            first <= d and c <= last and at < b + n and b < at + size for c, d, n, b in placed
        )
    )


def test_nothing_moves_where_all_has_a_place_for_good() -> None:
    unmoved = 0
    for seed in range(300):
        request = drawn(seed, LEAST, 4)
        made = planned(request)
        if made is not None and fits_unmoved(request):
            assert made.copies == ()
            unmoved += 1
    assert unmoved > 90


def test_no_plan_takes_longer_than_without_a_look_at_later_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [random_request(Random(seed)) for seed in range(70)]
    requests += [drawn(seed, SMALL, 9) for seed in range(20)]
    ahead = [planned(request) for request in requests]
    monkeypatch.setattr(RequiredAddresses, "__bool__", lambda self: False)
    plain = [planned(request) for request in requests]
    pairs = [(a, b) for a, b in zip(ahead, plain, strict=True) if b is not None]
    assert len(pairs) > 50 and all(a is not None and a.seconds <= b.seconds for a, b in pairs)
    copies = [sum(step.count for made in those if made is not None for step in made.copies)
              for those in zip(*pairs, strict=True)]  # fmt: skip
    assert copies[0] < 0.95 * copies[1]
