#!/usr/bin/env python3
"""How fast a `.ttb` opens: time against operations, and against bytes of constants.

Each figure is open + verify + decode, the minimum of several runs; small and large constants are
interleaved. Goals:
a program of 10,000 operations in 300 ms; a file with 500 MB of constants at most 5 ms slower than
one with 1 MB; and with all segments' checksums tested, at least 0.3 GB/s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from command_line import above_zero, bench_parser, exit_code_for, from_one

from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import (
    AttributeValue,
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    ValueType,
)
from stitch.ttb import Binary, load, save

F32 = DataType.FLOAT32
MACHINE = MachineShape("bench", (8, 8), SpaceShape(1, 0, 2**40, 64), SpaceShape(64, 0, 2**20, 16))


def value(name: str, shape: tuple[int, ...], layout: Layout | None = None) -> Value:
    return Value(name, ValueType(shape, F32), layout or Layout(F32))


def program_of_operations(count: int) -> Binary:
    """A chain of operations, each with attributes, a location, and a value at its own address."""
    values = [value("x", (8, 16))]
    operations = []
    for i in range(count):
        home = Layout(F32, Space.L1, address=64 * i) if i % 2 else Layout(F32)
        values.append(value(f"value_{i}", (8, 16 + i % 7), home))
        attributes: dict[str, AttributeValue] = {"axis": i % 4, "perm": (0, 1, 2)}
        operations.append(
            Operation("Transpose", (i,), (i + 1,), attributes, location=f"model.py:{i}")
        )
    program = Program(
        "main", (InputSlot("x", 0),), (OutputSlot("y", count),), tuple(values),
        tuple(operations), (), Scratch(Space.HOST, 0),
    )  # fmt: skip
    return Binary((program,), MACHINE, "bench")


def program_of_constants(nbytes: int, count: int = 16) -> Binary:
    """One operation over constants of so many bytes in all."""
    shape = (max(1, nbytes // count // 4),)
    held = [np.full(shape, i, np.float32) for i in range(count)]
    names = ["x", *(f"weight_{i}" for i in range(count)), "y"]
    program = Program(
        "main",
        (InputSlot("x", 0),),
        (OutputSlot("y", count + 1),),
        tuple(value(name, shape) for name in names),
        (Operation("Sum", tuple(range(count + 1)), (count + 1,)),),
        tuple(Constant(i + 1, data) for i, data in enumerate(held)),
        Scratch(Space.HOST, 0),
    )
    return Binary((program,), MACHINE, "bench")


def fastest(paths: dict[str, Path], runs: int) -> dict[str, float]:
    """The least seconds of `load` for each file; one run of each in turn."""
    best = dict.fromkeys(paths, float("inf"))
    for _ in range(runs):
        for name, path in paths.items():
            before = time.perf_counter()
            binary = load(path)
            best[name] = min(best[name], time.perf_counter() - before)
            del binary  # Freeing it is not part of the next figure.
    return best


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, float]:
    """All figures, in milliseconds unless their name says otherwise."""
    paths = {name: folder / f"{name}.ttb" for name in ("operations", "small", "large")}
    save(program_of_operations(arguments.operations), paths["operations"])
    save(program_of_constants(int(arguments.small_mb * 1e6)), paths["small"])
    before = time.perf_counter()
    large = program_of_constants(int(arguments.large_mb * 1e6))
    save(large, paths["large"])
    save_seconds = time.perf_counter() - before
    constants = {name: paths[name] for name in ("small", "large")}
    best = fastest(constants, arguments.runs)
    best |= fastest({"operations": paths["operations"]}, arguments.runs)
    before = time.perf_counter()
    load(paths["large"], verify="full")
    full_seconds = time.perf_counter() - before
    return {
        "operations_ms": best["operations"] * 1e3,
        "operations_file_mb": paths["operations"].stat().st_size / 1e6,
        "small_ms": best["small"] * 1e3,
        "large_ms": best["large"] * 1e3,
        "large_minus_small_ms": (best["large"] - best["small"]) * 1e3,
        "large_over_small": best["large"] / best["small"],
        "build_and_save_large_s": save_seconds,
        "full_verification_gb_per_s": arguments.large_mb / 1e3 / full_seconds,
    }


def missed(figures: dict[str, float], operations: int) -> list[str]:
    """The goals that were not reached; the time for operations scales with their number."""
    goals = (
        ("operations_ms", figures["operations_ms"] <= 300 * max(1.0, operations / 10_000)),
        ("large_minus_small_ms", figures["large_minus_small_ms"] <= 5),
        ("full_verification_gb_per_s", figures["full_verification_gb_per_s"] >= 0.3),
    )
    return [name for name, reached in goals if not reached]


def main(words: list[str] | None = None) -> int:
    """Measure, print; with `--check` the exit code says whether every goal was reached."""
    parser = bench_parser(__doc__)
    parser.add_argument("--operations", type=from_one, default=10_000)
    parser.add_argument("--small-mb", "--small_mb", type=above_zero, default=1)
    parser.add_argument("--large-mb", "--large_mb", type=above_zero, default=500)
    parser.add_argument("--runs", type=from_one, default=9)
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder))
    late = missed(figures, arguments.operations)
    if arguments.json:
        print(json.dumps({**figures, "missed": late}))
    else:
        for name, figure in figures.items():
            print(f"{name:28} {figure:10.3f}")
    return exit_code_for(late, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
