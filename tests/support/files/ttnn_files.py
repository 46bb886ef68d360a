"""TTNN binaries for tests: a real one of 2024, and peers that tt-mlir's schemas made."""

from __future__ import annotations

from pathlib import Path

from stitch.program import Program
from stitch.ttb import Binary, load

FOLDER = Path(__file__).resolve().parents[2] / "formats" / "ttnn"
#: Written by tt-mlir itself, in September 2024.
REAL = FOLDER / "simple_matmul.ttnn"
LAYER, HEAD, STRANGERS = (FOLDER / f"{n}_4013.ttnn" for n in ("layer", "head", "strangers"))
ALL = tuple(sorted(FOLDER.glob("*.ttnn")))
#: Where the release of the version stands in the real binary, and in those of flatc.
RELEASE_OF_REAL = 32


def program_of(path: Path) -> Program:
    """The first program of a file."""
    return load(path).programs[0]


def lacking(binary: Binary) -> str:
    """What of a binary has no counterpart, as text."""
    assert binary.origin is not None
    return "\n".join(binary.origin.lacking)
