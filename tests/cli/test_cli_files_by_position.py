"""What `stitch-run` is given without options, and what it says of machines, names and numbers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from stitch.cli import compile_main as stitch_compile
from stitch.machine.shipped import shipped_text

Cli = Callable[..., Any]
MASKED = """\
name: {name}
inputs:
  x: {{shape: [4, 8], type: float32, space: l1}}
  mask: {{shape: [4, 8], type: float32, space: l1}}
operations:
  - y = Mul(x, mask)
outputs: {{y: {{space: l1}}}}
"""


def model_of(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 26)], ir_version=13)


def masked(*names: str) -> None:
    for name in names:
        Path(f"{name}.yaml").write_text(MASKED.format(name=name))
        assert stitch_compile([f"{name}.yaml", "-o", f"{name}.ttb"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--input=@x.npy", "--input=@x.npy"], 0, "y: 4x8xf32"),
        (["--input=b=@x.npy", "--input=@x.npy"], 0, "y: 4x8xf32"),
        (["--input=net.b=1x8xf32=2", "--input=a=3x8xf32=1"], 0, "y: 3x8xf32=[3. 3."),
        (["--at=n=2,m=1", "--init=ones"], 0, "y: 2x8xf32=[2. 2."),
        (["--at=m=1", "--input=a=2x8xf32"], 2, "inputs are missing: b"),
        (["--at=n=2", "--input=a=3x8xf32"], 2, "--at=n=2 contradicts an --input"),
        (["--at=k=2", "--input=a=3x8xf32", "--input=b=3x8xf32"], 2, "no module has a size 'k'"),
        (["--input=a=3x8xf32"], 2, "nothing says m\n  expected: an --input of that size"),
        (["--at=n=2", "--init=ones"], 2, "nothing says m\n"),
        (["--at=nn=2,m=1", "--init=ones"], 2, "try: --at=nn: did you mean 'n'?"),
        (["--input=@z.npz", "--init=ones"], 2, "try: name the slot for one array of the file"),
        (["--input=c=3x8xf32"], 2, "there is no input 'c'"),
        (["--input=a=3x7xf32", "--at=m=1"], 3, "got [3, 7])\n  where: net.onnx\n"),
        ([], 2, "nothing says n, m\n"),
        (["--input=a=z.npz"], 2, "try: write a=@z.npz for this file"),
        (["--input=a=1x1xf32=@z.npz"], 3, "try: write [SLOT=]@z.npz for this file"),
    ],
)  # fmt: skip
def test_free_dimensions_of_an_onnx_model_are_those_of_its_inputs_or_of_at(
    words: list[str], code: int, text: str, cli: Cli, here: Path
) -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        "net",
        [helper.make_tensor_value_info(name, 1, [size, 8]) for name, size in ("an", "bm")],
        [helper.make_tensor_value_info("y", 1, [None, 8])],
    )
    onnx.save(model_of(graph), "net.onnx")
    np.savez("z.npz", z=np.zeros((3, 8), np.float32))
    done = cli("run", "net.onnx", *words)
    assert done.code == code and text in done.out + done.err, done.err


def test_an_onnx_model_is_compiled_in_memory_and_that_is_said(cli: Cli, here: Path) -> None:
    w = np.full((8, 8), 0.5, np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "net",
        [helper.make_tensor_value_info("x", 1, [4, 8])],
        [helper.make_tensor_value_info("y", 1, [4, 8])],
        [numpy_helper.from_array(w, "w")],
    )
    onnx.save(model_of(graph), "net.onnx")
    np.save("want.npy", np.load("x.npy") @ w)
    done = cli("run", "net.onnx", "--input=@x.npy", "--expected_output=@want.npy")
    assert done.code == 0, done.err
    assert "net.onnx is compiled for wormhole_n150, in memory" in done.err
    stitched = cli("run", "net.onnx", "b.ttb", "--input=@x.npy", "--explain")
    assert stitched.code == 0, stitched.err
    assert "2 program runs" in stitched.out
    assert sorted(p.name for p in here.glob("net*")) == ["net.onnx"]


def test_an_onnx_model_of_open_dimensions_is_compiled_by_the_compiler(cli: Cli, here: Path) -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])], "n", [info("x", 1, ["b"])], [info("y", 1, ["b"])]
    )
    onnx.save(model_of(graph), "n.onnx")
    done = cli("run", "n.onnx", "--init=ones")
    assert done.code == 2
    assert "stitch-compile n.onnx -o m.ttb takes --input_shape" in done.err


@pytest.mark.parametrize("suffix", ["onnx", "ttb"])
@pytest.mark.parametrize("slot", ["", "0=", "0.0=", "n0.0=", "x="])
def test_a_value_without_a_name_gives_the_sizes_of_the_first_of_several_modules(
    suffix: str, slot: str, cli: Cli, here: Path
) -> None:
    info = helper.make_tensor_value_info
    for k, (x, y) in enumerate((["x", "y"], ["y", "z"])):
        values = [info(x, 1, [f"b{k}"])], [info(y, 1, [f"b{k}"])]
        onnx.save(model_of(helper.make_graph([helper.make_node("Neg", [x], [y])], "g", *values)),
                  f"n{k}.onnx")  # fmt: skip
        assert (
            stitch_compile([f"n{k}.onnx", f"--input_shape={x}=b{k}:1..9", "-o", f"n{k}.ttb"]) == 0
        )
        done = cli("run", f"n0.{suffix}", f"n1.{suffix}", f"--input={slot}3xf32=5", "--at=b1=3")
    assert done.code == 0 and "z: 3xf32=5. 5. 5." in done.out, done.err
    done = cli("run", f"n0.{suffix}", f"n1.{suffix}", f"--input={slot}3xf32=5", "--at=b1=4")
    assert done.code == 6 and "try: compile one module for the other's shapes (--at" in done.err


def test_without_the_package_onnx_a_model_says_what_to_install(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("stitch.frontend.onnx") or name.partition(".")[0] == "onnx":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    (here / "m.onnx").write_bytes(b"")
    done = cli("run", "m.onnx", "--init=ones")
    assert done.code == 3 and "try: pip install 'stitch-runtime[onnx]'" in done.err, done.err


def test_one_mask_is_given_to_every_module_that_takes_it_and_copied_once(
    cli: Cli, here: Path
) -> None:
    masked("p", "q")
    mask = (np.arange(32).reshape(4, 8) % 2).astype(np.float32) * 3
    np.save("mask.npy", mask)
    np.save("want.npy", np.load("x.npy") * mask * mask)
    words = ("--input=@x.npy", "--input=mask=@mask.npy", "--expected_output=@want.npy")
    done = cli("run", "p.ttb", "q.ttb", *words, "--explain", "--num_runs=3")
    assert done.code == 0, done.err
    # In each of three passes x and the mask, each once.
    assert "6 program runs, 6 copies" in done.out
    assert cli("run", "p.ttb", "q.ttb", *words, "--max_copies=0").code == 0


def test_an_input_that_nothing_feeds_is_answered_with_words_that_work(cli: Cli, here: Path) -> None:
    masked("p", "q")
    done = cli("run", "p.ttb", "q.ttb", "--init=ones")
    assert done.code == 6 and "input 'mask' has no output to feed it" in done.err
    remedy = re.search(r"with (--wire=\S+);", done.err)
    assert remedy is not None, done.err
    assert cli("run", "p.ttb", "q.ttb", "--init=ones", remedy[1]).code == 0
    of_p, of_q = ("--input=p.mask=4x8xf32=2", "--input=q.mask=4x8xf32=3")
    assert cli("run", "p.ttb", "q.ttb", "--input=@x.npy", of_p, of_q).code == 0


def test_of_two_slots_that_could_be_the_mask_none_is_guessed(cli: Cli, here: Path) -> None:
    masked("p", "q")
    words = ("--input=x=@x.npy", "--input=mask=@x.npy")
    done = cli("run", "p.ttb", "q.ttb", *words)
    assert done.code == 6 and "connect the slots by name" in done.err
    done = cli("run", "p.ttb", "q.ttb", "--wire=p.y=q.x", *words)
    assert done.code == 0, done.err


@pytest.fixture
def front_and_back(here: Path) -> tuple[str, str]:
    """Programs p and q in files of other names: each scales x by a mask."""
    masked("p", "q")
    (here / "p.ttb").rename("front.ttb")
    (here / "q.ttb").rename("back.ttb")
    np.save("want.npy", np.load("x.npy") * 10)
    return "front.ttb", "back.ttb"


FIVES, TWOS = "4x8xf32=" + "5 " * 32, "4x8xf32=" + "2 " * 32


@pytest.mark.parametrize("slot", [("mask", "y"), ("1", "0")])
@pytest.mark.parametrize("module", [("front", "back"), ("p", "q"), ("0", "1")])
def test_a_slot_is_named_by_module_and_slot_in_every_option(
    cli: Cli, front_and_back: tuple[str, str], module: tuple[str, str], slot: tuple[str, str]
) -> None:
    (first, second), (mask, y) = module, slot
    words = [f"--input={first}.{mask}={TWOS}", f"--input={second}.{mask}={FIVES}", "--input=@x.npy"]
    expected = f"--expected_output={second}.{y}=@want.npy"
    done = cli("run", *front_and_back, *words, expected, f"--output={second}.{y}=@y.npy")
    assert done.code == 0, done.err
    np.testing.assert_array_equal(np.load("y.npy"), np.load("want.npy"))
    wire = f"--wire={first}.{y}={second}.x"
    assert cli("run", *front_and_back, wire, *words, expected).code == 0


def test_members_of_an_archive_are_named_by_module_and_slot(
    cli: Cli, front_and_back: tuple[str, str]
) -> None:
    twos = np.full((4, 8), 2, np.float32)
    np.savez("in.npz", **{"x": np.load("x.npy"), "0.mask": twos, "back.1": twos + 3})
    np.savez("want.npz", **{"q.y": np.load("want.npy")})
    words = ("--wire=p.y=q.x", "--input=@in.npz", "--expected_output=@want.npz")
    done = cli("run", *front_and_back, *words)
    assert done.code == 0, done.err


def test_inputs_that_are_missing_are_listed_by_names_that_work(
    cli: Cli, front_and_back: tuple[str, str]
) -> None:
    wire = "--wire=p.y=q.x"
    done = cli("run", *front_and_back, wire, "--input=x=@x.npy")
    missing = re.search(r"inputs are missing: (.*)", done.err)
    assert done.code == 2 and missing is not None, done.err
    assert missing[1] == "front.mask, back.mask"
    given = [f"--input={name}=4x8xf32=1" for name in missing[1].split(", ")]
    assert cli("run", *front_and_back, wire, "--input=x=@x.npy", *given).code == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--input=q.x=4x8xf32=1", "input 'q.x' is fed by another module"),
        ("--input=1.0=4x8xf32=1", "input '1.0' is fed by another module"),
        ("--input=2.mask=4x8xf32=1", "no module is called '2'"),
        ("--input=q.maks=4x8xf32=1", "'q' has no input 'maks'"),
        ("--output=p.y=-", "output 'p.y' feeds another module"),
        ("--output=q.z=-", "'q' has no output 'z'"),
        ("--expected_output=q.z=4x8xf32=1", "'q' has no output 'z'"),
    ],
)
def test_a_slot_that_is_not_the_run_s_is_refused_with_the_option(
    cli: Cli, front_and_back: tuple[str, str], word: str, said: str
) -> None:
    done = cli("run", *front_and_back, "--wire=p.y=q.x", "--init=ones", word)
    assert done.code == 2 and said in done.err, done.err
    assert f"where: {word}" in done.err


def test_a_machine_of_a_file_that_does_not_fit_is_answered_with_a_file_as_target(
    cli: Cli, here: Path
) -> None:
    (here / "mine.yaml").write_text(shipped_text("host").replace("name: host", "name: mine"))
    done = cli("run", "a.ttb", "--device=mine.yaml", "--init=ones")
    assert done.code == 4
    assert (
        "try: compile it with --target=FILE, or compile(..., target=FILE), the .yaml or .ttsys "
        "that describes this machine, or run it on 'wormhole_n150'"
    ) in done.err


def test_programs_of_one_name_are_told_apart_by_their_files(cli: Cli, here: Path) -> None:
    for name in ("first", "second"):
        masked("m")
        (here / "m.ttb").rename(f"{name}.ttb")
    done = cli(
        "run", "first.ttb", "second.ttb", "--wire=first.y=second.x", "--init=ones", "--explain"
    )
    assert "input 'mask' of 'm in first.ttb'" in done.out
    assert "input 'mask' of 'm in second.ttb'" in done.out
    (here / "wide.yaml").write_text(MASKED.format(name="m").replace("[4, 8]", "[4, 9]"))
    assert cli("compile", "wide.yaml", "-o", "wide.ttb").code == 0
    refused = cli("inspect", "first.ttb", "wide.ttb")
    assert "'m in first.ttb'" in refused.err and "'m in wide.ttb'" in refused.err


def test_inputs_called_as_those_told_apart_are_have_names_of_their_own(
    cli: Cli, here: Path
) -> None:
    masked("p", "q")
    (here / "r.yaml").write_text(MASKED.format(name="r").replace("mask", "p.mask"))
    assert cli("compile", "r.yaml", "-o", "r.ttb").code == 0
    done = cli("run", "p.ttb", "q.ttb", "r.ttb", "--wire=p.y=q.x", "--wire=q.y=r.x",
               "--input=x=4x8xf32=" + "1 " * 32, "--input=p.mask=4x8xf32=" + "2 " * 32,
               "--input=q.mask=4x8xf32=" + "3 " * 32, "--input=r.p.mask=4x8xf32=" + "5 " * 32,
               "--result_file=r.json", "--output=@y.npy")  # fmt: skip
    assert done.code == 0, done.err
    told = [one["name"] for one in json.loads((here / "r.json").read_text())["inputs"]]
    assert told == ["x", "p.mask", "q.mask", "r.p.mask"]
    np.testing.assert_array_equal(np.load("y.npy"), 30)


def test_inputs_of_one_file_given_twice_are_called_by_their_index(cli: Cli, here: Path) -> None:
    masked("p")
    done = cli("run", "p.ttb", "p.ttb", "--wire=0.y=1.x", "--input=x=4x8xf32=" + "1 " * 32,
               "--input=0.mask=4x8xf32=" + "2 " * 32, "--input=1.mask=4x8xf32=" + "3 " * 32,
               "--output=@y.npy")  # fmt: skip
    assert done.code == 0, done.err
    np.testing.assert_array_equal(np.load("y.npy"), 6)


@pytest.mark.parametrize(("value", "said"), [("nan", "NaN"), ("inf", "infinite")])
def test_results_that_are_no_numbers_are_noted(cli: Cli, here: Path, value: str, said: str) -> None:
    x = np.load("x.npy")
    x[1, 2] = np.float32(value)
    np.save("x.npy", x)
    done = cli("run", "b.ttb", "--input=@x.npy", "--result_file=r.json")
    assert done.code == 0
    assert f"note: output 'y': 1 of 32 elements are {said}" in done.err
    assert json.loads((here / "r.json").read_text())["exit_code"] == 0


def test_a_misspelled_input_of_a_chain_is_named(cli: Cli, here: Path) -> None:
    masked("p", "q")
    for word, said in (("maks", "did you mean 'mask'"), ("q.maks", "did you mean 'mask'"),
                       ("r.mask", "no module is called 'r'")):  # fmt: skip
        done = cli("run", "p.ttb", "q.ttb", "--init=ones", f"--input={word}=4x8xf32=1")
        assert done.code == 2 and said in done.err and f"--input={word}" in done.err, done.err
