"""Running the chain as often as asked, and what `stitch-run` says about it: statistics, copies, and
all of it as JSON.

Comes in: a runnable and its arrays; verdicts. Goes out: results as arrays, times, what memory saw;
text and plain data. Must not know: words of the command line, files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from stitch import api
from stitch.api import Device
from stitch.cli.chain import Runnable
from stitch.cli.device_costs import entries, peaks_of
from stitch.model import PRODUCER
from stitch.program import Array
from stitch.report import (
    CopyLine,
    OperationComparison,
    Verdict,
    counted,
    memory_views,
    other_lines,
    plan_json,
    totals_json,
)


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
        shares = {f"p{share}": float(np.percentile(self.seconds, share)) for share in (50, 90, 99)}
        least, most = min(self.seconds), max(self.seconds)
        return {**shares, "min": least, "max": most, "mean": float(np.mean(self.seconds))}


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


def statistics_text(measured: Measured) -> str:
    """One line: how many passes, and p50, p90, p99 in microseconds."""
    by_name = measured.percentiles()
    listed = "  ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in by_name.items())
    return f"{counted(len(measured.seconds), 'timed pass', 'timed passes')}: {listed}"


def copies_text(lines: Sequence[CopyLine]) -> str:
    """One line per copy, with its reason."""
    return "\n".join(
        f"  {line.kind} x{line.times} {line.nbytes} B  {line.source} -> {line.target}\n"
        f"    {line.reason}"
        for line in lines
    )


def result_json(
    device: api.Device,
    runnable: Runnable,
    measured: Measured,
    verdicts: Mapping[int, Verdict],
    code: int,
    failures: Sequence[str],
    operations: OperationComparison | None = None,
) -> dict[str, Any]:
    """Everything as plain data, the form of `run_results.json`."""
    account = device.account()
    return {
        "result": {0: "pass", 1: "mismatch"}.get(code, "error"),
        "exit_code": code,
        "errors": list(failures),
        "producer": PRODUCER,
        "machine": device.machine.name,
        "executor": device.executor,
        "inputs": [{"name": i.name, "type": i.type.text()} for i in runnable.inputs],
        "outputs": [{"name": o.name, "type": o.type.text()} for o in runnable.outputs],
        "comparisons": [
            {"result": index, **asdict(verdict)} for index, verdict in sorted(verdicts.items())
        ],
        **({} if operations is None else {"operations": [asdict(o) for o in operations.lines]}),
        "passes": measured.passes,
        "seconds": measured.percentiles(),
        "copies_per_pass": measured.copies,
        "totals": totals_json(account.period, account.total),
        "memory_writes": {"writes": account.writes_seen, "nbytes": account.nbytes_seen},
        "plans": [plan_json(plan) | {"runs": times} for plan, times in account.plans],
        "other_copies": [asdict(line) for line in other_lines(account)],
        "older_copies": totals_json("older or failed plans", account.earlier),
        "reads": {
            "times": sum(read.times for read in account.reads),
            "nbytes": sum(read.times * read.nbytes for read in account.reads),
        },
        "peak_bytes_per_bank": peaks_of(device),
        "memory": memory_views(device),
        "host_memory": {
            "peak_nbytes": device.peak_nbytes,
            "allowed_nbytes": device.allowed_nbytes,
        },
    }
