"""Architectures exported, split in two, saved, and run by `stitch-run` in a process of its own.

Nothing but files passes between the process that captures a module and the one that runs it: the
programs, the inputs as `.npz`, and the results, which are compared with eager torch.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.cli import compile as compile_command
from stitch.compiler import split_graph
from tests.support.torch.agreement import assert_close, tensors_of
from tests.support.torch.architectures import ARCHITECTURES, made

#: Compiled by a process of their own as well; the others by the same command, in this process.
APART = ("BERT", "tied weights")


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


def export(name: str, folder: Path) -> Any:
    """Split an architecture in two, `m.0.ttb` and `m.1.ttb`; gives its examples and results."""
    imports = "from tests.support.torch.architectures import made"
    source = folder / "exported.py"
    source.write_text(f"{imports}\n\n\ndef make():\n    return made({name!r})\n")
    if name in APART:
        words = ["--entry=exported:make", "--split=2", "-o", "m.ttb"]
        command("stitch-compile", *words, folder=folder)
    else:
        words = [str(source), "--entry=make", "--split=2", "-o", str(folder / "m.ttb")]
        assert compile_command.main(words) == 0
    module, examples = made(name)
    with torch.no_grad():
        wanted = module(**examples) if isinstance(examples, dict) else module(*examples)
    return tensors_of(examples), tensors_of(wanted)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_in_two_files_agrees_with_eager_in_a_new_process(
    name: str, tmp_path: Path
) -> None:
    examples, wanted = export(name, tmp_path)
    first, last = (stitch.load(tmp_path / f"m.{k}.ttb").programs[0] for k in range(2))
    assert first.operations and last.operations
    inputs = {slot.name: t.numpy() for slot, t in zip(first.inputs, examples, strict=True)}
    np.savez(tmp_path / "inputs.npz", **inputs)
    words = ["--module=m.0.ttb", "--module=m.1.ttb", "--input=@inputs.npz", "--output=@outputs.npz"]
    command("stitch-run", *words, folder=tmp_path)
    with np.load(tmp_path / "outputs.npz") as results:
        assert_close([results[slot.name] for slot in last.outputs], wanted)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["numpy", "onnxruntime"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_in_any_number_of_programs_agrees_with_eager(
    name: str, executor: str
) -> None:
    module, examples = made(name)
    with torch.no_grad():
        wanted = module(**examples) if isinstance(examples, dict) else module(*examples)
    graph = stitch.compile(module, examples).graph
    (whole,) = split_graph(graph, 1)
    for count in range(1, min(8, len(whole.operations)) + 1):
        with stitch.open_device("host", executor=executor) as device:
            parts = [stitch.compile(part, target="host") for part in split_graph(graph, count)]
            pipeline = stitch.Pipeline([device.load(part) for part in parts])
            for _ in range(2):
                found = pipeline(*(t.numpy() for t in tensors_of(examples)))
                results = found if isinstance(found, tuple) else (found,)
                assert_close([tensor.numpy() for tensor in results], tensors_of(wanted))
