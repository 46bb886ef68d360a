"""Certificates as data: sets of evictions, refutations that replay, what leaves in a bounce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from stitch.machine import load_machine
from stitch.planner import (
    WARNINGS,
    Branches,
    Certificate,
    Copy,
    Plan,
    PlanRequest,
    Relocate,
    check_certificate,
    check_plan,
    plan,
)
from stitch.planner.checker import proof
from stitch.planner.checker.relocations import TransferCosts, cheaper_inside
from stitch.program import DataType, Layout, TensorDesc
from tests.packing.test_bins import hard_refutation
from tests.support.machines import without_path
from tests.support.planner import cases
from tests.support.planner.small_requests import DRAM, L1, SMALL, Scene, desc_of, program, relaid


def evictions(made: Plan) -> list[Copy]:
    return [s for s in made.copies if isinstance(s, Copy) and s.kind == "evict"]


def kinds(made: Plan) -> list[str]:
    return [problem.kind for problem in check_plan(made)]


def changed(made: Plan, certificate: Certificate | None, which: int = 0) -> Plan:
    """The plan with another certificate for one of its evictions."""
    out = evictions(made)[which]
    steps = tuple(replace(s, certificate=certificate) if s is out else s for s in made.steps)
    return replace(made, steps=steps)


def crowd(*sizes: int, output: int) -> Scene:
    """Tensors fill L1 and are used next in their order, but first an output wants room."""
    scene = Scene(SMALL)
    at, values = 1024, []
    for size in sizes:
        values.append(scene.tensor(desc_of(size), at, keep=True))
        at += size
    scene.run(program("p", [], [desc_of(output)]), keep=True)
    for value, size in zip(values, sizes, strict=True):
        scene.run(program("q", [desc_of(size)], [desc_of(16, DRAM)]), value, keep=True)
    return scene


# -- evictions ------------------------------------------------------------------------------------


def test_a_set_of_two_is_justified_at_once() -> None:
    made = plan(crowd(1024, 1024, 1024, 1024, output=2048).request())
    first = [s for s in evictions(made) if "room for 'p'" in s.reason]
    assert len(first) == 2 and check_plan(made) == ()
    for out in first:
        assert out.certificate == Certificate("capacity", (1024,) * 3 + (2048,), (4096,))


def split() -> PlanRequest:
    """A pinned tensor splits L1; what is there and what is wanted packs into no gaps."""
    return cases.split_by_a_pin()


def test_a_packing_certificate_carries_its_branches() -> None:
    made = plan(split())
    (out,) = evictions(made)
    assert out.certificate is not None and out.certificate.kind == "packing"
    assert out.certificate.branches is not None and check_plan(made) == ()
    forged = replace(out.certificate, branches=Branches("bb"))
    assert kinds(changed(made, forged)) == ["certificate"]
    old = replace(out.certificate, branches=None)
    assert kinds(changed(made, old)) == []


def test_what_the_checker_cannot_tell_is_undecided_and_never_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = plan(split())
    (out,) = evictions(made)
    assert out.certificate is not None
    monkeypatch.setattr(proof, "WORK_LIMIT", 0)
    assert kinds(made) == ["undecided"]
    assert kinds(changed(made, replace(out.certificate, branches=None))) == ["undecided"]
    monkeypatch.undo()
    fits = Certificate("undecided", (3, 2), (5,))
    assert check_certificate(fits) == ("certificate", "the pieces can be packed into the gaps")


# -- refutations ----------------------------------------------------------------------------------


def branches_of(steps: bytes, *, by_sums: bool = True) -> Branches:
    return Branches("".join("bfk"[step] for step in steps), by_sums)


def test_a_refutation_of_every_kind_of_step_replays_in_the_checker_and_no_other_does() -> None:
    pieces, gaps, refutation = hard_refutation()
    right = branches_of(refutation.steps)
    assert proof.replays(pieces, gaps, right) is True
    steps = right.steps
    for wrong in (steps[:-1], steps + "f", steps[1:], "k" + steps[1:], "f", "", "x", "b" * 10**6):
        assert proof.replays(pieces, gaps, Branches(wrong)) is False
    for at, step in enumerate(steps):
        if step == "b":
            closed = steps[:at] + "f" + steps[at + 1 :]
            assert proof.replays(pieces, gaps, Branches(closed)) is False


@pytest.mark.parametrize(
    "certificate",
    [
        Certificate("capacity", (-1, 9), (5,)),
        Certificate("packing", (0,), (0,)),
        Certificate("packing", (3,), (-5, 2)),
        Certificate("packing", (), (), Branches("f", by_sums=False)),
        Certificate("cycle", (9,), (5,)),
        Certificate("packing", (3,) * 1_000_000, (3,) * 1_000_000, Branches("f")),
    ],
)
def test_a_forged_certificate_that_stands_alone_is_no_proof(certificate: Certificate) -> None:
    assert check_certificate(certificate) is not None


# -- bounces --------------------------------------------------------------------------------------


def bounced(made: Plan) -> Relocate:
    (step,) = made.copies
    assert isinstance(step, Relocate)
    return step


def test_a_bounce_names_the_pieces_that_are_set_aside() -> None:
    for scene in (cases.swapped(), cases.swapped_with_a_spare_granule()):
        made = plan(scene)
        step, banks = bounced(made), made.request.machine.shape.space(L1).banks
        assert step.certificate is not None and check_plan(made) == ()
        assert sum(step.certificate.pieces) * banks == step.bounced_nbytes
        forged = replace(step.certificate, pieces=(16,))
        wrong = replace(made, steps=tuple(
            replace(s, certificate=forged) if s is step else s for s in made.steps))  # fmt: skip
        assert kinds(wrong) == ["certificate"]


# -- figures --------------------------------------------------------------------------------------


def swap_in_wormhole(sizes: Sequence[int], free: int, *, path: bool = True) -> Plan:
    """Tensors of an L1 of a Wormhole rotate: the first comes to lie behind all others; what lies
    behind `free` bytes is pinned."""
    machine = load_machine("wormhole_n150")
    machine = machine if path else without_path(machine, L1, L1)
    l1, scene = machine.shape.space(L1), Scene(machine)
    end = l1.base + sum(sizes)
    if end + free < l1.limit:
        rest = TensorDesc((l1.banks, l1.limit - end - free), Layout(DataType.UINT8, L1))
        scene.tensor(rest, end + free, keep=True, pinned=True)
    places = [l1.base + sum(sizes[1:]), *(l1.base + sum(sizes[1:i]) for i in range(1, len(sizes)))]
    starts = [l1.base + sum(sizes[:i]) for i in range(len(sizes))]
    return plan(relaid(scene, *zip(sizes, starts, places, strict=True)))


def the_moves(made: Plan) -> Relocate:
    (step,) = made.copies
    assert isinstance(step, Relocate)
    return step


@pytest.mark.parametrize("free", [16_384, 32_768, 51_808, 131_072])
@pytest.mark.parametrize(
    "sizes",
    [[600_000, 500_000], [655_360, 4096], [400_000] * 3, [100_000, 500_000, 300_000], [99_968] * 6],
    ids=str,
)
def test_no_exchange_leaves_l1_where_the_checker_finds_cheaper_moves_inside(
    sizes: list[int], free: int
) -> None:
    sizes = [size // 32 * 32 for size in sizes]
    assert check_plan(swap_in_wormhole(sizes, free)) == ()
    blocked = swap_in_wormhole(sizes, free, path=False)
    certificate = the_moves(blocked).certificate
    assert check_plan(blocked) == ()
    assert certificate is not None and certificate.kind == "no_path"


def test_an_exchange_through_dram_that_is_dearer_than_moves_inside_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if moves inside had to take less by nearly a half.
    monkeypatch.setattr("stitch.planner.mover.cycles.CHEAPER", 0.6)
    made = swap_in_wormhole([640 << 10] * 2, 51_808)
    assert the_moves(made).bounced_nbytes > 0
    (problem,) = check_plan(made)
    assert problem.kind == "certificate" and "inside, leaving takes 8.7" in problem.detail


def test_the_checker_looks_at_many_sizes_of_pieces() -> None:
    curves, free = TransferCosts(load_machine("tiny")), [(0, 160), (3184, 3216)]
    core = [(160, 1584, 256), (416, 1840, 1344), (1760, 160, 1424)]
    way = cheaper_inside(core, free, 16, curves, 1.0)
    assert way is not None and way.seconds < 1.5e-6


@pytest.mark.parametrize("free", [16_384, 51_808])
def test_the_checker_finds_moves_that_take_hardly_less_than_they_may(free: int) -> None:
    curves, size = TransferCosts(load_machine("wormhole_n150")), 640 << 10
    core, rooms = [(0, size, size), (size, 0, size)], [(2 * size, 2 * size + free)]
    way = cheaper_inside(core, rooms, 32, curves, 1.0)
    assert way is not None
    again = cheaper_inside(core, rooms, 32, curves, way.seconds * 1.001)
    assert again is not None and again.seconds <= way.seconds
    assert cheaper_inside(core, rooms, 32, curves, way.seconds / 2) is None


def certified() -> dict[str, Plan]:
    """A plan with one certificate of each kind that says why bytes left a space."""
    return {
        "capacity": plan(cases.over_capacity()),
        "packing": plan(cases.split_by_a_pin()),
        "cycle": plan(cases.swapped()),
        "cost": plan(cases.swapped_with_a_spare_granule()),
        "no_path": plan(cases.swapped_without_path()),
    }


def other_figures(data: Any) -> list[tuple[str, Any]]:
    """The same data with one figure larger or smaller by a tenth, each by itself."""
    changed_data = []
    for field in fields(data):
        value = getattr(data, field.name)
        figures = value if isinstance(value, tuple) else (value,)
        for i, figure in enumerate(figures):
            if type(figure) not in (int, float):
                continue
            for sign in (1, -1):
                by = figure / 10 if isinstance(figure, float) else max(1, figure // 10)
                new: Any = figure + sign * by
                if isinstance(value, tuple):
                    new = (*value[:i], new, *value[i + 1 :])
                changed_data.append((f"{field.name}[{i}]", replace(data, **{field.name: new})))
    return changed_data


@pytest.mark.parametrize("kind", sorted(certified()))
def test_every_figure_of_every_certificate_is_computed_by_the_checker(kind: str) -> None:
    made, seen = certified()[kind], 0
    assert [p.kind for p in check_plan(made) if p.kind not in WARNINGS] == []
    for i, step in enumerate(made.steps):
        certificate = getattr(step, "certificate", None)
        if certificate is None or certificate.kind != kind:
            continue
        for name, forged in other_figures(certificate):
            seen += 1
            steps = (*made.steps[:i], replace(step, certificate=forged), *made.steps[i + 1 :])
            assert "certificate" in kinds(replace(made, steps=steps)), f"{name} of step {i}"
    assert seen >= 2


@pytest.mark.parametrize("kind", sorted(certified()))
def test_bytes_and_seconds_of_every_copy_and_move_are_computed_by_the_checker(kind: str) -> None:
    made = certified()[kind]
    for step in made.copies:
        for name, other in other_figures(step):
            if name in ("nbytes[0]", "seconds[0]"):
                steps = tuple(other if s is step else s for s in made.steps)
                found = kinds(replace(made, steps=steps))
                assert ("bytes" if name == "nbytes[0]" else "seconds") in found
