"""Networks by the executors that choose, beside those that do not: one thread, taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from statistics import median
from typing import Any

from peer_ways import networks

import stitch

#: The executors that choose by prices, and the single ones beside which they are held.
CHOOSING, SINGLE = ("auto", "torch"), ("numpy", "onnxruntime")
#: The most that one that chooses may take of the best single executor.
MOST = 1.05
#: Seconds of the processor that one turn takes at least.
TURN = 0.003


@dataclass(frozen=True, slots=True)
class Choice:
    """A network: least microseconds by executor, and by each that chooses the median over rounds
    of its part of the best single one."""

    network: str
    least_us: dict[str, float]
    best: str
    ratios: dict[str, float]

    def line(self) -> str:
        """It as a line of a table."""
        times = " ".join(f"{self.least_us[e]:10.0f}" for e in (*SINGLE, *CHOOSING))
        ratios = " ".join(f"{self.ratios[e]:6.2f}" for e in CHOOSING)
        return f"{self.network:14} {times}   {ratios}   {self.best}"

    def as_data(self) -> dict[str, Any]:
        """It as plain data."""
        return asdict(self)

    def missed(self) -> list[str]:
        """The goals that it misses."""
        return [
            f"{self.network}: {executor} takes {ratio:.2f} of {self.best}, not {MOST}"
            for executor, ratio in self.ratios.items()
            if ratio > MOST
        ]


def head() -> str:
    """The head of the table."""
    times = " ".join(f"{executor:>10}" for executor in (*SINGLE, *CHOOSING))
    ratios = " ".join(f"{executor:>6}" for executor in CHOOSING)
    return f"{'least us':14} {times}   {ratios}   best single (ratios: median of rounds)"


def measure(network: str, rounds: int, prices: str | None, *, is_small: bool) -> Choice:
    """One network in all ways, each once a round, in an order of its own."""
    module, x = networks.make(network, is_small=is_small)
    model = stitch.compile(module, (x,), target="host")
    given = x.numpy()
    with ExitStack() as stack:
        runs: dict[str, Callable[[], Any]] = {}
        for executor in (*SINGLE, *CHOOSING):
            words: dict[str, Any] = {"prices": prices} if executor in CHOOSING else {}
            device = stack.enter_context(stitch.open_device("host", executor=executor, **words))
            pipeline = stitch.Pipeline([device.load(model)])
            runs[executor] = partial(pipeline, given)
        times = _turns(runs, rounds)
    least = {executor: min(found) for executor, found in times.items()}
    best = min(SINGLE, key=least.__getitem__)
    ratios = {
        executor: median(a / b for a, b in zip(times[executor], times[best], strict=True))
        for executor in CHOOSING
    }
    return Choice(network, {e: s * 1e6 for e, s in least.items()}, best, ratios)


def _turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of the processor that a pass takes, by way and round."""
    passes = {name: max(1, int(TURN / _seconds(run, 1))) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    random, order = Random(0), list(runs)
    for _ in range(rounds):
        # Ways that always follow the same one would always find the same caches.
        random.shuffle(order)
        for name in order:
            found[name].append(_seconds(runs[name], passes[name]))
    return found


def _seconds(run: Callable[[], Any], passes: int) -> float:
    run()
    started = time.process_time()
    for _ in range(passes):
        result = run()
    spent = time.process_time() - started
    del result
    return max(1e-9, spent) / passes
