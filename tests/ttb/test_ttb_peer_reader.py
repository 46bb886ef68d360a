"""flatbuffers' own library, by flatc's schema, reads from a file what our verifier reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

import stitch
from stitch.flatbuffer import ProblemList, Record, Verifier
from stitch.ttb import Binary, encode, load
from stitch.ttb.generated import SCHEMA, TABLES, UNIONS
from tests.support.files.random_programs import binaries
from tests.support.files.specimens import rich_binary
from tests.support.flatc import peer
from tests.support.grids import in_turn, named

ROOT = Path(__file__).resolve().parents[2]
#: Those of plugins have operators that are not installed here.
MODULES = sorted(
    path
    for path in (ROOT / "examples").rglob("*.yaml")
    if path.read_text(encoding="utf-8").find("\noperations:") > 0 and "plugins" not in path.parts
)


def by_name(table: str, record: Record) -> dict[str, Any]:
    """Our record of a table in the form of the peer's."""
    found: dict[str, Any] = {}
    for field, value in zip(TABLES[table].fields, record, strict=True):
        if field.kind == "union":
            code, member = value
            found[f"{field.name}_type"] = code
            found[field.name] = by_name(UNIONS[field.of][code - 1], member)
        elif field.kind == "table":
            found[field.name] = "" if value is None else by_name(field.of, value)
        elif field.kind == "tables":
            found[field.name] = [by_name(field.of, one) for one in value]
        else:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def with_strings(read: Any) -> Any:
    """The peer's tables, in which an absent string or table is None: ours has an empty string."""
    if isinstance(read, dict):
        return {name: with_strings(value) for name, value in read.items()}
    if isinstance(read, list):
        return [with_strings(one) for one in read]
    return "" if read is None else read


def assert_both_read_the_same(binary: Binary) -> None:
    written, problems = encode(binary), ProblemList()
    metadata = written[: 4 + int.from_bytes(written[:4], "little")]
    root = Verifier(metadata, problems, SCHEMA).root()
    assert root is not None and not problems.count
    assert by_name("Binary", root) == with_strings(peer.read_file(written))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(binaries())
def test_drawn_binaries(binary: Binary) -> None:
    assert_both_read_the_same(binary)


def test_every_frozen_file_and_specimen() -> None:
    frozen = sorted((ROOT / "tests" / "formats").glob("v*.ttb"))
    assert frozen
    for binary in (rich_binary(), *map(load, frozen)):
        assert_both_read_the_same(binary)


@pytest.mark.parametrize(
    ("target", "path"),
    in_turn(["wormhole_n150", "blackhole_p150"], named(lambda path: path.stem, MODULES)),
)
def test_every_module_of_the_examples(path: Path, target: str) -> None:
    assert_both_read_the_same(stitch.compile(path, target=target).binary)
