"""Files of arrays with damaged headers: read, or refused with the exit code of a bad file."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.cli.chain import RunInput, RunOutput
from stitch.cli.run_inputs import gather_inputs
from stitch.cli.run_session import expectations
from stitch.errors import FormatError, StitchError, UsageError
from stitch.forms import read_array_file
from stitch.program import DataType, ValueType
from tests.support.run_seed import SEED


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
    campaign(tmp_path, 5000, SEED)


def bomb(path: Path, shape: tuple[int, ...]) -> Path:
    """A short archive whose member is zeros of a shape."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        stream = io.BytesIO()
        np.lib.format.write_array(stream, np.zeros(shape, np.float32))
        archive.writestr("x.npy", stream.getvalue())
    return path


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the data of an array was read")

    monkeypatch.setattr(np.lib.format, "read_array", refuse)


def test_an_array_of_another_shape_is_refused_before_its_data_are_read(
    tmp_path: Path, nothing_is_read: None
) -> None:
    path = bomb(tmp_path / "bomb.npz", (1000, 1000))
    slot = RunInput("x", ValueType((2, 2), DataType.FLOAT32))
    for word in (f"@{path}", f"x=@{path}"):
        with pytest.raises(UsageError, match="another shape") as refused:
            gather_inputs([slot], [word], init=None, seed=0)
        assert (refused.value.expected, refused.value.got) == ("[2, 2]", "[1000, 1000]")
    single = tmp_path / "single.npy"
    np.save(single, np.zeros((3, 5), np.float32))
    with pytest.raises(UsageError, match="another shape"):
        gather_inputs([slot], [f"x=@{single}"], init=None, seed=0)


def test_expected_outputs_and_weights_of_another_shape_are_not_read(
    tmp_path: Path, nothing_is_read: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bomb(tmp_path / "bomb.npz", (1000, 1000))
    output = RunOutput("y", ValueType((2, 2), DataType.FLOAT32), DataType.FLOAT32)
    (expected,) = expectations([output], [f"y=@{path}"]).values()
    assert expected.shape == (1000, 1000)
    assert expected.strides == (0, 0)  # Zeros that take no memory; the comparison refuses them.
    module = tmp_path / "m.yaml"
    module.write_text(
        "name: m\ninputs: {a: {shape: [2, 2], type: float32}}\n"
        "parameters: {w: {file: bomb.npz, name: x, shape: [2, 2], type: float32}}\n"
        "operations:\n  - y = MatMul(a, w)\noutputs: {y: {}}\n"
    )
    with pytest.raises(FormatError, match=r"has the shape \[1000, 1000\], declared is \[2, 2\]"):
        stitch.compile(module, target="host")


def test_slots_of_several_shapes_may_name_one_archive(tmp_path: Path) -> None:
    path = tmp_path / "two.npz"
    np.savez(path, a=np.ones((2, 2), np.float32), b=np.ones(3, np.float32))
    slots = [
        RunInput("a", ValueType((2, 2), DataType.FLOAT32)),
        RunInput("b", ValueType((3,), DataType.FLOAT32)),
    ]
    arrays = gather_inputs(slots, [f"a=@{path}", f"b=@{path}"], init=None, seed=0)
    assert [array.sum() for array in arrays] == [4, 3]
    assert [a.sum() for a in gather_inputs(slots, [f"@{path}"], init=None, seed=0)] == [4, 3]
