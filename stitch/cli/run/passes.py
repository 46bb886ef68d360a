"""Running the chain as often as asked, measuring each pass.

Comes in: a runnable and its arrays. Goes out: results as arrays, times, what memory saw. Must not
know: words of the command line, files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.progress import Progress

from stitch.api import Device
from stitch.cli.chain import Runnable
from stitch.cli.device_costs import entries
from stitch.program import Array


@dataclass(slots=True)
class Measured:
    """What the passes took.

    `seconds`: of each timed pass. `copies`: the most writes that the memory of all spaces saw in
    one pass, less those that brought host arrays in.
    """

    seconds: list[float] = field(default_factory=list)
    passes: int = 0
    copies: int = 0

    def percentiles(self) -> dict[str, float]:
        """p50, p90, p99, least, most and mean of the timed passes, in seconds."""
        if not self.seconds:
            return {}
        p50, p90, p99 = np.percentile(self.seconds, (50, 90, 99))
        return {
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "min": min(self.seconds),
            "max": max(self.seconds),
            "mean": float(np.mean(self.seconds)),
        }


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """What to call after each of `total` passes.

    Moves a bar on standard error, only on a terminal and only for several passes.
    """
    if total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("running", total=total)
        yield lambda: bar.advance(task)


def run_passes(
    runnable: Runnable,
    arrays: Sequence[Array],
    warmup: int,
    timed: int,
    measured: Measured,
    tick: Callable[[], None],
) -> list[Array]:
    """Warm up, run and time; gives the last pass's results (none without data)."""
    device = runnable.device
    for index in range(warmup + timed):
        before = device.history.seen()[0] - entries(device)
        began = time.perf_counter()
        tensors = runnable.run(arrays)
        device.flush()
        seconds = time.perf_counter() - began
        wrote = device.history.seen()[0] - entries(device) - before
        measured.copies = max(measured.copies, wrote)
        measured.passes += 1
        tick()
        if index >= warmup:
            measured.seconds.append(seconds)
        if index < warmup + timed - 1:
            del tensors
    if not device.computes:
        return []
    return [tensor.numpy() for tensor in tensors]


def leaks(device: Device) -> list[str]:
    """What is still allocated, one line per buffer; nothing should be once all is dropped."""
    device.flush()
    return [
        f"{space.value} {address:#x}: {size} B per bank, {origin}"
        for space, use in sorted(device.memory_use().items(), key=lambda item: item[0].value)
        for address, size, origin in sorted(use.buffers)
    ]
