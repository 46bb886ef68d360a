"""The schema, the generated code, the program's enums and the decoder agree."""

from __future__ import annotations

import enum
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from stitch.program import Layout, Operation, Program, ShardSpec, Value
from stitch.ttb.decoding import CODES, FILE_ENUMS, members
from stitch.ttb.generated import ENUMS, TABLES
from tests.support.flatc import peer

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "schema" / "program.fbs"
GENERATE = ROOT / "tools" / "generate_schema"


def run_generator(
    *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GENERATE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_generated_code_and_document_are_up_to_date() -> None:
    result = run_generator("--check")
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_check_notices_a_changed_schema(tmp_path: Path) -> None:
    changed = tmp_path / "program.fbs"
    changed.write_text(SCHEMA.read_text().replace("crc32:uint;", "crc32:uint; extra:uint;"))
    result = run_generator("--check", "--schema", str(changed))
    assert result.returncode == 1
    assert "out of date" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("table A { b:B; } table B { a:[A]; }", "recursive tables: A -> B -> A"),
        ("table A { b:Missing; }", "unknown type 'Missing'"),
        ("enum E : ubyte { X = 0, Y = 2 }", "Y must be 1"),
        ("struct S { a:int; }", "'struct' is not a declaration"),
    ],
)
def test_the_generator_refuses_what_the_verifier_could_not_bound(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.fbs"
    path.write_text(text)
    result = run_generator("--check", "--schema", str(path))
    assert result.returncode == 1
    assert message in result.stderr


@pytest.mark.parametrize("kind", FILE_ENUMS, ids=lambda kind: kind.__name__)
def test_schema_and_program_enums_have_the_same_members(kind: type[enum.Enum]) -> None:
    assert sorted(ENUMS[kind.__name__]) == sorted(member.name for member in kind)
    assert [CODES[member] for member in members(kind)] == list(range(len(kind)))
    assert peer.ENUMS[kind.__name__] == {member.name: CODES[member] for member in kind}


def fields_of(table: str) -> set[str]:
    return {field.name for field in TABLES[table].fields}


def test_the_schema_holds_every_field_of_a_program() -> None:
    named = {field.name for field in fields(Program) if field.init}
    assert named == fields_of("Program")
    assert set(Operation.__slots__) == fields_of("Operation")
    assert {*Value.__slots__} - {"is_numbered"} == fields_of("Value")
    assert "is_numbered" in fields_of("SymbolicValue")
    tile = {"tile_rows", "tile_columns"}
    assert set(Layout.__slots__) - {"tile_shape"} == fields_of("Layout") - tile
    grid = {"grid_rows", "grid_columns", "rows", "columns"}
    assert set(ShardSpec.__slots__) - {"core_grid", "shape"} == fields_of("ShardSpec") - grid
