"""What the tests of `stitch-run train.yaml` share: a small training, and processes that run it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stitch.program import Array

Cli = Callable[..., Any]
DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits"
RUN = "import sys; from stitch.cli.run import main; sys.exit(main())"
NET = """\
name: net
inputs:
  x: {shape: [8, 4], type: float32}
parameters:
  w1: {shape: [4, 16], init: {kind: randn, seed: 1, scale: 0.7}}
  b1: {shape: [16], init: zeros}
  w2: {shape: [16, 3], init: {kind: randn, seed: 2, scale: 0.3}}
operations:
  - s = Gemm(x, w1, b1)
  - h = Relu(s)
  - y = MatMul(h, w2)
outputs: [y]
"""
TRAIN = """\
name: small
model: net.yaml
data:
  file: data.npz
  inputs: {x: xs}
  labels: ys
  validation: 0.2
  held_out: out
batch_size: 8
epochs: 6
seed: 4
loss: sparse_categorical_crossentropy
optimizer: {name: adamw, lr: 0.02}
schedule: {name: warmup, warmup_steps: 4, then: cosine}
metrics: [accuracy, loss]
target: tiny
"""
RANDOM_NET = """\
import torch
def make():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16),
                              torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3))
    return net.train(), (torch.zeros(8, 4),)
"""


def npz_of(values: Mapping[str, Array]) -> None:
    np.savez("start.npz", **values)  # type: ignore[arg-type]


def changed(*pairs: tuple[str, str], file: str = "train.yaml", text: str = TRAIN) -> None:
    """Write the training with some of its text replaced."""
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new, 1)
    Path(file).write_text(text)


def lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a result file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def losses(path: str | Path) -> list[tuple[int, float]]:
    """Step and loss of each step in a result file."""
    return [(line["step"], line["loss"]) for line in lines(path) if line["kind"] == "step"]


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    """`stitch-run` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def ran(*words: str, **options: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of `stitch-run` in a process of its own."""
    process = started(*words, **options)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def wait_for_step(process: subprocess.Popen[str], path: Path, step: int) -> None:
    """Return once a step has been noted, or the process has ended."""
    while process.poll() is None:
        if path.exists() and path.read_bytes().count(b'"kind": "step"') >= step:
            return
        time.sleep(0.002)
