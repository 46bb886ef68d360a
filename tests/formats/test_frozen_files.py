"""Files of every released format version load for ever, and say what they always said."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from stitch.ttb import CURRENT, load
from tests.formats.write_frozen_files import golden_text

HERE = Path(__file__).resolve().parent

#: The hashes of the frozen files: nobody changes one by accident.
FROZEN = {
    "v1.0.ttb": "ca2af03105bacb9d6268f39ac643fac670f644d30081a58e1b4afdcb2eaa318d",
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_is_still_the_file_that_was_released(name: str) -> None:
    assert hashlib.sha256((HERE / name).read_bytes()).hexdigest() == FROZEN[name]


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_loads_and_says_what_it_always_said(name: str) -> None:
    binary = load(HERE / name, verify="full")
    assert golden_text(binary) == (HERE / name).with_suffix(".txt").read_text()


def test_every_released_version_has_a_frozen_file() -> None:
    assert set(FROZEN) == {path.name for path in HERE.glob("v*.ttb")}
    assert f"v{CURRENT}.ttb" in FROZEN


def test_every_frozen_version_stands_in_the_history() -> None:
    history = (HERE.parents[1] / "schema" / "README.md").read_text()
    for name in FROZEN:
        assert f"| {name.removeprefix('v').removesuffix('.ttb')} |" in history
