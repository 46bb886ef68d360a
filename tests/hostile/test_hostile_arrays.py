"""Files of arrays with damaged headers: read, or refused with the exit code of a bad file."""

from __future__ import annotations

import io
import random
from pathlib import Path

import numpy as np
import pytest

from stitch.errors import StitchError
from stitch.forms import read_array_file


def npy() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(6.0).reshape(2, 3))
    return stream.getvalue()


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(3))
    return stream.getvalue()


def with_header(text: str) -> bytes:
    """A `.npy` file of this header, and some bytes."""
    header = text.encode()
    header += b" " * ((-len(header) - 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64)


def shaped(shape: str) -> bytes:
    return with_header(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}")


def read(path: Path, data: bytes) -> bool:
    """Whether the file is read; anything but a refusal of ours passes out."""
    path.write_bytes(data)
    try:
        return bool(list(read_array_file(path).values()))
    except StitchError as error:
        assert error.exit_code == 3, str(error)
        return False


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("quotes.npy", with_header("'''")),
        ("brackets.npy", with_header("(" * 3000)),
        ("bool.npy", shaped("(True,)")),
        ("huge.npy", shaped("(2**70,)")),
        ("long.npy", shaped("(99999999999999999999,)")),
        ("negative.npy", shaped("(-1,)")),
        ("renamed.npz", npy()),
        ("renamed.npy", npz()),
    ],
)
def test_a_file_with_such_a_header_is_a_bad_file(name: str, data: bytes, tmp_path: Path) -> None:
    assert not read(tmp_path / name, data)


def campaign(folder: Path, rounds: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(rounds):
        for sound, name in ((npy(), "x.npy"), (npz(), "x.npz")):
            damaged = bytearray(sound)
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(min(128, len(damaged)))] = draw.randrange(256)
            read(folder / name, bytes(damaged))


def test_damaged_headers_are_read_or_refused(tmp_path: Path) -> None:
    assert read(tmp_path / "x.npy", npy()) and read(tmp_path / "x.npz", npz())
    campaign(tmp_path, 100, 20261122)


@pytest.mark.campaign("hostile")
def test_many_damaged_headers_are_read_or_refused(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    campaign(tmp_path, 5000, seed)
