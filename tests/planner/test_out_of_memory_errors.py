"""An out-of-memory error proves itself, and says what holds the memory."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from stitch.errors import LayoutError, OutOfMemoryError
from stitch.planner import Certificate, PlanRequest, check_certificate, plan
from tests.support.planner.small_requests import (
    DRAM,
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


@pytest.mark.parametrize("count", [200, pytest.param(1_500, marks=pytest.mark.campaign("planner"))])
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
