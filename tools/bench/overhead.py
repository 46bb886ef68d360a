"""What a stitched pass costs beyond its kernels: chains of tiny programs beside NumPy by hand.

Each program is one Gemm and one Relu on a row of `--width` numbers, compiled by itself. A chain of
them runs in three ways, one after the other in every round, in one process and on one thread:

* `hand`: the least that NumPy can do: `np.dot`, `np.add`, `np.maximum`, all with `out=` on buffers
  that exist before, weights contiguous, biases already as large as what they are added to;
* `pipeline`: `stitch.Pipeline(programs)(x)`, a handle on a result that is ready;
* `calls`: `c(b(a(x))).numpy()`, a future for every call, and the result copied out.

`hand` gets an array per pass that it neither copies in nor out; both others take a fresh, writable
array each pass, as users have it. All three results are compared first. Printed are the least times
over many short rounds, in microseconds per pass, and their ratios: other work on the machine
disturbs the least times least. `--json` adds the medians of the ratios of each round, in which
everything counts, the machine's other work too. `--check` exits 1 where `pipeline` takes more than
1.3 times as long as `hand`, where that ratio grows from the shortest chain to the longest, or where
`calls` costs more than 10 us a program beyond `hand`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

# Before NumPy is loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
from command_line import bench_parser, exit_code_for, from_one, refused, several_from_one

import stitch
from stitch import ComputationGraphBuilder, DataType
from stitch.errors import StitchError
from stitch.machine import load_machine
from stitch.program import Array

PIPELINE_GOAL = 1.3
CALLS_GOAL_US = 10.0
#: Noise that the ratio to hand may rise by from the shortest chain to the longest.
FLAT = 1.1
#: Keeps values within bounds over 64 layers.
SCALE = 0.15
#: About how many programs run in one timed stretch: fewer than the system lets run in one go.
STRETCH = 256

Layer = tuple[Array, Array]
Pass = Callable[[Array], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One chain: microseconds per pass, and what they make per program."""

    machine: str
    programs: int
    width: int
    batch: int
    hand_us: float
    pipeline_us: float
    calls_us: float
    pipeline_ratio: float
    calls_ratio: float
    pipeline_median_ratio: float
    calls_median_ratio: float
    pipeline_us_per_program: float
    calls_over_hand_us_per_program: float


def make_layers(count: int, width: int) -> list[Layer]:
    """Weights [width, width] and biases [width]."""
    random = np.random.default_rng(0)
    return [
        (
            random.standard_normal((width, width), dtype=np.float32) * np.float32(SCALE),
            random.standard_normal(width, dtype=np.float32),
        )
        for _ in range(count)
    ]


def compile_layer(number: int, layer: Layer, batch: int, machine: str) -> stitch.CompiledModel:
    """One Gemm and one Relu, as a binary of its own."""
    builder = ComputationGraphBuilder(f"layer{number}")
    x = builder.input("x", (batch, layer[0].shape[0]), DataType.FLOAT32)
    w, b = builder.parameter("w", layer[0]), builder.parameter("b", layer[1])
    builder.output("y", builder.op("Relu", builder.op("Gemm", x, w, b)))
    return stitch.compile(builder.build(), target=machine)


def by_hand(layers: Sequence[Layer], batch: int) -> Pass:
    """The same arithmetic, prepared as well as NumPy allows."""
    width = layers[0][0].shape[0]
    steps = [
        (
            np.ascontiguousarray(w),
            np.ascontiguousarray(np.broadcast_to(b, (batch, width))),
            np.empty((batch, width), np.float32),
            np.empty((batch, width), np.float32),
        )
        for w, b in layers
    ]
    dot, add, maximum = np.dot, np.add, np.maximum
    # An array without dimensions: ufuncs convert Python's and NumPy's scalars on every call.
    zero = np.zeros((), np.float32)

    def run(x: Array) -> Array:
        for w, b, h, o in steps:
            dot(x, w, out=h)
            add(h, b, out=h)
            maximum(h, zero, out=o)
            x = o
        return x

    return run


def one_by_one(programs: Sequence[stitch.LoadedProgram]) -> Pass:
    """Every program called by itself; the result on the host."""

    def run(x: Array) -> Array:
        value: object = x
        for program in programs:
            value = program(value)
        result: Array = value.numpy()  # type: ignore[attr-defined]  # programs give tensors
        return result

    return run


def measure(machine: str, count: int, width: int, batch: int, rounds: int) -> Row:
    """One chain in all three ways; raises if the results differ."""
    layers = make_layers(count, width)
    x = np.random.default_rng(1).standard_normal((batch, width), dtype=np.float32)
    with stitch.open_device(machine, window=max(64, count)) as device:
        programs = [
            device.load(compile_layer(i, layer, batch, machine)) for i, layer in enumerate(layers)
        ]
        ways = (by_hand(layers, batch), stitch.Pipeline(programs), one_by_one(programs))
        expected = np.array(ways[0](x))
        for way in ways[1:]:
            for _ in range(3):
                found = np.asarray(way(x))
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        times = interleaved(ways, x, max(4, STRETCH // count), rounds)
    hand, pipeline, calls = (min(found) * 1e6 for found in times)
    medians = [median(b / a for a, b in zip(times[0], t, strict=True)) for t in times[1:]]
    return Row(
        machine, count, width, batch, hand, pipeline, calls, pipeline / hand, calls / hand,
        medians[0], medians[1], pipeline / count, (calls - hand) / count,
    )  # fmt: skip


def interleaved(
    ways: Sequence[Pass], x: Array, passes: int, rounds: int
) -> tuple[list[float], ...]:
    """Seconds per pass of each way in each round; every round begins with another way."""
    times: tuple[list[float], ...] = tuple([] for _ in ways)
    for number in range(rounds + 1):
        for turn in range(len(ways)):
            chosen = (number + turn) % len(ways)
            way = ways[chosen]
            started = time.perf_counter()
            for _ in range(passes):
                way(x)
            spent = (time.perf_counter() - started) / passes
            if number:  # The first round warms up.
                times[chosen].append(spent)
    return times


def missed_goals(rows: Sequence[Row]) -> list[str]:
    """What `--check` complains of."""
    missed = []
    for row in rows:
        if row.pipeline_ratio > PIPELINE_GOAL:
            missed.append(f"{row.programs} programs: pipeline at {row.pipeline_ratio:.2f} x hand")
        if row.calls_over_hand_us_per_program > CALLS_GOAL_US:
            spent = row.calls_over_hand_us_per_program
            missed.append(f"{row.programs} programs: calls {spent:.1f} us a program over hand")
    first, last = min(rows, key=lambda r: r.programs), max(rows, key=lambda r: r.programs)
    if last.pipeline_ratio > FLAT * first.pipeline_ratio:
        missed.append(
            f"a pipeline of {last.programs} takes {last.pipeline_ratio:.2f} x hand, "
            f"one of {first.programs} {first.pipeline_ratio:.2f} x: its cost grows"
        )
    return missed


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; see the module's docstring for the exit code."""
    parser = bench_parser(__doc__)
    parser.add_argument(
        "--chains", type=several_from_one, default=(2, 8, 64), help="2,8,64: numbers of programs"
    )
    parser.add_argument("--width", type=from_one, default=64)
    parser.add_argument("--batch", type=from_one, default=1)
    parser.add_argument("--machine", default="wormhole_n150")
    parser.add_argument("--rounds", type=from_one, default=301)
    options = parser.parse_args(arguments)
    try:
        load_machine(options.machine)
    except StitchError as error:
        return refused("overhead.py", error)
    rows = [
        measure(options.machine, count, options.width, options.batch, options.rounds)
        for count in options.chains
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(f"{options.machine}, batch {options.batch}, width {options.width}; us per pass")
        print("programs     hand  pipeline     x  (each)     calls     x  (each over hand)")
        for row in rows:
            print(
                f"{row.programs:8} {row.hand_us:8.2f} {row.pipeline_us:9.2f} "
                f"{row.pipeline_ratio:5.2f} {row.pipeline_us_per_program:8.2f} "
                f"{row.calls_us:9.2f} {row.calls_ratio:5.2f} "
                f"{row.calls_over_hand_us_per_program:18.2f}"
            )
    return exit_code_for(missed_goals(rows), check=options.check)


if __name__ == "__main__":
    sys.exit(main())
