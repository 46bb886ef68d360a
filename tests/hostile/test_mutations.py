"""Damage at random and cuts at every place: a file loads, or is refused; nothing else happens."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from zlib import crc32

import pytest

from stitch.errors import FormatError
from stitch.ttb import encode, load
from tests.support import run_seed
from tests.support.files.damage import damaged_bytes
from tests.support.files.scanned_specimens import scanned_binary
from tests.support.files.specimens import rich_binary

FILE = encode(rich_binary())
#: Every kind of part in a few lines; scans within scans.
FILES = {"rich": FILE, "scans": encode(scanned_binary())}
METADATA_NBYTES = 4 + struct.unpack_from("<I", FILE)[0]
SEED = 20260714


def mutated(draw: random.Random, sound: bytes = FILE) -> bytes:
    """A specimen with one to four changes to its metadata, and the CRC mended."""
    file = damaged_bytes(draw, sound, 4 + struct.unpack_from("<I", sound)[0])
    end = min(4 + struct.unpack_from("<I", file)[0], len(file) - 4)
    struct.pack_into("<I", file, end, crc32(file[:end]))
    return bytes(file)


def survive(count: int, seed: int, sound: bytes) -> tuple[int, int]:
    """Load `count` mutations; how many were taken and refused. Any other exception passes out."""
    draw, taken, refused = random.Random(seed), 0, 0
    for _ in range(count):
        try:
            binary = load(mutated(draw, sound), verify="full")
        except FormatError as error:
            refused += 1
            assert str(error)
        else:
            taken += 1
            assert all(program.text() for program in binary.programs)
            written = encode(binary)
            assert encode(load(written, verify="full")) == written
    return taken, refused


@pytest.mark.parametrize("name", FILES)
def test_three_hundred_mutations_load_or_are_refused(name: str) -> None:
    taken, refused = survive(300, SEED, FILES[name])
    assert taken + refused == 300
    assert taken > 2
    assert refused > 150


@pytest.mark.campaign("hostile")
@pytest.mark.parametrize("name", FILES)
def test_ten_thousand_mutations_load_or_are_refused(name: str) -> None:
    taken, refused = survive(10_000, run_seed.SEED, FILES[name])
    assert taken + refused == 10_000
    assert refused > 5_000


@pytest.mark.parametrize("count", [70, pytest.param(200, marks=pytest.mark.campaign("hostile"))])
@pytest.mark.parametrize("name", FILES)
def test_mutations_take_no_more_memory_than_a_sound_file_of_their_size(
    name: str, count: int
) -> None:
    draw = random.Random(SEED + 1)
    files = [mutated(draw, FILES[name]) for _ in range(count)]
    peaks = []
    for file in [FILES[name], *files]:
        tracemalloc.start()
        with contextlib.suppress(FormatError):
            load(file, verify="full")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 300_000


def test_every_truncation_is_refused() -> None:
    for length in range(len(FILE)):
        with pytest.raises(FormatError):
            load(FILE[:length])


def test_every_changed_byte_is_refused_or_makes_no_difference() -> None:
    for at in range(len(FILE)):
        damaged = bytearray(FILE)
        damaged[at] ^= 0x55
        try:
            binary = load(bytes(damaged), verify="full")
        except FormatError:
            continue
        # Only the zeros between segments belong to nobody.
        assert binary == rich_binary()
        assert FILE[at] == 0
        assert at >= METADATA_NBYTES


def test_random_bytes_behind_a_good_identifier_are_refused() -> None:
    draw = random.Random(SEED + 2)
    for _ in range(300):
        body = draw.randbytes(draw.randrange(0, 300))
        metadata = struct.pack("<I", len(body) + 8) + draw.randbytes(4) + b"STCH" + body
        file = metadata + crc32(metadata).to_bytes(4, "little")
        with pytest.raises(FormatError):
            load(file.ljust(-(-len(file) // 64) * 64, b"\0"))
