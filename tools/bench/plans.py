"""The search for a plan of a training on several devices: what it takes, and what it finds.

A transformer of `--layers` layers (attention with skips; batch 8, 64 words, width 256) with Adam
and the mean squared error is planned for `--devices` of `wormhole_n150` with default links and 16
micro-batches. `search` chooses among replicas, stages and divided weights; `data_parallel` and
`pipeline` are the best plans of one kind. `search_seconds`: processor time of this thread;
`estimate_ms`: a step by the plan's own estimate; `simulated_ms`: the same step simulated with the
programs of its stages. `--check` exits 1 where the search takes more than 60 s.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from command_line import bench_parser, exit_code_for, from_one, refused

from stitch.errors import StitchError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.mesh import MachineSpecification
from stitch.parallel import simulate_plan
from stitch.program import InputKind
from stitch.training import AlgorithmConfig, SimulatedTime, TrainingOptions, optimize

GOAL_SECONDS = 60
ALGORITHMS = ("search", "data_parallel", "pipeline")
BATCH, WORDS, WIDTH, HEADS, MICRO_BATCHES = 8, 64, 256, 2, 16


@dataclass(frozen=True, slots=True)
class Row:
    """What one algorithm found."""

    algorithm: str
    search_seconds: float
    replicas: int
    stages: int
    tensor: int
    schedule: str
    estimate_ms: float
    simulated_ms: float


def transformer(layers: int) -> ComputationGraph:
    """Layers of attention with skips: four readers of each layer's input."""
    b = ComputationGraphBuilder("transformer")
    x = b.input("x", (BATCH, WORDS, WIDTH), "float32")
    split = np.array([BATCH, WORDS, HEADS, WIDTH // HEADS])
    whole = np.array([BATCH, WORDS, WIDTH])
    for i in range(layers):
        q, k, v, o = (
            b.input(f"{name}{i}", (WIDTH, WIDTH), "float32", InputKind.PARAMETER) for name in "qkvo"
        )
        q, k, v = (
            b.op("Transpose", b.op("Reshape", b.op("MatMul", x, w), split), perm=[0, 2, 1, 3])
            for w in (q, k, v)
        )
        scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2])) * np.float32(0.35)
        h = b.op("MatMul", b.op("Softmax", scores, axis=-1), v)
        h = b.op("Reshape", b.op("Transpose", h, perm=[0, 2, 1, 3]), whole)
        x = x + b.op("MatMul", h, o)
    b.output("y", x)
    return b.build()


def measure(layers: int, devices: int) -> list[Row]:
    """Search with each algorithm, and simulate what it found."""
    graph = transformer(layers)
    specification = MachineSpecification.of(devices, "wormhole_n150")
    options = TrainingOptions(accumulation_steps=MICRO_BATCHES)
    rows = []
    for algorithm in ALGORITHMS:
        config = AlgorithmConfig(algorithm, "mse", "adam", options)
        began = time.thread_time()
        found = optimize(graph, specification, SimulatedTime(), config)
        seconds = time.thread_time() - began
        chosen, simulated = found.solution, simulate_plan(found.plan).makespan
        rows.append(
            Row(
                algorithm, seconds, chosen.replicas, len(chosen.cuts) + 1, chosen.tensor,
                chosen.schedule, found.cost_values.seconds * 1e3, simulated * 1e3,
            )
        )  # fmt: skip
    return rows


def misses(rows: Sequence[Row]) -> list[str]:
    """The goals that these rows miss."""
    return [
        f"{row.algorithm}: {row.search_seconds:.1f} s, at most {GOAL_SECONDS}"
        for row in rows
        if row.algorithm == "search" and row.search_seconds > GOAL_SECONDS
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--layers", type=from_one, default=24, help="layers of the transformer")
    parser.add_argument("--devices", type=from_one, default=8, help="devices of the machine")
    options = parser.parse_args(arguments)
    try:
        rows = measure(options.layers, options.devices)
    except StitchError as error:
        return refused("plans.py", error)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print("algorithm       seconds  replicas stages shards schedule  estimated ms simulated ms")
        for r in rows:
            print(
                f"{r.algorithm:<14} {r.search_seconds:>8.2f} {r.replicas:>9} {r.stages:>6} "
                f"{r.tensor:>6} {r.schedule:<9} {r.estimate_ms:>12.2f} {r.simulated_ms:>12.2f}"
            )
    return exit_code_for(misses(rows), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
