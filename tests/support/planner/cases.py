"""Requests written by hand, each the smallest that makes the planner take one certain decision."""

from __future__ import annotations

from collections.abc import Callable

from stitch.machine import load_machine
from stitch.planner import Instance, PlanRequest
from stitch.program import Layout, TensorDesc
from tests.support.machines import without_path
from tests.support.planner.small_requests import (
    BF16,
    DRAM,
    F32,
    HOST,
    L1,
    TINY,
    Scene,
    bare,
    desc_of,
    machine_with,
    program,
    to_layout,
)

#: 4096 usable bytes in each bank of L1, from address 1024.
SMALL = machine_with(l1_nbytes=4096)


def roomy() -> PlanRequest:
    """There is a hole: nothing moves."""
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(1024), 1024, keep=True)
    scene.run(program("p", [desc_of(1024)], [desc_of(2560)]), a, keep=True)
    return scene.request()


def fragmented() -> PlanRequest:
    """Two holes, together large enough: one buffer has to move."""
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(1024), 2048, keep=True)
    scene.run(program("p", [desc_of(1024)], [desc_of(2560)]), a, keep=True)
    return scene.request()


def split_by_a_pin() -> PlanRequest:
    """A pinned buffer in the middle: the rest fits by its sum, and packs into no two gaps."""
    scene = Scene(SMALL)
    scene.tensor(desc_of(16), 3072, pinned=True, keep=True)
    a = scene.tensor(desc_of(1024), 1024)
    b = scene.tensor(desc_of(1040), 4080)
    (c,) = scene.run(program("first", [], [desc_of(1536)]))
    scene.run(program("second", [desc_of(1024)], [desc_of(16, DRAM)]), a)
    scene.run(program("third", [desc_of(1040)], [desc_of(16, DRAM)]), b)
    scene.run(program("fourth", [desc_of(1536)], [desc_of(16, DRAM)]), c, keep=True)
    return scene.request()


def swapped(size: int = 2048) -> PlanRequest:
    """Each of two inputs is wanted where the other lies."""
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(size), 1024, keep=True)
    b = scene.tensor(desc_of(size), 3072, keep=True)
    inputs = [desc_of(size, address=3072), desc_of(size, address=1024)]
    scene.run(program("p", inputs, [desc_of(16, DRAM)]), a, b, keep=True)
    return scene.request()


def swapped_with_a_spare_granule() -> PlanRequest:
    """As before, with 16 bytes free behind each of the two."""
    return swapped(2032)


def swapped_without_path() -> PlanRequest:
    """A cycle on a machine whose L1 banks cannot reach each other."""
    request = swapped()
    return PlanRequest(
        without_path(request.machine, L1, L1),
        request.tasks,
        request.buffers,
        request.residents,
        request.kept,
    )


def fragmented_without_path() -> PlanRequest:
    """A move on a machine whose L1 banks cannot reach each other."""
    request = fragmented()
    return PlanRequest(
        without_path(request.machine, L1, L1),
        request.tasks,
        request.buffers,
        request.residents,
        request.kept,
    )


def under_scratch() -> PlanRequest:
    """A live tensor lies where the program's scratch will be."""
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(512), 1024, keep=True)
    b = scene.tensor(desc_of(512), 1536, keep=True)
    what = program("p", [desc_of(512)], [desc_of(512)], scratch=700)
    scene.run(what, a, keep=True)
    scene.run(program("q", [desc_of(512)], [desc_of(512)], scratch=100), b, keep=True)
    return scene.request()


def over_capacity() -> PlanRequest:
    """Two tensors fill L1; the output needs one of their places. `far` is read last."""
    scene = Scene(SMALL)
    far = scene.tensor(desc_of(1024), 1024)
    near = scene.tensor(desc_of(1024), 2048)
    middle = scene.tensor(desc_of(2048), 3072)
    (made,) = scene.run(program("p0", [], [desc_of(1024)]))
    scene.run(program("p1", [desc_of(1024)], [desc_of(16, DRAM)]), near)
    scene.run(program("p2", [desc_of(2048)], [desc_of(16, DRAM)]), middle)
    scene.run(program("p3", [desc_of(1024), desc_of(1024)], [desc_of(16, DRAM)]), far, made,
              keep=True)  # fmt: skip
    return scene.request()


def clean_copies() -> PlanRequest:
    """Three tensors take turns in room for two; each has to be written to DRAM at most once."""
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(2048), 1024, keep=True)
    b = scene.tensor(desc_of(2048), 3072, keep=True)
    c = scene.tensor(desc_of(2048, DRAM), 0, keep=True)
    for round_ in range(3):
        for name, value in (("a", a), ("b", b), ("c", c)):
            scene.run(program(f"{name}{round_}", [desc_of(2048)], [desc_of(16, DRAM)]), value)
    return scene.request()


def spare_copy() -> PlanRequest:
    """L1 is full, and one of its tensors lies in DRAM as well."""
    scene = Scene(SMALL)
    clean = scene.buffer(desc_of(2048), 1024)
    copy = scene.buffer(desc_of(2048, DRAM), 0)
    scene.value(
        Instance(copy.number, 0, copy.desc), Instance(clean.number, 0, clean.desc), keep=True
    )
    scene.tensor(desc_of(2048), 3072, keep=True)
    scene.run(program("p", [], [desc_of(2048)]), keep=True)
    return scene.request()


def aliases() -> PlanRequest:
    """An output takes a dead input's place, another one must not take a kept input's."""
    scene = Scene(SMALL)
    a = scene.tensor(desc_of(512), 1024)
    b = scene.tensor(desc_of(512), 2048, keep=True)
    what = program("p", [desc_of(512)], [desc_of(512)], aliases=((0, 0),))
    (first,) = scene.run(what, a)
    (second,) = scene.run(what, b)
    scene.run(program("q", [desc_of(512)] * 2, [desc_of(512)]), first, second, keep=True)
    return scene.request()


def chain() -> PlanRequest:
    """A host array through three programs and a to_layout, with a view and two data types."""
    scene = Scene(TINY)
    x = scene.tensor(TensorDesc((64, 4), Layout(F32)), None)
    whole = scene.buffer(desc_of(1024), 4096)
    w = scene.value(Instance(whole.number, 0, whole.desc), keep=True)
    part = TensorDesc((64, 4), whole.desc.layout)
    view = scene.value(Instance(whole.number, 64 * 4 * 4, part), keep=True)
    half = TensorDesc((64, 4), Layout(BF16, L1))
    tiled = TensorDesc((64, 4), Layout(F32, DRAM, (32, 32)))
    (h,) = scene.run(program("a", [half, part], [half], scratch=256), x, view)
    (t,) = scene.run(to_layout(tiled), h, keep=True)
    host = TensorDesc((64, 4), Layout(F32, HOST))
    scene.run(
        program("b", [tiled, bare(desc_of(1024))], [host], scratch=64, scratch_space=DRAM),
        t, w, keep=True,
    )  # fmt: skip
    return scene.request()


def phi_2() -> PlanRequest:
    """786,432 B live, 305,152 B needed, largest hole 254,912 B (a report of tt-mlir users)."""
    machine = load_machine("wormhole_n150")
    shape = machine.shape.space(L1)
    scene = Scene(machine)

    def rows(nbytes_per_bank: int) -> TensorDesc:
        return TensorDesc((shape.banks * nbytes_per_bank // 1024, 256), Layout(F32, L1))

    address = shape.base + 254_912
    for _ in range(3):
        scene.tensor(rows(262_144), address, keep=True)
        free = shape.capacity - 786_432 - 254_912
        address += 262_144 + free // 3 // shape.granule * shape.granule
    scene.run(program("layer", [], [rows(305_152)]), keep=True)
    return scene.request()


CASES: dict[str, Callable[[], PlanRequest]] = {
    f.__name__: f
    for f in (
        roomy, fragmented, split_by_a_pin, swapped, swapped_with_a_spare_granule,
        swapped_without_path, fragmented_without_path, under_scratch, over_capacity,
        clean_copies, spare_copy, aliases, chain, phi_2,
    )
}  # fmt: skip
