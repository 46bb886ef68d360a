"""A value that a program does not use goes around it, in a pipeline as in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import stitch
from stitch.cli import compile_main as compile_command
from stitch.cli import link_main as link_command
from stitch.cli import run_main as run_command
from stitch.compiler import split_graph
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from tests.support.stitched_models import one

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def around() -> ComputationGraph:
    """A sum of what the first of three products gives and what the last gives."""
    b = ComputationGraphBuilder("around")
    rng = np.random.default_rng(2)
    h = x = b.op("Tanh", b.input("x", (4, 8), "float32"))
    for k in range(3):
        with b.at(f"around:layer{k}"):
            h = b.op("MatMul", h, rng.standard_normal((8, 8)).astype(np.float32))
    b.output("y", b.op("Add", h, x))
    return b.build()


def whole() -> np.ndarray:
    """What the graph gives unsplit."""
    return np.asarray(one(stitch.compile(around(), target="host")(X)).numpy())


@pytest.mark.parametrize("machine", ["host", "wormhole_n150"])
@pytest.mark.parametrize("window", [1, 64])
def test_a_pipeline_of_parts_is_the_whole_every_time(machine: str, window: int) -> None:
    parts = split_graph(around(), ["layer0", "layer1"])
    with stitch.open_device(machine, window=window, debug=True) as device:
        pipeline = stitch.Pipeline([device.load(stitch.compile(p, target=machine)) for p in parts])
        for _ in range(4):
            np.testing.assert_array_equal(one(pipeline(X)).numpy(), whole())
        np.testing.assert_array_equal(
            one(pipeline(pipeline(X))).numpy(), one(pipeline(one(pipeline(X)).numpy())).numpy()
        )


def test_files_of_parts_run_and_link_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("y.npy", whole())
    Path("around.json").write_text(stitch.graph.as_json(around()))
    words = ["around.json", "--split_at=layer0,layer1", "-o", "m.ttb", "--target=host"]
    assert compile_command(words) == 0
    parts = [f"m.{k}.ttb" for k in range(3)]
    told = ["--input=x=@x.npy", "--expected_output=@y.npy", "--atol=0", "--rtol=0"]
    assert run_command([*(f"--module={part}" for part in parts), *told]) == 0
    assert link_command([*parts, "-o", "linked.ttb"]) == 0
    assert run_command(["--module=linked.ttb", *told]) == 0
