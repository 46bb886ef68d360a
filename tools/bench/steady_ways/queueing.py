"""The queue: tasks a second where results are kept, and a call while another thread computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

import stitch
from steady_ways.measuring import Effort, Row, ratio
from steady_ways.subjects import MACHINE, by_hand, check, expected, inputs, load

GOAL_TASKS, GOAL_QUEUED_MS = 50_000.0, 1.0
#: About how long the other thread computes, and the side of the matrices that it multiplies.
COMPUTING_SECONDS, SIDE = 0.062, 512
#: After this the other thread is among its kernels.
INTO_KERNELS_SECONDS = 0.003


def rows(effort: Effort) -> Iterator[Row]:
    """Both."""
    yield all_kept(effort)
    yield while_computing(effort)


def all_kept(effort: Effort) -> Row:
    """Tasks a second where the result of each is kept, beside NumPy, which keeps as many."""
    ours: list[float] = []
    peer: list[float] = []
    hand, x = by_hand(1), inputs()[0]
    with stitch.open_device(MACHINE) as device:
        (program,) = load(device, 1)
        for _ in range(effort.rounds + 1):
            began = time.perf_counter()
            kept: list[Any] = [program(x) for _ in range(effort.tasks)]
            stitch.wait(kept)
            ours.append((time.perf_counter() - began) / effort.tasks)
            check(kept[0], expected(1, 0))
            check(kept[-1], expected(1, 0))
            kept.clear()
            began = time.perf_counter()
            copies = [hand(x).copy() for _ in range(effort.tasks)]
            peer.append((time.perf_counter() - began) / effort.tasks)
            del copies
    over = ratio("", tuple(ours[1:]), tuple(peer[1:]), 0.0)
    return Row("results all kept, tasks a second", 1 / min(ours[1:]), GOAL_TASKS, "/s", True,
               over.ours_us, over.peer_us, note=f"NumPy by hand: {over.value:.1f} x")  # fmt: skip


def while_computing(effort: Effort) -> Row:
    """Milliseconds that a call of a tiny program takes while another thread computes."""
    with stitch.open_device("host") as device:
        tiny = device.load(product(1, 8))
        large = device.load(product(products(effort), SIDE))
        found = [queued_beside(tiny, large) for _ in range(effort.rounds + 1)][1:]
    queued, computed = (median(times) * 1e3 for times in zip(*found, strict=True))
    return Row("queueing while another thread computes", queued, GOAL_QUEUED_MS, "ms", False,
               queued * 1e3, computed * 1e3, note="ours: queueing, peer: computing")  # fmt: skip


def queued_beside(tiny: Any, large: Any) -> tuple[float, float]:
    """Seconds to queue one program while another thread runs the other, and what that takes."""
    small, wide = (np.ones((n, n), np.float32) for n in (8, SIDE))
    begins = threading.Event()
    computed: list[float] = []

    def compute() -> None:
        value = large(wide)
        began = time.perf_counter()
        begins.set()
        value.numpy()
        computed.append(time.perf_counter() - began)

    thread = threading.Thread(target=compute)
    thread.start()
    begins.wait()
    time.sleep(INTO_KERNELS_SECONDS)
    began = time.perf_counter()
    result = tiny(small)
    queued = time.perf_counter() - began
    thread.join()
    result.numpy()
    return queued, computed[0]


def products(effort: Effort) -> int:
    """How many products take about as long as the other thread shall compute."""
    wide = np.ones((SIDE, SIDE), np.float32)
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        np.dot(wide, wide)
        spent.append(time.perf_counter() - began)
    return max(2, round(COMPUTING_SECONDS / min(spent))) if effort.rounds > 2 else 4


def product(count: int, side: int) -> stitch.CompiledModel:
    """A program of so many products, one after the other."""
    builder = stitch.ComputationGraphBuilder(f"products{count}")
    h = builder.input("x", (side, side), "float32")
    w = builder.parameter("w", np.eye(side, dtype=np.float32))
    for _ in range(count):
        h = builder.matmul(h, w)
    builder.output("y", h)
    return stitch.compile(builder.build(), target="host")
