"""Times of ways that take turns, and what they come to."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from fractal_ways.cases import Run


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of the processor (of all threads), and of the clock."""

    processor: float
    clock: float


def once(run: Run) -> Spent:
    """What one run takes."""
    processor, clock = time.process_time(), time.perf_counter()
    run()
    return Spent(time.process_time() - processor, time.perf_counter() - clock)


def least(spent: Sequence[Spent]) -> Spent:
    """The least of either, which other work on the machine disturbs least."""
    return Spent(min(s.processor for s in spent), min(s.clock for s in spent))


def interleaved(runs: Sequence[Run], rounds: int) -> list[Spent]:
    """The least times of each; every round runs each once, in an order of its own."""
    spent: list[list[Spent]] = [[] for _ in runs]
    order, shuffle = list(range(len(runs))), Random(0)
    gc.collect()
    for number in range(rounds + 1):
        shuffle.shuffle(order)
        for i in order:
            taken = once(runs[i])
            if number:  # The first round warms up.
                spent[i].append(taken)
    return [least(each) for each in spent]
