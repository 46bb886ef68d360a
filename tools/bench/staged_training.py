#!/usr/bin/env python3
"""A step of a training in two stages over Ray, beside `torch.distributed.pipelining`.

Both train four layers (Linear and ReLU) with SGD and the mean squared error on `--micro_batches` in
schedule 1F1B, in two processes with one thread each: Stitch's device servers, and two processes of
torch joined by gloo. They start from the same weights and take the same batches, and their losses
are compared. They run in turn; `ratio` is the median over `--rounds` of ours ÷ torch's.
Goals: 1.1 from width 1024 on, 1.5 below.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from command_line import bench_parser, exit_code_for, from_one

import stitch
from stitch.program import Array

LAYERS, STAGES, RATE = 4, 2, 0.01
WIDE = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """One width; milliseconds are of a step, the least; `difference` is of the losses, relative."""

    width: int
    batch: int
    ours_ms: float
    torch_ms: float
    ratio: float
    difference: float


def network(width: int) -> Any:
    """The network, with the same weights in every process."""
    import torch

    torch.manual_seed(0)
    layers = [(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*[each for pair in layers for each in pair])


def batches_of(width: int, batch: int, count: int) -> list[tuple[Array, Array]]:
    """The micro-batches of a step: inputs and targets."""
    draw = np.random.default_rng(0)
    return [
        (
            draw.standard_normal((batch, width), np.float32),
            draw.standard_normal((batch, width), np.float32),
        )
        for _ in range(count)
    ]


def torch_stage(
    rank: int, width: int, batch: int, count: int, folder: str, orders: Connection
) -> None:
    """A process of torch: a step for each order, answered with the losses of the last stage."""
    import torch
    from torch import distributed
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES
    )
    layers = list(network(width))
    each = len(layers) // STAGES
    part = torch.nn.Sequential(*layers[rank * each : (rank + 1) * each])
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=count, loss_fn=torch.nn.MSELoss())
    optimizer = torch.optim.SGD(part.parameters(), lr=RATE)
    given = batches_of(width, batch, count)
    x, y = (torch.from_numpy(np.concatenate(side)) for side in zip(*given, strict=True))
    while orders.recv():
        losses: list[Any] = []
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        optimizer.step()
        orders.send([loss.item() for loss in losses])
    distributed.destroy_process_group()


class TorchPipeline:
    """Two processes of torch that wait for orders."""

    def __init__(self, width: int, batch: int, count: int) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._orders = []
        self._processes = []
        for rank in range(STAGES):
            here, there = context.Pipe()
            process = context.Process(
                target=torch_stage, args=(rank, width, batch, count, self._folder.name, there)
            )
            process.start()
            self._orders.append(here)
            self._processes.append(process)

    def step(self) -> list[float]:
        """A step; returns the losses."""
        for each in self._orders:
            each.send(True)
        answers: list[list[float]] = [each.recv() for each in self._orders]
        return answers[-1]

    def close(self) -> None:
        """End the processes."""
        for each in self._orders:
            each.send(False)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def measured(width: int, batch: int, count: int, rounds: int, machine: str) -> Row:
    """One row."""
    given = batches_of(width, batch, count)
    compiled = stitch.compile(
        network(width), (given[0][0],), loss="mse", optimizer=stitch.SGD(lr=RATE), target=machine,
        parallel={"stages": STAGES, "schedule": "1f1b", "micro_batches": count}, devices=STAGES,
    )  # fmt: skip
    theirs = TorchPipeline(width, batch, count)
    try:
        with compiled.start(backend="ray") as training:
            # Gradients of torch's schedule are means over micro-batches, as ours.
            pairs = [(training.step(given), theirs.step()) for _ in range(3)]
            ours, torchs = (np.array(losses) for losses in zip(*pairs, strict=True))
            difference = float(np.abs(ours / torchs - 1).max())
            times = []
            for _ in range(rounds):
                begun = time.perf_counter()
                training.step(given)
                training.mesh.wait()  # Until the update has ended.
                between = time.perf_counter()
                theirs.step()
                times.append((between - begun, time.perf_counter() - between))
    finally:
        theirs.close()
    ours_ms, torch_ms = (min(each) * 1e3 for each in zip(*times, strict=True))
    ratio = statistics.median(mine / other for mine, other in times)
    return Row(width, batch, ours_ms, torch_ms, ratio, difference)


def missed(rows: Sequence[Row]) -> list[str]:
    """The goals that were not reached."""
    late = []
    for row in rows:
        goal = 1.1 if row.width >= WIDE else 1.5
        if row.ratio > goal:
            late.append(f"width {row.width}: {row.ratio:.2f} of torch's step, goal {goal}")
        if row.difference > 1e-3:
            late.append(f"width {row.width}: losses differ from torch's by {row.difference:.1e}")
    return late


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print; with `--check` the exit code says whether every goal was reached."""
    parser = bench_parser(__doc__)
    parser.add_argument("--widths", type=from_one, nargs="+", default=[1024, 256])
    parser.add_argument(
        "--batches", type=from_one, nargs="+", default=[64, 32], help="each width's"
    )
    parser.add_argument("--micro_batches", type=from_one, default=8)
    parser.add_argument("--rounds", type=from_one, default=15)
    parser.add_argument("--machine", default="host")
    options = parser.parse_args(words)
    rows = [
        measured(width, batch, options.micro_batches, options.rounds, options.machine)
        for width, batch in zip(options.widths, options.batches, strict=True)
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        for row in rows:
            print(
                f"width {row.width:5} x {row.batch}: ours {row.ours_ms:7.1f} ms a step, torch "
                f"{row.torch_ms:7.1f} ms, ratio {row.ratio:.2f}, losses within {row.difference:.1e}"
            )
    return exit_code_for(missed(rows), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
