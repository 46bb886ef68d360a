"""Descriptors that are cut off, damaged, of an unknown version, or that describe what cannot be:
a machine comes of them, or one error that says what is wrong."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from stitch.errors import FormatError, IncompatibleError, StitchError, UsageError
from stitch.machine import load_machine
from stitch.machine.systems import machines_in
from tests.support import run_seed
from tests.support.files.damage import damaged_bytes

FILES = Path(__file__).resolve().parents[1] / "conformance" / "tenstorrent"
SOUND = {path.stem: path.read_bytes() for path in sorted(FILES.glob("*.ttsys"))}
SEED = 20261126


def place_of(field: int, name: str = "p150") -> int:
    """Where a field of the first chip stands: its table by the vtables that lead there."""
    data = SOUND[name]

    def follow(table: int, slot: int) -> int:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        return table + int(struct.unpack_from("<H", data, vtable + 4 + 2 * slot)[0])

    def inner(at: int) -> int:
        return at + int(struct.unpack_from("<I", data, at)[0])

    root = inner(4)
    chips = inner(follow(inner(follow(root, 4)), 1))
    return follow(inner(chips + 4), field)


def changed(field: int, value: int, code: str = "<I", name: str = "p150") -> bytes:
    file = bytearray(SOUND[name])
    struct.pack_into(code, file, place_of(field, name), value)
    return bytes(file)


def survive(count: int, seed: int) -> tuple[int, int]:
    """How many mutations were taken and refused; any other exception passes out."""
    draw, taken, refused = random.Random(seed), 0, 0
    names = [*SOUND]
    for number in range(count):
        try:
            machines = machines_in(
                bytes(damaged_bytes(draw, SOUND[names[number % len(names)]])), "x.ttsys"
            )
        except FormatError as error:
            refused += 1
            assert str(error)
        else:
            taken += 1
            assert all(m.shape.l1.base < m.shape.l1.limit for m in machines if m.shape.l1)
    return taken, refused


def test_three_hundred_mutations_give_a_machine_or_are_refused() -> None:
    taken, refused = survive(300, SEED)
    assert taken + refused == 300
    assert min(taken, refused) > 15


@pytest.mark.campaign("hostile")
def test_eight_thousand_mutations_give_a_machine_or_are_refused() -> None:
    assert sum(survive(8_000, run_seed.SEED)) == 8_000


@pytest.mark.parametrize("name", SOUND)
def test_a_descriptor_that_is_cut_off_anywhere_is_refused(name: str) -> None:
    sound = SOUND[name]
    for length in range(0, len(sound), 7):
        with pytest.raises(FormatError):
            machines_in(sound[:length], "cut.ttsys")
    with pytest.raises(FormatError, match="bytes follow"):
        machines_in(sound + b"\0", "longer.ttsys")


def test_an_unknown_version_is_named_beside_those_that_are_known() -> None:
    file = bytearray(SOUND["n150"])
    at = SOUND["n150"].index((3758).to_bytes(4, "little"))
    for release in (0, 4014):
        struct.pack_into("<I", file, at, release)
        with pytest.raises(IncompatibleError, match=rf"0\.0\.{release}") as caught:
            machines_in(bytes(file), "new.ttsys")
        assert caught.value.expected == "version 0.0.1 to 0.0.4013"


@pytest.mark.parametrize(
    ("field", "value", "code", "names"),
    [
        (1, 0, "<I", "core_grid"),
        (1, 2**31, "<I", "core_grid"),
        (3, 64 * 1024, "<Q", "is not below the limit"),
        (4, 0, "<I", "dram.banks"),
        (5, 4096, "<Q", "dram"),
        (6, 0, "<I", "l1.alignment"),
        (6, 24, "<I", "power of two"),
        (8, 0, "<I", "dram.alignment"),
        (9, 1_600_000, "<I", "is not below the limit"),
        (11, 2**32 - 1, "<I", "dram"),
        (12, 0, "<I", "dram"),
        (0, 77, "<I", "Arch"),
    ],
)
def test_what_no_chip_can_be_is_named(field: int, value: int, code: str, names: str) -> None:
    with pytest.raises(FormatError) as caught:
        machines_in(changed(field, value, code), "odd.ttsys")
    assert names in str(caught.value)


def test_an_architecture_without_a_machine_of_ours_is_refused_by_name() -> None:
    with pytest.raises(IncompatibleError, match="quasar") as caught:
        machines_in(changed(0, 2), "quasar.ttsys")
    assert caught.value.exit_code == 4


def test_chips_that_are_not_alike_are_chosen_by_number(tmp_path: Path) -> None:
    path = tmp_path / "two.ttsys"
    path.write_bytes(changed(4, 6, name="n300-llmbox"))
    drams = [machine.shape.dram for machine in machines_in(path.read_bytes(), str(path))]
    assert [dram.banks for dram in drams if dram is not None] == [6] + [12] * 7
    with pytest.raises(UsageError, match=r"the chips of .* differ") as caught:
        load_machine(path)
    assert "dram banks" in str(caught.value) and "two.ttsys:0" in str(caught.value)
    chosen = load_machine(f"{path}:1")
    assert (chosen.name, chosen.shape.dram and chosen.shape.dram.banks) == ("two:1", 12)


def test_a_chip_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no chip 8"):
        load_machine(f"{FILES / 'n300-llmbox.ttsys'}:8")


def test_a_file_that_is_no_descriptor_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.ttsys").write_text("name: mine\n")
    with pytest.raises(FormatError, match="TTSY"):
        load_machine(tmp_path / "text.ttsys")
    with pytest.raises(StitchError, match="nowhere"):
        load_machine(tmp_path / "nowhere.ttsys")


def test_reading_takes_memory_in_proportion_to_the_file() -> None:
    draw = random.Random(SEED + 1)
    files = [bytes(damaged_bytes(draw, SOUND["n300-llmbox"])) for _ in range(40)]
    machines_in(SOUND["n300-llmbox"], "warm.ttsys")
    tracemalloc.start()
    try:
        for file in files:
            with contextlib.suppress(FormatError):
                machines_in(file, "x.ttsys")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
