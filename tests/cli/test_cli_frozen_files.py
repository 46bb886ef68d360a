"""`stitch-inspect` shows every frozen file, also one whose operations nothing here computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FORMATS = Path(__file__).resolve().parents[1] / "formats"
FROZEN = sorted(FORMATS.rglob("*.tt[bn]*"))

Cli = Callable[..., Any]


def test_there_are_frozen_files_of_both_kinds() -> None:
    assert {path.suffix for path in FROZEN} == {".ttb", ".ttnn"}


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.name)
@pytest.mark.parametrize("words", [(), ("--section=all", "--verify=full"), ("--json",)])
def test_every_frozen_file_is_shown(cli: Cli, path: Path, words: tuple[str, ...]) -> None:
    done = cli("inspect", str(path), *words)
    assert (done.code, done.err) == (0, "")
    assert done.out


def test_the_parts_of_a_program_that_an_earlier_linker_made_are_shown(cli: Cli) -> None:
    shown = cli("inspect", str(FORMATS / "v1.1.ttb"), "--section=all").out
    assert "seams" in shown
    assert "linked from 2 parts, which begin at operations 0, 2" in shown


def test_of_a_program_that_does_not_load_the_defect_stands_where_the_host_memory_would(
    cli: Cli,
) -> None:
    path = str(FORMATS / "v1.1.ttb")
    defect = "the output type of Gemm differs from the inferred one"
    said = f"host memory: unknown, numpy cannot run this program: {defect}"
    assert said in cli("inspect", path).out
    found = json.loads(cli("inspect", path, "--json").out)
    hosts = [program["memory"]["host"] for program in found["programs"]]
    assert [host["problem"].splitlines()[0] for host in hosts] == [defect, defect]
