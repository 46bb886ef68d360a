"""`tools/mutants`: its list stays true to the code, and it finds what no test notices."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.run_seed import SEED

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tools" / "planner_mutants.toml"
MUTANTS = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]


def mutants(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "mutants"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_mutant_applies_exactly_once_and_its_test_exists(mutant: dict[str, str]) -> None:
    assert mutant["old"] != mutant["new"]
    assert (ROOT / mutant["file"]).read_text(encoding="utf-8").count(mutant["old"]) == 1
    file, _, test = mutant["test"].partition("::")
    assert f"\ndef {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_the_tests_that_are_named_are_there_with_their_parameters() -> None:
    """A test's parameters are part of its name; one that is not found stops the whole campaign."""
    tests = sorted({mutant["test"] for mutant in MUTANTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *tests], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.campaign("mutants")
def test_every_mutant_is_killed_by_its_test() -> None:
    done = mutants("--sample=40", f"--seed={SEED}")
    assert done.returncode == 0, done.stdout
