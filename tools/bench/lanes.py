#!/usr/bin/env python3
"""What lanes gain where stretches are independent, and cost where nothing is worth handing over.

Two products of `--sizes` numbers squared in one window, and `--tasks` tiny programs in one window,
on a device with one thread and on one with `--inter_op_threads`; the same products by hand, by
NumPy's `dot` on as many threads that wait for them: what this machine has to give just now.
Ways run in turn; the best of `--rounds` counts; ratios are one thread's time by theirs.
Goals, on a machine that does nothing else, with two lanes on two cores: products at least 1.6, tiny
programs at least 0.98. Set OMP_NUM_THREADS for BLAS; it is 1 unless said otherwise.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from command_line import bench_parser, exit_code_for, from_one, from_zero, refused

import stitch
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.program import Array
from stitch.runtime.executors import EXECUTORS

GOAL_PRODUCTS, GOAL_TINY = 1.6, 0.98
#: A timing is of so many seconds of passes at least.
LEAST_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Row:
    """One work on one executor: seconds of a pass on one lane, and on several; `by_hand`: the ratio
    without Stitch, where that was measured."""

    work: str
    executor: str
    one: float
    several: float
    by_hand: float | None = None

    @property
    def ratio(self) -> float:
        """How much faster several are."""
        return self.one / self.several

    @property
    def goal(self) -> float:
        """What it should be."""
        return GOAL_TINY if self.by_hand is None else GOAL_PRODUCTS


def product(x: Any, w: Any) -> Any:
    """What the large programs compute."""
    return x @ w


def scaled(x: Any) -> Any:
    """What the tiny programs compute."""
    return x * 2.0 + 1.0


@contextmanager
def calls(
    model: stitch.CompiledModel, given: Sequence[tuple[Array, ...]], target: str, executor: str,
    lanes: int,
) -> Iterator[Callable[[], object]]:  # fmt: skip
    """A pass: one call for each of these arguments, in one window."""
    with stitch.open_device(
        target, executor=executor, inter_op_threads=lanes, window=len(given) + 1
    ) as device:
        loaded = device.load(model)

        def run() -> None:
            kept = [loaded(*arguments) for arguments in given]
            device.wait()
            del kept

        yield run


@contextmanager
def by_hand(given: Sequence[tuple[Array, ...]], threads: int) -> Iterator[Callable[[], object]]:
    """The products without Stitch, on threads that wait for work."""
    made = [np.empty_like(x) for x, _ in given]
    asked: SimpleQueue[tuple[int, ...] | None] = SimpleQueue()
    done: SimpleQueue[int] = SimpleQueue()

    def multiply(which: Sequence[int]) -> None:
        for i in which:
            x, w = given[i]
            x.dot(w, made[i])

    def serve() -> None:
        while (which := asked.get()) is not None:
            multiply(which)
            done.put(len(which))

    others = [Thread(target=serve, daemon=True) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    shares = [tuple(range(first, len(given), threads)) for first in range(threads)]

    def run() -> None:
        for share in shares[1:]:
            asked.put(share)
        multiply(shares[0])
        for _ in shares[1:]:
            done.get()

    try:
        yield run
    finally:
        for _ in others:
            asked.put(None)
        for thread in others:
            thread.join()


def best_of(ways: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of one pass of each way, at best; they run in turn."""
    counts = []
    for way in ways:
        for _ in range(4):
            way()
        began = time.perf_counter()
        way()
        counts.append(1 + int(LEAST_SECONDS / max(time.perf_counter() - began, 1e-7)))
    best = [float("inf")] * len(ways)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            order = range(len(ways)) if number % 2 else range(len(ways))[::-1]
            for i in order:
                way, count = ways[i], counts[i]
                began = time.perf_counter()
                for _ in range(count):
                    way()
                best[i] = min(best[i], (time.perf_counter() - began) / count)
    finally:
        gc.enable()
    return best


def products(size: int, options: argparse.Namespace, executor: str) -> Row:
    """As many independent products as there are lanes."""
    draw = np.random.default_rng(options.seed)
    given = [
        tuple([draw.standard_normal((size, size)).astype(np.float32) for _ in range(2)])
        for _ in range(options.inter_op_threads)
    ]
    model = stitch.compile(product, given[0], target=options.target)
    with ExitStack() as stack:
        ways = [
            stack.enter_context(calls(model, given, options.target, executor, lanes))
            for lanes in (1, options.inter_op_threads)
        ]
        ways += [
            stack.enter_context(by_hand(given, count)) for count in (1, options.inter_op_threads)
        ]
        one, several, hand, hands = best_of(ways, options.rounds)
    work = f"{options.inter_op_threads} products of {size}x{size}"
    return Row(work, executor, one, several, hand / hands)


def tiny(options: argparse.Namespace, executor: str) -> Row:
    """Many programs that take a few microseconds each."""
    given = [(np.full((4, 64), i, np.float32),) for i in range(options.tasks)]
    model = stitch.compile(scaled, given[0], target=options.target)
    with ExitStack() as stack:
        ways = [
            stack.enter_context(calls(model, given, options.target, executor, lanes))
            for lanes in (1, options.inter_op_threads)
        ]
        one, several = best_of(ways, options.rounds)
    return Row(f"{options.tasks} tiny programs", executor, one, several)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print; with `--check` the exit code says whether every goal was reached."""
    parser = bench_parser(__doc__)
    parser.add_argument("--sizes", type=from_one, nargs="*", default=[512])
    parser.add_argument("--tasks", type=from_one, default=64)
    parser.add_argument("--inter_op_threads", type=from_one, default=2)
    parser.add_argument("--executors", nargs="+", choices=list(EXECUTORS), default=["numpy"])
    parser.add_argument("--target", default="wormhole_n150")
    parser.add_argument("--rounds", type=from_one, default=100)
    parser.add_argument("--seed", type=from_zero, default=0)
    options = parser.parse_args(words)
    if options.inter_op_threads < 2:
        parser.error("--inter_op_threads takes numbers from 2 on")
    try:
        load_machine(options.target)
    except StitchError as error:
        return refused("lanes.py", error)
    rows = []
    for executor in options.executors:
        rows += [products(size, options, executor) for size in options.sizes]
        rows.append(tiny(options, executor))
    if options.json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio, "goal": row.goal} for row in rows]))
    else:
        for row in rows:
            hand = "" if row.by_hand is None else f"  by hand {row.by_hand:.2f}"
            print(
                f"{row.work:24} {row.executor:12} one lane {row.one * 1e6:9.1f} us  "
                f"{options.inter_op_threads} lanes {row.several * 1e6:9.1f} us  "
                f"ratio {row.ratio:.2f} ({row.goal}){hand}"
            )
    late = [
        f"{row.work} on {row.executor}: {row.ratio:.2f} of {row.goal}"
        for row in rows
        if row.ratio < row.goal
    ]
    return exit_code_for(late, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
