"""Whole architectures with random weights agree with eager torch: in one piece, and in two files.

The files are run by `stitch-run` in a process of its own. Nothing but files passes between it and
the process that captures a module: the programs, the inputs as `.npz`, and the results.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.compiler import split_graph
from stitch.graph import ComputationGraph
from tests.support.grids import every
from tests.support.torch.agreement import assert_close, run_graph, tensors_of
from tests.support.torch.architectures import ARCHITECTURES, made

#: Compiled by `stitch-compile` in a process of its own; the others here, captured once.
APART = ("tied weights", "BERT")


def command(name: str, *words: str, folder: Path) -> str:
    """Run an installed command as a shell would, in a folder; gives what it printed."""
    script = Path(sysconfig.get_path("scripts")) / name
    search = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    found = subprocess.run(
        [str(script), *words],
        cwd=folder, env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


@dataclass(frozen=True)
class Captured:
    """A module's graph, the tensors of its examples, and what eager torch makes of them."""

    graph: ComputationGraph
    examples: list[Any]
    wanted: list[Any]


@cache
def captured(name: str) -> Captured:
    """Once for all tests: to capture a module takes torch longer than anything else here."""
    module, examples = made(name)
    with torch.no_grad():
        wanted = module(**examples) if isinstance(examples, dict) else module(*examples)
    graph = stitch.compile(module, examples).graph
    return Captured(graph, tensors_of(examples), tensors_of(wanted))


def compile_in_two(name: str, folder: Path) -> None:
    """Split an architecture in two, `m.0.ttb` and `m.1.ttb`."""
    if name in APART:
        imports = "from tests.support.torch.architectures import made"
        source = f"{imports}\n\n\ndef make():\n    return made({name!r})\n"
        (folder / "exported.py").write_text(source)
        words = ["--entry=exported:make", "--split=2", "-o", "m.ttb"]
        command("stitch-compile", *words, folder=folder)
        return
    for k, part in enumerate(split_graph(captured(name).graph, 2)):
        stitch.compile(part).save(folder / f"m.{k}.ttb")


# The quick suite has the others through torch.compile (test_torch_compile.py).
@pytest.mark.parametrize("name", every(4, [*list(ARCHITECTURES)[1:], "MLP"]))
def test_an_architecture_agrees_with_eager(name: str) -> None:
    one = captured(name)
    assert_close(run_graph(one.graph, one.examples), one.wanted)


def test_weights_that_are_tied_are_one_constant() -> None:
    graph = captured("tied weights").graph
    shapes = [graph.values[constant.value].type.shape for constant in graph.constants]
    assert shapes.count((20, 8)) == 1


@pytest.mark.parametrize("name", every(9, ARCHITECTURES))
def test_an_architecture_in_two_files_agrees_with_eager_in_a_new_process(
    name: str, tmp_path: Path
) -> None:
    compile_in_two(name, tmp_path)
    one = captured(name)
    first, last = (stitch.load(tmp_path / f"m.{k}.ttb").programs[0] for k in range(2))
    assert first.operations and last.operations
    inputs = {slot.name: t.numpy() for slot, t in zip(first.inputs, one.examples, strict=True)}
    np.savez(tmp_path / "inputs.npz", **inputs)
    words = ["--module=m.0.ttb", "--module=m.1.ttb", "--input=@inputs.npz", "--output=@outputs.npz"]
    command("stitch-run", *words, folder=tmp_path)
    with np.load(tmp_path / "outputs.npz") as results:
        assert_close([results[slot.name] for slot in last.outputs], one.wanted)


@pytest.mark.campaign("networks")
@pytest.mark.parametrize("executor", ["numpy", "onnxruntime"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_in_any_number_of_programs_agrees_with_eager(
    name: str, executor: str
) -> None:
    one = captured(name)
    graph = one.graph
    (whole,) = split_graph(graph, 1)
    for count in range(1, min(8, len(whole.operations)) + 1):
        with stitch.open_device("host", executor=executor) as device:
            parts = [stitch.compile(part, target="host") for part in split_graph(graph, count)]
            pipeline = stitch.Pipeline([device.load(part) for part in parts])
            for _ in range(2):
                found = pipeline(*(t.numpy() for t in one.examples))
                results = found if isinstance(found, tuple) else (found,)
                assert_close([tensor.numpy() for tensor in results], one.wanted)
