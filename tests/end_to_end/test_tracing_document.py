"""The listing of the tracing document, verbatim but for the import: both branches learn digits.

`batch_num`, which the listing does not define, is its `batch_id`.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from stitch import CompiledModel

ROOT = Path(__file__).resolve().parents[2]
LISTING = """
import stitch.torch as torch
import stitch.torch.nn as nn

class NeuralNetwork(nn.Module):
  def __init__(self):
    super(NeuralNetwork, self).__init__()
    self.flatten = nn.Flatten()
    self.linear_relu_stack = nn.Sequential(
      nn.Linear(8*8, 64),
      nn.ReLU(),
      nn.Linear(64, 64),
      nn.ReLU(),
      nn.Linear(64, 10),
    )

  def forward(self, x):
    x = self.flatten(x)
    logits = self.linear_relu_stack(x)
    return logits

def top_level_task():
  model = NeuralNetwork()
  optimizer = made_optimizer(model)

  if tracing_mechanism == 'symbolic_trace':
    compiled_model = model.compile(
      algorithm=algorithm,
      optimizer=optimizer
    )
  elif tracing_mechanism == 'dynamo':
    compiled_model = torch.compile(
      model,
      backend='stitch',
      options=dict(
        algorithm=algorithm,
        optimizer=optimizer,
      )
    )
  compiled_model = resumed(compiled_model, model, optimizer)

  for batch_id, (X, y) in enumerate(dataloader, first_batch):
    batch_num = batch_id
    pred = compiled_model(X)
    loss = loss_fn(pred, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

    if batch_id % 100 == 0:
      loss, current = loss.item(), (batch_num + 1) * len(X)
      print(f"loss: {loss:>7f} [{current:>5d}/{size:>5d}]")
    if batch_id == kill_at:
      compiled_model.dump(path)
      os.kill(os.getpid(), signal.SIGKILL)
  judge(compiled_model)
"""
#: What the listing leaves open: the data, the optimizer, the loss; and what the tests ask.
AROUND = """
import json, os, signal, sys
import numpy as np
import torch as real_torch
tracing_mechanism, algorithm, path = sys.argv[1:4]
kill_at, first_batch = int(sys.argv[4]), int(sys.argv[5])
real_torch.manual_seed(0)
real_torch.set_num_threads(1)
digits = np.load({digits!r})
images = real_torch.from_numpy(digits["images"].astype(np.float32) / 16).reshape(-1, 8, 8)
labels = real_torch.from_numpy(digits["labels"].astype(np.int64))
train, held_out = (real_torch.from_numpy(digits[k].astype(np.int64)) for k in ("train", "held_out"))
order = real_torch.cat([train[real_torch.randperm(len(train))] for _ in range(5)])
batches = order[: len(order) // 32 * 32].reshape(-1, 32)[first_batch:]
size, dataloader = len(order), [(images[rows], labels[rows]) for rows in batches]

def made_optimizer(model):
    return real_torch.optim.AdamW(model.parameters(), lr=0.003)

def resumed(compiled_model, model, optimizer):
    if not first_batch:
        return compiled_model
    return torch.load(path, compiled_model if tracing_mechanism == "dynamo" else model, optimizer)

def judge(compiled_model):
    names = [f"linear_relu_stack.{{n}}.{{kind}}" for n in (0, 2, 4) for kind in ("weight", "bias")]
    weights = [compiled_model.get_tensor(name) for name in names]
    x = images[held_out].reshape(-1, 64).numpy()
    for n in (0, 2, 4):
        x = x @ weights[n].T + weights[n + 1]
        x = np.maximum(x, 0) if n < 4 else x
    right = float((x.argmax(1) == labels[held_out].numpy()).mean())
    print(json.dumps({{"right": right, "weights": [w.tobytes().hex() for w in weights]}}))
    if hasattr(compiled_model, "search_result"):
        print(json.dumps(compiled_model.search_result.as_data()))

loss_fn = nn.CrossEntropyLoss()
top_level_task()
"""


def listing(
    mechanism: str, path: Path, kill_at: int = -1, first: int = 0, algorithm: str = "search"
) -> tuple[int, list[str]]:
    """Run the listing in a process of its own; gives how it ended, and the lines that it wrote."""
    around = AROUND.format(digits=str(ROOT / "examples" / "digits" / "digits.npz"))
    opening, closing = around.split("loss_fn = ", 1)
    code = textwrap.dedent(opening) + LISTING + "\nloss_fn = " + closing
    words = [mechanism, algorithm, str(path), str(kill_at), str(first)]
    run = subprocess.run(
        # Unbuffered: who is killed has written the lines that it printed.
        [sys.executable, "-u", "-c", code, *words],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode in (0, -signal.SIGKILL), run.stderr
    return run.returncode, run.stdout.splitlines()


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[str]]]:
    """By mechanism, the JSON of a listing that was killed behind its hundredth batch, and what it
    had written."""

    @cache
    def run(mechanism: str) -> tuple[Path, list[str]]:
        path = tmp_path_factory.mktemp("killed") / "compiled.json"
        ended, lines = listing(mechanism, path, kill_at=99)
        assert ended == -signal.SIGKILL
        return path, lines

    return run


@pytest.mark.campaign("training")
@pytest.mark.parametrize("mechanism", ["symbolic_trace", "dynamo"])
def test_the_listing_learns_digits_and_resumes_bit_for_bit(
    mechanism: str, tmp_path: Path, killed: Callable[[str], tuple[Path, list[str]]]
) -> None:
    ended, lines = listing(mechanism, tmp_path / "never.json")
    assert ended == 0
    losses = [line for line in lines if re.fullmatch(r"loss: [ \d.]{8} \[ *\d+/ *\d+\]", line)]
    assert len(losses) == 3
    whole = json.loads(lines[3])
    assert whole["right"] > 0.93
    path, before = killed(mechanism)
    assert before == lines[:1]
    ended, after = listing(mechanism, path, first=100)
    assert ended == 0
    assert after == lines[1:]


def test_what_the_search_found_is_in_the_json_of_the_listing(
    killed: Callable[[str], tuple[Path, list[str]]],
) -> None:
    path, _ = killed("symbolic_trace")
    found = CompiledModel.load(path).search_result
    assert found is not None
    assert found.solution.algorithm == "search"
    assert found.as_data() == json.loads(path.read_text())["search"]
