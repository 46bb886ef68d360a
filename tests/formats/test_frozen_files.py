"""Files of every released format version, and of features since, load for ever, and say what they
always said."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.ttb import CURRENT, Binary, Version, encode, load, load_any
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
    "feature_symbolic_sizes.ttb": (
        "5b497874b16ba17f554f0612dd0e7c986431b272024bfc02db581f0c61ef255a"
    ),
    "v1.0.ttb": "ca2af03105bacb9d6268f39ac643fac670f644d30081a58e1b4afdcb2eaa318d",
    "v1.1.ttb": "99ddf34ef5f0db4d0cc64cae350e4dbe0f6a3b02c4845e45de83e1bbc4a1ab90",
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_is_still_the_file_that_was_released(name: str) -> None:
    assert hashlib.sha256((HERE / name).read_bytes()).hexdigest() == FROZEN[name]


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_file_loads_and_says_what_it_always_said(name: str) -> None:
    binary = load_any(HERE / name, verify="full")
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
    made = SPECIMENS[name]()
    assert isinstance(made, Binary)
    frozen = replace(made, version=Version(1, 0))
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


def test_frozen_sizes_are_chosen_as_they_always_were() -> None:
    name = "feature_symbolic_sizes.ttb"
    assert encode(load_any(HERE / name)) == (HERE / name).read_bytes()
    model = stitch.load(HERE / name)
    for batch, length in ((8, 4), (3, 5), (64, 32)):
        x, y = np.arange(2 * batch * length, dtype=np.float32).reshape(2, batch, length)
        expected = np.concatenate([x, y]).reshape(-1)[length:]
        np.testing.assert_array_equal(model(x, y), expected)
    with pytest.raises(stitch.CompileError, match=r"length // 2"):
        model.at(batch=2, length=5)
