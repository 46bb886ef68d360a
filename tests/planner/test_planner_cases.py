"""Named cases: which of its remedies the planner chooses, and how it proves that it had to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stitch.errors import LayoutError
from stitch.planner import (
    Allocate,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
    check_plan,
    plan,
)
from stitch.program import Layout, Space, TensorDesc
from tests.support.planner import cases
from tests.support.planner.byte_machine import ByteMachine
from tests.support.planner.small_requests import (
    BF16,
    DRAM,
    F32,
    L1,
    Scene,
    desc_of,
    machine_with,
    program,
)


def moves(made: Plan) -> list[Relocate]:
    return [s for s in made.steps if isinstance(s, Relocate)]


def evictions(made: Plan) -> list[Copy]:
    return [s for s in made.steps if isinstance(s, Copy) and s.kind == "evict"]


@pytest.mark.parametrize("name", cases.CASES)
def test_the_plan_of_each_case_is_sound(name: str) -> None:
    made = plan(cases.CASES[name]())
    assert check_plan(made) == ()


@pytest.mark.parametrize("name", sorted(cases.CASES.keys() - {"phi_2"}))
def test_the_plan_of_each_case_keeps_the_bytes(name: str) -> None:
    assert ByteMachine(plan(cases.CASES[name]()), 3).run() == []


def test_the_phi_2_layer_is_placed_without_a_byte_in_dram() -> None:
    request = cases.phi_2()
    shape = request.machine.shape.space(Space.L1)
    live = sorted((b.address or 0, b.size_per_bank) for b in request.buffers)
    edges = [shape.base, *(x for a, size in live for x in (a, a + size)), shape.limit]
    holes = [b - a for a, b in zip(edges[::2], edges[1::2], strict=True)]
    assert (sum(size for _, size in live), max(holes)) == (786_432, 254_912)
    made = plan(request)
    (move,) = moves(made)
    assert evictions(made) == [] and move.stage is None and move.certificate is None
    assert {t.target_space for t in move.transfers} == {Space.L1}
    (placed,) = (s.buffer for s in made.steps if isinstance(s, Allocate))
    assert placed.size_per_bank == 305_152
    assert move.nbytes == 262_144 * shape.banks


def test_a_pinned_buffer_in_the_middle_forces_a_bounce_with_a_packing_certificate() -> None:
    made = plan(cases.split_by_a_pin())
    (out,) = evictions(made)
    assert out.certificate is not None and out.certificate.kind == "packing"
    assert sum(out.certificate.pieces) <= sum(out.certificate.gaps)
    back = [s for s in made.steps if isinstance(s, Copy) and s.source.buffer == out.target.buffer]
    assert [s.target.desc for s in back] == [out.source.desc]
    pinned = next(b for b in made.final_buffers if b.pinned)
    assert pinned == made.request.buffers[pinned.number]


def test_swapping_two_inputs_with_spare_room_stays_inside_l1() -> None:
    (step,) = plan(cases.swapped(1536)).copies
    assert isinstance(step, Relocate)
    assert step.stage is None and step.certificate is None and step.bounced_nbytes == 0


def test_free_bytes_inside_a_target_are_enough_to_keep_a_cycle_inside_l1() -> None:
    paths = tuple((source, target, replace(path, latency_seconds=1e-6 * (source is not target)))
                  for source, target, path in cases.SMALL.paths)  # fmt: skip
    scene = Scene(replace(cases.SMALL, paths=paths))
    a = scene.tensor(desc_of(1024), 1024, keep=True)
    b = scene.tensor(desc_of(1536), 2048, keep=True)
    c = scene.tensor(desc_of(960), 4096, keep=True)
    wanted = [desc_of(1024, address=4096), desc_of(1536, address=1024), desc_of(960, address=2560)]
    scene.run(program("p", wanted, [desc_of(16, DRAM)]), a, b, c, keep=True)
    made = plan(scene.request())
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []
    assert all(step.stage is None for step in moves(made))


def test_a_cycle_in_a_full_dram_is_staged_on_the_host() -> None:
    scene = Scene(machine_with(dram_nbytes=8192))
    a = scene.tensor(desc_of(1024, DRAM), 0, keep=True)
    b = scene.tensor(desc_of(1024, DRAM), 4096, keep=True)
    inputs = [desc_of(1024, DRAM, 4096), desc_of(1024, DRAM, 0)]
    scene.run(program("p", inputs, [desc_of(16)]), a, b, keep=True)
    made = plan(scene.request())
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []
    (step,) = moves(made)
    assert step.stage_space is Space.HOST
    assert step.certificate is not None and step.certificate.kind == "cycle"


def test_a_small_tensor_leaves_rather_than_a_large_one_that_is_read_a_little_later() -> None:
    scene = Scene(cases.SMALL)
    large = scene.tensor(desc_of(3072), 1024, keep=True)
    small = scene.tensor(desc_of(512), 4096, keep=True)
    scene.run(program("p0", [], [desc_of(1024)]), keep=True)
    scene.run(program("p1", [desc_of(512)], [desc_of(16, DRAM)]), small)
    scene.run(program("p2", [desc_of(3072)], [desc_of(16, DRAM)]), large)
    made = plan(scene.request())
    assert next(step.value for step in evictions(made)) == small
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []


def test_an_input_that_is_overwritten_is_not_shared_with_its_twin() -> None:
    scene = Scene(cases.SMALL)
    a = scene.tensor(desc_of(512), 1024)
    what = program("p", [desc_of(512)] * 2, [desc_of(512)], aliases=((0, 0),))
    scene.run(what, a, a, keep=True)
    made = plan(scene.request())
    ran = next(s for s in made.steps if isinstance(s, Execute))
    assert ran.inputs[0].buffer == ran.outputs[0].buffer != ran.inputs[1].buffer
    assert check_plan(made) == ()


def test_dropping_an_exact_copy_never_makes_a_rounded_one_the_value() -> None:
    scene = Scene(cases.SMALL)
    exact = scene.buffer(desc_of(2048), 1024)
    half = TensorDesc(exact.desc.shape, Layout(BF16, L1))
    rounded = scene.buffer(half, 3072)
    again = scene.buffer(desc_of(2048, DRAM), 0)
    scene.value(*(Instance(b.number, 0, b.desc) for b in (exact, rounded, again)), keep=True)
    scene.run(program("p", [], [desc_of(2048)]), keep=True)
    scene.run(program("q", [], [desc_of(1040)]), keep=True)
    made = plan(scene.request())
    assert check_plan(made) == ()
    (kept,) = (r for r in made.final_values if r.value == 0)
    assert kept.instances[0].desc.layout.data_type is F32


def crowded(*, has_spare_copy: bool) -> PlanRequest:
    """DRAM is full of what the task reads there, and its output needs room in a full L1."""
    wide = TensorDesc((64, 32), Layout(F32, L1))
    waiting = TensorDesc((64, 32), Layout(F32, DRAM))
    scene = Scene(machine_with(l1_nbytes=4096, dram_nbytes=8192))
    read = scene.buffer(waiting, 0)
    near = scene.buffer(wide, 1024)
    instances = [Instance(b.number, 0, b.desc) for b in (read, near)]
    value = scene.value(*instances[: 1 + has_spare_copy], keep=True)
    if not has_spare_copy:
        scene.value(instances[1], keep=True)
    scene.tensor(waiting, 4096, keep=True)
    scene.tensor(wide, 3072, keep=True)
    scene.run(program("p", [waiting], [wide]), value, keep=True)
    return scene.request()


def test_room_for_an_eviction_never_costs_an_input_that_the_task_reads_in_dram() -> None:
    made = plan(crowded(has_spare_copy=True))
    assert check_plan(made) == () and ByteMachine(made, 1).run() == []
    assert made.copies == () and made.steps[0] == Free(1)


def test_a_pinned_tensor_stays_when_its_last_reader_has_run() -> None:
    scene = Scene(cases.SMALL)
    a = scene.tensor(desc_of(512), 2048, pinned=True)
    scene.run(program("p", [desc_of(512)], [desc_of(512)]), a, keep=True)
    made = plan(scene.request())
    assert all(not isinstance(s, Free) for s in made.steps)
    assert made.final_buffers[0].number == 0 and check_plan(made) == ()


def test_scratch_in_dram_takes_no_more_than_its_bytes() -> None:
    scene = Scene()
    scene.run(program("p", [], [desc_of(16)], scratch=1000, scratch_space=DRAM), keep=True)
    made = plan(scene.request())
    (scratch,) = (
        s.buffer for s in made.steps if isinstance(s, Allocate) and s.buffer.space is DRAM
    )
    assert scratch.size_per_bank == 1024
    assert check_plan(made) == ()


def test_fixed_addresses_that_clash_are_refused_with_both_names() -> None:
    scene = Scene(cases.SMALL)
    scene.run(program("p", [], [desc_of(512, address=1024), desc_of(512, address=1520)]))
    with pytest.raises(LayoutError, match=r"output 0.*overlap") as error:
        plan(scene.request())
    assert "output 1" in str(error.value)


def test_a_fixed_address_over_a_pinned_buffer_is_refused() -> None:
    scene = Scene(cases.SMALL)
    scene.tensor(desc_of(512), 2048, pinned=True, keep=True)
    scene.run(program("p", [], [desc_of(512, address=2048)]))
    with pytest.raises(LayoutError, match="pinned"):
        plan(scene.request())
