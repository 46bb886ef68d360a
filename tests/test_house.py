"""The rules of the house: what rooms may import, what stays light, and how files are kept."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = {"torch", "onnx", "onnxruntime", "ray", "safetensors", "plotly", "sklearn"}
#: Written by a generator, so neither their length nor their docstrings are ours.
GENERATED = {ROOT / "stitch" / "ttb" / "generated.py"}


def python_files(*folders: str) -> list[Path]:
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if file not in GENERATED]


def repository_files() -> list[Path]:
    """Every text file that is, or would be, part of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:  # An unpacked archive has no git.
        hidden = re.compile(r"/(\.venv|\.git|\.\w+_cache|__pycache__)/")
        files = [f for f in ROOT.rglob("*") if not hidden.search(f.as_posix())]
    return [file for file in files if file.is_file()]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


#: For each contract, by its id: a file, a line there that breaks it, and what is then said.
BREACHES = {
    "packages": ("compiler/options.py", "import stitch.runtime",
              "stitch.compiler is not allowed to import stitch.runtime"),
    "runtime layers": ("runtime/values/effects.py", "import stitch.runtime.execution",
                       "stitch.runtime.values is not allowed to import stitch.runtime.execution"),
    "cycles": ("machine/shape.py", "import stitch.machine.description",
                "No cycles are allowed in stitch.machine."),
    "front ends": ("frontend/yaml.py", "import stitch.frontend.torch",
                   "stitch.frontend.yaml is not allowed to import stitch.frontend.torch"),
    "checker": ("planner/checker/proof.py", "import stitch.planner.mover.order",
                "stitch.planner.checker is not allowed to import stitch.planner.mover"),
    "checker's own packing": ("planner/checker/plan_check.py", "import stitch.packing",
                              "stitch.planner.checker is not allowed to import stitch.packing"),
    "public API": ("report/explanation.py", "import stitch",
             "stitch.report.explanation is not allowed to import stitch"),
    "flatbuffers": ("flatbuffer/verify.py", "import flatbuffers",
                    "stitch.flatbuffer.verify -> flatbuffers"),
    "generated": ("model.py", "import stitch.ttb.generated",
                  "stitch.model -> stitch.ttb.generated"),
    "extras": ("files/writing.py", "import torch", "stitch.files.writing -> torch"),
    "workshop": ("errors.py", "import pytest", "stitch.errors -> pytest"),
}  # fmt: skip


def test_every_contract_is_broken_by_an_import_against_it(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "stitch", tmp_path / "stitch", ignore=shutil.ignore_patterns("__pycache__")
    )
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    names = {contract["id"]: contract["name"] for contract in contracts}
    assert set(names) == set(BREACHES)
    for file, line, _ in BREACHES.values():
        with (tmp_path / "stitch" / file).open("a", encoding="utf-8") as text:
            text.write(f"\n{line}\n")
    code = (
        "import sys; sys.path.insert(0, '.'); "
        "from importlinter.cli import lint_imports_command as run; run()"
    )
    config = ROOT / "pyproject.toml"
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-logo", "--no-cache", "--config", str(config)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    # Long names are broken into lines.
    said = " ".join(result.stdout.split())
    for contract, (_, _, complaint) in BREACHES.items():
        assert f"{names[contract]} BROKEN" in said, said
        assert complaint in said, said


#: What a process runs, what it must load, and what it must not.
LOADED: dict[str, tuple[str, set[str], set[str]]] = {
    "every name": ("import stitch; [getattr(stitch, name) for name in dir(stitch)]", set(), EXTRAS),
    "compile and run": (
        "import stitch; stitch.compile, stitch.load, stitch.open_device",
        {"stitch.compiler", "stitch.runtime"},
        {"stitch.frontend.onnx", "stitch.frontend.torch", "stitch.frontend.yaml", "stitch.cli",
         "stitch.documents", "stitch.training", "stitch.ttb.ttnn.program_file",
         "stitch.machine.systems"},
    ),
    "torch.compile": (
        "from stitch.frontend.torch.compile import device_of; device_of()",
        {"stitch.runtime.executors.torch_executor"},
        {"stitch.training", "stitch.ttb.ttnn.program_file", "onnxruntime"},
    ),
    "stitch-run": (
        "import stitch; stitch.compile(lambda x: x + x, (1.0,), target='tiny').save('a.ttb'); "
        "from stitch.cli import run_main as main; main(['a.ttb', '--init=ones'])",
        {"stitch.runtime"},
        {"stitch.training", "stitch.documents.yaml_pipeline", "stitch.frontend.yaml"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("work", LOADED)
def test_a_process_loads_what_it_uses_and_nothing_else(work: str, tmp_path: Path) -> None:
    code, needed, unwanted = LOADED[work]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{code}\nimport sys; print([*sys.modules])"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    loaded = set(ast.literal_eval(result.stdout.splitlines()[-1]))
    assert loaded >= needed and not loaded & unwanted


@pytest.mark.parametrize("command", ["compile", "inspect", "link", "run"])
def test_a_command_says_its_version_and_loads_nothing_for_it(command: str) -> None:
    code = (
        f"import sys; from stitch.cli import {command}_main as main; code = main(['--version']); "
        "print([code, *sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    version, rest = result.stdout.splitlines()
    code, *loaded = ast.literal_eval(rest)
    assert (version, code) == (f"stitch-{command} 0.1.0", 0)
    assert not {"numpy", "argparse", "stitch.api", f"stitch.cli.{command}_command"} & {*loaded}


def faces_on_demand() -> list[str]:
    return [
        relative(file)
        for file in python_files("stitch")
        if file.name == "__init__.py" and "names_on_demand(" in file.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("face", faces_on_demand())
def test_a_face_loads_the_names_that_type_checkers_see(face: str) -> None:
    tree = ast.parse((ROOT / face).read_text(encoding="utf-8"))
    (choice,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(choice.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module
        for node in choice.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    (call,) = (node for node in ast.walk(choice) if isinstance(node, ast.Call))
    homes = ast.literal_eval(call.args[1])
    place = ".".join(Path(face).parent.parts)
    assert {n: f"{place}.{home}" for home, names in homes.items() for n in names.split()} == seen
    beside = {file.stem for file in (ROOT / face).parent.iterdir()}
    assert not seen.keys() & beside, "once it is imported, a file hides a name of its own name"
    room = importlib.import_module(place)
    assert seen.keys() <= set(room.__all__) <= set(dir(room))
    for name, home in seen.items():
        assert getattr(room, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        getattr(room, "no_such" + "_name")


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert importlib.import_module("stitch").__version__ == project["version"]


@pytest.mark.parametrize("folder", ["stitch", "tools", "examples", "tests"])
def test_every_module_says_what_it_is_for(folder: str) -> None:
    says = re.compile(r'(#.*\n|\n)*r?"""\s*[^\s"]')
    silent = [f for f in python_files(folder) if not says.match(f.read_text(encoding="utf-8"))]
    assert list(map(relative, silent)) == []


#: Calls that open or write a path, and who may make them outside of the room of files: what reads
#: the package's own files or the system's, and a folder that is copied whole.
FILE_CALLS = {"open", "write_text", "write_bytes", "read_text", "read_bytes", "rename", "replace",
              "fsync", "mkstemp", "NamedTemporaryFile", "TemporaryDirectory", "savez", "memmap",
              "fromfile", "tofile"}  # fmt: skip
OWN_FILES = {
    "stitch/machine/shipped.py": {"read_bytes"},
    "stitch/ttb/ttnn/field_history.py": {"read_bytes"},
    # In a new folder, which is renamed when it is complete.
    "stitch/cli/examples_command.py": {
        "read_bytes",
        "read_text",
        "rename",
        "TemporaryDirectory",
        "write_bytes",
    },
    "stitch/budget.py": {"read_text"},
    "stitch/forms/array_files.py": {"open"},  # members of an archive
    "stitch/frontend/onnx/protos.py": {"memmap"},
    "stitch/frontend/torch/compile/graph_cache.py": {"read_text"},  # What pip wrote of torch.
    "stitch/cli/command.py": {"open"},
    "stitch/planner/planner.py": {"rename"},  # Of buffers.
    # What SQLite writes into a file only, in a folder that is gone with the report.
    "stitch/report/visualizer.py": {"TemporaryDirectory"},
}


def test_one_room_opens_and_writes_files() -> None:
    found = {}
    named = re.compile(rf"\b(?:{'|'.join(FILE_CALLS)})\s*\(")
    for file in python_files("stitch"):
        text = file.read_text(encoding="utf-8")
        if file.parent == ROOT / "stitch" / "files" or not named.search(text):
            continue
        calls = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                ours = isinstance(node.func, ast.Name) and name != "open"
                # `str.replace` and `dataclasses.replace` take more than a path.
                taken = name != "replace" or (len(node.args) == 1 and not node.keywords)
                if name in FILE_CALLS and taken and not ours:
                    calls.add(name)
        if calls - OWN_FILES.get(relative(file), set()):
            found[relative(file)] = calls
    assert found == {}


def test_no_file_names_a_place_of_one_machine() -> None:
    # Spelt in pieces, so that this file does not name them either.
    places = "|".join(
        ("/ro" + "ot/", "/ho" + "me/", "/wo" + "rk/", "/tm" + "p/venv", "/Us" + "ers/")
    )
    found = []
    for file in repository_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{relative(file)}: {line}" for line in text.splitlines() if re.search(places, line)
        ]
    assert found == []


#: Names of our own that the field's terms have replaced (`docs/glossary.md`): none comes back.
RETIRED = {
    "Deaths", "what_is_left", "mend", "once_more", "Again", "KnownWork", "KnownRun", "Stretch",
    "Lease", "put_back", "welcome", "let_go", "take_again", "Recording", "Straight", "KindOfWork",
    "look_around", "was_bound", "found_others", "in_the_way", "clear_way", "Bystander",
    "Foresight", "expose", "forget_stale_copies", "runs_here", "queues_here",
    "leave_behind", "check_whole", "LoopStage", "found_once", "quietly", "plan_picture",
    "Residency", "Picture", "Standing", "births", "OwnPlace", "own_places",
    "compute_parts_together", "pool_first", "Meaning", "MeaningReader", "way_set", "way_in_use",
    "GoesBack", "lifting", "unfinished", "run_words", "wire_words", "scans_in_words",
    "RecordingMaker", "Recordings", "lease", "leases", "told_steps", "spool", "sweeping", "pour",
    "wishes",
}  # fmt: skip


def test_no_retired_name_comes_back() -> None:
    files = python_files("stitch")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    words = {f: re.findall(r"\w+", f.read_text(encoding="utf-8")) for f in files}
    words |= {p: re.findall(r"`(\w+)[`(.]", p.read_text(encoding="utf-8")) for p in pages}
    used = {relative(file): RETIRED.intersection(names) for file, names in words.items()}
    found = {file: names for file, names in used.items() if names}
    assert found == {}


def test_nothing_is_left_half_done() -> None:
    marks = re.compile(
        "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "Not" + "ImplementedError"))
    )
    found = [
        f"{relative(file)}: {line.strip()}"
        for file in python_files("stitch", "tools", "examples", "tests")
        for line in file.read_text(encoding="utf-8").splitlines()
        if marks.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "tool",
    ["tools/demo", "tools/test", "tools/campaign", "tools/test_pythons", "tools/check", ".ci/run"],
)
def test_a_tool_is_executable_and_sound_bash(tool: str) -> None:
    file = ROOT / tool
    assert file.stat().st_mode & 0o111
    checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("spelled", ["", ".venv", ".venv/", ".venv/./"])
def test_a_linked_environment_of_another_checkout_is_left_alone(
    spelled: str, tmp_path: Path
) -> None:
    """`python -m venv --clear` on a link empties what it leads to."""
    here, other = tmp_path / "here", tmp_path / "other" / ".venv"
    (here / "tools").mkdir(parents=True)
    (other / "bin").mkdir(parents=True)
    for name in ("tools/environment.sh", "pyproject.toml"):
        shutil.copy2(ROOT / name, here / name)
    for name in ("precious", ".stitch-installed", "bin/activate"):
        (other / name).write_text("dev of another")
    (here / ".venv").symlink_to(other)
    venv = {"STITCH_VENV": f"{here}/{spelled}"} if spelled else {}
    done = subprocess.run(
        ["bash", "-c", "set -eu; . tools/environment.sh; prepare_environment test"],
        cwd=here, capture_output=True, text=True, check=False, env={**os.environ, **venv},
    )  # fmt: skip
    assert done.returncode == 1 and "is a link" in done.stderr, done.stderr
    left = {str(file.relative_to(other)) for file in other.rglob("*") if file.is_file()}
    assert left == {"precious", ".stitch-installed", "bin/activate"}


def test_what_tests_share_lies_in_support_and_is_imported_by_its_full_name() -> None:
    support, elsewhere = ROOT / "tests" / "support", []
    for file in python_files("tests"):
        own = file.name.startswith("test_") or file.name in ("conftest.py", "__init__.py")
        is_writer = file.name == "write_frozen_files.py"
        if not own and support not in file.parents and not is_writer:
            elsewhere.append(f"{relative(file)} is no test")
        text = file.read_text(encoding="utf-8")
        if re.search(r"^[^\"'#]*\bsys\s*\.\s*path\s*\.\s*insert\s*\(", text, re.MULTILINE):
            elsewhere.append(f"{relative(file)} changes the path")
    assert elsewhere == []


def test_links_between_pages_lead_somewhere() -> None:
    dead = []
    for page in repository_files():
        if page.suffix != ".md":
            continue
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path = target.partition("#")[0]
            if path and "://" not in path and not (page.parent / path).exists():
                dead.append(f"{relative(page)}: {target}")
    assert dead == []


def test_files_that_texts_name_are_there() -> None:
    named = re.compile(
        r"(?<![\w/.-])(?:stitch|tests|tools|docs|schema)/[\w./]*\w(?:\.(?:py|md|fbs)|/)(?!\w)"
    )
    gone = {
        f"{relative(file)}: {name}"
        for file in repository_files()
        if file.suffix in {".md", ".py", ".toml"} and "CHANGELOG" not in file.name
        for name in named.findall(file.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert gone == set()


def test_the_site_s_navigation_names_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {file.relative_to(ROOT / "docs").as_posix() for file in ROOT.glob("docs/**/*.md")}
    records = {page for page in pages if re.match(r"decisions/\d", page)}
    # The index of the benchmarks links these.
    benchmarks = {page for page in pages if re.match(r"benchmarks/[a-z]", page)}
    # What tools/site_hook.py adds.
    added = {"changelog.md", "contributing.md", "examples.md", "format_versions.md", "overview.md"}
    assert sorted(_leaves(site["nav"])) == sorted((pages - records) | added)
    start = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)\s]+)\)", start))
    assert pages - records - benchmarks - linked == {"README.md"}


def _leaves(nav: object) -> list[str]:
    """The pages of a navigation, or of a part of it."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(parts, Iterable)
    return [page for part in parts for page in _leaves(part)]


def test_the_index_of_decisions_names_every_record_with_its_status() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d+)\]\((\S+)\) \| .* \| (.+) \|$", index, re.MULTILINE)
    assert [file for _, file, _ in rows] == sorted(file.name for file in folder.glob("0*.md"))
    for number, file, status in rows:
        assert file.startswith(f"{number}-")
        text = (folder / file).read_text(encoding="utf-8")
        stated = re.search(r"^\*Status: (superseded by \S+\)|accepted)", text, re.MULTILINE)
        assert status == (stated[1] if stated else "accepted"), file


def test_the_table_of_packages_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    named = {
        word for row in rows for word in re.findall(r"`(?:stitch/)?(\w+)/`", row.split("|")[1])
    }
    packages = {file.parent.name for file in (ROOT / "stitch").glob("*/__init__.py")}
    assert packages - named == set()
