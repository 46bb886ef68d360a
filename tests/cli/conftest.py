"""Modules compiled once for all tests of the commands, and a way to run a command in process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stitch.cli.stitch_command import MAINS

A_YAML = """\
name: a
inputs:
  x: {shape: [4, 8], type: float32}
parameters:
  w: {shape: [8, 8], init: {kind: randn, seed: 1, scale: 0.5}}
operations:
  - h = MatMul(x, w)
  - y = Relu(h)
outputs: [y]
"""
B_YAML = """\
name: b
inputs:
  x: {shape: [4, 8], type: float32}
operations:
  - y = Add(x, 1.0)
outputs: [y]
"""
CELL_YAML = """\
name: cell
inputs:
  x: {shape: [4, 8], type: float32, space: dram}
  h: {shape: [4, 8], type: float32, space: l1}
operations:
  - h_next = Add(x, h)
outputs: {h_next: {space: l1}}
"""
TYPES_YAML = """\
name: types
inputs:
  i: {shape: [3], type: int32}
  p: {shape: [3], type: bool}
  f: {shape: [3], type: bfloat16}
operations:
  - j = Add(i, i)
  - q = Not(p)
  - g = Add(f, f)
outputs: [j, q, g]
"""


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a.ttb, b.ttb (both in L1), b_dram.ttb, cell.ttb, types.ttb and their YAML."""
    folder = tmp_path_factory.mktemp("modules")
    for name, text in (("a", A_YAML), ("b", B_YAML), ("cell", CELL_YAML), ("types", TYPES_YAML)):
        (folder / f"{name}.yaml").write_text(text)
    for arguments in (
        ("a.yaml", "-o", "a.ttb", "--set", "input.x.space=l1", "--set", "output.y.space=l1"),
        ("b.yaml", "-o", "b.ttb", "--set", "input.x.space=l1"),
        ("b.yaml", "-o", "b_dram.ttb", "--set", "input.x.space=dram"),
        ("cell.yaml", "-o", "cell.ttb"),
        ("types.yaml", "-o", "types.ttb"),
    ):
        words = [str(folder / w) if w.endswith((".yaml", ".ttb")) else w for w in arguments]
        assert MAINS["compile"](words) == 0
    return folder


@pytest.fixture
def here(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own, with the modules and the arrays x.npy and y.npy, to work in."""
    for file in built.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(3).standard_normal((4, 8)).astype(np.float32)
    np.save("x.npy", x)
    return tmp_path


@pytest.fixture
def cli(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in process, in a folder of its own: `cli("run", "--module=a.ttb")`."""

    def run(command: str, *words: str) -> Outcome:
        capsys.readouterr()
        code = MAINS[command](words)
        seen = capsys.readouterr()
        return Outcome(code, seen.out, seen.err)

    return run
