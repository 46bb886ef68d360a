"""Our table and flatc's generated code write the same metadata, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import stitch
from stitch.ttb import Binary, load
from stitch.ttb.encoding import encode_metadata
from stitch.ttb.envelope import collect_segments
from tests.support.files.random_programs import binaries
from tests.support.files.specimens import rich_binary
from tests.support.flatc.encoder import flatc_metadata
from tests.support.grids import in_turn, named

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
MODULES = sorted(
    path
    for path in EXAMPLES.rglob("*.yaml")
    if path.read_text(encoding="utf-8").find("\noperations:") > 0
)


def assert_both_write_the_same(binary: Binary) -> None:
    segments = collect_segments(binary.programs)
    assert encode_metadata(binary, segments) == flatc_metadata(binary, segments)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(binaries())
def test_drawn_binaries(binary: Binary) -> None:
    assert_both_write_the_same(binary)


def test_every_frozen_file_and_specimen() -> None:
    frozen = sorted((ROOT / "tests" / "formats").glob("v*.ttb"))
    assert frozen
    for binary in (rich_binary(), *map(load, frozen)):
        assert_both_write_the_same(binary)


@pytest.mark.parametrize(
    ("target", "path"),
    in_turn(["wormhole_n150", "blackhole_p150"], named(lambda path: path.stem, MODULES)),
)
def test_every_module_of_the_examples(path: Path, target: str) -> None:
    assert_both_write_the_same(stitch.compile(path, target=target).binary)
