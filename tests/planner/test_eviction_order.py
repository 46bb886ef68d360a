"""Who leaves a space that is full: each rule's order, what goes for nothing, what stays."""

from __future__ import annotations

import pytest

from stitch.errors import OutOfMemoryError
from stitch.planner import Copy, Free, Instance, Plan, eviction, plan
from stitch.planner.eviction import SpaceDemand, eviction_candidates
from stitch.planner.plan_state import PlanState, Rule
from stitch.program import Layout, TensorDesc
from tests.support.planner.byte_machine import sound
from tests.support.planner.small_requests import (
    BF16,
    DRAM,
    HOST,
    L1,
    SMALL,
    Scene,
    desc_of,
    machine_with,
    program,
)


def outs(made: Plan) -> list[Copy]:
    return [s for s in made.steps if isinstance(s, Copy) and s.kind == "evict"]


# -- the order of each rule -----------------------------------------------------------------------


def order(
    scene: Scene, rule: Rule, wanted: int, away: frozenset[tuple[int, int]] = frozenset()
) -> list[int]:
    """Values in L1 in the order in which they would leave for so many bytes, at the first task."""
    state = PlanState(scene.request(), rule, away)
    state.begin(0)
    demand = SpaceDemand(L1, "p", set(), floating=[(wanted, "output")])
    return [min(state.users[b.number]) for _, b, _ in eviction_candidates(state, demand)]


def read_in(scene: Scene, *values: int) -> None:
    """A first task that reads nothing, then one for each of these values in turn."""
    scene.run(program("p", [], [desc_of(16, DRAM)]), keep=True)
    for value in values:
        (desc,) = (r.instances[0].desc for r in scene.residents if r.value == value)
        scene.run(program(f"reads {value}", [desc], [desc_of(16, DRAM)]), value, keep=True)


def three(*sizes: int) -> tuple[Scene, list[int]]:
    scene, at, values = Scene(SMALL), 1024, []
    for size in sizes:
        values.append(scene.tensor(desc_of(size), at))
        at += size
    return scene, values


def test_the_farthest_next_use_leaves_first() -> None:
    scene, (a, b, c) = three(1024, 1024, 1024)
    read_in(scene, b, c, a)
    assert order(scene, "farthest", 1024) == [a, c, b]


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


def test_of_equals_the_largest_leaves_first() -> None:
    scene, (a, b, c) = three(512, 2048, 1024)
    scene.kept |= {a, b, c}
    read_in(scene)
    assert order(scene, "farthest", 512) == [b, c, a]


def test_of_those_that_are_read_together_one_that_lies_elsewhere_too_leaves_first() -> None:
    scene = Scene(SMALL)
    dirty = scene.tensor(desc_of(1024), 1024)
    near, far = scene.buffer(desc_of(1024), 2048), scene.buffer(desc_of(1024, DRAM), 0)
    clean = scene.value(*(Instance(b.number, 0, b.desc) for b in (near, far)))
    read_in(scene)
    both = program("reads both", [desc_of(1024)] * 2, [desc_of(16, DRAM)])
    scene.run(both, dirty, clean, keep=True)
    assert order(scene, "farthest", 1024) == [clean, dirty]


def test_the_sufficient_rule_takes_the_cheapest_that_makes_room_alone() -> None:
    scene, (small, enough, large) = three(512, 1024, 2560)
    read_in(scene, small, enough, large)
    assert order(scene, "sufficient", 1024) == [enough, large, small]


def test_the_cheapest_rule_weighs_bytes_with_the_time_that_they_are_away() -> None:
    scene, (soon, late, large) = three(1024, 1280, 1792)
    read_in(scene, soon, late, large)
    # Bytes out and back for each task away: 2048 / 1, 2560 / 2, 3584 / 3.
    assert order(scene, "cheapest", 512) == [large, late, soon]
    scene, (soon, late, large) = three(512, 1280, 2304)
    read_in(scene, soon, late, large)
    assert order(scene, "cheapest", 512) == [soon, late, large]


def test_what_was_chosen_to_leave_before_its_next_use_leaves_first() -> None:
    scene, (a, b, c) = three(1024, 1024, 1024)
    read_in(scene, b, c, a)
    assert order(scene, "chosen", 1024, frozenset({(b, 1)})) == [b, a, c]
    # Chosen for another of its uses it waits its turn.
    assert order(scene, "chosen", 1024, frozenset({(b, 2)})) == [a, c, b]


# -- what goes for nothing, and what stays ------------------------------------------------------


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
    large = scene.tensor(desc_of(1792), 2048, keep=True, idle=2)
    small = scene.tensor(desc_of(512), 3840, keep=True, idle=1)
    scene.run(program("p", [], [desc_of(1280)]), keep=True)
    assert order(scene, "farthest", 1280) == [large, small]
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


# -- places and sources ---------------------------------------------------------------------------


def test_pieces_that_best_fit_places_need_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object) -> None:
        raise AssertionError("nothing has to move")

    monkeypatch.setattr(eviction, "arrange", search)
    scene = Scene(SMALL)
    scene.tensor(desc_of(512), 3584, keep=True)
    # Holes of 2560 and 1024 B: placed from the smallest on, the largest would find none.
    scene.run(program("p", [], [desc_of(n) for n in (512, 1024, 2048)]), keep=True)
    assert sound(plan(scene.request())).copies == ()


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


def test_the_smallest_change_that_would_do_is_named() -> None:
    scene = Scene(machine_with(dram_nbytes=8192))
    scene.tensor(desc_of(1024, DRAM), 0, keep=True)
    scene.tensor(desc_of(256, DRAM), 4096, keep=True)
    scene.tensor(desc_of(512, DRAM), 5120, keep=True)
    scene.run(program("p", [], [desc_of(768, DRAM)]), keep=True)
    with pytest.raises(OutOfMemoryError) as error:
        plan(scene.request(), spills=False)
    assert "buffer 2 (2048 B) elsewhere: 2048 B per bank are missing" in str(error.value)
