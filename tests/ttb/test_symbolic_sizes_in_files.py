"""Programs with named sizes in `.ttb` files: what is read back gives the same programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError, FormatError, IncompatibleError, UsageError
from stitch.ttb import binary, encode, inspect_sizes, load, load_any
from tests.support.files.symbolic_specimens import rich_model


def test_what_is_read_back_is_what_was_saved(tmp_path: Path) -> None:
    model = rich_model()
    model.save(tmp_path / "model.ttb")
    read = stitch.load(tmp_path / "model.ttb")
    assert isinstance(read, stitch.DynamicModel)
    assert read.text() == model.text()
    assert read.encode() == model.encode() == (tmp_path / "model.ttb").read_bytes()
    assert read.program.guards == model.program.guards
    for sizes in ({"n": 8, "m": 3}, {"n": 10, "m": 7}):
        assert read.at(**sizes).encode() == model.at(**sizes).encode()
        assert read.at(**sizes).text() == model.at(**sizes).text()
    x = np.random.default_rng(2).standard_normal((10, 7)).astype(np.float32)
    for one, other in zip(read(x), model(x), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
    assert list(read.models) == [(8, 3), (10, 7)]


def test_a_broken_guard_names_its_line_after_reading() -> None:
    read = stitch.load(rich_model().encode())
    with pytest.raises(CompileError, match=r"4 < n\n.*symbolic_specimens.py:\d+"):
        read.at(n=4, m=3)
    with pytest.raises(UsageError, match="out of bounds"):
        read.at(n=41, m=3)
    with pytest.raises(UsageError, match="after its compilation"):
        int(read.program.graph.input_type(0).shape[0])


def test_whatever_takes_placed_programs_says_what_to_do(tmp_path: Path) -> None:
    model = rich_model()
    model.save(tmp_path / "model.ttb")
    remedy = r"named sizes.*stitch.load\(path\).at\(n=8, m=3\)"
    with stitch.open_device("wormhole_n150") as device:
        for source in (tmp_path / "model.ttb", model.encode()):
            with pytest.raises(IncompatibleError, match=f"(?s){remedy}"):
                device.load(source)
        placed = device.load(model.at(n=8, m=3))
        assert placed.ports[0].type.shape == (8, 3)
    with pytest.raises(IncompatibleError, match=f"(?s){remedy}"):
        load(tmp_path / "model.ttb")


def test_a_reader_that_does_not_know_named_sizes_says_so(monkeypatch: Any) -> None:
    file = rich_model().encode()
    monkeypatch.setattr("stitch.ttb.file.FEATURES", binary.FEATURES - {"symbolic_sizes"})
    with pytest.raises(IncompatibleError, match="does not know: symbolic_sizes"):
        load_any(file)


def test_the_sizes_of_such_a_file_sum_up(tmp_path: Path) -> None:
    model = rich_model()
    model.save(tmp_path / "model.ttb")
    sizes = inspect_sizes(tmp_path / "model.ttb")
    assert sizes.total == len(model.encode())
    assert sizes == inspect_sizes(load_any(model.encode()))


def test_damaged_constants_are_found_at_once() -> None:
    file = bytearray(rich_model().encode())
    file[-1] ^= 1
    with pytest.raises(FormatError, match="constants of the file are damaged"):
        load_any(bytes(file))


def test_an_encoded_binary_is_the_model() -> None:
    model = rich_model()
    read = load_any(model.encode())
    assert encode(read) == model.encode()
    assert repr(read) == "<SymbolicBinary 1.1 for wormhole_n150: rich (n, m)>"
