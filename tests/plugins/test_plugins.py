"""Extensions by entry points, by `--plugin` and by `register`: what is found, refused and named."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch import plugins
from stitch.cli import compile_main as compile_main
from stitch.cli import run_main as run_main
from stitch.errors import UsageError
from stitch.machine import load_machine, with_policies
from stitch.planner import EvictionCandidate, check_plan
from stitch.testing import integers, one

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plugins"
#: By file name of `--plugin`: its text.
POLICIES = """\
import stitch
stitch.register("allocators", "first", lambda holes, nbytes: next(
    (address for address, size in holes if size >= nbytes), None))
stitch.register("residency", "largest", lambda candidate: -candidate.nbytes)
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a test registers or loads is known to another one."""
    for name in ("_registered", "_loaded", "_failed"):
        monkeypatch.setattr(plugins, name, {})
    plugins._entry_points.cache_clear()
    yield
    monkeypatch.undo()
    plugins._entry_points.cache_clear()


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package of one module with entry points, as pip leaves it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def write(package: str, text: str, **points: str) -> None:
        (folder / f"{package}.py").write_text(text, encoding="utf-8")
        metadata = folder / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0")
        lines = [f"[stitch.{kind}]\n{line}" for kind, line in points.items()]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        plugins._entry_points.cache_clear()
        monkeypatch.delitem(sys.modules, package, raising=False)

    return write


MACHINE = """\
from dataclasses import replace
from stitch.machine import load_machine
def bench():
    machine = load_machine("tiny")
    return replace(machine, shape=replace(machine.shape, name="bench"))
"""


def test_a_plugin_is_imported_when_its_name_is_asked_for_and_no_sooner(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("mypackage", MACHINE, machines="bench = mypackage:bench")
    load_machine("tiny")
    assert plugins.names("machines") == ("bench",)
    assert run_main(["--list_devices"]) == 0
    assert "bench: of the plugin mypackage 1.0 (mypackage:bench)" in capsys.readouterr().out
    assert "mypackage" not in sys.modules
    assert load_machine("bench").name == "bench"
    assert "mypackage" in sys.modules


def test_a_plugin_that_fails_is_named_and_left_out(install: Install) -> None:
    install("mypackage", MACHINE, machines="bench = mypackage:bench")
    install("broken", "1 / 0", machines="bad = broken:machine", executors="bad = broken:Executor")
    for _ in range(2):
        with pytest.raises(UsageError, match="the machine plugin 'bad' failed") as caught:
            load_machine("bad")
    assert "broken 1.0 (broken:machine)" in str(caught.value)
    assert "ZeroDivisionError: division by zero" in str(caught.value)
    assert plugins.names("machines") == ("bench",)
    assert load_machine("bench").name == "bench"
    with pytest.raises(UsageError, match="the executor plugin 'bad' failed"):
        stitch.open_device("tiny", executor="bad")
    problems = {(p.kind, p.name): p.problem for p in plugins.installed() if p.problem}
    assert set(problems) == {("machines", "bad"), ("executors", "bad")}


def test_shipped_names_are_not_taken(install: Install) -> None:
    install("thief", "1 / 0", machines="tiny = thief:machine", executors="numpy = thief:machine")
    assert load_machine("tiny").shape.l1 is not None
    assert plugins.names("machines") == ()
    said = [plugin.problem for plugin in plugins.installed("machines")]
    assert said == ["the name is Stitch's own, so it is not used"]
    taken = {
        "machines": "tiny", "executors": "numpy", "operators": "stitch", "frontends": "onnx",
        "allocators": "best_fit", "residency": "farthest",
    }  # fmt: skip
    assert taken.keys() == plugins.KINDS.keys()
    for kind, name in taken.items():
        with pytest.raises(UsageError, match=f"{name!r} is Stitch's own"):
            stitch.register(kind, name, object())


def test_a_name_is_registered_once(install: Install) -> None:
    stitch.register("machines", "bench", load_machine("tiny"))
    with pytest.raises(UsageError, match="'bench' is registered twice") as caught:
        stitch.register("machines", "bench", load_machine("tiny"))
    assert f"{Path(__file__).name}:" in str(caught.value)
    install("mypackage", MACHINE, executors="mine = mypackage:bench")
    with pytest.raises(UsageError, match="'mine' is registered twice"):
        stitch.register("executors", "mine", object())
    install("other", MACHINE, executors="mine = other:bench")
    with pytest.raises(UsageError, match="several packages provide the executor plugin 'mine'"):
        stitch.open_device("tiny", executor="mine")
    with pytest.raises(UsageError, match="there is no kind of plugin 'machine'"):
        stitch.register("machine", "x", object())


FILES = {
    "raises": ("import json\njson.loads('{')", "the plugin file .* failed"),
    "leaves": ("raise SystemExit(3)", "the plugin file .* failed"),
    "nothing": ("x = 1", "registers nothing"),
    "twice": (POLICIES + POLICIES, "the allocator plugin 'first' is registered twice"),
    "takes": ("import stitch\nstitch.register('machines', 'tiny', 1)", "'tiny' is Stitch's own"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = FILES[name]
    file = tmp_path / "mine.py"
    file.write_text(text, encoding="utf-8")
    assert run_main(["a.ttb", f"--plugin={file}"]) == 2
    said = capsys.readouterr().err
    assert str(file) in said

    assert re.search(message, said), said
    assert plugins.installed() == ()


@pytest.mark.parametrize("path", ["missing.py", "folder", "mine.txt"])
def test_a_plugin_that_is_no_file_is_refused(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("mine.txt").write_text(POLICIES, encoding="utf-8")
    assert run_main(["a.ttb", f"--plugin={path}"]) == 2
    assert f"there is no plugin file {path!r}" in capsys.readouterr().err


#: A value of each kind but operators, of which an example is tested elsewhere.
VALUES = (
    MACHINE
    + """\
from pathlib import Path
from stitch.graph import ComputationGraphBuilder
from stitch.runtime import make_executor
at_once = bench()
in_a_file = Path(__file__).with_name("bench.yaml")
def make():
    return make_executor("numpy")
def read(path, examples, input_shapes):
    builder = ComputationGraphBuilder(path.stem)
    builder.output("y", builder.input("x", (4, 4), "float32") * float(path.read_text()))
    return builder.build()
def first(holes, nbytes):
    return next((address for address, size in holes if size >= nbytes), None)
def largest(candidate):
    return -candidate.nbytes
"""
)
REGISTRATIONS = """\
import stitch
stitch.register("frontends", "factor", read)
stitch.register("machines", "bench", bench)
stitch.register("executors", "mine", make)
stitch.register("allocators", "first", first)
stitch.register("residency", "largest", largest)
"""


def test_the_commands_use_what_a_file_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(VALUES + REGISTRATIONS, encoding="utf-8")
    Path("three.factor").write_text("3", encoding="utf-8")
    plugin = "--plugin=mine.py"
    assert compile_main(["three.factor", plugin, "--target=bench", "-o", "a.ttb"]) == 0
    words = ["a.ttb", "--input=x=4x4xf32=" + " ".join(["2"] * 16), "--output=y=@y.npy"]
    assert run_main([*words, plugin, "--executor=mine", "--allocator=first",
                     "--residency=largest"]) == 0  # fmt: skip
    np.testing.assert_array_equal(np.load("y.npy"), np.full((4, 4), 6, np.float32))
    capsys.readouterr()
    # Afterwards nothing of it is known.
    for extra, message in {
        "--executor=mine": "auto, torch, null, torch:cpu or cuda:0, not 'mine'",
        "--device=tiny": "",
        "--allocator=first": "was compiled for 'bench', a machine that Stitch does not ship",
    }.items():
        assert run_main([*words, extra]) == (2 if message else 0)
        assert message in capsys.readouterr().err
    assert run_main([*words, "--device=tiny", "--residency=larges", plugin]) == 2
    assert "there is no residency plugin 'larges'" in (said := capsys.readouterr().err)
    assert "did you mean 'largest'?" in said
    assert compile_main(["three.factor", "-o", "b.ttb"]) == 3
    assert "no front end reads 'three.factor'" in capsys.readouterr().err


@pytest.mark.parametrize("machine", ["bench", "at_once", "in_a_file"])
def test_each_kind_is_an_entry_point(
    machine: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine is a function, a `Machine` or a path; nothing is imported before it is named."""
    shipped = (Path(stitch.machine.__file__).parent / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "site" / "bench.yaml").write_text(shipped.replace("name: tiny", "name: bench"))
    lab = (EXAMPLES / "operator" / "lab_operator" / "__init__.py").read_text(encoding="utf-8")
    install("labpackage", lab, operators="lab = labpackage:OPERATORS")
    install(
        "mypackage", VALUES, machines=f"bench = mypackage:{machine}",
        executors="mine = mypackage:make", frontends="factor = mypackage:read",
        allocators="first = mypackage:first", residency="largest = mypackage:largest",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("three.factor").write_text("3", encoding="utf-8")
    assert {kind: plugins.names(kind) for kind in plugins.KINDS} == {
        "machines": ("bench",), "executors": ("mine",), "operators": ("lab",),
        "frontends": ("factor",), "allocators": ("first",), "residency": ("largest",),
    }  # fmt: skip
    assert compile_main(["three.factor", "--target=tiny", "-o", "a.ttb"]) == 0
    assert "labpackage" not in sys.modules
    module = EXAMPLES / "operator" / "squares.yaml"
    assert compile_main([str(module), "--target=bench", "-o", "b.ttb"]) == 0
    words = ["a.ttb", "--device=bench", "--init=ones", "--output=y=@y.npy", "--executor=mine",
             "--allocator=first", "--residency=largest"]  # fmt: skip
    assert run_main(words) == 0
    np.testing.assert_array_equal(np.load("y.npy"), np.full((4, 4), 3, np.float32))
    assert run_main(["b.ttb", "--init=ones", "--output=y=@y.npy"]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), np.ones((4, 8), np.float32))


def test_a_plugin_that_is_something_else_is_named() -> None:
    stitch.register("machines", "other", load_machine("tiny"))
    stitch.register("machines", "number", 3)
    stitch.register("executors", "text", "numpy")
    stitch.register("operators", "lab", ("Relu",))
    stitch.register("allocators", "flag", True)
    for make, message in (
        (lambda: load_machine("other"), "the machine of the plugin 'other' has another name"),
        (lambda: load_machine("number"), "the machine plugin 'number' is not what it must be"),
        (lambda: stitch.open_device(executor="text"), "the executor plugin 'text' is not what"),
        (lambda: stitch.ops.lookup("Relu", "lab"), "the operator plugin 'lab' is not what"),
        (lambda: with_policies(load_machine("tiny"), "flag", None), "allocator plugin 'flag' is"),
        (lambda: with_policies(load_machine("tiny"), None, "x"), "there is no residency plugin"),
    ):
        with pytest.raises(UsageError, match=message):
            make()


def full_chain(allocator: str | None, residency: str | None) -> str:
    """What `explain` says of a chain whose tensors do not fit into L1 together."""
    machine = with_policies(load_machine("tiny"), allocator, residency)
    graph = stitch.trace(lambda x: x + 1.0, np.zeros((32, 96), np.float32))
    model = stitch.compile(graph, target=machine)
    with stitch.open_device(machine) as device:
        step = device.load(model)
        tensors = [one(step(integers((32, 96), start))) for start in range(8)]
        for start, tensor in enumerate(tensors):
            np.testing.assert_array_equal(tensor.numpy(), integers((32, 96), start) + 1)
        return device.explain()


POLICY_FAULTS = {
    "outside": ("allocators", lambda holes, nbytes: 1 << 30, "an address that is not free"),
    "text": ("allocators", lambda holes, nbytes: "top", "an address that is not free"),
    "misaligned": ("allocators", lambda holes, nbytes: holes[0][0] + 1, "that is not free"),
    "raises": ("allocators", lambda holes, nbytes: holes[99], "IndexError: tuple index out of"),
    "no price": ("residency", lambda candidate: None, "returned no price"),
    "nan": ("residency", lambda candidate: float("nan"), "returned no price"),
    "misspelt": ("residency", lambda candidate: candidate.size, "AttributeError"),
}


@pytest.mark.parametrize("name", POLICY_FAULTS)
def test_a_policy_that_fails_is_named(name: str) -> None:
    kind, policy, message = POLICY_FAULTS[name]
    stitch.register(kind, "mine", policy)
    own = ("mine", None) if kind == "allocators" else (None, "mine")
    with pytest.raises(UsageError) as caught:
        full_chain(*own)
    assert "plugin 'mine'" in str(caught.value)
    assert message in str(caught.value)


def test_an_eviction_rule_decides_what_leaves_a_full_space() -> None:
    seen: list[str] = []

    def noting(candidate: EvictionCandidate) -> float:
        seen.append(candidate.origin)
        return candidate.nbytes

    stitch.register("residency", "noted", noting)
    assert "evict" in full_chain(None, "noted")
    assert seen


def test_plans_by_plugins_policies_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def noting(plan: stitch.planner.Plan) -> object:
        checked.append(plan)
        return check_plan(plan)

    monkeypatch.setattr("stitch.planner.checker.check_plan", noting)
    full_chain(None, None)
    assert not checked
    stitch.register("allocators", "lowest", lambda holes, nbytes: next(
        (address for address, size in holes if size >= nbytes), None))  # fmt: skip
    full_chain("lowest", None)
    assert checked


def test_a_machine_description_names_policies(tmp_path: Path) -> None:
    text = (EXAMPLES / "machine" / "lab_machine" / "lab4x4.yaml").read_text(encoding="utf-8")
    text = text.replace("base: 8_192,", "base: 8_192, policy: first,") + "residency: largest\n"
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(stitch.FormatError, match="best_fit, first_fit"):
        load_machine(file)
    mine = tmp_path / "mine.py"
    mine.write_text(POLICIES, encoding="utf-8")
    with plugins.files([str(mine)]):
        machine = load_machine(file)
    assert machine.shape.l1 is not None
    assert (machine.shape.l1.allocator, machine.residency) == ("first", "largest")
