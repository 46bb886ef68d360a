"""Files whose scans do not fit: refused with what is wrong and where, in memory that is theirs."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import fields

import numpy as np
import pytest

import stitch
from stitch.budget import BUDGET
from stitch.cli.describe import SECTIONS, describe
from stitch.errors import FormatError, OutOfMemoryError, StitchError
from stitch.graph import scan
from stitch.ops import program_work
from stitch.program import MAX_SCAN_DEPTH, Body, Program, is_scan
from stitch.ttb import Binary, encode, inspect_sizes, load
from tests.program.test_scan_nesting import WRONG
from tests.support import run_seed
from tests.support.files.scanned_specimens import (
    by_hand,
    scanned_binary,
    scanned_program,
    scans_within_scans,
    unchecked,
)
from tests.support.files.scans_damaged import damaged
from tests.support.stitched_models import one

SOUND = scanned_program()
SEED = 20261126


def file_of(program: Program) -> bytes:
    """A file of a program that nobody has looked at."""
    binary, sound = object.__new__(Binary), scanned_binary()
    for field in fields(Binary):
        object.__setattr__(binary, field.name, getattr(sound, field.name))
    object.__setattr__(binary, "programs", (program,))
    return encode(binary)


@pytest.mark.parametrize("name", WRONG)
def test_a_file_whose_scans_do_not_fit_is_refused_by_what_is_wrong(name: str) -> None:
    changes, kind, detail = WRONG[name]
    with pytest.raises(FormatError) as caught:
        load(file_of(unchecked(SOUND, **changes)))
    found = [(p.kind, p.detail) for p in caught.value.problems]
    assert any(k == kind and detail in said for k, said in found), found
    assert all(p.where.startswith("programs[0]") for p in caught.value.problems)


def refused(file: bytes) -> list[str]:
    """The kinds of defects of a file, which are found in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            load(file, verify="full")
        assert tracemalloc.get_traced_memory()[1] < 200 * len(file) + 1_000_000
    finally:
        tracemalloc.stop()
    return [problem.kind for problem in caught.value.problems]


def test_scans_that_go_too_deep_are_refused_in_little_memory() -> None:
    file = file_of(scans_within_scans(MAX_SCAN_DEPTH + 1, make=unchecked))
    assert refused(file) == ["too_deep"]
    assert refused(file_of(scans_within_scans(2000, make=unchecked))) == ["too_deep"]


def test_scans_that_come_to_too_much_are_refused_in_little_memory() -> None:
    """A few kilobytes that would be bound to steps 4 to the 16th times."""
    file = file_of(scans_within_scans(MAX_SCAN_DEPTH, 2, 2, make=unchecked))
    assert len(file) < 8_000
    assert refused(file) == ["too_large"]
    assert set(refused(file_of(scans_within_scans(60, 2, 2, make=unchecked)))) == {
        "too_deep", "too_large"
    }  # fmt: skip


def test_as_many_rounds_as_a_file_may_ask_for_take_no_memory() -> None:
    """Time is the user's: nothing is made for each round."""
    program = scans_within_scans(3, 1, 2**31)
    with stitch.open_device("host") as device:
        device.load(scanned_binary())  # What is imported on first use is none of its memory.
        tracemalloc.start()
        loaded = device.load(Binary((program,), scanned_binary().machine, "test"))
        assert loaded.name == program.name
        assert device.backend.executor.host_bytes(program).peak < 4 << 20
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("where", ["collected", "inside"])
def test_what_scans_make_is_claimed_before_it_is_made(where: str) -> None:
    b = stitch.ComputationGraphBuilder("large")
    x = b.input("x", (1024,), "float32")
    if where == "collected":
        _, (rows,) = scan(b, lambda _, e: ([], [b.op("Tanh", x)]), [], [], count=2**20)
        b.output("y", b.op("ReduceMax", rows))
    else:
        large = np.array([2**20, 1024])
        ((y,), _) = scan(
            b, lambda s, _: ([b.op("ReduceMax", b.op("Expand", s[0], large), [0], keepdims=0)], []),
            [x], [], count=3,
        )  # fmt: skip
        b.output("y", y)
    model = stitch.compile(b.build(), target="host", schedule="rounds")
    with stitch.open_device("host", max_memory=BUDGET.taken_nbytes + (1 << 30)) as device:
        program = device.load(model)
        tracemalloc.start()
        with pytest.raises(OutOfMemoryError, match="large"):
            one(program(np.ones(1024, np.float32))).numpy()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def rounds_of(program: Program) -> int:
    parts: list[Program | Body] = [program, *program.bodies]
    scans = [o for part in parts for o in part.operations if is_scan(o)]
    counts = [o.attributes["count"] for o in scans]
    return max((c for c in counts if isinstance(c, int)), default=0)


def survive(times: int, seed: int) -> tuple[int, int, int]:
    """Damaged programs go all the way from a file to a run; how many were refused by the file, by
    the device, and ran. Any error but our own passes out."""
    draw, by_file, by_device, ran = random.Random(seed), 0, 0, 0
    rng = np.random.default_rng(0)
    first, xs = rng.standard_normal(8, np.float32), rng.standard_normal((5, 3, 8), np.float32)
    with stitch.open_device("host") as device:
        for _ in range(times):
            try:
                file = file_of(damaged(draw, SOUND))
                binary = load(file, verify="full")
            except StitchError as error:
                by_file += 1
                assert str(error)
                continue
            (program,) = binary.programs
            # A type that damage has made narrow is named as a feature when it is written again.
            again = encode(binary)
            assert program.text() and encode(load(again)) == again
            assert again == file or b"narrow_types" in again
            try:
                described = describe(binary, inspect_sizes(binary), SECTIONS)
                loaded = device.load(binary)
                assert described["programs"] and program_work(program).nbytes
                if rounds_of(program) > 9:
                    continue
                given = [loaded.program.input_desc(i).shape for i in range(2)]
                if given != [first.shape, xs.shape]:
                    continue
                found = loaded(first, xs)
                assert isinstance(found, tuple)
                made = [tensor.numpy() for tensor in found]
            except StitchError as error:
                by_device += 1
                assert str(error)
                continue
            ran += 1
            if program == SOUND:
                for ours, theirs in zip(made, by_hand(first, xs), strict=True):
                    np.testing.assert_allclose(ours, theirs, 1e-6)
    return by_file, by_device, ran


def test_damaged_scans_run_or_are_refused() -> None:
    by_file, by_device, ran = survive(200, SEED)
    assert by_file > 100
    assert by_device > 1
    assert ran > 4


@pytest.mark.campaign("hostile")
def test_eight_thousand_damaged_scans_run_or_are_refused() -> None:
    by_file, by_device, ran = survive(8_000, run_seed.SEED)
    assert min(by_file, by_device, ran) > 40
