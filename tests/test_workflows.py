"""The GitHub action and the workflows: their steps are run here, by the shell that they run in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

import stitch
from stitch.report import Recorder
from tests.support.stitched_models import integers

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
ACTION = GITHUB / "actions/stitch-diff/action.yml"
#: Commands, of this environment and of the system.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
B_YAML = """\
name: b
inputs:
  x: {shape: [4, 64], type: float32, space: l1}
operations:
  - y = Add(x, 1.0)
outputs: [y]
"""


def record(folder: Path, name: str, text: str) -> None:
    """Record a run of a chain whose second module has this source."""
    (folder / "models").mkdir(exist_ok=True)
    (folder / "models/b.yaml").write_text(text)
    a = stitch.compile(lambda x: x + x, (integers(),), target="tiny", placement="output.0.space=l1")
    b = stitch.compile(folder / "models/b.yaml", target="tiny")
    with stitch.open_device("tiny") as device:
        recorder = Recorder(device)
        device.load(b)(device.load(a)(integers())).numpy()
        (folder / name).write_text(recorder.text())


def run_action(folder: Path, **inputs: str) -> tuple[int, str, str]:
    """Run the steps of the action as the runner does; return exit code, output and summary."""
    action: dict[str, Any] = yaml.safe_load(ACTION.read_text())
    values = {name: one.get("default", "") for name, one in action["inputs"].items()} | inputs
    missing = {name for name, one in action["inputs"].items() if one.get("required")} - set(inputs)
    assert not missing and set(inputs) <= set(action["inputs"])
    summary = folder / "summary.md"
    output = ""
    for step in action["runs"]["steps"]:
        condition = re.fullmatch(r"inputs\.(\w+) != ''", step.get("if", "inputs.old != ''"))
        assert condition is not None, "a condition that this test does not evaluate"
        if not values[condition[1]]:
            continue
        told = {
            name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: values[m[1]], word)
            for name, word in step["env"].items()
        }
        assert "${{" not in step["run"]
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder, capture_output=True, text=True, check=False,
            env=os.environ | told | {"PATH": PATH, "GITHUB_STEP_SUMMARY": str(summary)},
        )  # fmt: skip
        output += done.stdout + done.stderr
        if done.returncode:
            break
    return done.returncode, output, summary.read_text() if summary.exists() else ""


def test_the_action_fails_for_a_changed_layout_and_annotates_its_source(tmp_path: Path) -> None:
    record(tmp_path, "old run.json", B_YAML)
    record(tmp_path, "new.json", B_YAML.replace("space: l1", "space: dram"))
    budgets = "copies,bytes:+0,seconds:+1%,peak.l1"
    code, output, summary = run_action(
        tmp_path, old="old run.json", new="new.json", fail_on=budgets, junit="r.xml", package=""
    )
    assert code == 7, output
    assert re.search(r"^::error file=models/b.yaml,line=5,title=stitch%3A \+1 copy", output, re.M)
    assert "a budget is broken" in summary and "(b.yaml:5)" in summary
    assert ElementTree.parse(tmp_path / "r.xml").getroot().get("failures") == "3"


def test_the_action_passes_for_kept_budgets_and_runs_no_input_as_a_command(tmp_path: Path) -> None:
    record(tmp_path, "$(touch made).json", B_YAML)
    same = "$(touch made).json"
    code, output, summary = run_action(tmp_path, old=same, new=same, package="")
    assert code == 0 and "::error" not in output, output
    assert "all budgets kept" in summary and not (tmp_path / "made").exists()


def test_the_action_names_a_file_that_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"stitch": "run"')
    code, output, _ = run_action(tmp_path, old="old.json", new="old.json", package="")
    assert code == 3 and "cut off" in output, output


def steps() -> list[tuple[str, str]]:
    """The scripts of all workflows and of the action, by file and job."""
    found = []
    for path in sorted(GITHUB.rglob("*.yml")):
        body = yaml.safe_load(path.read_text())
        jobs = body["jobs"] if "jobs" in body else {"action": body["runs"]}
        for job, content in jobs.items():
            found += [(f"{path.name}: {job}", step["run"]) for step in content["steps"]
                      if "run" in step]  # fmt: skip
    return found


def test_every_step_is_a_sound_script_of_tools_that_exist() -> None:
    scripts = steps()
    assert len(scripts) > 10
    for where, script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True,
                                 check=False)  # fmt: skip
        assert checked.returncode == 0, (where, checked.stderr)
        for tool in re.findall(r"(?:^|\s)((?:tools|\.github|\.ci)/[\w/-]+)", script):
            assert os.access(ROOT / tool, os.X_OK), (where, tool)
        # What others write (branches, titles) reaches scripts by the environment only.
        assert "${{" not in script, where


def test_local_actions_have_the_inputs_that_workflows_pass() -> None:
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    jobs = yaml.safe_load((GITHUB / "workflows/checks.yml").read_text())["jobs"].values()
    passed = [step["with"] for job in jobs for step in job["steps"]
              if step.get("uses") == "./.github/actions/stitch-diff"]  # fmt: skip
    assert len(passed) == 2 and all(set(words) <= set(inputs) for words in passed)


@pytest.mark.campaign("pages")
def test_the_records_of_the_examples_keep_their_budgets(tmp_path: Path) -> None:
    for name in ("old", "new"):
        subprocess.run(
            [GITHUB / "record_examples", ROOT, tmp_path / name], check=True, capture_output=True,
            env=os.environ | {"PATH": PATH},
        )  # fmt: skip
    for name in ("digits", "recurrent"):
        assert json.loads((tmp_path / f"new/{name}.json").read_text())["stitch"] == "run"
        code, output, summary = run_action(
            tmp_path, old=f"old/{name}.json", new=f"new/{name}.json", package=""
        )
        assert code == 0 and "all budgets kept" in summary, output
