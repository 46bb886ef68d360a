"""What others build beside the wheel: plugins in a fresh environment, emitters in C++ and C; and
the wheel and the source distribution themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.testing import one
from stitch.ttb import content_of
from tests.end_to_end.test_installed_wheel import blocks_of
from tests.support.installed_wheel import ROOT, Wheel
from tests.support.installed_wheel import wheel as wheel

LONG = pytest.mark.campaign("extensions")
#: Lines of a package of `examples/plugins`, and of an emitter.
MOST_PLUGIN_LINES, MOST_EMITTER_LINES = 120, 150
EMITTERS = ("emit.cpp", "emit.c")


def ran(folder: Path, *words: str, **variables: str) -> str:
    """What a command prints; fails with its errors."""
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def fresh(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and the extra `onnx`."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    ran(folder, *pip, f"{wheel.file}[onnx]")
    return folder / "bin"


@LONG
def test_four_packages_are_installed_beside_the_wheel_and_used_by_name(
    fresh: Path, tmp_path: Path
) -> None:
    """The commands of `examples/plugins/README.md`, which end with the suites of stitch.testing."""
    path = f"{fresh}{os.pathsep}{os.environ['PATH']}"
    ran(tmp_path, str(fresh / "stitch-run"), "--example=plugins")
    folder = tmp_path / "plugins"
    ((_, commands),) = blocks_of(folder / "README.md")
    printed = ran(folder, "bash", "-euo", "pipefail", "-c", commands, PATH=path)
    assert "squares.ttb: " in printed and "1 program for lab4x4" in printed
    assert "[ 64. 81. ... 196. 225.]" in printed
    assert "timed: squares: " in printed
    assert "100%" in printed
    listed = ran(folder, str(fresh / "stitch-run"), "--list_devices")
    assert "lab4x4: of the plugin lab-machine 0.1 (lab_machine:DESCRIPTION)" in listed


def test_the_packages_and_emitters_are_short() -> None:
    for folder in (ROOT / "examples" / "plugins").glob("*/"):
        files = [f for f in folder.rglob("*") if f.suffix in (".py", ".toml", ".yaml")]
        lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files)
        assert lines <= MOST_PLUGIN_LINES, folder.name
    for name in EMITTERS:
        text = (ROOT / "examples" / "emit" / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_EMITTER_LINES


@LONG
def test_emitters_write_the_bytes_that_python_writes(wheel: Wheel, tmp_path: Path) -> None:
    """The commands of `examples/emit/README.md`; the file is stitched with a program of ours."""
    written = wheel.run(tmp_path, "stitch-run", "--example=emit")
    assert written.returncode == 0, written.stderr
    folder = tmp_path / "emit"
    ((_, commands),) = blocks_of(folder / "README.md")
    done = wheel.run(folder, "bash", "-euo", "pipefail", "-c", commands)
    assert done.returncode == 0, done.stdout + done.stderr
    warnings = ["-Wall", "-Wextra", "-Werror"]
    ran(folder, "cc", "-std=c11", "-O1", *warnings, "emit.c", "-o", "emit_c")
    ran(folder, "./emit_c", "dense_c.ttb")
    for name in ("dense.ttb", "dense_c.ttb"):
        binary = stitch.load(folder / name, verify="full")
        again = tmp_path / f"again_{name}"
        check_bytes(folder / name, binary, again)
        check_stitching(folder / name)


def check_bytes(path: Path, binary: stitch.ttb.Binary, again: Path) -> None:
    """Python's encoder writes what was read from the emitter's file as the same bytes."""
    from stitch.files import write_files

    write_files({str(again): content_of(binary)})
    assert again.read_bytes() == path.read_bytes()


def check_stitching(path: Path) -> None:
    """The emitter's program feeds one of ours without a copy, and computes y = Relu(x w' + b)."""
    x = np.random.default_rng(2).normal(0, 1, (8, 64)).astype(np.float32)
    weight = ((np.arange(32 * 64) % 7 - 3) / 4).astype(np.float32).reshape(32, 64)
    expected = np.maximum(x @ weight.T + np.arange(32, dtype=np.float32) / 8, 0)
    graph = stitch.trace(lambda h: h * 2.0, np.zeros((8, 32), np.float32))
    ours = stitch.compile(graph, target="wormhole_n150")
    with stitch.open_device("wormhole_n150", debug=True) as device:
        theirs, double = device.load(path), device.load(ours)
        h = device.tensor(x).to_layout(theirs.program.input_desc(0).layout)
        device.flush()
        with device.without_copies():
            y = one(double(one(theirs(h))))
            device.flush()
        np.testing.assert_allclose(y.numpy(), expected * 2, rtol=1e-5, atol=1e-5)


def checksums(wheel: Path) -> dict[str, int]:
    """The CRC-32 of each file; of the list of files itself only that it is there."""
    with zipfile.ZipFile(wheel) as packed:
        return {
            entry.filename: 0 if entry.filename.endswith("RECORD") else entry.CRC
            for entry in packed.infolist()
        }


@LONG
def test_distributions_are_whole_and_well_formed(wheel: Wheel, tmp_path: Path) -> None:
    """sdist: every file of the repository; the wheel made of it is the wheel of the tree."""
    python = sys.executable
    ran(ROOT, python, "-m", "build", "--no-isolation", "--sdist", "-o", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    kept = {name for name in listed.split("\0") if name and not name.startswith(".git")}
    assert kept - names == {".gitignore"} & kept
    ran(tmp_path, *[python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"],
        "--no-build-isolation", "-w", str(tmp_path), str(archive))  # fmt: skip
    (again,) = tmp_path.glob("*.whl")
    assert checksums(again) == checksums(wheel.file)
    ran(tmp_path, python, "-m", "twine", "check", "--strict", str(archive), str(again))
    checker = shutil.which("check-wheel-contents", path=str(Path(python).parent))
    assert checker is not None
    ran(tmp_path, checker, str(again))


def test_the_other_distribution_is_one_error_at_import(tmp_path: Path) -> None:
    """Installed into the same folder before Stitch, or after it."""
    folder = tmp_path / "site"
    for source in ("__init__.py", "installation.py", "on_demand.py", "version.py", "cli"):
        copied = shutil.copytree if source == "cli" else shutil.copyfile
        (folder / "stitch").mkdir(parents=True, exist_ok=True)
        copied(ROOT / "stitch" / source, folder / "stitch" / source)
    (folder / "stitch-1.4.4.dist-info").mkdir()
    here = {"PYTHONPATH": str(folder)}
    for code, files in (
        ("import stitch", {}),
        ("import stitch.cli", {"__init__.py": "from stitch.stitch import Stitch\n",
                               "stitch.py": "class Stitch: ...\n"}),
    ):  # fmt: skip
        for name, text in files.items():
            (folder / "stitch" / name).write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | here,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 1
        assert "ImportError: the distribution 'stitch' 1.4.4, a tool for Android" in done.stderr
        assert "pip uninstall stitch stitch-runtime" in done.stderr
