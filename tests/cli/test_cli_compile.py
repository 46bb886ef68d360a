"""`stitch-compile`: what it reads, what it writes, and how it says no."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stitch
from stitch.graph import as_json, trace

Cli = Callable[..., Any]


FACTORIES = """
import numpy as np
import stitch

def graph():
    builder = stitch.ComputationGraphBuilder("built")
    x = builder.input("x", (2, 3), "float32")
    builder.output("y", x + x)
    return builder.build()

def function():
    return (lambda x: np.tanh(x)), (np.zeros((2, 3), np.float32),)

def nothing():
    return 3

def broken():
    raise ValueError("out of ideas")
"""


def test_one_line_says_what_was_written_and_where_slots_lie(cli: Cli, here: Path) -> None:
    done = cli("compile", "a.yaml", "-o", "new.ttb", "--set", "input.x.space=dram")
    assert done.code == 0
    size = (here / "new.ttb").stat().st_size
    assert done.out.startswith(f"new.ttb: {size} bytes, 1 program for wormhole_n150; a: ")
    assert "x 4x8xf32:dram:row_major:interleaved" in done.out
    assert done.out.count("\n") == 1 and done.err == "stitch-compile: wrote new.ttb\n"


def test_name_role_and_target_end_up_in_the_file(cli: Cli) -> None:
    words = ("--name=other", "--role=update", "--target=tiny")
    assert cli("compile", "a.yaml", "-o", "n.ttb", *words).code == 0
    binary = stitch.load("n.ttb")
    program = binary.programs[0]
    assert (program.name, program.role.value, binary.machine.name) == ("other", "update", "tiny")


def test_text_shows_the_program_without_writing_a_file(cli: Cli, here: Path) -> None:
    before = sorted(here.iterdir())
    done = cli("compile", "a.yaml", "--text")
    assert done.code == 0 and done.out.startswith("program @a role=forward {")
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("factory", ["graph", "function"])
def test_an_entry_may_be_a_graph_or_a_function_with_its_arguments(
    cli: Cli, here: Path, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"factories_of_{factory}"
    (here / f"{module}.py").write_text(FACTORIES)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli("compile", f"--entry={module}:{factory}", "-o", "e.ttb").code == 0
    assert stitch.load("e.ttb").programs[0].inputs[0].name == "x"
    assert cli("compile", f"{module}.py", f"--entry={factory}", "-o", "f.ttb").code == 0
    assert cli("compile", f"--entry={module}.py:{factory}", "-o", "g.ttb").code == 0
    assert cli("compile", f"--entry={here / module}.py:{factory}", "-o", "h.ttb").code == 0
    assert len({(here / f"{name}.ttb").read_bytes() for name in "efgh"}) == 1


@pytest.mark.parametrize(
    ("factory", "code", "said"),
    [
        ("nothing", 3, "a value that no front end reads"),
        ("broken", 3, "out of ideas"),
        ("absent", 2, "has no factory 'absent'"),
    ],
)
def test_a_factory_that_gives_no_module_is_refused(
    cli: Cli, here: Path, factory: str, code: int, said: str
) -> None:
    (here / "made.py").write_text(FACTORIES)
    done = cli("compile", "made.py", f"--entry={factory}", "-o", "e.ttb")
    assert done.code == code and said in done.err and not (here / "e.ttb").exists()


OTHERS = {
    "mine.yaml": "name: m\ncore_grid: [1, 1]\nhost: {banks: 1, bank_nbytes: 64, alignment: 64}\n",
    "pipe.yaml": "modules: {a: a.ttb}\ninputs: {}\nsteps: []\noutputs: {}\n",
    "unsound.yaml": "modules: {a: a.ttb}\nsteps: 3\noutputs: 4\n",
    "made.py": FACTORIES,
}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("mine.yaml",), 2, "try: stitch-compile module.yaml -o module.ttb --target=mine"),
        (("pipe.yaml",), 2, "'pipe.yaml' is a pipeline"),
        (("pipe.yaml", "--split=2"), 2, "try: stitch-run pipe.yaml"),
        (("a.ttb",), 3, "try: stitch-inspect a.ttb"),
        (("made.py:graph",), 3, "try: --entry=made.py:graph"),
        (("a.yml2",), 3, "did you mean 'a.yaml'?"),
        (("--entry=made.py:grap",), 2, "did you mean 'graph'?"),
    ],
)
def test_what_is_meant_for_another_word_or_command_is_said_to_be(
    cli: Cli, here: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    for name, text in OTHERS.items():
        (here / name).write_text(text)
    done = cli("compile", *words, "-o", "o.ttb")
    assert done.code == code and said in done.err, done.err
    assert not (here / "o.ttb").exists()


def test_a_graph_in_json_compiles(cli: Cli, here: Path) -> None:
    graph = trace(lambda x: x + x, stitch.TensorDesc((2,), stitch.Layout(stitch.DataType.FLOAT32)))
    (here / "g.json").write_text(as_json(graph))
    assert cli("compile", "g.json", "-o", "g.ttb").code == 0
    with (here / "m.json").open("w") as file:
        stitch.compile(graph, placement=["input.x.space=dram"]).dump(file)
    done = cli("compile", "m.json", "-o", "m.ttb")
    assert done.code == 0 and "x 2xf32:dram" in done.out, done.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("input.x.spce=l1", "space"),
        ("input.z.space=l1", "there is no input 'z'; inputs: x"),
        ("output.9.space=l1", "there is no output 9 of 1; outputs, counted from 0: y"),
        ("output.y.alias=9", "take the buffer of that input: there is no input 9"),
        ("output.y.alias=zz", "there is no input 'zz'; inputs: x"),
        ("input.x.shard_spec=2x1,2x8", "add --set input.x.memory_layout=height_sharded"),
    ],
)
def test_a_option_that_cannot_be_meant_is_wrong_usage(
    cli: Cli, here: Path, option: str, said: str
) -> None:
    done = cli("compile", "a.yaml", "-o", "w.ttb", f"--set={option}")
    assert done.code == 2 and said in done.err, done.err
    assert "[unknown_slot]" not in done.err and not (here / "w.ttb").exists()


def test_a_option_in_a_file_that_names_no_slot_is_a_bad_file(cli: Cli, here: Path) -> None:
    text = (here / "a.yaml").read_text().replace("outputs: [y]", "outputs: {y: {alias: z}}")
    (here / "w.yaml").write_text(text)
    done = cli("compile", "w.yaml", "-o", "w.ttb")
    assert done.code == 3 and "there is no input 'z'" in done.err, done.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "there is no module"),
        (("-o", "o.ttb"), 2, "there is no module"),
        ((str(Path(__file__).parents[2] / "README.md"), "-o", "o.ttb"), 3, "modules in YAML"),
        (("a.yaml",), 2, "nothing to do"),
        (("a.yaml", "-o", "-", "--text"), 2, "standard output"),
        (("gone.yaml", "-o", "o.ttb"), 3, "gone.yaml"),
        (("a.bin", "-o", "o.ttb"), 3, "modules in YAML"),
        (("a.py", "-o", "o.ttb"), 2, "--entry"),
        (("--entry=nocolon", "-o", "o.ttb"), 2, "pkg.mod:factory"),
        (("--entry=a.py:", "-o", "o.ttb"), 2, "file.py:factory"),
        (("--entry=gone.py:make", "-o", "o.ttb"), 3, "gone.py"),
        (("a.py", "--entry=", "-o", "o.ttb"), 2, "names no factory"),
        (("--entry=sub/mod:make", "-o", "o.ttb"), 3, "sub/mod.py:make"),
        (("--entry=no_such_module:f", "-o", "o.ttb"), 3, "no_such_module"),
        (("a.yaml", "-o", "o.ttb", "--target=wormhole"), 2, "wormhole_n150"),
        (("a.yaml", "-o", "o.ttb", "--target=gone.yaml"), 2, "gone.yaml"),
        (("a.yaml", "-o", "o.ttb", "--role=boss"), 2, "forward"),
        (("a.yaml", "-o", "o.ttb", "--nope"), 2, "--nope"),
    ],
)
def test_what_cannot_be_compiled_is_said_with_its_exit_code(
    cli: Cli, here: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    done = cli("compile", *words)
    assert done.code == code and said in done.err and done.out == ""
    assert not (here / "o.ttb").exists()
    assert "Traceback" not in done.err


def test_a_module_too_big_for_the_machine_is_out_of_memory(cli: Cli, here: Path) -> None:
    text = (here / "b.yaml").read_text().replace("[4, 8]", "[4096, 4096]")
    (here / "big.yaml").write_text(text)
    done = cli("compile", "big.yaml", "-o", "o.ttb", "--target=tiny")
    assert done.code == 5 and "does not fit" in done.err


def test_the_console_script_pipes_a_module_into_the_runner(here: Path) -> None:
    scripts = Path(sys.executable).parent
    made = subprocess.run(
        [scripts / "stitch-compile", "a.yaml", "-o", "-"], capture_output=True, check=False
    )
    assert made.returncode == 0 and b"1 program" in made.stderr
    ran = subprocess.run(
        [scripts / "stitch-run", "--module=-", "--input=@x.npy", "--output=@y.npy"],
        input=made.stdout, capture_output=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (here / "y.npy").exists()


def test_debug_shows_a_traceback_and_keeps_the_exit_code(cli: Cli) -> None:
    done = cli("compile", "gone.yaml", "-o", "o.ttb", "--debug")
    assert done.code == 3 and "Traceback" in done.err


@pytest.mark.parametrize(("package", "extra"), [("torch", "torch"), ("onnxruntime", "onnx")])
def test_a_factory_without_its_package_says_what_to_install(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (here / f"at_once_{package}.py").write_text(f"import {package}.nn\ndef make(): pass\n")
    (here / f"late_{package}.py").write_text(f"def make():\n    import {package}\n")
    for name in (f"at_once_{package}", f"late_{package}"):
        for words in ((f"--entry={name}:make",), (f"{name}.py", "--entry=make")):
            done = cli("compile", *words, "-o", "m.ttb")
            assert done.code == 3, done.err
            assert f"try: pip install 'stitch-runtime[{extra}]'" in done.err, done.err
    (here / "other.py").write_text("import no_such_package\n")
    done = cli("compile", "other.py", "--entry=make", "-o", "m.ttb")
    assert done.code == 3 and "pip install" not in done.err
