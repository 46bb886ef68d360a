"""What it costs that torch runs an operator in the middle of a graph of torch.compile.

`fallback`: two multilayer perceptrons with an operator between that Stitch lacks, one graph:
two programs, torch's operator between. `halves`: the same as two functions that are compiled each
by itself, the operator called between them. `whole`: with an operator that Stitch has, one program.
`eager`, `eager whole`: the same two by torch. What a fallback costs is what `fallback` takes above
`whole`, less what `eager` takes above `eager whole`: there it is the operator alone. Then, for
parts of `--parts` operations between two such operators, what a call takes where a program runs the
part and where torch does: `min_operations` is where both are equal. Calls are taken by turns, one
at a time; printed is the least of all, in microseconds. `--check` exits 1 where a fallback costs
more than 10 us.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

# Before NumPy and torch are loaded: threads would measure the machine's other work.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import torch
from command_line import bench_parser, exit_code_for, from_one, several_from_one

#: Microseconds that a fallback may cost.
MOST_US = 10.0
lacking = torch.special.i0


def least(ways: Mapping[str, Callable[[Any], object]], x: Any, calls: int) -> dict[str, float]:
    """Microseconds that one call takes at least, by way."""
    best = dict.fromkeys(ways, float("inf"))
    with torch.no_grad():
        for number in range(calls + 50):
            for name, run in ways.items():
                began = time.perf_counter()
                run(x)
                spent = (time.perf_counter() - began) * 1e6
                if number >= 50:  # The first calls compile and plan.
                    best[name] = min(best[name], spent)
    return best


def compiled(function: Callable[..., Any], least_operations: int = 1) -> Callable[..., Any]:
    """A function compiled by Stitch."""
    options = {"min_operations": least_operations}
    return torch.compile(function, backend="stitch", options=options)  # type: ignore[no-any-return]  # torch has no types here


def in_the_middle(calls: int, width: int) -> dict[str, float]:
    """The ways to run two perceptrons with an operator between."""
    first, second = (
        torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
        )
        for _ in range(2)
    )

    def function(x: Any) -> Any:
        return second(lacking(first(x)))

    before, after = compiled(lambda x: first(x)), compiled(lambda x: second(x))
    ways: dict[str, Callable[[Any], object]] = {
        "fallback": compiled(function),
        "halves": lambda x: after(lacking(before(x))),
        "whole": compiled(lambda x: second(torch.sin(first(x)))),
        "eager": function,
        "eager whole": lambda x: second(torch.sin(first(x))),
    }
    return least(ways, torch.rand(8, width), calls)


def part_of(operations: int) -> Callable[[Any], Any]:
    """A function whose part between two operators that Stitch lacks has so many operations."""
    kinds: tuple[Callable[[Any], Any], ...] = (
        lambda x: x * 1.01, torch.sin, lambda x: x + 0.1, torch.relu
    )  # fmt: skip

    def function(x: Any) -> Any:
        x = lacking(x)
        for number in range(operations):
            x = kinds[number % 4](x)
        return lacking(x)

    return function


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 where a goal is missed."""
    parser = bench_parser(__doc__)
    parser.add_argument("--width", type=from_one, default=64)
    parser.add_argument("--parts", type=several_from_one, default=(1, 2, 4, 6, 8, 10, 12))
    parser.add_argument("--calls", type=from_one, default=2000)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    middle = in_the_middle(options.calls, options.width)
    x = torch.rand(options.width)
    parts = {}
    for count in options.parts:
        torch._dynamo.reset()  # One function is compiled a few times only.
        ways = {"program": compiled(part_of(count)), "torch": compiled(part_of(count), count + 1)}
        parts[count] = least(ways, x, options.calls)
    if options.json:
        print(json.dumps({"middle": middle, "parts": parts}, indent=2))
    else:
        for name, spent in middle.items():
            print(f"{name:12} {spent:7.1f} us")
        for count, row in parts.items():
            mine, theirs = row["program"], row["torch"]
            print(f"a part of {count:2}: {mine:6.1f} us a program, {theirs:6.1f} torch")
    cost = middle["fallback"] - middle["whole"] - middle["eager"] + middle["eager whole"]
    if not options.json:
        print(f"a fallback costs {cost:.1f} us")
    missed = [f"a fallback costs {cost:.1f} us"] if cost > MOST_US else []
    return exit_code_for(missed, check=options.check)


if __name__ == "__main__":
    sys.exit(main())
