"""The wheel of this tree, built without an index, and installed into a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("stitch", "examples", "schema", "pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
OFFLINE = ["--no-deps", "--no-index"]


@dataclass(frozen=True)
class Wheel:
    """A wheel, and the folder into which it was installed."""

    file: Path
    installed: Path

    def run(self, folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command from a folder, with the installed package and nothing of the checkout."""
        commands = os.pathsep.join((str(self.installed / "bin"), str(Path(sys.executable).parent)))
        environment = os.environ | {
            "PYTHONPATH": str(self.installed),
            "PYTHONIOENCODING": "utf-8",
            "PATH": commands + os.pathsep + os.environ["PATH"],
        }
        return subprocess.run(
            words,
            cwd=folder,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The wheel of this tree, built and installed without looking at any index."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    build = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    target = out / "installed"
    install = [*PIP, "install", *OFFLINE, "--target", str(target), str(file)]
    subprocess.run(install, check=True, capture_output=True)
    return Wheel(file, target)
