"""An LSTM over sentences of different lengths, with peers; what compiling it takes, by schedule."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fractal_ways.cases import Case, Peer, RatioGoal, Run
from fractal_ways.ours import MACHINE, schedules_for
from fractal_ways.recurrent_cases import (
    SMALL,
    eager_goals,
    loop_peers,
    lstm_cell,
    lstm_weights,
    normal,
)
from fractal_ways.results import Figure
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.program import Array

#: For whom what begins is measured: the default of devices.
EXECUTOR = "numpy"
#: The fewest words of a sentence.
SHORTEST = 5
#: Best of ours / `nn.LSTM` over packed sequences.
PACKED_GOAL = 1.1
PACKED = "torch.nn.LSTM, packed in each run"


def sentences_of(many: int, longest: int, hidden: int) -> list[Array]:
    """Sentences of up to `longest` words [1, hidden]."""
    least = min(SHORTEST, longest)
    lengths = np.random.default_rng(0).integers(least, longest + 1, many).tolist()
    return [normal(n, 1, hidden, seed=i) for i, n in enumerate(lengths)]


def network_of(hidden: int) -> Any:
    """What an LSTM says after each word of each sentence."""
    w, u, b = (each[0] for each in lstm_weights(1, hidden))
    zero = np.zeros((1, hidden), np.float32)

    def network(nest: Any) -> Any:
        return ops.map(lambda row: ops.scan(lstm_cell, row, (zero, zero), w=w, u=u, b=b)[0], nest)

    return network


def nest_of(sentences: list[Array]) -> FractalTensor:
    """The sentences as a nest."""
    return FractalTensor([FractalTensor(each) for each in sentences])


def sentences(many: int, longest: int, hidden: int, compiled: bool, small: bool = True) -> Case:
    """So many sentences of 5 to `longest` words."""
    given, weights = sentences_of(many, longest, hidden), lstm_weights(1, hidden)

    def packed(is_packed: bool) -> Run:
        from fractal_ways import torch_peers

        return torch_peers.packed_lstm(given, *weights, is_packed=is_packed)

    return Case(
        f"LSTM over {many} sentences",
        f"{many} sentences of {SHORTEST} to {longest} words, hidden {hidden}",
        network_of(hidden), (nest_of(given),),
        (
            *loop_peers("sentences", given, *(each[0] for each in weights), compiled=compiled),
            Peer(PACKED, lambda: packed(False)),
            Peer("torch.nn.LSTM, packed before", lambda: packed(True)),
        ),
        (*eager_goals(), RatioGoal("PACKED_GOAL", PACKED, PACKED_GOAL)),
        sentences(3, SMALL[1], SMALL[3], False, False) if small else None,
    )  # fmt: skip


def begun(many: int, longest: int, hidden: int) -> Iterator[Figure]:
    """What it takes to compile the network, and the file, with the schedule that is chosen and with
    each by name."""
    network, nest = network_of(hidden), nest_of(sentences_of(many, longest, hidden))
    chosen = ops.compile(network, nest, target=MACHINE, executor=EXECUTOR)
    for schedule in (None, *schedules_for(chosen, EXECUTOR)):
        started = time.process_time()
        compiled = ops.compile(network, nest, target=MACHINE, schedule=schedule, executor=EXECUTOR)
        seconds = time.process_time() - started
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "nest.ttb"
            compiled.save(file)
            size = file.stat().st_size
        name = schedule or "chosen"
        yield Figure(f"{name}: compile", seconds * 1e3, "ms")
        yield Figure(f"{name}: file", size, "bytes")
