"""Plans with a known defect: the checker names its kind, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import pytest

from stitch.planner import (
    Allocate,
    Buffer,
    Certificate,
    Copy,
    CostCertificate,
    Execute,
    Free,
    Instance,
    Plan,
    Relocate,
    Resident,
    Step,
    check_plan,
    plan,
)
from stitch.planner.checker.symbolic_memory import ByteMap, ContentPiece
from stitch.program import Space
from tests.support.machines import without_path
from tests.support.planner import cases
from tests.support.planner.small_requests import BF16, DRAM, L1, Scene, desc_of, program

Kind = TypeVar("Kind", Allocate, Copy, Execute, Free, Relocate)


def first(made: Plan, kind: type[Kind], count: int = 0) -> tuple[int, Kind]:
    found = [(i, s) for i, s in enumerate(made.steps) if isinstance(s, kind)]
    return found[count]


def with_step(made: Plan, index: int, *steps: Step) -> Plan:
    return replace(made, steps=(*made.steps[:index], *steps, *made.steps[index + 1 :]))


def changed(made: Plan, kind: type[Any], count: int = 0, **fields: Any) -> Plan:
    index, step = first(made, kind, count)
    return with_step(made, index, replace(step, **fields))


def kinds(made: Plan) -> set[str]:
    return {p.kind for p in check_plan(made)}


@pytest.mark.parametrize("address", [0, 16_384 - 16, 1025, 1040])
def test_an_address_out_of_range_misaligned_or_taken_is_named(address: int) -> None:
    made = plan(cases.roomy())
    _, step = first(made, Allocate)
    assert "address" in kinds(changed(made, Allocate, buffer=replace(step.buffer, address=address)))


def test_a_copy_from_a_rounded_instance_is_named() -> None:
    scene = Scene(cases.SMALL)
    exact = scene.buffer(desc_of(1024), 1024)
    half = replace(exact.desc, layout=replace(exact.desc.layout, data_type=BF16))
    rounded = scene.buffer(half, 2048)
    value = scene.value(Instance(0, 0, exact.desc), Instance(rounded.number, 0, half), keep=True)
    scene.run(program("p", [desc_of(1024, DRAM)], [desc_of(16)]), value)
    made = plan(scene.request())
    bad = changed(made, Copy, source=Instance(rounded.number, 0, half))
    assert "lossy" in kinds(bad) and "lossy" not in kinds(made)


def test_wrong_byte_counts_are_named() -> None:
    assert "bytes" in kinds(changed(plan(cases.over_capacity()), Copy, nbytes=1))
    assert "bytes" in kinds(changed(plan(cases.fragmented()), Relocate, nbytes=1))


def test_an_input_at_another_address_than_described_is_named() -> None:
    made = plan(cases.swapped())
    index, _ = first(made, Relocate)
    still = with_step(made, index)
    assert "layout" in kinds(still)


def test_an_output_that_leaves_the_place_of_its_alias_is_named() -> None:
    made = plan(cases.aliases())
    index, step = first(made, Execute)
    moved = replace(step, outputs=(replace(step.outputs[0], buffer=1),))
    assert "alias" in kinds(with_step(made, index, moved))


def test_an_output_over_another_operand_is_named() -> None:
    made = plan(cases.roomy())
    index, step = first(made, Execute)
    over = replace(step, outputs=step.inputs)
    assert "overlap" in kinds(with_step(made, index, over))


@pytest.mark.parametrize(
    "scratch", [None, (L1, 1040, 704), (L1, 1024, 688), (DRAM, 0, 704), (L1, 1024, 3600)]
)
def test_scratch_that_is_not_what_was_promised_is_named(
    scratch: tuple[Space, int, int] | None,
) -> None:
    assert "scratch" in kinds(changed(plan(cases.under_scratch()), Execute, scratch=scratch))


def test_a_pinned_buffer_that_moves_or_is_freed_is_named() -> None:
    made = plan(cases.fragmented())
    buffers = (replace(made.request.buffers[0], pinned=True), *made.request.buffers[1:])
    pinned = replace(made, request=replace(made.request, buffers=buffers))
    assert "pinned" in kinds(pinned)
    made = plan(cases.split_by_a_pin())
    pin = next(b for b in made.request.buffers if b.pinned)
    assert "pinned" in kinds(replace(made, steps=(*made.steps, Free(pin.number))))


def test_only_what_takes_its_inputs_place_may_overwrite_a_shared_buffer() -> None:
    made = plan(cases.split_by_a_pin())
    pin = next(b for b in made.request.buffers if b.pinned)
    buffers = tuple(replace(b, shared=b is pin) for b in made.request.buffers)
    shared = replace(made, request=replace(made.request, buffers=buffers))
    assert "pinned" in kinds(replace(shared, steps=(*made.steps, Free(pin.number))))
    index, step = next((i, s) for i, s in enumerate(made.steps) if isinstance(s, Execute))
    over = replace(step, outputs=(replace(step.outputs[0], buffer=pin.number), *step.outputs[1:]))
    assert "pinned" in kinds(with_step(shared, index, over))


def test_a_kept_value_that_is_lost_is_named() -> None:
    made = plan(cases.roomy())
    left = tuple(r for r in made.final_values if r.value != 0)
    assert "kept" in kinds(replace(made, final_values=left))


def test_a_final_value_that_does_not_lie_where_it_is_said_to_is_named() -> None:
    made = plan(cases.roomy())
    (a, b) = made.final_values
    crossed = (Resident(a.value, b.instances), Resident(b.value, a.instances))
    assert "final" in kinds(replace(made, final_values=crossed))


def test_a_buffer_that_stays_alive_for_nobody_is_named() -> None:
    made = plan(cases.roomy())
    leak = Buffer(9, L1, 2048, 16, desc_of(16), "leak")
    bad = replace(
        made,
        steps=(*made.steps, Allocate(leak)),
        final_buffers=(*made.final_buffers, leak),
        free_regions=(*made.free_regions, (L1, 2048, 16)),
    )
    assert [p.kind for p in check_plan(bad)] == ["final"]


def test_regions_that_are_missing_surplus_or_taken_are_named() -> None:
    made = plan(cases.roomy())
    assert kinds(replace(made, free_regions=())) == {"free_region"}
    for extra in ((L1, 2048, 16), (L1, 1024, 16)):
        more = replace(made, free_regions=(*made.free_regions, extra))
        assert kinds(more) == {"free_region"}


def test_a_resident_that_is_used_and_not_listed_is_named() -> None:
    assert "touched" in kinds(replace(plan(cases.roomy()), touched=frozenset()))


def test_a_transfer_beside_the_stage_is_named() -> None:
    made = plan(cases.swapped())
    _, step = first(made, Relocate)
    assert step.stage is not None
    assert "stage" in kinds(changed(made, Relocate, stage=(step.stage[0], 32)))
    assert "stage" in kinds(changed(made, Relocate, stage=None))


# -- certificates ---------------------------------------------------------------------------------


def test_bytes_that_leave_l1_without_a_certificate_are_a_warning_of_their_own() -> None:
    assert kinds(changed(plan(cases.over_capacity()), Copy, certificate=None)) == {"uncertified"}
    assert kinds(changed(plan(cases.swapped()), Relocate, certificate=None)) == {"uncertified"}


@pytest.mark.parametrize(
    "certificate",
    [
        Certificate("capacity", (1024,) * 5, (8192,)),
        Certificate("capacity", (1024,) * 6, (4096,)),
        Certificate("packing", (1024,), (4096,)),
        Certificate("cycle", (1024,) * 5, (4096,)),
    ],
)
def test_an_eviction_that_was_justified_by_other_numbers_is_named(certificate: object) -> None:
    made = plan(cases.over_capacity())
    assert "certificate" in kinds(changed(made, Copy, certificate=certificate))


def test_a_missing_path_that_exists_is_no_reason_to_bounce() -> None:
    made = plan(cases.fragmented_without_path())
    whole = replace(made.request, machine=cases.SMALL)
    assert kinds(replace(made, request=whole)) == {"certificate"}


@pytest.mark.parametrize(
    "forged", [{"cyclic_size": 4096}, {"free_size": 16}, {"through_seconds": 0.0}]
)
def test_a_cost_certificate_with_other_numbers_is_named(forged: dict[str, float]) -> None:
    made = plan(cases.swapped_with_a_spare_granule())
    (step,) = made.copies
    assert check_plan(made) == () and isinstance(step.certificate, CostCertificate)
    certificate = replace(step.certificate, **forged)  # type: ignore[arg-type]
    assert kinds(changed(made, Relocate, certificate=certificate)) == {"certificate"}


def test_a_cycle_of_which_more_than_one_piece_leaves_is_named() -> None:
    made = plan(cases.swapped())
    (step,) = made.copies
    assert isinstance(step, Relocate)
    there = next(t for t in step.transfers if t.target_space is not L1)
    twice = (there, *step.transfers)
    assert kinds(changed(made, Relocate, transfers=twice)) == {"certificate", "seconds"}


# -- the map of bytes -----------------------------------------------------------------------------


def test_a_buffer_that_is_too_small_for_its_tensor_is_named() -> None:
    made = plan(cases.roomy())
    _, step = first(made, Allocate)
    assert "room" in kinds(changed(made, Allocate, buffer=replace(step.buffer, size_per_bank=2544)))


def test_a_transfer_over_a_path_that_the_machine_lacks_is_named() -> None:
    made = plan(cases.fragmented())
    cut = replace(made.request, machine=without_path(made.request.machine, L1, L1))
    assert "transfer" in kinds(replace(made, request=cut))


def test_a_cycle_that_had_a_free_granule_is_no_reason_to_bounce() -> None:
    made = plan(cases.swapped())
    small = tuple(replace(b, size_per_bank=2032) for b in made.request.buffers)
    looser = replace(made, request=replace(made.request, buffers=small))
    assert "certificate" in kinds(looser)


def test_a_price_is_no_reason_to_bounce_where_moves_inside_are_impossible() -> None:
    made = plan(cases.swapped_with_a_spare_granule())
    cut = replace(made.request, machine=without_path(made.request.machine, L1, L1))
    assert "certificate" in kinds(replace(made, request=cut))


def test_an_overlapping_move_keeps_the_content_whole() -> None:
    space = ByteMap()
    space.write(10, 20, 1)
    space.move(10, 4, 10)
    assert space.read(4, 14) == (ContentPiece(4, 14, 1, 0),)
