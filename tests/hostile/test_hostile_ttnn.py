"""TTNN binaries damaged at random: a file is shown, or refused as a file; nothing else happens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stitch.cli.describe import SECTIONS, describe, head_lines, program_lines
from stitch.errors import FormatError
from stitch.ttb import inspect_sizes, load
from tests.support import run_seed
from tests.support.files.damage import damaged_bytes
from tests.support.files.ttnn_files import ALL
from tests.support.grids import every

SEED = 20261126
#: Where the offset to the first shape of `simple_matmul.ttnn` stands.
TO_SHAPE = 8500


def survive(path: Path, count: int, seed: int) -> tuple[int, int]:
    """Show `count` mutations; how many were taken and refused. Any other exception passes out."""
    draw, sound, taken = random.Random(seed), path.read_bytes(), 0
    for _ in range(count):
        data = bytes(damaged_bytes(draw, sound))
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


def test_a_tensor_without_elements_that_no_array_can_be_is_refused() -> None:
    (path,) = [path for path in ALL if path.stem == "simple_matmul"]
    data = bytearray(path.read_bytes())
    data[TO_SHAPE] = 4  # A shape of 28 sizes begins there, two of them 0.
    with pytest.raises(FormatError, match="beyond any array"):
        load(bytes(data))


@pytest.mark.parametrize("path", every(3, ALL), ids=lambda path: path.stem)
def test_mutations_are_shown_or_refused(path: Path) -> None:
    taken, refused = survive(path, 150, SEED)
    assert taken > 10
    assert refused > 25


@pytest.mark.campaign("hostile")
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_three_thousand_mutations_are_shown_or_refused(path: Path) -> None:
    survive(path, 3000, run_seed.SEED)
