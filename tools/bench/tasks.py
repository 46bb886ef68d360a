#!/usr/bin/env python3
"""How many host tasks a second: functions that do nothing, one thread, beside schedulers of others.

Each way queues `--counts` calls and waits for the last. A chain gives each call what the call
before it gives; a random DAG (by `--seed`) gives it up to two of the last fifty. Ways run in turn,
the best of `--rounds` counts; peers that take long are given fewer tasks (`tasks` says how many).
Ray runs in processes of its own, on two CPUs, and is started before anything is timed.
`kept` is what a task leaves behind in the process (resident bytes, ours only).
`arrays` calls a function on a tensor or an array, beside a pool that is given a future
of the array, or the array. `task_graph` builds, prepares and runs a chain of 1,000 host tasks.
Goals: ours at least 200,000 tasks a second, and at most 8 bytes kept a task; on arrays at most 5 us
a call, and three times as fast as the pool; of a graph at most 4, 4 and 3 us a task.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from command_line import bench_parser, exit_code_for, from_one, from_zero

import stitch
from stitch.program import DataType, TensorDesc, host_layout
from stitch.tasks import TaskGraph, task

#: Of a DAG, each task reads some of so many before it.
REACH = 50
GOAL_A_SECOND = 200_000
GOAL_KEPT = 8.0
#: By graph and way: the most microseconds a task.
GOAL_MICROSECONDS = {
    ("arrays", "call(f, tensor)"): 5.0, ("arrays", "f(tensor)"): 5.0,
    ("arrays", "call(f, array)"): 5.0, ("task_graph", "build"): 4.0,
    ("task_graph", "prepare"): 4.0, ("task_graph", "run"): 3.0,
}  # fmt: skip
#: How many times as fast as the peer: a pool that is given the array, or a future of it (a tensor
#: may be pending, too).
GOAL_RATIO = 3.0
PEERS = {
    "call(f, tensor)": "submit(f, future)", "f(tensor)": "submit(f, future)",
    "call(f, array)": "submit(f, array)",
}  # fmt: skip
CALLS_ON_ARRAYS = 20_000
TASKS_OF_A_GRAPH = 1_000
#: How many tasks those are given that need long for each.
MOST = {"dask": 100_000, "ray": 2_000}
#: One of them for the worker that runs the calls, as all others have one thread for that.
RAY_CPUS = 2

Reads = Callable[[int], Sequence[int]]


def nothing(*arguments: object) -> None:
    """What every way calls."""


@dataclass(frozen=True, slots=True)
class Row:
    """One graph in one way; `missing`: why it could not be measured."""

    graph: str
    way: str
    tasks: int
    per_second: float | None
    kept: float | None = None
    missing: str = ""


def reads_of(graph: str, count: int, seed: int) -> list[tuple[int, ...]]:
    """By task: how many tasks before it those are whose results it reads."""
    if graph == "chain":
        return [(), *[(1,)] * (count - 1)]
    draw = random.Random(seed)
    return [
        tuple([draw.randint(1, min(i, REACH)) for _ in range(draw.randrange(3))]) if i else ()
        for i in range(count)
    ]


def ours(reads: Iterable[Sequence[int]]) -> None:
    """Calls of a host function, given results that are perhaps pending."""
    function = task()(nothing)
    with stitch.open_device("host") as device:
        call, last = device.call, deque[Any](maxlen=REACH)
        for before in reads:
            last.append(call(function, *[last[-at] for at in before]))
        last[-1].result()


def thread_pool(reads: Iterable[Sequence[int]]) -> None:
    """Futures of a pool of one thread; each waits for what it reads."""

    def run(before: list[Future[None]]) -> None:
        nothing(*[future.result() for future in before])

    with ThreadPoolExecutor(1) as pool:
        last = deque[Any](maxlen=REACH)
        for before in reads:
            last.append(pool.submit(run, [last[-at] for at in before]))
        last[-1].result()


def dask(reads: Iterable[Sequence[int]]) -> None:
    """dask's graph on its synchronous scheduler."""
    from dask.local import get_sync

    graph = {i: (nothing, *[i - at for at in before]) for i, before in enumerate(reads)}
    get_sync(graph, len(graph) - 1)


def ray(reads: Iterable[Sequence[int]]) -> None:
    """Ray's remote functions, on the workers of a cluster of this machine (`started_ray`)."""
    import ray as cluster

    remote = cluster.remote(nothing)
    last = deque[Any](maxlen=REACH)
    for before in reads:
        last.append(remote.remote(*[last[-at] for at in before]))
    cluster.get(last[-1])


WAYS: dict[str, Callable[[Iterable[Sequence[int]]], None]] = {
    "stitch": ours, "ThreadPoolExecutor": thread_pool, "dask": dask, "ray": ray,
}  # fmt: skip


def resident() -> int:
    """The resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(graph: str, count: int, ways: Sequence[str], rounds: int, seed: int) -> list[Row]:
    """Every way on one graph, in turn."""
    for way in ways:
        # What is imported, opened and planned once.
        with suppress(ImportError):
            WAYS[way](reads_of(graph, min(count, 300), seed))
    best: dict[str, float] = {}
    kept: dict[str, float] = {}
    missing: dict[str, str] = {}
    for _ in range(rounds):
        for way in ways:
            if way in missing:
                continue
            tasks = min(count, MOST.get(way, count))
            reads = reads_of(graph, tasks, seed)
            gc.collect()
            before, began = resident(), time.perf_counter()
            try:
                WAYS[way](reads)
            except ImportError as error:
                missing[way] = f"{error.name} is not installed"
                continue
            seconds = time.perf_counter() - began
            gc.collect()
            kept[way] = max(0.0, (resident() - before) / tasks)
            best[way] = min(best.get(way, seconds), seconds)
    rows = []
    for way in ways:
        tasks = min(count, MOST.get(way, count))
        rate = tasks / best[way] if way in best else None
        left = kept[way] if way == "stitch" else None
        rows.append(Row(graph, way, tasks, rate, left, missing.get(way, "")))
    return rows


def least(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The least seconds of each way, which run in turn; the first of each is not counted."""
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            gc.collect()
            began = time.perf_counter()
            way()
            seconds = time.perf_counter() - began
            if number:
                best[name] = min(best.get(name, seconds), seconds)
    return best


def arrays(most: int, rounds: int) -> list[Row]:
    """Calls of one function on one tensor or array, at most so many."""
    count = min(most, CALLS_ON_ARRAYS)
    array, function = np.ones(4, np.float32), task()(nothing)

    def repeated(call: Callable[..., Any], *given: object) -> None:
        for _ in range(count):
            last = call(*given)
        last.result()

    def on_result(future: Future[Any]) -> None:
        nothing(future.result())

    with stitch.open_device("host") as device, ThreadPoolExecutor(1) as pool:
        tensor, pending = device.tensor(array), pool.submit(lambda: array)
        ways: dict[str, Callable[[], Any]] = {
            "call(f, tensor)": lambda: repeated(device.call, function, tensor),
            "f(tensor)": lambda: repeated(function, tensor),
            "call(f, array)": lambda: repeated(device.call, function, array),
            "submit(f, array)": lambda: repeated(pool.submit, nothing, array),
            "submit(f, future)": lambda: repeated(pool.submit, on_result, pending),
        }
        best = least(ways, rounds)
    return [Row("arrays", way, count, count / seconds) for way, seconds in best.items()]


def task_graph(most: int, rounds: int) -> list[Row]:
    """A chain of host functions, at most so many, in a task graph; each returns its argument."""
    array, count = np.ones(4, np.float32), min(most, TASKS_OF_A_GRAPH)
    desc = TensorDesc((4,), host_layout(DataType.FLOAT32))
    same = task(returns=desc)(lambda x: x)

    def built() -> TaskGraph:
        graph = TaskGraph("chain")
        value = graph.input(desc, "x")
        for _ in range(count):
            value = graph.call(same, value)
        graph.output(value, "y")
        return graph

    with stitch.open_device("host") as device:
        graph = built()
        prepared = device.prepare(graph)
        for _ in range(3):
            # Planned, and then written out.
            prepared(array)
        ways: dict[str, Callable[[], Any]] = {
            "build": built,
            "prepare": lambda: device.prepare(graph),
            "run": lambda: prepared(array),
        }
        # Each takes a few milliseconds.
        best = least(ways, 10 * rounds)
    return [Row("task_graph", way, count, count / seconds) for way, seconds in best.items()]


def missed(rows: Sequence[Row]) -> list[str]:
    """The goals that were not reached."""
    late = []
    rates = {row.way: row.per_second for row in rows}
    for row in rows:
        name = f"{row.graph} of {row.tasks}"
        goal = GOAL_MICROSECONDS.get((row.graph, row.way))
        if goal is not None and row.per_second is not None:
            if 1e6 / row.per_second > goal:
                late.append(f"{row.graph} {row.way}: {1e6 / row.per_second:.1f} us a task")
            peer = rates.get(PEERS.get(row.way, ""))
            if peer is not None and row.per_second < GOAL_RATIO * peer:
                ratio = row.per_second / peer
                late.append(f"{row.graph} {row.way}: {ratio:.1f} x {PEERS[row.way]}")
        if row.way == "stitch" and row.per_second is not None and row.kept is not None:
            if row.per_second < GOAL_A_SECOND:
                late.append(f"{name}: {row.per_second:,.0f} tasks a second")
            if row.kept > GOAL_KEPT:
                late.append(f"{name}: {row.kept:.1f} bytes kept a task")
    return late


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print; with `--check` the exit code says whether every goal was reached."""
    parser = bench_parser(__doc__)
    parser.add_argument("--counts", type=from_one, nargs="+", default=[100_000, 1_000_000])
    graphs = ["chain", "dag", "arrays", "task_graph"]
    parser.add_argument("--graphs", nargs="+", default=graphs, choices=graphs)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rounds", type=from_one, default=3)
    parser.add_argument("--seed", type=from_zero, default=0)
    options = parser.parse_args(words)
    with started_ray() if "ray" in options.ways else nullcontext():
        rows = [
            row
            for count in options.counts
            for graph in options.graphs
            if graph in ("chain", "dag")
            for row in measured(graph, count, options.ways, options.rounds, options.seed)
        ]
    for name, group in (("arrays", arrays), ("task_graph", task_graph)):
        rows += group(max(options.counts), options.rounds) if name in options.graphs else []
    if options.json:
        print(json.dumps([{**asdict(row)} for row in rows]))
    else:
        for row in rows:
            rate = row.missing or f"{row.per_second:12,.0f} tasks/s"
            kept = "" if row.kept is None else f"  {row.kept:6.1f} B kept a task"
            print(f"{row.graph:10} {row.tasks:9,} {row.way:20} {rate}{kept}")
    return exit_code_for(missed(rows), check=options.check)


@contextmanager
def started_ray() -> Iterator[None]:
    """Ray with two CPUs and without its dashboard, where it is installed."""
    try:
        import ray as cluster
    except ImportError:
        yield
        return
    cluster.init(
        num_cpus=RAY_CPUS, include_dashboard=False, logging_level="error", log_to_driver=False
    )
    try:
        yield
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
