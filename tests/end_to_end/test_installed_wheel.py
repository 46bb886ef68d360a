"""What a user gets: the wheel, installed into a folder of its own, and every page's blocks as they
stand.

A page's blocks run from the top in one empty folder (an example's page in a copy of the example).
Python blocks share their names. A block whose first line is `# NAME.yaml` or `# NAME.py` is that
file. `text` blocks are what an earlier block printed; of those without a language, the one with
`tools/` names commands of a checkout.
"""

from __future__ import annotations

import re
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.explained import without_the_computers_bytes
from tests.support.installed_wheel import ROOT, Wheel
from tests.support.installed_wheel import wheel as wheel

LONG = pytest.mark.campaign("pages")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.(?:yaml|py))\n")
#: Blocks come as Python data; each says what it printed between two marks.
_DRIVER = """\
import ast, subprocess, sys
names = {"__name__": "__main__"}
for language, text in ast.literal_eval(sys.stdin.read()):
    if language == "python":
        exec(compile(text, "a block", "exec"), names)
    else:
        subprocess.run(["bash", "-euo", "pipefail", "-c", text], check=True)
    sys.stdout.flush()
"""


def blocks_of(page: Path) -> list[tuple[str, str]]:
    return [(found[1], found[2]) for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def run_page(wheel: Wheel, page: Path, folder: Path) -> str:
    """Run a page's blocks; gives all that they printed."""
    steps = []
    for language, text in blocks_of(page):
        named = _FILE.match(text)
        if "ray" in re.findall(r"\w+", text) and find_spec("ray") is None:
            continue
        if named is not None:
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language in ("python", "sh"):
            steps.append((language, text))
    done = wheel.run(folder, sys.executable, "-W", "error", "-c", _DRIVER, stdin=repr(steps))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@LONG
def test_every_block_of_the_readme_runs_in_an_empty_folder(wheel: Wheel, tmp_path: Path) -> None:
    # The page shows what PyTorch's users do (torch.nn, torch.onnx).
    page = ROOT / "README.md"
    printed = run_page(wheel, page, tmp_path)
    shown = [text for language, text in blocks_of(page) if language == "text"]
    assert len(shown) == 1
    assert without_the_computers_bytes(shown[0]) in without_the_computers_bytes(printed)
    assert "[SUCCESS]" in printed


LONG_PAGES = (
    "compile_cache.md", "fractal.md", "how-to/c.md", "how-to/dynamic-shapes.md", "how-to/gpu.md",
    "how-to/plugins.md", "how-to/report-page.md", "how-to/several-devices.md",
    "local_backend.md", "tasks.md", "torch_compile.md", "tracing.md", "training.md",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "devices.md",
        "observing.md",
        "foreign_operators.md",
        *(pytest.param(name, marks=LONG) for name in LONG_PAGES),
    ],
)
def test_every_block_of_a_page_runs_in_an_empty_folder(
    wheel: Wheel, tmp_path: Path, name: str
) -> None:
    assert run_page(wheel, ROOT / "docs" / name, tmp_path)


#: Pages of docs/ whose text blocks are what they print.
SHOWN_PAGES = (
    "architecture.md",
    "how-to/check-copies-in-ci.md",
    "placement_and_schedules.md",
    *sorted(f"tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.md")),
)


@LONG
@pytest.mark.parametrize("name", SHOWN_PAGES)
def test_a_page_runs_in_an_empty_folder_and_prints_what_it_shows(
    wheel: Wheel, tmp_path: Path, name: str
) -> None:
    page = ROOT / "docs" / name
    printed = run_page(wheel, page, tmp_path)
    assert printed
    for language, text in blocks_of(page):
        assert language != "text" or text in printed


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=LONG) for name in ("c", "digits", "fractal")), "recurrent"]
)
def test_an_example_written_by_the_command_runs_as_its_page_says(
    wheel: Wheel, tmp_path: Path, name: str
) -> None:
    written = wheel.run(tmp_path, "stitch-run", f"--example={name}")
    assert written.returncode == 0, written.stderr
    assert f"cd {name}\n" in written.stdout
    assert run_page(wheel, tmp_path / name / "README.md", tmp_path / name)
    again = wheel.run(tmp_path, "stitch-run", f"--example={name}")
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_no_page_has_a_block_that_no_test_runs() -> None:
    run = {"README.md", "docs/devices.md", "docs/observing.md", "docs/tasks.md", "docs/training.md"}
    run |= {"docs/compile_cache.md", "docs/fractal.md", "docs/local_backend.md"}
    run |= {"docs/foreign_operators.md", "docs/how-to/several-devices.md"}
    run |= {"docs/how-to/report-page.md", "docs/how-to/plugins.md", "docs/how-to/gpu.md"}
    run |= {"docs/how-to/c.md", "docs/how-to/dynamic-shapes.md"}
    run |= {"docs/torch_compile.md", "docs/tracing.md"}
    run |= {f"docs/{name}" for name in SHOWN_PAGES}
    # tests/end_to_end/test_extensions_from_outside.py runs these in an environment of their own.
    run |= {"examples/plugins/README.md", "examples/emit/README.md"}
    run |= {"examples/digits/README.md", "examples/recurrent/README.md", "examples/c/README.md"}
    run.add("examples/fractal/README.md")
    strangers = []
    folders = [folder for folder in ROOT.iterdir() if not folder.name.startswith(".")]
    pages = [page for folder in folders for page in folder.glob("**/*.md")]
    for page in sorted([ROOT / "README.md", *pages]):
        name = page.relative_to(ROOT).as_posix()
        for language, text in blocks_of(page):
            of_a_checkout = all(re.match("(python )?tools/", w) for w in text.splitlines())
            # tests/test_errands.py applies them.
            of_a_checkout |= (name, language) == ("docs/errands.md", "diff")
            # tests/cli/test_stitch_settings.py reads them.
            of_a_checkout |= (name, language) == ("docs/reference/commands.md", "toml")
            if not (name in run and language in ("python", "sh", "yaml", "text")):
                strangers += [] if of_a_checkout else [f"{name}: ```{language}\n{text}"]
    assert strangers == []


def test_the_wheel_carries_the_examples_and_what_they_need(wheel: Wheel, tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(wheel.file).namelist())
    here = {
        f"stitch/{file.relative_to(ROOT).as_posix()}"
        for file in (ROOT / "examples").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert here - names == set()
    schema = wheel.run(tmp_path, "stitch", "schema", "ttb")
    assert schema.stdout == (ROOT / "schema" / "program.fbs").read_text(encoding="utf-8"), schema
