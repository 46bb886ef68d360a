"""The demo's two files, linked into one by `stitch-link`: `stitch-run` makes the same output of it,
and `stitch-inspect` shows no boundary. All commands run as users run them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.trace_format import checked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "digits"


def run(folder: Path, command: str, *words: str) -> str:
    """What a command prints, in a folder; fails with its errors if it does."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / f"stitch-{command}"), *words],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def inspected(folder: Path, *words: str) -> Any:
    return json.loads(run(folder, "inspect", *words, "--json", "--section=all"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """features.ttb and classifier.ttb, what they make of the held-out digits, and both.ttb."""
    made = tmp_path_factory.mktemp("digits")
    for name in ("features", "classifier"):
        source = str(EXAMPLES / f"{name}.yaml")
        run(made, "compile", source, "-o", f"{name}.ttb", "--target", "wormhole_n150")
    with np.load(EXAMPLES / "digits.npz") as digits:
        np.save(made / "x.npy", digits["images"][digits["held_out"]].astype(np.float32) / 16)
    run(made, "run", "--module=features.ttb", "--module=classifier.ttb",
        "--input=image=@x.npy", "--output=@apart.npy")  # fmt: skip
    run(made, "link", "features.ttb", "classifier.ttb", "-o", "both.ttb", "--name=both")
    return made


def test_one_file_runs_with_the_same_output_bit_for_bit(folder: Path) -> None:
    words = ("--module=both.ttb", "--input=image=@x.npy", "--output=@joined.npy")
    explained = run(folder, "run", *words, "--explain", "--executor=numpy")
    assert (folder / "apart.npy").read_bytes() == (folder / "joined.npy").read_bytes()
    assert np.load(folder / "joined.npy").shape == (360, 10)
    assert "1 program run, 1 copy, 92160 B" in explained  # The images, on their way in.


def test_the_trace_of_the_two_files_shows_what_passes_between_them(folder: Path) -> None:
    run(folder, "run", "--module=features.ttb", "--module=classifier.ttb",
        "--input=image=@x.npy", "--output=@traced.npy", "--trace=t.json.gz")  # fmt: skip
    assert (folder / "apart.npy").read_bytes() == (folder / "traced.npy").read_bytes()
    found = checked(json.loads(gzip.decompress((folder / "t.json.gz").read_bytes())))
    assert [each.name for each in found.of("program")] == ["features", "classifier"]
    (copy,) = found.of("copy")
    assert copy.args["nbytes"] == 92160
    assert found.ways() == {("copy", "features"), ("features", "classifier")}
    assert found.begun > found.ended > 0, "constants stay"


def test_inspect_shows_no_boundary_and_each_constant_once(folder: Path) -> None:
    shown = inspected(folder, "both.ttb")
    (program,) = shown["programs"]
    assert [slot["name"] for slot in program["inputs"]] == ["image"]
    assert [slot["name"] for slot in program["outputs"]] == ["probabilities"]
    parts = [inspected(folder, f"{name}.ttb") for name in ("features", "classifier")]
    operations = [op["op"] for part in parts for op in part["programs"][0]["operations"]]
    assert [op["op"] for op in program["operations"]] == operations
    assert shown["size"]["segments"] == [n for p in parts for n in p["size"]["segments"]]
    assert _constants(program) == [name for p in parts for name in _constants(p["programs"][0])]


def test_a_program_that_is_linked_in_twice_has_its_constants_once(folder: Path) -> None:
    run(folder, "link", "features.ttb", "classifier.ttb", "classifier.ttb", "-o", "twice.ttb",
        "--wire=0.features=1.features", "--wire=0.features=2.features")  # fmt: skip
    once, twice = inspected(folder, "both.ttb"), inspected(folder, "twice.ttb")
    assert twice["size"]["segments"] == once["size"]["segments"]
    assert _constants(twice["programs"][0]) == _constants(once["programs"][0])
    drams = [part["programs"][0]["memory"]["spaces"]["dram"] for part in (once, twice)]
    assert drams[0] == drams[1]
    run(folder, "run", "--module=twice.ttb", "--input=image=@x.npy", "--output=0=@one.npy",
        "--output=1=@two.npy")  # fmt: skip
    for name in ("one.npy", "two.npy"):
        assert (folder / name).read_bytes() == (folder / "apart.npy").read_bytes()


def _constants(program: Any) -> list[str]:
    return [p["what"] for p in program["memory"]["parts"] if p["what"].startswith("constant ")]
