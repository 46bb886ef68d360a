"""`stitch-compile model.onnx`: shapes, examples, splits, and how it says no."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import stitch

Cli = Callable[..., Any]


@pytest.fixture
def onnx_here(here: Path) -> Path:
    """A folder with mlp.onnx: four layers, a symbolic batch, and a shape that an input decides."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for k in range(4):
        weight = rng.standard_normal((16, 16)).astype(np.float32) / 4
        weights.append(numpy_helper.from_array(weight, f"w{k}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{k}"], [f"h{k}"], name=f"/l{k}/mm"))
        nodes.append(helper.make_node("Relu", [f"h{k}"], [f"r{k}"], name=f"/l{k}/relu"))
        last = f"r{k}"
    nodes.append(helper.make_node("Reshape", [last, "s"], ["y"]))
    inputs = [helper.make_tensor_value_info("x", 1, ["b", 16]),
              helper.make_tensor_value_info("s", 7, [2])]  # fmt: skip
    graph = helper.make_graph(
        nodes, "mlp", inputs, [helper.make_empty_tensor_value_info("y")], weights
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), here / "mlp.onnx")
    rng.standard_normal((2, 16)).astype(np.float32).tofile(here / "x.bin")
    return here


BOUND = ("--input_shape=x=2x16", "--input=s=2xi64=4 8")
GIVEN = ("--input=x=2x16xf32=@x.bin", "--input=s=2xi64=4 8")


@pytest.mark.parametrize("how", ["--split=3", "--split_at=/l0/relu,r2"])
def test_the_parts_of_a_split_chain_to_the_same_numbers(
    cli: Cli, onnx_here: Path, how: str
) -> None:
    assert cli("compile", "mlp.onnx", "-o", "m.ttb", *BOUND).code == 0
    done = cli("compile", "mlp.onnx", "-o", "m.ttb", *BOUND, how)
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "m.0.ttb", "m.1.ttb", "m.2.ttb"
    ]  # fmt: skip
    assert cli("run", "--module=m.ttb", *GIVEN, "--output=y=@whole.npy").code == 0
    parts = [f"--module=m.{k}.ttb" for k in range(3)]
    assert cli("run", *parts, *GIVEN, "--output=y=@parts.npy").code == 0
    assert Path("whole.npy").read_bytes() == Path("parts.npy").read_bytes()


def test_another_value_for_an_input_that_decides_a_shape_is_an_error(
    cli: Cli, onnx_here: Path
) -> None:
    assert cli("compile", "mlp.onnx", "-o", "m.ttb", *BOUND).code == 0
    done = cli("run", "--module=m.ttb", GIVEN[0], "--input=s=2xi64=8 4")
    assert done.code == 6
    assert "compiled for one value of 's'" in done.err


def test_a_module_in_yaml_splits_too(cli: Cli) -> None:
    assert cli("compile", "a.yaml", "-o", "s.ttb", "--split=2", "--name=two").code == 0
    assert [stitch.load(f"s.{k}.ttb").programs[0].name for k in (0, 1)] == ["two_0", "two_1"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((), 3, "dynamic dimension left unbound: b"),
        (("--input_shape=x=2x16",), 3, "stitch compile --input s=2xi64=VALUES"),
        (("--input_shape=x=2by16",), 2, "is not an input with its shape"),
        (("--input_shape=x=1", "--input_shape=x=2"), 2, "given twice"),
        (("--input_shape=q=2x16",), 3, "no input 'q'"),
        (("--input=2xi64=4 8",), 2, "is no example input"),
        ((*BOUND, "--split=0"), 2, "at least 1, not '0'"),
        ((*BOUND, "--split=99"), 3, "cannot be split into 99 parts"),
        ((*BOUND, "--split=2", "--split_at=r1"), 2, "exclude each other"),
        ((*BOUND, "--split_at=,"), 2, "names no node"),
        ((*BOUND, "--split_at=/l9/relu"), 3, "no node '/l9/relu'"),
        ((*BOUND, "--split=2", "-o", "-"), 2, "writes several files"),
    ],
)
def test_words_that_do_not_fit(
    cli: Cli, onnx_here: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    done = cli("compile", "mlp.onnx", "-o", "m.ttb", *words)
    assert done.code == code, done.err
    assert text in done.err


def test_words_for_onnx_models_are_refused_for_others(cli: Cli, here: Path) -> None:
    shaped = cli("compile", "a.yaml", "-o", "m.ttb", "--input_shape=x=4x8")
    assert (shaped.code, "input shapes are for ONNX models" in shaped.err) == (2, True)
    given = cli("compile", "a.yaml", "-o", "m.ttb", "--input=x=4x8xf32=1")
    assert (given.code, "example inputs are only for ONNX models" in given.err) == (2, True)


def test_a_node_with_a_comma_in_its_name_is_named_whole(cli: Cli) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu(1,2)"),
        helper.make_node("Neg", ["a"], ["b"], name="neg"),
        helper.make_node("Exp", ["b"], ["c"], name="exp,last"),
        helper.make_node("Abs", ["c"], ["y"], name="abs"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), "g.onnx")
    for names, parts in (
        (["relu(1,2)", "exp,last"], 3), (["relu(1,2)", "neg,c"], 4), (["a,neg", "exp,last"], 4)
    ):  # fmt: skip
        words = [f"--split_at={name}" for name in names]
        done = cli("compile", "g.onnx", "-o", "g.ttb", *words)
        assert done.code == 0, done.err
        assert len(done.out.splitlines()) == parts
    done = cli("compile", "g.onnx", "-o", "g.ttb", "--split_at=relu(1,3)")
    assert done.code == 3
    assert "no node 'relu(1'" in done.err
