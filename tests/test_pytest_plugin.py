"""The pytest plugin: a changed layout fails a test, and the message names link and source line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.errors import StitchError, UsageError
from tests.support.stitched_models import scaled, tiny

A_YAML = """\
name: a
inputs:
  x: {shape: [4, 8], type: float32}
operations:
  - y = Relu(x)
outputs: {y: {space: l1}}
"""
B_YAML = """\
name: b
inputs:
  x: {shape: [4, 8], type: float32, space: l1}
operations:
  - y = Add(x, 1.0)
outputs: [y]
"""
TESTS = """\
import pytest

def chain(stitch_plan):
    return stitch_plan("a.yaml", "b.yaml", target="tiny")

def test_copies(stitch_plan):
    chain(stitch_plan).assert_copies(at_most=0)

def test_bytes(stitch_plan):
    chain(stitch_plan).assert_bytes(at_most=64)

def test_snapshot(stitch_plan):
    chain(stitch_plan).assert_matches("chain")

def test_what_the_change_does_not_break(stitch_plan):
    plan = chain(stitch_plan)
    plan.assert_fits()
    plan.assert_copies(at_most=1)
    plan.assert_bytes(at_most="4KiB")

def test_another_snapshot(stitch_plan):
    stitch_plan("a.yaml", target="tiny").assert_matches("alone")
"""
DRAM, L1 = "4x8xf32:dram:row_major:interleaved", "4x8xf32:l1:row_major:interleaved"
LINK = "output 'y' of 'a' (a.yaml:5) -> input 'x' of 'b' (b.yaml:5)"


def run_pytest(folder: Path, *words: str) -> tuple[dict[str, str], str]:
    """Run pytest in a process of its own; return the outcome of each test, and the output."""
    assert [one.value for one in entry_points(group="pytest11", name="stitch")] == [
        "stitch.pytest_plugin"
    ], "the environment is older than the plugin: pip install -e ."
    # Where `CI` is set, pytest repeats whole messages in its summary.
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "BUILD_NUMBER")}
    environment |= {"COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--tb=short", "-p", "no:cacheprovider",
         "-p", "stitch", *words],
        cwd=folder, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.M)
    return {name: outcome for outcome, name in outcomes}, done.stdout + done.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with two modules and their tests."""
    for name, text in (("a.yaml", A_YAML), ("b.yaml", B_YAML), ("test_chain.py", TESTS)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_changed_layout_fails_tests_that_name_link_and_source_line(project: Path) -> None:
    outcomes, text = run_pytest(project, "--stitch-update")
    assert len(outcomes) == 5 and set(outcomes.values()) == {"PASSED"}, text
    snapshots = project / "stitch_snapshots"
    assert sorted(path.name for path in snapshots.iterdir()) == ["alone.json", "chain.json"]
    before = (snapshots / "chain.json").read_text()

    # A comment moves the source lines of `a`, which changes nothing; `b` gets another layout.
    (project / "a.yaml").write_text(A_YAML.replace("name: a", "name: a  # more\n"))
    (project / "b.yaml").write_text(B_YAML.replace("space: l1", "space: dram"))
    outcomes, text = run_pytest(project)
    failed = {name for name, outcome in outcomes.items() if outcome == "FAILED"}
    assert failed == {"test_copies", "test_bytes", "test_snapshot"} and len(outcomes) == 5, text
    assert "AssertionError: 1 copy in one pass, at most 0 allowed" in text
    assert "AssertionError: 128 B copied in one pass, at most 64 B allowed" in text
    assert "AssertionError: the plan differs from the snapshot" in text
    assert text.count(LINK.replace("a.yaml:5", "a.yaml:6")) == 3
    assert len(re.findall(rf"(?<!\+ )copy x1 128 B .*{L1} -> {DRAM}", text)) >= 2
    assert re.search(rf"\+ copy x1 128 B .*{L1} -> {DRAM}", text)
    assert "pytest --stitch-update" in text
    assert (snapshots / "chain.json").read_text() == before


def test_a_session_without_the_fixture_loads_nothing_of_stitch(tmp_path: Path) -> None:
    (tmp_path / "test_modules.py").write_text(
        "import sys\n"
        "def test_modules():\n"
        "    ours = {name for name in sys.modules if name.partition('.')[0] == 'stitch'}\n"
        "    assert ours == {'stitch', 'stitch.installation', 'stitch.on_demand',\n"
        "                    'stitch.pytest_plugin'}\n"
        "    assert 'numpy' not in sys.modules\n"
    )
    outcomes, text = run_pytest(tmp_path)
    assert outcomes == {"test_modules": "PASSED"}, text


Plan = Callable[..., Any]


def test_models_paths_and_pipelines_are_planned(
    stitch_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    l1 = ("input.x.space=l1", "output.y.space=l1")
    a, b = (scaled(name, 2.0, placement=l1) for name in "ab")
    assert stitch_plan(a, b).copies == 0
    monkeypatch.chdir(tmp_path)
    for name, model in (("a", a), ("b", scaled("b", 2.0, placement="input.x.space=dram"))):
        model.save(f"{name}.ttb")
    Path("p.yaml").write_text(
        "modules: {a: a.ttb, b: b.ttb}\ninputs: {x: {shape: [4, 64], type: float32}}\n"
        "steps:\n- {run: a, inputs: {x: x}, outputs: {y: h}}\n"
        "- {run: b, inputs: {x: h}, outputs: {y: y}}\noutputs: {y: y}\n"
    )
    for plan in (
        stitch_plan("a.ttb", "b.ttb"), stitch_plan(a, Path("b.ttb")), stitch_plan("p.yaml"),
        stitch_plan("a.ttb", "b.ttb", target="tiny", wires=["a.y=b.x"]),
    ):  # fmt: skip
        assert (plan.copies, plan.nbytes) == (1, plan.lines[0].nbytes)
        with pytest.raises(AssertionError, match=r"output 'y' of 'a' .* -> input 'x' of 'b'"):
            plan.assert_copies(at_most=0)


def test_a_pass_that_does_not_fit_fails_each_assertion(stitch_plan: Plan) -> None:
    machine = tiny(l1_nbytes=1024, name="small")
    model = scaled("a", 2.0, (64, 64), placement="output.y.space=l1")
    plan = stitch_plan(model, target=machine)
    for check in (plan.assert_fits, lambda: plan.assert_copies(at_most=9)):
        with pytest.raises(AssertionError, match="the pass does not fit: "):
            check()


def test_wrong_arguments_and_snapshots_are_named(
    stitch_plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="stitch_plan has no modules"):
        stitch_plan()
    with pytest.raises(UsageError, match="this is no module"):
        stitch_plan(3)
    for bound in (float("nan"), -1, None, True, 0.5):
        for check in ("assert_copies", "assert_bytes"):
            with pytest.raises(UsageError, match=f"{check} takes a .*number"):
                getattr(stitch_plan(scaled("a", 2.0)), check)(at_most=bound)
    plan = stitch_plan(scaled("a", 2.0))
    monkeypatch.setattr(plan, "_folder", tmp_path)
    with pytest.raises(ValueError, match="snapshot's name"):
        plan.assert_matches("../a")
    with pytest.raises(AssertionError, match=r"there is no snapshot .*a\.json\n  try: run pytest"):
        plan.assert_matches("a")
    for text, said in (
        ("{", "cut off"), ("[]", "no record"),
        ('{"result": "plan", "machine": "wormhole_n150"}', "no 'plans'"),
    ):  # fmt: skip
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(AssertionError, match=said) as raised:
            plan.assert_matches("a")
        assert str(tmp_path / "a.json") in str(raised.value)
    monkeypatch.setattr(plan, "_update", True)
    plan.assert_matches("a")
    monkeypatch.setattr(plan, "_update", False)
    plan.assert_matches("a")
    # The machine of the snapshot had other figures, as one of another version may have.
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(
        re.sub(r'"machine_digest": "\w+"', '"machine_digest": "0"', text)
    )
    with pytest.raises(AssertionError, match=r"(?s)two machines, both named.*--stitch-update"):
        plan.assert_matches("a")
    (tmp_path / "a.json").write_text(text)
    other = stitch_plan(stitch.compile(lambda x: x + x, (1.0,), target="wormhole_n150"))
    monkeypatch.setattr(other, "_folder", tmp_path)
    with pytest.raises(AssertionError, match="two machines"):
        other.assert_matches("a")


def test_an_unwritable_folder_of_snapshots_is_named(
    stitch_plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = stitch_plan(scaled("a", 2.0))
    monkeypatch.setattr(plan, "_update", True)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("kept")
    for folder in (in_the_way, in_the_way / "deep", Path("/proc/stitch_snapshots")):
        monkeypatch.setattr(plan, "_folder", folder)
        with pytest.raises(StitchError) as raised:
            plan.assert_matches("a")
        assert str(folder) in str(raised.value) and in_the_way.read_text() == "kept"


@pytest.mark.campaign("pages")
def test_two_workers_write_the_same_snapshots(project: Path) -> None:
    (project / "test_more.py").write_text(TESTS)
    outcomes, text = run_pytest(project, "--stitch-update", "-p", "xdist", "-n", "2")
    assert set(outcomes.values()) == {"PASSED"} and "2 workers" in text, text
    snapshots = project / "stitch_snapshots"
    assert sorted(path.name for path in snapshots.iterdir()) == ["alone.json", "chain.json"]
    outcomes, text = run_pytest(project, "-p", "xdist", "-n", "2")
    assert set(outcomes.values()) == {"PASSED"}, text
