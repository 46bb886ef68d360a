"""Running the chain as often as asked, and what `stitch-run` says about it: statistics, copies, all
of it as JSON, and `--save_artifacts`, its inputs, outputs, programs, plans and reports as files.

Comes in: a runnable and its arrays; verdicts. Goes out: results as arrays, times, what memory saw;
text, plain data, files in a batch. Must not know: words of the command line.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from stitch import api
from stitch.api import Device
from stitch.cli.chain import RunInput, Runnable, RunOutput
from stitch.cli.device_costs import entries, peaks_of
from stitch.cli.output_checks import JSON, NPY, TEXT
from stitch.cli.run.run_outputs import Verdict
from stitch.files import FileBatch, make_folder
from stitch.forms import npy_bytes
from stitch.model import PRODUCER
from stitch.program import Array
from stitch.report import (
    CopyLine,
    counted,
    memory_views,
    other_lines,
    plan_json,
    totals_json,
)
from stitch.runtime import LoadedProgram


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


_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_REPORTS = ("plans.json", "memory.json", "explain.txt")


def add_artifacts(
    batch: FileBatch,
    folder: str,
    device: api.Device,
    runnable: Runnable,
    arrays: Sequence[Array],
    results: Sequence[Array],
) -> None:
    """Adds the files of a run to the batch; makes the folders."""
    places = _places(folder, runnable)
    for part in places:
        make_folder(Path(folder) / part)
    for path, array in zip(places["inputs"], arrays, strict=True):
        batch.add(path, npy_bytes(array))
    for path, array in zip(places["outputs"], results, strict=False):  # Without data none are.
        batch.add(path, npy_bytes(array))
    for path, program in zip(places["programs"], runnable.programs, strict=True):
        batch.add(path, program.program.text())
    plans = [plan_json(plan) | {"runs": times} for plan, times in device.history.plans]
    texts = json.dumps(plans, indent=2), json.dumps(memory_views(device), indent=2)
    for name, text in zip(_REPORTS, (*texts, device.explain()), strict=True):
        batch.add(Path(folder) / name, text + "\n")


def artifact_kinds(folder: str, runnable: Runnable) -> dict[Path, str]:
    """The files that `add_artifacts` will add, and of which kind each is."""
    places = _places(folder, runnable)
    plans, memory, explain = (Path(folder) / name for name in _REPORTS)
    return {
        **dict.fromkeys((*places["inputs"], *places["outputs"]), NPY),
        **dict.fromkeys((*places["programs"], explain), TEXT),
        **dict.fromkeys((plans, memory), JSON),
    }


def _places(folder: str, runnable: Runnable) -> dict[str, tuple[Path, ...]]:
    """Where the artifacts of each part go: names from files are data, never paths."""
    parts: tuple[tuple[str, Sequence[RunInput | RunOutput | LoadedProgram], str], ...] = (
        ("inputs", runnable.inputs, ".npy"), ("outputs", runnable.outputs, ".npy"),
        ("programs", runnable.programs, ".txt"),
    )  # fmt: skip
    return {
        part: tuple(
            Path(folder) / part / f"{at}-{_UNSAFE.sub('_', one.name)[:80]}{suffix}"
            for at, one in enumerate(named)
        )
        for part, named, suffix in parts
    }
