"""Requests that nobody means well with: tiny machines, paths that are missing, thousands of views,
pins everywhere. Each ends with a sound plan or one clear error, after bounded work."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import FrameType

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.machine import Machine
from stitch.planner import Certificate, Copy, Execute, Instance, PlanRequest, check_plan, plan
from stitch.program import DataType, Layout, Space, TensorDesc
from tests.support.grids import every
from tests.support.machines import without_path
from tests.support.planner.byte_machine import sound
from tests.support.planner.small_requests import (
    DRAM,
    HOST,
    L1,
    SMALL,
    Scene,
    desc_of,
    machine_with,
    program,
    random_request,
)

# -- machines -------------------------------------------------------------------------------------


def without_dram(machine: Machine) -> Machine:
    return replace(machine, shape=replace(machine.shape, dram=None),
                   paths=tuple(p for p in machine.paths if DRAM not in p[:2]))  # fmt: skip


def test_without_dram_tensors_of_l1_wait_on_the_host() -> None:
    scene = Scene(without_dram(SMALL))
    a = scene.tensor(desc_of(3072), 1024, keep=True)
    scene.run(program("p", [], [desc_of(2048)]), keep=True)
    scene.run(program("q", [desc_of(3072)], [desc_of(16)]), a, keep=True)
    made = sound(plan(scene.request()))
    ways = [(s.source.desc.layout.space, s.target.desc.layout.space)
            for s in made.copies if isinstance(s, Copy)]  # fmt: skip
    assert ways[0] == (L1, HOST) and (HOST, L1) in ways


MISSING = [(L1, L1), (L1, DRAM), (DRAM, L1), (DRAM, DRAM), (L1, HOST), (HOST, L1)]


@pytest.mark.parametrize(
    "first", every(3, MISSING), ids=lambda path: "-".join(s.value for s in path)
)
def test_with_two_paths_missing_every_request_ends_in_a_sound_plan_or_a_clear_error(
    first: tuple[Space, Space],
) -> None:
    made = 0
    for second in MISSING:
        machine = without_path(without_path(SMALL, *first), *second)
        for seed in range(20):
            try:
                sound(plan(random_request(Random(seed), machine)))
            except (LayoutError, OutOfMemoryError) as error:
                assert str(error)
            else:
                made += 1
    assert made > 60


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [L1, DRAM])
def test_tensors_without_bytes_are_placed_moved_and_read(space: Space) -> None:
    empty = TensorDesc((0, 4), Layout(DataType.FLOAT32, space))
    scene = Scene(SMALL)
    size = max(1, scene.buffer(empty, 1024).size_per_bank)
    a = scene.value(Instance(0, 0, empty), keep=True)
    scene.tensor(desc_of(2032), 3072, keep=True)
    (b,) = scene.run(program("p", [empty], [empty, empty][:1]), a, keep=True)
    scene.run(program("q", [empty, empty], [desc_of(2032)]), a, b, keep=True)
    made = plan(scene.request())
    assert check_plan(made) == () and size <= 32


def many_views(count: int) -> PlanRequest:
    """Views of one block, one of which is read; what that makes needs the block's room."""
    scene = Scene(machine_with(l1_nbytes=1 << 17))
    rows = 2 * count
    block = scene.buffer(TensorDesc((rows, 4), Layout(DataType.FLOAT32, L1)), 1024)
    part = TensorDesc((1, 4), Layout(DataType.FLOAT32, L1))
    views = [scene.value(Instance(block.number, 16 * i, part), keep=True) for i in range(count)]
    scene.run(program("p", [part], [desc_of(16)]), views[count // 2], keep=True)
    scene.run(program("q", [], [desc_of((1 << 17) - 4096)]), keep=True)
    return scene.request()


def test_ten_thousand_live_views_of_one_block_leave_with_it() -> None:
    made = plan(many_views(10_000))
    (out,) = (s for s in made.steps if isinstance(s, Copy) and s.kind == "evict")
    assert check_plan(made) == ()
    homes = {r.instances[0].buffer for r in made.final_values if r.value < 10_000}
    assert homes == {out.target.buffer}


def pinned_at_every_second_granule(granules: int) -> Scene:
    scene = Scene(machine_with(l1_nbytes=16 * granules))
    for at in range(0, granules, 2):
        scene.tensor(desc_of(16), 1024 + 16 * at, pinned=True, keep=True)
    return scene


@pytest.mark.parametrize("granules", [16, 256])
def test_between_pins_at_every_second_granule_only_granules_fit(granules: int) -> None:
    scene = pinned_at_every_second_granule(granules)
    scene.run(program("p", [], [desc_of(16)] * (granules // 2)), keep=True)
    assert sound(plan(scene.request())).copies == ()
    scene = pinned_at_every_second_granule(granules)
    scene.run(program("p", [], [desc_of(32)]), keep=True)
    with pytest.raises(OutOfMemoryError, match="largest hole 16 B") as error:
        plan(scene.request())
    certificate = error.value.certificate
    assert isinstance(certificate, Certificate) and certificate.kind == "packing"
    assert certificate.pieces == (32,) and set(certificate.gaps) == {16}


@pytest.mark.parametrize("which", ["input", "output"])
@pytest.mark.parametrize("at", [1024, 1024 + 1008])
def test_a_fixed_address_inside_the_programs_own_scratch_is_refused(which: str, at: int) -> None:
    scene = Scene(SMALL)
    fixed, loose = desc_of(512, address=at), desc_of(512)
    a = scene.tensor(desc_of(512), 4096, keep=True)
    inputs, outputs = ([fixed], [loose]) if which == "input" else ([loose], [fixed])
    scene.run(program("p", inputs, outputs, scratch=1024), a, keep=True)
    with pytest.raises(
        LayoutError, match=r"scratch.*overlap|overlap.*scratch|overlap in l1"
    ) as error:
        plan(scene.request())
    assert "scratch" in str(error.value) and "compile one of them" in str(error.value)
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(512), 4096, keep=True)
    beside = desc_of(512, address=2048)
    inputs, outputs = ([beside], [loose]) if which == "input" else ([loose], [beside])
    scene.run(program("p", inputs, outputs, scratch=1024), a, keep=True)
    (ran,) = (s for s in sound(plan(scene.request())).steps if isinstance(s, Execute))
    assert ran.scratch == (L1, 1024, 1024)


# -- budgets --------------------------------------------------------------------------------------


def calls_of(run: Callable[[], object]) -> int:
    """How many functions are called: the same on any machine."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def every_second_pinned(blocks: int) -> Scene:
    scene = Scene(machine_with(l1_nbytes=64 * blocks))
    for i in range(blocks):
        scene.tensor(desc_of(32), 1024 + 64 * i, pinned=bool(i % 2), keep=True)
    return scene


def scattered(blocks: int) -> Scene:
    random, at, sizes = Random(blocks), 1024, []
    for _ in range(blocks):
        sizes.append((at, 16 * random.randrange(1, 40)))
        at += sizes[-1][1] + 16 * random.randrange(1, 20)
    scene = Scene(machine_with(l1_nbytes=at - 1024))
    for address, size in sizes:
        scene.tensor(desc_of(size), address, keep=True)
    return scene


def powers_of_two(blocks: int) -> Scene:
    at, scene = (
        1024,
        Scene(machine_with(l1_nbytes=16 * sum((1 << i % 6) + 1 for i in range(blocks)))),
    )
    for i in range(blocks):
        scene.tensor(desc_of(16 << i % 6), at, keep=True)
        at += (16 << i % 6) + 16
    return scene


SCENES = (every_second_pinned, scattered, powers_of_two)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_the_work_of_the_worst_request_grows_no_faster_than_the_square_of_its_blocks(
    scene: Callable[[int], Scene], share: float
) -> None:
    def work(blocks: int) -> int:
        made = scene(blocks)
        l1 = made.machine.shape.space(L1)
        free = l1.capacity - sum(b.size_per_bank for b in made.buffers)
        made.run(program("p", [], [desc_of(int(free * share) // 16 * 16)]), keep=True)
        request = made.request()

        def run() -> None:
            with contextlib.suppress(OutOfMemoryError):
                plan(request)

        return calls_of(run)

    few, many = work(50), work(200)
    assert many <= 16 * few and many <= 305_000
