"""The ways of training a model: each gives a function that makes one step and tells the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

import stitch
from stitch import training
from train_ways.models import Subject

#: One step on the batch: forward, loss, backward, update; the loss as a number.
Step = Callable[[], float]
RATE = 1e-3

OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=RATE), lambda: training.SGD(lr=RATE)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
        lambda: training.SGD(lr=RATE, momentum=0.9),
    ),
    "adam": (lambda p: torch.optim.Adam(p, lr=RATE), lambda: training.Adam(lr=RATE)),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=RATE), lambda: training.AdamW(lr=RATE)),
}


def torch_step(
    subject: Subject, optimizer: str, backend: str | None, *, steps: bool = False
) -> Step:
    """PyTorch, eager (no backend) or through torch.compile; `steps`: the optimizer's step is a
    program too, which our backend takes."""
    module = subject.make()
    stepper = OPTIMIZERS[optimizer][0](module.parameters())
    compute_loss = torch.nn.CrossEntropyLoss()
    options = {"optimizer": stepper} if steps else None
    model: Any = module
    if backend is not None:
        model = torch.compile(module, backend=backend, options=options)
    batch, labels = subject.batch, subject.labels

    def step() -> float:
        stepper.zero_grad()
        loss = compute_loss(model(batch), labels)
        loss.backward()
        stepper.step()
        return float(loss.item())

    return step


def our_step(
    subject: Subject, optimizer: str, executor: str, machine: str, stack: ExitStack
) -> Step:
    """Four stitched programs on a machine, by one of our executors."""
    with warnings.catch_warnings():
        # What torch.export says of its own internals.
        warnings.simplefilter("ignore")
        compiled = stitch.compile(
            subject.make(),
            [subject.batch],
            target=machine,
            optimizer=OPTIMIZERS[optimizer][1](),
            loss=training.losses.CrossEntropyLoss(),
        )
    assert compiled.training is not None
    device = stack.enter_context(stitch.open_device(machine, executor=executor))
    model = stack.enter_context(compiled.training.start(device))
    stepper, compute_loss = compiled.training.optimizer, compiled.training.loss
    batch, labels = subject.batch.numpy(), subject.labels.numpy()

    def step() -> float:
        loss = compute_loss(model(batch), labels)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        return float(loss.item())

    return step
