"""Two trainings that write their JSON after each step and go on from it: for who kills them.

`python -m tests.support.training.killed_training FOLDER` trains a network by SGD with momentum and
one by AdamW until it is killed, from what `FOLDER/NAME.json` holds if it is there, and prints the
number of each step that it has taken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch

import stitch.torch
import stitch.torch.nn as nn

NAMES = ("sgd", "adamw")
LOSS = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Layers with dropout and running statistics: all that a step depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(16, 96), nn.BatchNorm1d(96)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(96, 5)

    def forward(self, x: Any) -> Any:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def made(name: str, file: Path | None = None) -> tuple[Any, Any, int]:
    """The model of a name and its optimizer, and how many steps it has taken."""
    torch.manual_seed(0)
    net = Net()
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        if name == "sgd"
        else torch.optim.AdamW(net.parameters(), lr=0.01)
    )
    if file is None or not file.exists():
        return net.compile(optimizer=optimizer, target="host", algorithm="search"), optimizer, 0
    model = stitch.torch.load(file, net, optimizer)
    return model, optimizer, int(model.training.values["training.steps"])


def step(model: Any, optimizer: Any, number: int) -> None:
    """One step, whose batch follows from its number."""
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(12, 16, generator=generator), torch.randint(0, 5, (12,), generator=generator)
    LOSS(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(name: str, steps: int) -> dict[str, Any]:
    """Everything that a training has after so many steps, without a stop."""
    model, optimizer, _ = made(name)
    for number in range(steps):
        step(model, optimizer, number)
    state: dict[str, Any] = model.instance.state_dict()
    return state


def train(folder: Path, numbers: Iterable[int]) -> None:
    """Take the steps of these numbers, both trainings in turn; those taken before are left out."""
    torch.set_num_threads(1)
    files = {name: folder / f"{name}.json" for name in NAMES}
    trainings = {name: made(name, file) for name, file in files.items()}
    for number in numbers:
        going = [name for name, (_, _, first) in trainings.items() if number >= first]
        for name in going:
            model, optimizer, _ = trainings[name]
            step(model, optimizer, number)
            model.dump(files[name])
        if going:
            print(number, flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), count())
