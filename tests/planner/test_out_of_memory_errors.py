"""An out-of-memory error proves itself, says who holds what, and names the smallest change."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.planner import Certificate, PlanRequest, check_certificate, plan
from stitch.program import Space
from tests.support.planner.room_brute_force import lies
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


def refused(request: PlanRequest, *, spills: bool = True) -> tuple[str, Certificate]:
    """What the error says, and its certificate."""
    with pytest.raises(OutOfMemoryError) as error:
        plan(request, spills=spills)
    certificate = error.value.certificate
    assert isinstance(certificate, Certificate)
    return str(error.value), certificate


def pins(*regions: tuple[int, int], outputs: tuple[int, ...]) -> Scene:
    """L1 with pinned tensors (offset, size), and a task that makes outputs there."""
    scene = Scene(SMALL)
    for offset, size in regions:
        scene.tensor(desc_of(size), 1024 + offset, pinned=True, keep=True)
    scene.run(program("p", [], [desc_of(size) for size in outputs]), keep=True)
    return scene


def test_the_branches_of_a_refuted_packing_replay() -> None:
    # Three of 512 and two of 640 between pins that leave 1408, 1408 and 64.
    scene = pins((1408, 512), (3328, 512), outputs=(512, 512, 512, 640, 640))
    _, certificate = refused(scene.request())
    assert certificate.kind == "packing" and certificate.branches is not None
    assert sum(certificate.pieces) <= sum(certificate.gaps)
    assert check_certificate(certificate) is None
    cut = certificate.branches.steps[:-1]
    forged = Certificate("packing", certificate.pieces, certificate.gaps,
                         type(certificate.branches)(cut, certificate.branches.by_sums))  # fmt: skip
    assert check_certificate(forged) is not None


def test_a_tensor_that_is_pinned_in_the_middle_is_named_with_what_pins_it() -> None:
    text, certificate = refused(pins((2032, 32), outputs=(2048,)).request())
    assert certificate == Certificate("packing", (2048,), (2032, 2032), certificate.branches)
    assert check_certificate(certificate) is None
    assert (
        "buffer 0 (32 B, allocated before, referenced by a handle, pinned by an exported array)"
        in text
    )
    assert "buffer 0 (32 B) elsewhere: the other tensors would fit" in text


def test_the_biggest_tensors_are_named_with_their_makers_readers_and_holders() -> None:
    scene = Scene(machine_with(dram_nbytes=8192))
    read = scene.tensor(desc_of(512, DRAM), 0)
    held = scene.tensor(desc_of(256, DRAM), 2048, keep=True)
    size = desc_of(64, DRAM)
    scene.buffer(size, 3072, pinned=True)
    (made,) = scene.run(program("p", [desc_of(256, DRAM)], [desc_of(512, DRAM)]), held)
    scene.run(program("q", [], [desc_of(1024, DRAM)]), keep=True)
    scene.run(program("r", [desc_of(512, DRAM)] * 2, [size]), read, made, keep=True)
    text, certificate = refused(scene.request(), spills=False)
    assert (
        "biggest live tensors: buffer 0 (2048 B, allocated before, read by queued task 2), "
        "output 'output 0' of 'p' (2048 B, made by task 0, read by queued task 2), "
        "buffer 1 (1024 B, allocated before, referenced by a handle), "
        "buffer 2 (256 B, allocated before, pinned by an exported array or a loaded program)"
    ) in text
    assert check_certificate(certificate) is None


@pytest.mark.parametrize("count", [400, pytest.param(1_500, marks=pytest.mark.campaign("planner"))])
def test_every_proof_of_random_requests_is_confirmed(count: int) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(count):
        l1, dram = 1024 << seed % 3, 4096 >> seed % 2
        machine = machine_with(l1_nbytes=l1, dram_nbytes=dram)
        try:
            plan(random_request(Random(seed), machine), spills=bool(seed % 3))
        except LayoutError:
            continue
        except OutOfMemoryError as error:
            assert isinstance(error.certificate, Certificate)
            assert check_certificate(error.certificate) is None, f"seed {seed}: {error}"
            kinds[error.certificate.kind] += 1
    assert kinds["capacity"] > count // 15 and kinds["packing"] > count // 150 and kinds.keys() < {
        "capacity", "packing", "undecided"}  # fmt: skip


# -- the smallest change --------------------------------------------------------------------------

Region = tuple[int, int]


def crowded(random: Random, space: Space) -> tuple[Scene, list[Region], list[int]]:
    """A task whose outputs have to lie beside pinned tensors and its inputs, in place.

    With the regions that are pinned, and the sizes of all else that stays in the space."""
    scene = Scene(machine_with(l1_nbytes=1024, dram_nbytes=4096))
    shape, at = scene.machine.shape.space(space), scene.machine.shape.space(space).base
    # A tensor takes so many times the bytes of a bank: DRAM has fewer banks.
    scale = 4 if space is DRAM else 1
    regions, pieces, inputs = [], [], []
    while (at := at + 32 * scale * random.randrange(5)) < shape.limit:
        size = 32 * random.randrange(1, 7)
        if at + size * scale > shape.limit:
            break
        pinned = bool(random.randrange(2))
        value = scene.tensor(desc_of(size, space), at, pinned=pinned, keep=True)
        if pinned:
            regions.append((at, size * scale))
        else:
            pieces.append(size * scale)
            inputs.append((value, size))
        at += size * scale
    outputs = [32 * random.randrange(1, 9) for _ in range(random.randrange(1, 4))]
    pieces += [size * scale for size in outputs]
    scene.run(program("p", [desc_of(size, space) for _, size in inputs],
                      [desc_of(size, space) for size in outputs]),
              *(value for value, _ in inputs), keep=True)  # fmt: skip
    return scene, regions, pieces


def smallest_change(regions: list[Region], pieces: list[int], base: int, limit: int) -> int | None:
    """The least bytes of one tensor without which the rest can lie, by trying each."""
    without = [(size, regions, [*pieces[:i], *pieces[i + 1 :]]) for i, size in enumerate(pieces)]
    without += [(region[1], [r for r in regions if r != region], pieces) for region in regions]
    sizes = [size for size, fixed, free in without if lies(fixed, free, base, limit)]
    return min(sizes, default=None)


@pytest.mark.parametrize("space", [L1, DRAM])
def test_the_smallest_change_is_that_of_brute_force(space: Space) -> None:
    named: Counter[str] = Counter()
    for seed in range(300):
        scene, regions, pieces = crowded(Random(seed), space)
        shape = scene.machine.shape.space(space)
        if lies(regions, pieces, shape.base, shape.limit):
            continue
        text, certificate = refused(scene.request(), spills=False)
        assert check_certificate(certificate) is None
        found = re.search(r"\((\d+) B\) elsewhere: (\d+)?", text)
        least = smallest_change(regions, pieces, shape.base, shape.limit)
        assert (int(found[1]) if found else None) == least, f"seed {seed}: {text}"
        over = sum(certificate.pieces) - sum(certificate.gaps)
        assert found is None or int(found[2] or 0) == max(0, over)
        named["nothing" if found is None else certificate.kind] += 1
    assert min(named[kind] for kind in ("capacity", "packing", "nothing")) > 10, named
