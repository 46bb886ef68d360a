"""Every errand of docs/errands.md: its diff applies, and touches and does what the page says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "errands.md"
#: The files of the product that an errand may touch.
CHANGED = {
    "A new ATen lowering": {"stitch/frontend/torch/lowering/single_elements.py"},
    "A new elementwise operator": {"stitch/ops/arithmetic.py"},
    "A new key in a pipeline file": {
        "stitch/documents/pipeline_form.py",
        "stitch/documents/yaml_pipeline.py",
    },
}


def sections() -> dict[str, str]:
    """The text of each errand by its heading."""
    _, *parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def only(pattern: str, text: str) -> str:
    (match,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return str(match)


def test_the_page_has_these_errands() -> None:
    assert sections().keys() == CHANGED.keys()


@pytest.mark.campaign("pages")
@pytest.mark.parametrize("errand", CHANGED)
def test_an_errand_is_done_by_its_diff(errand: str, tmp_path: Path) -> None:
    text = sections()[errand]
    diff = only(r"^```diff\n(.*?)^```$", text)
    files = set(re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE))
    assert {file for file in files if file.startswith("stitch/")} == CHANGED[errand]
    for folder in ("stitch", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(only(r"^Shown by `(pytest [^`]*)`\.$", text))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
