"""What leaves a full space, what is dropped without a copy, and where copies start."""

from __future__ import annotations

import pytest

from stitch.planner import Copy, Free, Instance, Plan, plan
from stitch.program import Layout, TensorDesc
from tests.support.planner.byte_machine import sound
from tests.support.planner.small_requests import (
    BF16,
    DRAM,
    HOST,
    SMALL,
    Scene,
    desc_of,
    machine_with,
    program,
)


def outs(made: Plan) -> list[Copy]:
    return [s for s in made.steps if isinstance(s, Copy) and s.kind == "evict"]


@pytest.mark.parametrize("idle", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_of_those_that_nobody_is_known_to_read_the_least_recently_used_leaves(
    idle: tuple[int, int, int],
) -> None:
    scene = Scene(SMALL)
    for i, since in enumerate(idle):
        scene.tensor(desc_of(1024), 1024 + 1024 * i, keep=True, idle=since)
    scene.run(program("p", [], [desc_of(2048)]), keep=True)
    (out,) = outs(sound(plan(scene.request())))
    assert out.value == idle.index(3)


def spare_copies(*places: int) -> Scene:
    """Values of 512 B with a copy in L1 at each of these places, and one in DRAM each."""
    scene = Scene(SMALL)
    for i, at in enumerate(places):
        near, far = scene.buffer(desc_of(512), at), scene.buffer(desc_of(512, DRAM), 2048 * i)
        scene.value(*(Instance(b.number, 0, b.desc) for b in (far, near)), keep=True)
    return scene


def test_a_copy_that_nobody_is_known_to_want_is_dropped_before_anything_moves() -> None:
    scene = spare_copies(3072)
    scene.tensor(desc_of(1024), 1024, keep=True)
    scene.run(program("p", [], [desc_of(2560)]), keep=True)
    made = sound(plan(scene.request()))
    assert made.copies == () and made.steps[0] == Free(0)


def test_no_more_copies_are_dropped_than_make_room() -> None:
    scene = spare_copies(1024, 2048, 3072, 4096)
    scene.run(program("p", [], [desc_of(1024)]), keep=True)
    made = sound(plan(scene.request()))
    assert made.copies == ()
    assert sum(isinstance(s, Free) for s in made.steps) == 1


def test_a_value_whose_other_copy_is_rounded_is_written_before_it_leaves() -> None:
    scene = Scene(SMALL)
    exact = scene.buffer(desc_of(2560), 1024)
    half = TensorDesc(exact.desc.shape, Layout(BF16, DRAM))
    rounded = scene.buffer(half, 0)
    scene.value(*(Instance(b.number, 0, b.desc) for b in (exact, rounded)), keep=True)
    scene.run(program("p", [], [desc_of(2048)]), keep=True)
    (out,) = outs(sound(plan(scene.request())))
    assert out.source.buffer == exact.number and out.nbytes == 2560 * 4


def test_values_that_share_bytes_leave_together_also_where_each_lies_elsewhere_too() -> None:
    scene = Scene(SMALL)
    block = scene.buffer(desc_of(3072), 1024)
    half = desc_of(1536)
    for at, offset, desc in ((0, 0, block.desc), (16_384, 6_144, half)):
        copy = scene.buffer(TensorDesc(desc.shape, Layout(desc.layout.data_type, DRAM)), at)
        scene.value(Instance(block.number, offset, desc), Instance(copy.number, 0, copy.desc),
                    keep=True)  # fmt: skip
    scene.run(program("p", [], [desc_of(2048)]), keep=True)
    made = sound(plan(scene.request()))
    (out,) = outs(made)
    assert out.source.buffer == block.number
    homes = [r.instances[0].buffer for r in made.final_values if r.value in (0, 1)]
    assert homes == [out.target.buffer] * 2


def test_what_was_dropped_for_one_that_finds_no_room_is_not_dropped_for_another_that_does() -> None:
    scene = Scene(machine_with(l1_nbytes=4096, dram_nbytes=8192))
    near = scene.buffer(desc_of(1024), 1024, pinned=True)
    spare = scene.buffer(desc_of(1024, DRAM), 0)
    twice = scene.value(*(Instance(b.number, 0, b.desc) for b in (near, spare)), keep=True)
    scene.tensor(desc_of(512, DRAM), 4096, keep=True)
    # The first to leave finds no room in DRAM, not even without the copy that lies there.
    scene.tensor(desc_of(1792), 2048, keep=True, idle=2)
    small = scene.tensor(desc_of(512), 3840, keep=True, idle=1)
    scene.run(program("p", [], [desc_of(1280)]), keep=True)
    made = sound(plan(scene.request()))
    assert [out.value for out in outs(made)] == [small]
    (left,) = (r for r in made.final_values if r.value == twice)
    assert [i.buffer for i in left.instances] == [near.number, spare.number]


def test_a_value_that_leaves_again_is_not_written_again() -> None:
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(2560), 1024, keep=True)
    for _ in range(3):
        scene.run(program("fills", [], [desc_of(2048)]))
        scene.run(program("reads", [desc_of(2560)], [desc_of(16, DRAM)]), a, keep=True)
    made = sound(plan(scene.request()))
    assert len(outs(made)) == 1
    # Brought back for each of three tasks, though it left three times.
    assert sum(isinstance(s, Copy) and s.kind == "copy" for s in made.steps) == 3


def test_of_those_that_leave_together_the_spare_are_dropped() -> None:
    scene = spare_copies(1024, 2048)
    scene.tensor(desc_of(2048), 3072, pinned=True, keep=True)
    scene.run(program("p", [], [desc_of(2048)]))
    scene.run(program("reads", [desc_of(512)] * 2, [desc_of(16, DRAM)]), 0, 1, keep=True)
    made = sound(plan(scene.request()))
    assert outs(made) == [] and {Free(0), Free(2)} <= {*made.steps}


def test_a_pinned_input_that_lies_at_its_address_is_read_there() -> None:
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(1024), 2048, pinned=True, keep=True)
    scene.run(program("p", [desc_of(1024, address=2048)], [desc_of(16)]), a, keep=True)
    assert sound(plan(scene.request())).copies == ()


def test_a_copy_starts_from_where_it_takes_least() -> None:
    scene = Scene(SMALL)
    desc = desc_of(1024)
    host, dram = (TensorDesc(desc.shape, Layout(desc.layout.data_type, s)) for s in (HOST, DRAM))
    copies = scene.buffer(host, None), scene.buffer(dram, 0)
    a = scene.value(*(Instance(b.number, 0, b.desc) for b in copies), keep=True)
    scene.run(program("p", [desc], [desc_of(16, DRAM)]), a, keep=True)
    (copy,) = sound(plan(scene.request())).copies
    assert isinstance(copy, Copy) and copy.source.desc.layout.space is DRAM
