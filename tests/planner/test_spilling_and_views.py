"""Out of memory is said only where there is no room: views may leave blocks, DRAM has the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.planner import (
    Certificate,
    Copy,
    Execute,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    after_steps,
    check_plan,
    plan,
)
from stitch.program import Space
from tests.support.machines import without_path
from tests.support.planner.byte_machine import sound
from tests.support.planner.leaving_brute_force import task_finds_room
from tests.support.planner.small_requests import (
    DRAM,
    L1,
    SMALL,
    Scene,
    desc_of,
    machine_with,
    program,
    random_request,
)

CRAMPED = machine_with(l1_nbytes=2048, dram_nbytes=4096)
CROWDED = (
    CRAMPED,
    machine_with(l1_nbytes=2048, dram_nbytes=2048),
    machine_with(l1_nbytes=1024, dram_nbytes=4096),
    without_path(CRAMPED, L1, L1),
)


def ways_out(made: Plan) -> Counter[tuple[Space, Space]]:
    return Counter(
        (s.source.desc.layout.space, s.target.desc.layout.space)
        for s in made.copies
        if isinstance(s, Copy) and s.kind == "evict"
    )


def a_view_of_a_block(output_nbytes: int, *others: int) -> Scene:
    """A task reads a view (256 B) of a block (3072 B) in L1; its output is to lie there too."""
    scene = Scene(SMALL)
    block = scene.buffer(desc_of(3072), 1024)
    scene.value(Instance(block.number, 0, block.desc), keep=True)
    view = scene.value(Instance(block.number, 512, desc_of(256)), keep=True)
    at = 1024 + 3072
    for size in others:
        scene.tensor(desc_of(size), at, keep=True)
        at += size
    scene.run(program("p", [desc_of(256)], [desc_of(output_nbytes)]), view, keep=True)
    return scene


def test_a_small_view_of_a_large_l1_block_leaves_it_where_the_output_needs_the_room() -> None:
    made = sound(plan(a_view_of_a_block(2048).request()))
    (ran,) = (s for s in made.steps if isinstance(s, Execute))
    assert ran.inputs[0].offset_nbytes == 0 and ran.inputs[0].desc == desc_of(256)
    assert ways_out(made) == {(L1, DRAM): 1}


def test_of_two_blocks_whose_views_are_read_one_stays_where_one_is_enough() -> None:
    scene = Scene(SMALL)
    views = []
    for at, size in ((1024, 2048), (3072, 1024)):
        block = scene.buffer(desc_of(size), at)
        scene.value(Instance(block.number, 0, block.desc), keep=True)
        views.append(scene.value(Instance(block.number, 512, desc_of(256)), keep=True))
    scene.run(program("p", [desc_of(256)] * 2, [desc_of(2048)]), *views, keep=True)
    made = sound(plan(scene.request()))
    (out,) = (s for s in made.copies if isinstance(s, Copy) and s.kind == "evict")
    assert out.nbytes == 2048 * 4
    (ran,) = (s for s in made.steps if isinstance(s, Execute))
    assert [i.offset_nbytes for i in ran.inputs] == [0, 512]


def a_full_dram() -> Scene:
    """DRAM is full; host and L1 are empty; a task wants room in DRAM, then one reads what left."""
    scene = Scene(machine_with(dram_nbytes=8192))
    first, second = (scene.tensor(desc_of(1024, DRAM), at, keep=True) for at in (0, 4096))
    scene.run(program("p", [desc_of(1024, DRAM)], [desc_of(1024, DRAM)]), first, keep=True)
    scene.run(program("q", [desc_of(1024, DRAM)], [desc_of(16)]), second, keep=True)
    return scene


def test_with_dram_full_and_host_and_l1_empty_a_tensor_waits_on_the_host() -> None:
    made = sound(plan(a_full_dram().request()))
    assert ways_out(made).keys() == {(DRAM, Space.HOST)}
    outs = [s for s in made.copies if isinstance(s, Copy) and s.kind == "evict"]
    assert all(s.certificate and s.certificate.kind == "capacity" for s in outs)
    (back,) = (s for s in made.copies if isinstance(s, Copy) and s.kind == "copy")
    assert back.source.desc.layout.space is Space.HOST and back.value == outs[0].value


def test_a_plan_that_may_not_spill_is_refused_and_a_certificate_says_why() -> None:
    with pytest.raises(
        OutOfMemoryError, match="dram cannot hold output 'output 0' of 'p'"
    ) as error:
        plan(a_full_dram().request(), spills=False)
    assert error.value.certificate == Certificate("capacity", (4096, 4096, 4096), (8192,))
    text = str(error.value)
    assert (
        "buffer 1 (4096 B, allocated before, read by queued task 1, referenced by a handle)" in text
    )


def test_what_bounces_passes_through_the_host_where_dram_is_full_of_what_the_task_reads() -> None:
    scene = Scene(without_path(machine_with(l1_nbytes=2048, dram_nbytes=4096), L1, L1))
    read = scene.tensor(desc_of(1024, DRAM), 0, keep=True)
    scene.tensor(desc_of(512), 1536, keep=True)
    scene.run(program("p", [desc_of(1024, DRAM)], [desc_of(1536)]), read, keep=True)
    made = sound(plan(scene.request()))
    (move,) = made.copies
    assert isinstance(move, Relocate) and move.stage_space is Space.HOST
    with pytest.raises(OutOfMemoryError, match="dram cannot hold staging of a bounce for 'p'"):
        plan(scene.request(), spills=False)


def views_of_blocks(random: Random) -> Scene:
    """A crowded L1 with a block or two, and tasks that read views of them, and whole tensors."""
    scene = Scene(random.choice((SMALL, CRAMPED)))
    shape, known, at = scene.machine.shape.space(L1), [], 1024
    while (size := 256 * random.randrange(1, 9)) <= shape.limit - at:
        block = scene.buffer(desc_of(size), at, pinned=not random.randrange(8))
        known.append((scene.value(Instance(block.number, 0, block.desc), keep=True), size))
        for _ in range(random.randrange(3)):
            part = 16 * random.randrange(1, size // 16)
            offset = 64 * random.randrange((size - part) // 16 + 1)
            view = Instance(block.number, offset, desc_of(part))
            known.append((scene.value(view, keep=True), part))
        at += size
    for index in range(random.randrange(1, 4)):
        read = random.sample(known, min(len(known), random.randrange(1, 3)))
        made = 64 * random.randrange(1, shape.capacity // 64)
        what = program(f"p{index}", [desc_of(size) for _, size in read], [desc_of(made)])
        scene.run(what, *(value for value, _ in read), keep=True)
    return scene


def confirmed(request: PlanRequest, seed: int) -> Counter[object]:
    """A sound plan, or an error that brute force confirms."""
    try:
        made = plan(request)
    except LayoutError:
        return Counter()
    except OutOfMemoryError as error:
        assert not all(task_finds_room(request, i) for i in range(len(request.tasks))), (
            f"seed {seed}: there is room: {error}"
        )
        return Counter(["refused"])
    return Counter([*ways_out(sound(made, seed))])


def crowded_seed(seed: int) -> Counter[object]:
    """Random requests of two kinds on tiny machines."""
    request = random_request(Random(seed), CROWDED[seed % len(CROWDED)])
    done = confirmed(request, seed)
    return done + confirmed(views_of_blocks(Random(seed)).request(), seed)


def test_every_out_of_memory_error_on_tiny_machines_is_confirmed_by_brute_force() -> None:
    done: Counter[object] = Counter()
    for seed in range(60):
        done += crowded_seed(seed)
    assert done["refused"] > 4 and done[L1, DRAM] > 4 and done[DRAM, Space.HOST] > 4


@pytest.mark.campaign("planner")
@pytest.mark.parametrize("start", range(100_000, 120_000, 4_000))
def test_no_out_of_memory_error_is_one_too_many(start: int) -> None:
    for seed in range(start, start + 2_000):
        crowded_seed(seed)


def views_of_a_block_that_left() -> Scene:
    """A block leaves for a large output; the next task reads it and a view that covers most of it:
    beside the output there is room for the block, not for both apart."""
    scene = Scene(CRAMPED)
    block = scene.buffer(desc_of(1280), 1024)
    whole = scene.value(Instance(block.number, 0, block.desc), keep=True)
    view = scene.value(Instance(block.number, 448 * 4, desc_of(800)), keep=True)
    scene.run(program("p", [], [desc_of(1024)]), keep=True)
    scene.run(program("q", [desc_of(1280), desc_of(800)], [desc_of(64)]), whole, view, keep=True)
    return scene


def test_a_block_that_left_comes_back_whole_where_its_views_take_more_room_apart() -> None:
    made = sound(plan(views_of_a_block_that_left().request()))
    (back,) = (s for s in made.copies if isinstance(s, Copy) and s.kind == "return")
    assert back.nbytes == 1280 * 4 and ways_out(made).total() == 2
    ran = [s for s in made.steps if isinstance(s, Execute)][-1]
    assert {i.buffer for i in ran.inputs} == {back.target.buffer}
    buffers, values = after_steps(made, len(made.steps))
    assert sorted(buffers) == [b.number for b in made.final_buffers]
    assert {r.value: list(r.instances) for r in made.final_values} == values


def test_a_view_that_was_copied_out_joins_its_block_again_where_only_that_has_room() -> None:
    scene = Scene(CRAMPED)
    block = scene.buffer(desc_of(1280), 1024)
    whole = scene.value(Instance(block.number, 0, block.desc), keep=True)
    view = scene.value(Instance(block.number, 1408, desc_of(768)), keep=True)
    scene.run(program("p", [desc_of(768)], [desc_of(1088)]), view, keep=True)
    scene.run(program("q", [desc_of(768), desc_of(1280)], [desc_of(512)]), view, whole, keep=True)
    made = sound(plan(scene.request()))
    first, last = (s for s in made.steps if isinstance(s, Execute))
    assert first.inputs[0].offset_nbytes == 0 and last.inputs[0].offset_nbytes == 1408
    assert {i.buffer for i in last.inputs} == {last.inputs[1].buffer}


def test_a_block_that_comes_back_in_another_form_is_found() -> None:
    made = plan(views_of_a_block_that_left().request())
    at = next(i for i, s in enumerate(made.steps) if isinstance(s, Copy) and s.kind == "return")
    back = made.steps[at]
    assert isinstance(back, Copy)
    outwards = next(s for s in made.copies if isinstance(s, Copy) and s.kind == "evict")
    for wrong in (replace(outwards, kind="return"), replace(back, kind="evict")):
        where = made.steps.index(outwards) if wrong.source == outwards.source else at
        steps = (*made.steps[:where], wrong, *made.steps[where + 1 :])
        assert "layout" in {p.kind for p in check_plan(replace(made, steps=steps))}
