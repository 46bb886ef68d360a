"""What a round of a recorded loop costs beside its kernels: a Scan whose body is one tiny Add,
less the same calls of NumPy.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np

import stitch
from fractal_ways.cases import check_alike, numbers
from fractal_ways.measuring import interleaved
from fractal_ways.ours import MACHINE
from fractal_ways.results import OURS, Figure, Result, Row
from stitch.graph import ComputationGraphBuilder, scan
from stitch.program import Array

#: Microseconds of a round beyond its kernel.
ROUND_GOAL_US = 1.0
#: Elements of the state.
WIDTH = 8


def measured(count: int, rounds: int) -> Result:
    """The loop on NumPy, and the additions by hand; raises `AssertionError` where they differ."""
    builder = ComputationGraphBuilder("additions")
    state = builder.input("state", (WIDTH,), "float32")
    step = builder.input("step", (WIDTH,), "float32")
    (last,), _ = scan(builder, lambda s, _: ([s[0] + step], []), [state], [], count=count)
    builder.output("last", last)
    given = np.zeros(WIDTH, np.float32), np.arange(WIDTH, dtype=np.float32)

    def by_hand() -> Array:
        add, after = np.add, given[0].copy()
        for _ in repeat(None, count):
            add(after, given[1], after)
        return after

    with stitch.open_device(MACHINE, executor="numpy") as device:
        program = device.load(stitch.compile(builder.build(), target=MACHINE))

        def loop() -> Any:
            found: Any = program(*given)
            return found.numpy()

        check_alike("a loop of additions", numbers(loop()), by_hand())
        ours, hand = interleaved([loop, by_hand], rounds)
    beyond = (ours.processor - hand.processor) / count * 1e6
    clock = (ours.clock - hand.clock) / count * 1e6
    return Result(
        "rounds", f"a Scan of {count} rounds, an Add of {WIDTH} elements in each",
        (Row.of("stitch numpy", OURS, ours), Row.of("NumPy by hand", "by hand", hand)),
        more=(
            Figure("a round beside its kernel (ROUND_GOAL_US)", beyond, "us", ROUND_GOAL_US,
                   f"by the clock {clock:.2f}; a round {ours.processor / count * 1e6:.2f}"),
        ),
    )  # fmt: skip
