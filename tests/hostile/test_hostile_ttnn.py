"""TTNN binaries damaged at random: a file is shown, or refused as a file; nothing else happens."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from stitch.cli.inspect.describe import SECTIONS, describe, head_lines, program_lines
from stitch.errors import FormatError
from stitch.ttb import inspect_sizes, load
from tests.support.files.ttnn_files import ALL

SEED = 20261126
NASTY = (0, 1, 2, 4, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 4)


def mutated(draw: random.Random, sound: bytes) -> bytes:
    """A file with one to four changes."""
    file = bytearray(sound)
    for _ in range(draw.randint(1, 4)):
        kind, at = draw.randrange(5), draw.randrange(len(file))
        word = at & ~3
        if kind == 0:
            file[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            file[at] = draw.randrange(256)
        elif kind == 2:
            struct.pack_into("<I", file, word, draw.choice(NASTY))
        elif kind == 3:
            near = struct.unpack_from("<I", file, word)[0] + draw.choice((-8, -4, -1, 1, 4, 8))
            struct.pack_into("<I", file, word, near % 2**32)
        else:
            source = draw.randrange(len(file)) & ~3
            file[word : word + 4] = file[source : source + 4]
    return bytes(file)


def survive(path: Path, count: int, seed: int) -> tuple[int, int]:
    """Show `count` mutations; how many were taken and refused. Any other exception passes out."""
    draw, sound, taken = random.Random(seed), path.read_bytes(), 0
    for _ in range(count):
        data = mutated(draw, sound)
        try:
            binary = load(data)
        except FormatError as error:
            assert str(error)
        else:
            taken += 1
            described = describe(binary, inspect_sizes(data), SECTIONS)
            assert head_lines("-", described)
            assert all(program_lines(program) for program in described["programs"])
    return taken, count - taken


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_three_hundred_mutations_are_shown_or_refused(path: Path) -> None:
    taken, refused = survive(path, 300, SEED)
    assert taken > 20
    assert refused > 50


@pytest.mark.full
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_three_thousand_mutations_are_shown_or_refused(path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    survive(path, 3000, seed)
