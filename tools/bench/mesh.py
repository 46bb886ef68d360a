#!/usr/bin/env python3
"""Two stages on two devices of a mesh over Ray, beside the same stages by hand as Ray actors.

A stage is a number of layers, `x @ w` and `maximum(x, 0)`, so many that NumPy needs about
`--stages` milliseconds in this process for a value of `--nbytes` (at least `maximum(x, 0)`). By
hand, an actor calls NumPy, at most `--in_flight` batches are under way, and Ray carries the values.
Both use one cluster, take arrays of this process and read the results as views of Ray's store
(`np.asarray`). They run in turn, the best
of `--rounds` counts; `throughput` is ours ÷ by hand.
Goals: 0.9 for stages of 5 ms and longer, 0.8 for shorter ones; the values of one device in all.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from command_line import above_zero, bench_parser, exit_code_for, from_one

import stitch
from stitch.mesh import Mesh, open_mesh
from stitch.program import Array, DataType, Layout, TensorDesc
from stitch.tasks import TaskGraph

LONG_STAGE_MS = 5.0
GOALS = {True: 0.9, False: 0.8}
#: Columns of a value: from this size on layers are narrow, so that short stages are possible.
LARGE_NBYTES, COLUMNS = 1 << 20, {False: 128, True: 32}

Weights = Sequence[Array]


@dataclass(frozen=True, slots=True)
class Row:
    """One length of stages and one size of values; milliseconds are of one batch, the least."""

    stage_ms: float
    numpy_ms: float
    nbytes: int
    layers: int
    ours_ms: float
    by_hand_ms: float
    throughput: float
    equal_bits: bool


def stage(x: Array, weights: Weights) -> Array:
    """A stage in NumPy."""
    for weight in weights:
        x = np.maximum(x @ weight, np.float32(0))
    return x if len(weights) else np.maximum(x, np.float32(0))


class ByHand:
    """The actor of a stage, as written by hand."""

    def __init__(self, weights: Weights) -> None:
        self.weights = [np.array(weight) for weight in weights]

    def run(self, x: Array) -> Array:
        """Run the stage; this class knows nothing of this module, which actors cannot import."""
        for weight in self.weights:
            x = x @ weight
            np.maximum(x, 0, out=x)
        return x if self.weights else np.maximum(x, 0)


def seconds_of(work: Callable[[], Any]) -> float:
    """The seconds of a call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def stage_near(milliseconds: float, x: Array) -> tuple[list[Array], float]:
    """Weights for a stage of about so long, and how long it takes."""
    draw = np.random.default_rng(0)
    columns = x.shape[1]

    def weights(count: int) -> list[Array]:
        scale = np.float32((2 / columns) ** 0.5)
        return [draw.standard_normal((columns, columns), np.float32) * scale for _ in range(count)]

    def least(given: Weights) -> float:
        return min(seconds_of(lambda: stage(x, given)) for _ in range(7)) * 1e3

    each = least(weights(4)) / 4
    chosen = weights(round(milliseconds / each))
    return chosen, least(chosen)


def graph_of(x: Array, stages: Sequence[Weights], machine: str) -> TaskGraph:
    """The stages as programs on `device0`, `device1`."""
    desc = TensorDesc(x.shape, Layout(DataType.FLOAT32))
    graph = TaskGraph("stages")
    value: Any = graph.input(desc, "x")
    for number, weights in enumerate(stages):
        program = stitch.compile(
            lambda x, weights=weights: stage(x, weights), [x], name=f"stage{number}", target=machine
        )
        with graph.on(f"device{number}"):
            value = graph.call(program, value)
    graph.output(value, "y")
    return graph


def by_hand(actors: Sequence[Any], batches: Sequence[Array], in_flight: int) -> list[Array]:
    """All batches through the actors, at most so many under way."""
    import ray

    results, under_way = [], deque[Any]()
    for x in batches:
        if len(under_way) == in_flight:
            ray.wait([under_way.popleft()], fetch_local=False)
        value: Any = x
        for actor in actors:
            value = actor.run.remote(value)
        under_way.append(value)
        results.append(value)
    return list(ray.get(results))


def measured(
    mesh: Mesh, milliseconds: float, nbytes: int, batches: int, rounds: int, machine: str
) -> Row:
    """One row."""
    import ray

    columns = COLUMNS[nbytes >= LARGE_NBYTES]
    draw = np.random.default_rng(1)
    given = [
        draw.standard_normal((nbytes // 4 // columns, columns), np.float32) for _ in range(batches)
    ]
    weights, numpy_ms = stage_near(milliseconds, given[0])
    stages = [weights, weights]
    graph = graph_of(given[0], stages, machine)
    run = mesh.prepare(graph)
    with stitch.open_device(machine) as device:
        alone = device.prepare(graph_without_devices(graph))
        wanted = [alone(x).numpy().tobytes() for x in given]
    actors = [ray.remote(num_cpus=0)(ByHand).remote(each) for each in stages]

    def ours() -> list[Array]:
        results = [run(x) for x in given]
        return [np.asarray(result) for result in results]

    equal = [array.tobytes() for array in ours()] == wanted
    for array, x in zip(by_hand(actors, given, mesh.in_flight), given, strict=True):
        np.testing.assert_allclose(array, stage(stage(x, weights), weights), rtol=1e-4, atol=1e-4)
    times: list[tuple[float, float]] = []
    for _ in range(rounds):
        mine = seconds_of(ours)
        times.append((mine, seconds_of(lambda: by_hand(actors, given, mesh.in_flight))))
    for actor in actors:
        ray.kill(actor)
    ours_ms, by_hand_ms = (min(each) / batches * 1e3 for each in zip(*times, strict=True))
    throughput = by_hand_ms / ours_ms
    return Row(milliseconds, numpy_ms, nbytes, len(weights), ours_ms, by_hand_ms, throughput, equal)


def graph_without_devices(graph: TaskGraph) -> TaskGraph:
    """The same graph for one device."""
    return TaskGraph.of(replace(graph.table(), devices=()))


def missed(rows: Iterable[Row]) -> list[str]:
    """The goals that were not reached."""
    late = []
    for row in rows:
        name = f"stages of {row.stage_ms:g} ms, values of {row.nbytes:,} bytes"
        goal = GOALS[row.stage_ms >= LONG_STAGE_MS]
        if row.throughput < goal:
            late.append(f"{name}: throughput {row.throughput:.2f} of {goal}")
        if not row.equal_bits:
            late.append(f"{name}: other values than on one device")
    return late


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print; with `--check` the exit code says whether every goal was reached."""
    parser = bench_parser(__doc__)
    parser.add_argument("--stages", type=above_zero, nargs="+", default=[20.0, 5.0, 1.0])
    parser.add_argument("--nbytes", type=from_one, nargs="+", default=[64 << 10, 4 << 20])
    parser.add_argument("--batches", type=from_one, default=16)
    parser.add_argument("--in_flight", type=from_one, default=4)
    parser.add_argument("--rounds", type=from_one, default=15)
    parser.add_argument("--machine", default="wormhole_n150")
    options = parser.parse_args(words)
    with open_mesh(2, machine=options.machine, backend="ray", in_flight=options.in_flight) as mesh:
        rows = [
            measured(mesh, each, nbytes, options.batches, options.rounds, options.machine)
            for each in options.stages
            for nbytes in options.nbytes
        ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        for row in rows:
            print(
                f"{row.stage_ms:4g} ms (NumPy {row.numpy_ms:5.2f}, {row.layers} layers) "
                f"{row.nbytes:9,} B: ours {row.ours_ms:6.2f} ms, by hand {row.by_hand_ms:6.2f} ms, "
                f"throughput {row.throughput:.2f}, bits of one device: {row.equal_bits}"
            )
    return exit_code_for(missed(rows), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
