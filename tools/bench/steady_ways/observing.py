"""Observed over bare: a pipeline and a training step with a Chrome trace listening, or hooks.

The observed ones have a device of their own, so nothing is switched on and off between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import numpy as np

import stitch
from steady_ways.measuring import Effort, Pass, Row, interleaved, passes_of, ratio
from steady_ways.subjects import MACHINE, WIDTH, check, expected, in_turn, inputs, load

GOAL_PIPELINE, GOAL_STEP = 3.0, 1.5
LENGTH, BATCH, CLASSES = 2, 16, 10
#: Makes a device seen.
Observe = Callable[[Any], object]


def nothing(context: object) -> None:
    """A hook that does nothing: what it costs is the way to it."""


def trace(device: Any) -> object:
    """A Chrome trace that listens; older trees have it in a file of its own."""
    report = import_module("stitch.report")
    if not hasattr(report, "ChromeTrace"):
        report = import_module("stitch.report.chrome_trace")
    return report.ChromeTrace(device)


OBSERVERS: Mapping[str, Observe] = {
    "a Chrome trace": trace,
    "a program hook": lambda device: device.hooks.register(before_program=nothing),
    "an operation hook": lambda device: device.hooks.register(after_operation=nothing),
}


def rows(effort: Effort) -> Iterator[Row]:
    """Each observer, of a pipeline and of a step of training."""
    for what, make, programs, goal in (
        (f"pipeline of {LENGTH}", pipeline, LENGTH, GOAL_PIPELINE),
        ("training step", training_step, 8, GOAL_STEP),
    ):
        with ExitStack() as stack:
            observers: dict[str, Observe] = {"bare": lambda device: None, **OBSERVERS}
            ways = {name: make(stack, observe) for name, observe in observers.items()}
            times = interleaved(ways, passes_of(programs, effort), effort)
        for name in OBSERVERS:
            yield ratio(f"{what} with {name} ÷ bare", times[name], times["bare"], goal)


def pipeline(stack: ExitStack, observe: Observe) -> Pass:
    """A pass on a device that is observed."""
    device = stack.enter_context(stitch.open_device(MACHINE))
    call, x = stitch.Pipeline(load(device, LENGTH)), in_turn()
    observe(device)
    check(call(inputs()[0]), expected(LENGTH, 0))
    return lambda: call(x())


def training_step(stack: ExitStack, observe: Observe) -> Pass:
    """A step of training two layers on a device that is observed."""
    random = np.random.default_rng(0)
    builder = stitch.ComputationGraphBuilder("classifier")
    h = builder.input("x", (BATCH, WIDTH), "float32")
    for number, width in enumerate((WIDTH, CLASSES)):
        w = random.standard_normal((WIDTH, width), np.float32) * np.float32(0.1)
        weights = builder.parameter(f"w{number}", w)
        bias = builder.parameter(f"b{number}", np.zeros(width, np.float32))
        h = builder.op("Gemm", builder.op("Relu", h) if number else h, weights, bias)
    builder.output("y", h)
    compiled = stitch.compile(
        builder.build(), target=MACHINE, optimizer=stitch.SGD(lr=0.01),
        loss=stitch.losses.CrossEntropyLoss(),
    )  # fmt: skip
    assert compiled.training is not None
    device = stack.enter_context(stitch.open_device(MACHINE))
    model = stack.enter_context(compiled.training.start(device))
    stepper, compute_loss = compiled.training.optimizer, compiled.training.loss
    batch = random.standard_normal((BATCH, WIDTH), np.float32)
    labels = random.integers(0, CLASSES, BATCH)
    observe(device)

    def step() -> float:
        loss = compute_loss(model(batch), labels)
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        return float(loss.item())

    first = step()
    for _ in range(20):
        last = step()
    assert last < first, f"training does not learn: {first} to {last}"
    return step
