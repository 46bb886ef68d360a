"""`stitch-compile --input_shape x=batch:1..64x784`: files with named sizes, and how it says no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnxruntime import InferenceSession

import stitch

Cli = Callable[..., Any]

FACTORY = """\
import numpy as np

def make():
    examples = np.zeros((4, 3, 4), np.float32), np.ones((12, 2), np.float32)
    return lambda x, y: x.reshape(x.shape[0], 12) @ y, examples
"""


@pytest.fixture
def models(here: Path) -> Path:
    """A folder with m.onnx, y = x @ w + z of free dimensions, and a factory in f.py."""
    w = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "z"], ["y"])],
        "m",
        [helper.make_tensor_value_info("x", 1, ["b", 6]),
         helper.make_tensor_value_info("z", 1, ["b", "k"])],
        [helper.make_tensor_value_info("y", 1, ["b", 4])],
        [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), here / "m.onnx")
    (here / "f.py").write_text(FACTORY)
    return here


X, Z = "--input_shape=x=batch:1..64x6", "--input_shape=z=batch:1..64x4"


def test_the_file_runs_at_its_sizes_as_onnx_runtime(cli: Cli, models: Path) -> None:
    done = cli("compile", "m.onnx", X, Z, "-o", "m.ttb")
    assert done.code == 0, done.err
    assert "(x batchx6xf32, z batchx4xf32) -> (y batchx4xf32)\n  size batch: 1 to 64\n" in done.out
    session, draw = InferenceSession("m.onnx"), np.random.default_rng(1)
    for batch in (1, 7, 64):
        feeds: dict[str, Any] = {"x": draw.standard_normal((batch, 6)).astype(np.float32),
                 "z": draw.standard_normal((batch, 4)).astype(np.float32)}  # fmt: skip
        np.savez("in.npz", **feeds)
        done = cli("run", "m.ttb", "--input=@in.npz", "--output=y=@y.npy")
        assert done.code == 0, done.err
        (expected,) = session.run(None, feeds)
        np.testing.assert_allclose(np.load("y.npy"), expected, rtol=1e-5, atol=1e-5)
    by_name = stitch.compile(
        "m.onnx", dynamic_shapes={"b": stitch.Dim("batch", 1, 64)}, input_shapes={"z": (None, 4)}
    )
    assert by_name.encode() == Path("m.ttb").read_bytes()


def test_sizes_of_factories_text_and_json(cli: Cli, models: Path) -> None:
    done = cli("compile", "--entry=f.py:make", "--input_shape=x=max:2..9x3x4", "-o", "f.ttb")
    assert done.code == 0 and "(x maxx3x4xf32, y 12x2xf32)" in done.out, done.err
    model = stitch.load("f.ttb")
    x, y = np.ones((5, 3, 4), np.float32), np.ones((12, 2), np.float32)
    assert np.array_equal(np.asarray(model(x, y)), np.full((5, 2), 12, np.float32))
    # One axis of one input, the other size of an example.
    words = ("m.onnx", X, "--input=z=5x4xf32=1", "--json", "--text", "-o", "m.ttb")
    (body,) = json.loads(cli("compile", *words).out)["files"]
    assert body["programs"] == [{
        "name": "m", "inputs": ["x", "z"], "outputs": ["y"],
        "sizes": [{"name": "batch", "least": 1, "most": 64}], "guards": [],
    }]  # fmt: skip
    assert body["nbytes"] == Path("m.ttb").stat().st_size
    assert "size batch: 1 to 64" in body["text"]
    assert stitch.load("m.ttb").program.sizes.hints == {"batch": 5}


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--input_shape=x=batch:64..1x6", Z), 2, "got: 64 to 1"),
        ((X, "--input_shape=z=batch:1..32x4"), 2, "size 'batch' has two bounds"),
        ((X, Z, "--input_shape=q=batch:1..64"), 3, "no input 'q'"),
        ((X + "x2", Z), 2, "has another number of axes"),
        ((X, "--input_shape=z="), 2, "has another number of axes"),
        (("--input_shape=x=batch:1..64x7", Z), 3, "does not fit"),
        (("--input_shape=x=batch:1..64xn:1..6", Z), 2, "axis 1 of input 'x' has a fixed size"),
        ((X, "--input_shape=z=7x4"), 2, "dimension 'b' of the model has bounds and a size"),
        ((X, "--input_shape=z=n:1..64x4"), 2, "dimension 'b' of the model has two Dims"),
        ((X,), 3, "dynamic dimension left unbound: k"),
        ((X, Z, "--input=z=65x4xf32=1"), 2, "out of bounds"),
        ((X, Z, "--input=z=5x3xf32=1"), 3, "the example has another shape"),
        (("--input_shape=x=batch:1..manyx6",), 2, "NAME=batch:1..64x784"),
        (("--input_shape=x=batch:1x6",), 2, "NAME=batch:1..64x784"),
        (("--input_shape=x=1..64x6",), 2, "NAME=batch:1..64x784"),
        (("--input_shape=x=batch:-1..64x6",), 2, "NAME=batch:1..64x784"),
        ((X, Z, "--split=2", "--cache=c"), 2, "--split, --cache and named sizes exclude"),
        ((X, Z, "--split_at=h"), 2, "--split_at and named sizes exclude each other"),
        ((X, Z, "--schedule=rows", "--unroll=0"), 2, "--unroll, --schedule and named sizes"),
    ],
)
def test_sizes_that_do_not_fit(
    cli: Cli, models: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    done = cli("compile", "m.onnx", "-o", "m.ttb", *words)
    assert done.code == code and text in done.err, done.err
    assert not Path("m.ttb").exists()


def test_modules_without_named_sizes_and_examples_of_other_sizes(cli: Cli, models: Path) -> None:
    done = cli("compile", "a.yaml", "-o", "m.ttb", "--input_shape=x=batch:1..64x8")
    assert done.code == 2 and "functions, ONNX models and torch modules only" in done.err
    for word, text in (
        ("x=n:1..9x3x5", "expected: ?x3x5"), ("x=n:1..9x3", "expected: ?x3"),
        ("q=n:1..9", "'q', which is no input"), ("x=n:5..9x3x4", "out of bounds"),
        ("x=4x3x4", "for ONNX"),
    ):  # fmt: skip
        done = cli("compile", "--entry=f.py:make", "-o", "m.ttb", f"--input_shape={word}")
        assert done.code == 2 and text in done.err, done.err
