"""The loop: batches in a fixed order, steps, what is counted and timed on the way.

Comes in: a model in training, data, how many epochs. Goes out: a `StepResult` for every step. What
is done with them (bars, files, checkpoints) is the session's affair. Must not know: files.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from stitch.cli.device_costs import entries
from stitch.documents import DataPart, shuffled
from stitch.errors import StitchError
from stitch.program import Array
from stitch.training import TrainingInstance

#: From this step of a run on (the fourth) nothing is planned any more.
STEADY = 3


@dataclass(frozen=True, slots=True)
class Course:
    """The shape of a training: batches of a step, steps of an epoch, epochs, the order."""

    batch_size: int
    batches_per_step: int
    steps_per_epoch: int
    epochs: int
    seed: int
    shuffle: bool

    @property
    def steps(self) -> int:
        """Steps in all."""
        return self.steps_per_epoch * self.epochs


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step: its number (from 1), epoch (from 1), loss, learning rate, seconds, and counts.

    `copies`: writes that the memories saw, less those that brought host arrays in; None where
    they are not counted. `plans`: how many plans were made.
    """

    step: int
    epoch: int
    loss: float
    rate: float
    seconds: float
    plans: int
    copies: int | None


class TrainingLoop:
    """Runs the steps that are left, one at a time; `step` is the number of those done."""

    def __init__(
        self, instance: TrainingInstance, data: DataPart, course: Course, *, count_copies: bool
    ) -> None:
        self.instance = instance
        self.course = course
        self._data = data
        self._count_copies = count_copies
        self._rate: float | None = None
        self._order: tuple[int, Array] = (-1, np.arange(0))

    @property
    def step(self) -> int:
        """Steps done so far, those before a resume included."""
        return self.instance.steps

    def run_step(self) -> StepResult:
        """One step; raises `TaskError` for a loss that is no number: then it has not happened."""
        instance, device = self.instance, self.instance.device
        began, forwards = time.perf_counter(), instance.forwards
        plans = device.statistics().plans_made
        before = self._writes()
        epoch = self.step // self.course.steps_per_epoch
        losses = []
        try:
            for rows in self._rows():
                instance.forward(**{n: a[rows] for n, a in self._data.inputs.items()})
                losses.append(instance.judge(self._label(rows)))
                instance.backward()
            rate = instance.optimizer.rate(instance.steps)
            instance.update()
        except StitchError as error:
            # Random operators draw by the number of forward passes: these have not happened.
            instance.forwards = forwards
            # The instance counts steps from 0, and all that is said here from 1.
            error.what = error.what.replace(f"step {self.step} is", f"step {self.step + 1} is")
            raise
        instance.zero_grad()
        values = [loss.item() for loss in losses]
        # A new rate is written as a number from the host, like the batch.
        entered, self._rate = int(rate != self._rate), rate
        total = sum(values) / (len(values) if instance.loss_fn.reduction == "mean" else 1)
        copies = self._writes() - before - entered if self._count_copies else None
        made, seconds = device.statistics().plans_made - plans, time.perf_counter() - began
        return StepResult(self.step, epoch + 1, total, rate, seconds, made, copies)

    def _writes(self) -> int:
        if not self._count_copies:
            return 0
        device: Any = self.instance.device
        return int(device.history.seen()[0]) - entries(device)

    def _rows(self) -> Iterator[Array]:
        """The rows of each batch of the next step."""
        course = self.course
        epoch, index = divmod(self.step, course.steps_per_epoch)
        if self._order[0] != epoch:
            count = len(self._data)
            order = shuffled(count, course.seed, epoch) if course.shuffle else np.arange(count)
            self._order = (epoch, order)
        first = index * course.batches_per_step
        for batch in range(first, first + course.batches_per_step):
            yield self._order[1][batch * course.batch_size : (batch + 1) * course.batch_size]

    def _label(self, rows: Array) -> Array:
        label = self.instance.loss_fn.label_type(self.instance.programs.prediction_type)
        if not label.shape:
            return np.zeros((), label.data_type.dtype)
        return self._data.labels[rows]


@contextmanager
def stopping_between_steps() -> Iterator[Callable[[], int]]:
    """Within the block, SIGINT and SIGTERM are only noted: what is yielded gives the signal, or 0.

    The second one ends the program at once, as without this.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0  # Only the main thread hears signals.
        return
    earlier: Mapping[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        for each, handler in earlier.items():
            signal.signal(each, handler)

    try:
        for number in earlier:
            signal.signal(number, note)
        yield lambda: seen[0] if seen else 0
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
