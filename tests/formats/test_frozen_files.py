"""Files of every released format version, and of features since, load for ever, and say what they
always said."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.ttb import CURRENT, Version, encode, load
from tests.formats.write_frozen_files import SPECIMENS, golden_text
from tests.support.files.scanned_specimens import by_hand
from tests.support.stitched_models import several

HERE = Path(__file__).resolve().parent

#: The hashes of the frozen files: nobody changes one by accident.
FROZEN = {
    "feature_conditions.ttb": "08bf1d23291db7e146146f96bf45031e701d5f801efd48bd359c1877380adfd6",
    "feature_foreign_operators.ttb": (
        "0c964cfdf1c36905859fa970ce41a27a10d65eb6ef1fd63134db98c82a711d27"
    ),
    "feature_scans.ttb": "9d6f2cb9e709e68583f6ca67d83f7720be16d7ee04e7b208c55e06e9c8c51df9",
    "v1.0.ttb": "ca2af03105bacb9d6268f39ac643fac670f644d30081a58e1b4afdcb2eaa318d",
    "v1.1.ttb": "99ddf34ef5f0db4d0cc64cae350e4dbe0f6a3b02c4845e45de83e1bbc4a1ab90",
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_is_still_the_file_that_was_released(name: str) -> None:
    assert hashlib.sha256((HERE / name).read_bytes()).hexdigest() == FROZEN[name]


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_loads_and_says_what_it_always_said(name: str) -> None:
    binary = load(HERE / name, verify="full")
    assert golden_text(binary) == (HERE / name).with_suffix(".txt").read_text()


def test_every_released_version_has_a_frozen_file() -> None:
    assert set(FROZEN) == {path.name for path in HERE.glob("*.ttb")}
    assert f"v{CURRENT}.ttb" in FROZEN


def test_every_frozen_version_and_feature_stands_in_the_history() -> None:
    history = (HERE.parents[1] / "schema" / "README.md").read_text()
    for name in FROZEN:
        kind, _, said = name.removesuffix(".ttb").partition("_")
        assert (f"| feature `{said}` |" if said else f"| {kind.removeprefix('v')} |") in history


def test_the_same_program_still_gives_the_bytes_that_were_frozen() -> None:
    name = "feature_scans.ttb"
    frozen = replace(SPECIMENS[name](), version=Version(1, 0))
    assert encode(frozen) == (HERE / name).read_bytes()
    assert encode(load(HERE / name)) == (HERE / name).read_bytes()


def test_a_frozen_loop_still_ends_where_its_data_say() -> None:
    with stitch.open_device("host") as device:
        run = device.load(load(HERE / "feature_conditions.ttb"))
        x = np.full(8, 3, np.float32)
        for goes_on, times in ((True, 5), (False, 0)):
            last, ended = several(run(x, np.array(goes_on)))
            assert last.numpy().tolist() == (x / 2**times).tolist()
            assert not ended.numpy()


def test_frozen_scans_give_what_they_always_gave() -> None:
    rng = np.random.default_rng(0)
    first, xs = rng.standard_normal(8, np.float32), rng.standard_normal((5, 3, 8), np.float32)
    with stitch.open_device("host") as device:
        made = device.load(load(HERE / "feature_scans.ttb"))(first, xs)
        assert isinstance(made, tuple)
        for ours, theirs in zip(made, by_hand(first, xs), strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, 1e-6)
