"""What it costs to compare parameters with their copies at every call of torch.compile on a device.

The models of `train.py`, through `torch.compile(model, backend="stitch")`. Three ways run on
`--machine` by turns in one process, on the same compiled model: `compared` is what the runtime does
(a copy stays while it is equal to torch's bytes), `copied` copies at every call whatever can be
written, `trusted` looks at nothing (and reads stale weights as soon as someone writes: it is the
bound below). Two kinds of call: `inference`, where nothing is ever written, and `training` with
`--optimizer`, where every parameter is written every step; `trusted` has none there, as it would
learn nothing. Printed: medians of the ratios of each round, and what each way writes to the device.
`--check` exits 1 where copying at every call takes less than 0.85 of the time of comparing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch
from command_line import bench_parser, exit_code_for, from_one, refused
from train_ways.models import MODELS, Sizes, subjects

from stitch.errors import StitchError
from stitch.frontend.torch.compile import device_of
from stitch.machine import load_machine
from stitch.runtime.graphs import replay
from stitch.runtime.queue import reclaimer, task_queue

#: `copied` over `compared`, at least.
LEAST_RATIO = 0.85
_COMPARED = reclaimer.invalidate_stale_copies


def _copied(records: Any, contents: Any, value: Any) -> None:
    records.forget_copies(value)


def _trusted(records: Any, contents: Any, value: Any) -> None:
    pass


WAYS: dict[str, Callable[[Any, Any, Any], None]] = {
    "compared": _COMPARED, "copied": _copied, "trusted": _trusted
}  # fmt: skip


def calls(subject: Any, machine: str, optimizer: str) -> dict[str, Callable[[], object]]:
    """An inference call and a training step of one model."""
    module = subject.make()
    model = torch.compile(module, backend="stitch", options={"target": machine})
    compute_loss = torch.nn.CrossEntropyLoss()
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    stepper = kind(module.parameters(), lr=1e-3, fused=True)

    def infer() -> object:
        with torch.no_grad():
            return model(subject.batch)

    def step() -> object:
        stepper.zero_grad()
        loss = compute_loss(model(subject.batch), subject.labels)
        loss.backward()
        stepper.step()
        return loss.item()

    return {"inference": infer, "training": step}


def measured(
    run: Callable[[], object], ways: tuple[str, ...], rounds: int, device: Any
) -> dict[str, tuple[list[float], int]]:
    """Seconds in each round, and bytes that a call writes, by way; the order is drawn anew."""
    found: dict[str, tuple[list[float], int]] = {way: ([], 0) for way in ways}
    shuffle = Random(0)
    order = list(ways)
    for number in range(rounds + 3):
        shuffle.shuffle(order)
        for way in order:
            _compare_by(WAYS[way])
            run()
            before = device.backend.write_counts()[1]
            began = time.perf_counter()
            run()
            spent = time.perf_counter() - began
            if number >= 3:  # The first rounds plan.
                found[way][0].append(spent)
                found[way] = found[way][0], device.backend.write_counts()[1] - before
    _compare_by(_COMPARED)
    return found


def _compare_by(way: Callable[[Any, Any, Any], None]) -> None:
    for module in (task_queue, replay):
        vars(module)["invalidate_stale_copies"] = way


@dataclass(frozen=True, slots=True)
class Row:
    """One way of one kind of call on one model; `ratio` is over `compared`, by rounds."""

    model: str
    call: str
    way: str
    ratio: float
    median_us: float
    written_nbytes: int


def rows_of(subject: Any, options: argparse.Namespace) -> list[Row]:
    """All that is measured of one model."""
    rows = []
    device = device_of({"target": options.machine})
    for name, run in calls(subject, options.machine, options.optimizer).items():
        ways = tuple(WAYS) if name == "inference" else ("compared", "copied")
        found = measured(run, ways, options.rounds, device)
        base = found["compared"][0]
        for way, (times, nbytes) in found.items():
            ratio = median(t / b for t, b in zip(times, base, strict=True))
            rows.append(Row(subject.name, name, way, ratio, median(times) * 1e6, nbytes))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where a goal is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--models", default="mlp,transformer")
    parser.add_argument("--machine", default="wormhole_n150")
    parser.add_argument("--optimizer", default="sgd", choices=("sgd", "adamw"))
    parser.add_argument("--batch", type=from_one, default=64)
    parser.add_argument("--rounds", type=from_one, default=41)
    options = parser.parse_args(arguments)
    models = options.models.split(",")
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        parser.error(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    try:
        load_machine(options.machine)
    except StitchError as error:
        return refused("stale_weights.py", error)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for subject in subjects(models, Sizes(options.batch)):
        rows += rows_of(subject, options)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        for row in rows:
            print(
                f"{row.model:12} {row.call:10} {row.way:9} {row.ratio:5.2f} x compared, "
                f"{row.median_us:7.0f} us, {row.written_nbytes / 2**20:6.2f} MiB written"
            )
    missed = [
        f"{row.model}, {row.call}: {row.ratio:.2f}"
        for row in rows
        if row.way == "copied" and row.ratio < LEAST_RATIO
    ]
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
