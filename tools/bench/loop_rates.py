"""What loops take by each executor on this machine: the figures `loops` of its description.

For each executor of `--executors` small scans run, which differ in one thing alone: more rounds,
more additions, more loops, more elements of sequences, more parts moved, more functions of several
steps, more products. A rate is what one more of it takes, of the processor, the least of `--tries`.
Printed is the section as a machine's YAML has it, with this processor as its source: copy it into a
description of your own, `--target mine.yaml`, or into `stitch/machine/host.yaml`.

The caches (`near_nbytes` and the two rates of bytes) are the machine's, whoever computes, and are
not measured here. One process, one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
from command_line import from_one, refused

import stitch
from stitch.errors import StitchError, UsageError
from stitch.graph import ComputationGraphBuilder, scan
from stitch.machine import LOOP_EXECUTORS
from stitch.program import Array

MACHINE = "host"
#: The executor `cuda` needs a card, and unrolls what is measured here.
MEASURED = tuple(executor for executor in LOOP_EXECUTORS if executor != "cuda")
#: Where what only moves elements is a view: known of how they are built, not measured.
WITH_VIEWS = ("numpy",)
#: Where a round's elements are copied out of their sequences: known likewise.
WITH_COPIES = ("numpy",)
#: Elements of what is added, moved, or a function of.
WIDTH = 8
#: Rows, columns, columns of what is made, how many at a time: the products of an LSTM's cell.
ROWS, WIDE, WIDER, LANES = 16, 64, 256, 8
#: How many more of a thing are in the longer of two bodies.
MORE = 8
#: Rounds of the loops that a round begins.
LOOPED = 2
#: Rounds of bodies of products, as a part of others'.
FEWER_ROUNDS = 8
#: Seconds that nothing takes less than: too few rounds or tries can say so.
LEAST = 1e-9

#: A round's states and elements, what all rounds share → the states after.
Step = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Body:
    """A scan: its first state, the form of its elements, what its rounds share (`is_constant`: part
    of the program, else given), and its step."""

    state: Array
    step: Step
    elements: int = 0
    shared: tuple[Array, ...] = ()
    is_constant: bool = True
    part: int = 1


def _added(many: int, elements: int = 0) -> Body:
    def step(states: Any, given: Any, shared: Any) -> Any:
        total = states[0]
        for number in range(many):
            total = total + (given[number] if given else shared[0])
        return [total]

    return Body(np.zeros(WIDTH, np.float32), step, elements, (np.ones(WIDTH, np.float32),))


def _moved(many: int) -> Body:
    def step(states: Any, _: Any, __: Any) -> Any:
        (x,) = states
        for _ in range(many):
            a, b = np.split(x, 2, axis=0)
            x = x.builder.concat([b, a], 0)
        return [x]

    return Body(np.zeros((WIDTH, WIDTH), np.float32), step)


def _functions(many: int) -> Body:
    def step(states: Any, _: Any, __: Any) -> Any:
        (x,) = states
        for _ in range(many):
            x = x.builder.sigmoid(x)
        return [x]

    return Body(np.zeros(WIDTH, np.float32), step)


def _loops(many: int) -> Body:
    """Loops of `LOOPED` rounds, each an addition."""

    def step(states: Any, _: Any, shared: Any) -> Any:
        (x,) = states
        for _ in range(many):
            (x,), _ = scan(
                x.builder, lambda s, _: ([s[0] + shared[0]], []), [x], [], count=LOOPED
            )  # fmt: skip
        return [x]

    return Body(np.zeros(WIDTH, np.float32), step, 0, (np.ones(WIDTH, np.float32),))


def _products(many: int, *, lanes: int, width: int, wider: int, is_constant: bool) -> Body:
    """Products there and back, `lanes` at a time (0: matrices alone)."""
    around = (lanes,) if lanes else ()
    there = np.full((*around, width, wider), 1 / width, np.float32)
    back = np.full((*around, wider, width), 1 / wider, np.float32)

    def step(states: Any, _: Any, shared: Any) -> Any:
        (x,) = states
        for _ in range(many):
            x = x @ shared[0] @ shared[1]
        return [x]

    state = np.ones((*around, ROWS if width > WIDTH else width, width), np.float32)
    part = FEWER_ROUNDS if width > WIDTH else 1
    return Body(state, step, 0, (there, back), is_constant, part)


def _program(body: Body, count: int) -> tuple[Any, tuple[Array, ...]]:
    """The scan as a graph, and what it is given."""
    builder = ComputationGraphBuilder("rates")
    state = builder.input("state", body.state.shape, "float32")
    given, shared = [body.state], []
    for number, array in enumerate(body.shared):
        if body.is_constant:
            shared.append(builder.parameter(f"shared_{number}", array))
        else:
            shared.append(builder.input(f"shared_{number}", array.shape, "float32"))
            given.append(array)
    sequences = []
    for number in range(body.elements):
        # Part of the program: what is given is copied at each call, which would count as well.
        data = np.full((count, *body.state.shape), number, np.float32)
        sequences.append(builder.parameter(f"xs_{number}", data))
    (last,), _ = scan(
        builder, lambda s, x: (body.step(s, x, shared), []), [state], sequences, count=count
    )
    builder.output("last", last)
    return builder.build(), tuple(given)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two lengths of one scan on a device: a round takes what they differ by."""

    short: Callable[[], Any]
    long: Callable[[], Any]
    rounds: int

    def seconds(self, tries: int) -> float:
        """Of one round."""
        least = [min(_spent(run) for _ in range(tries)) for run in (self.short, self.long)]
        return max(0.0, least[1] - least[0]) / self.rounds


def _spent(run: Callable[[], Any]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def _numbers(program: Any, given: tuple[Array, ...]) -> Any:
    return program(*given).numpy()


def _pair(device: Any, body: Body, count: int) -> _Pair:
    runs = []
    rounds = max(8, count // body.part)
    for length in (rounds, 2 * rounds):
        graph, given = _program(body, length)
        program = device.load(stitch.compile(graph, target=MACHINE, schedule="rounds"))
        runs.append(partial(_numbers, program, given))
    for run in runs:
        run()
    return _Pair(runs[0], runs[1], rounds)


def _bodies() -> Iterator[tuple[str, Body]]:
    """Each thing once, and `MORE` times more."""
    tiny = partial(_products, lanes=LANES, width=WIDTH // 2, wider=WIDTH // 2, is_constant=False)
    wide = partial(_products, width=WIDE, wider=WIDER)
    for name, make in (
        ("added", _added), ("loops", _loops), ("moved", _moved), ("functions", _functions),
        ("elements", lambda n: _added(n, n)),
        ("matrices", tiny),
        ("products", partial(wide, lanes=LANES, is_constant=False)),
        ("packed", partial(wide, lanes=0, is_constant=True)),
    ):  # fmt: skip
        yield f"{name} 1", make(1)
        yield f"{name} more", make(1 + MORE)


def rates(executor: str, count: int, tries: int) -> dict[str, float]:
    """The rates of one executor."""
    with ExitStack() as stack:
        device = stack.enter_context(stitch.open_device(MACHINE, executor=executor))
        spent = {name: _pair(device, body, count).seconds(tries) for name, body in _bodies()}

    def one_more(name: str) -> float:
        return max(0.0, spent[f"{name} more"] - spent[f"{name} 1"]) / MORE

    operation = one_more("added")
    flops = 2 * 2 * ROWS * WIDE * WIDER
    round_ = max(0.0, spent["added 1"] - operation)
    return {
        "loop_seconds": max(0.0, one_more("loops") - LOOPED * (round_ + operation)),
        "round_seconds": round_,
        "element_seconds": max(0.0, one_more("elements") - operation),
        "operation_seconds": operation,
        "function_seconds": one_more("functions"),
        # A Split and a Concat.
        "movement_seconds": one_more("moved") / 2,
        "matrix_seconds": max(0.0, one_more("matrices") / 2 - operation) / LANES,
        "flops_per_second": LANES * flops / max(LEAST, one_more("products") - 2 * operation),
        "packed_flops_per_second": flops / max(LEAST, one_more("packed") - 2 * operation),
    }


def processor() -> str:
    """This machine's, as its system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def section(found: dict[str, dict[str, float]]) -> str:
    """What was measured as YAML."""
    source = f"measured by tools/bench/loop_rates.py, {processor()}"
    lines = ["loops:"]
    for executor, figures in found.items():
        lines.append(f"  {executor}:")
        lines.append(f"    has_views: {str(executor in WITH_VIEWS).lower()}")
        lines.append(f"    copies_elements: {str(executor in WITH_COPIES).lower()}")
        lines += [f"    {name}: {_number(value)}" for name, value in figures.items()]
        lines.append(f'    source: "{source}"')
    return "\n".join(lines)


def _number(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent):+d}" if value else "0"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executors", default=",".join(MEASURED))
    parser.add_argument("--count", type=from_one, default=1024, help="rounds of the shorter scans")
    parser.add_argument("--tries", type=from_one, default=9)
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    options = parser.parse_args(arguments)
    found: dict[str, dict[str, float]] = {}
    try:
        for executor in options.executors.split(","):
            if executor not in MEASURED:
                raise UsageError(
                    f"no rates are kept for an executor {executor!r}",
                    expected=", ".join(MEASURED),
                )
            found[executor] = rates(executor, options.count, options.tries)
    except StitchError as error:
        return refused("loop_rates.py", error)
    print(json.dumps(found, indent=2) if options.json else section(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
