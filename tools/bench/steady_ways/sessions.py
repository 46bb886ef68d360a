"""Ours beside ONNX Runtime's bound sessions, one a program: no copy enters or leaves those."""

from __future__ import annotations

from collections.abc import Iterator

import stitch
from steady_ways.measuring import Effort, Pass, Row, absent, interleaved, passes_of, ratio
from steady_ways.subjects import (
    MACHINE,
    by_hand,
    check,
    expected,
    in_turn,
    inputs,
    load,
    one_by_one,
    onnx_bound,
)

#: By programs: what `pipe(x)`, `pipe(x).numpy()` and calls may take of a bound session each.
GOALS = {2: (0.75, 0.85, 1.5), 64: (0.75, 0.85, 0.7)}
NAMES = ("pipe(x)", "pipe(x).numpy()", "c(b(a(x))).numpy()")


def rows(effort: Effort) -> Iterator[Row]:
    """The three ways for each length."""
    for length, goals in GOALS.items():
        named = [f"{name} ÷ ONNX Runtime bound, {length} programs" for name in NAMES]
        try:
            peer = onnx_bound(length)
        except ImportError as error:
            for name, goal in zip(named, goals, strict=True):
                yield absent(name, goal, f"{error.name} is not installed")
            continue
        yield from measured(length, named, goals, peer, effort)


def measured(
    length: int, names: list[str], goals: tuple[float, ...], peer: Pass, effort: Effort
) -> Iterator[Row]:
    """The rows of one length."""
    with stitch.open_device(MACHINE) as device:
        programs = load(device, length)
        unread, read, x = stitch.Pipeline(programs), stitch.Pipeline(programs), in_turn()
        hand, calls = by_hand(length), one_by_one(programs)

        for way in (unread, read, calls):
            check(way(inputs()[0]), expected(length, 0))
        ways: dict[str, Pass] = {
            names[0]: lambda: unread(x()), names[1]: lambda: read(x()).numpy(),
            names[2]: lambda: calls(x()).numpy(), "peer": peer, "hand": lambda: hand(x()),
        }  # fmt: skip
        times = interleaved(ways, passes_of(length, effort), effort)
    least = min(times["hand"]) / min(times["peer"])
    for name, goal in zip(names, goals, strict=True):
        yield ratio(name, times[name], times["peer"], goal, f"NumPy by hand: {least:.2f}")
