"""Every way of holding results, over pipelines of every length and windows of every size.

How a result is held may not change what a pass costs, nor may anything that is held ever change.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import stitch
from steady_ways.measuring import (
    Effort,
    Pass,
    Row,
    Times,
    counts_of,
    interleaved,
    passes_of,
    ratio,
)
from steady_ways.subjects import (
    INPUTS,
    MACHINE,
    check,
    expected,
    in_turn,
    inputs,
    load,
    two_output_model,
)

GOAL, GOAL_PER_PROGRAM, GOAL_KEPT_US, GOAL_KEPT_GROWTH = 2.0, 1.2, 20.0, 1.2
#: Places of the way that holds at random.
SLOTS = 20
ALL, FEEDBACK = "all", "feedback"
#: A call of ours.
Call = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Holder:
    """A way of holding: what a pass does with its result, and what is held of all."""

    hold: Callable[[Any], object]
    held: Callable[[], Sequence[Any]]
    forget: Callable[[], object]


def in_a_ring(size: int | None) -> Holder:
    """The last so many results; all, if there is no number."""
    ring: deque[Any] = deque(maxlen=size)
    return Holder(ring.append, lambda: list(ring), ring.clear)


def at_random() -> Holder:
    """Each result in one of some places, drawn at random."""
    slots: dict[int, Any] = {}
    drawn = Random(0).randrange

    def hold(result: Any) -> None:
        slots[drawn(SLOTS)] = result

    return Holder(hold, lambda: list(slots.values()), slots.clear)


def in_a_name(index: int | None = None) -> Holder:
    """`y = pipe(x)`; with an index `y, _ = pipe(x)`."""
    name: dict[str, Any] = {}

    def hold(result: Any) -> None:
        name["y"] = result if index is None else result[index]

    return Holder(hold, lambda: list(name.values()), name.clear)


def not_at_all(look: Callable[[Any], object] = lambda result: None) -> Holder:
    """A result that is gone after the pass; perhaps it is looked at."""
    return Holder(look, list, lambda: None)


def holders(effort: Effort) -> dict[str, Holder]:
    """The ways of holding one result, by name; feedback is none of them: it has other inputs."""
    return {
        "unheld": not_at_all(),
        "y =": in_a_name(),
        **{f"ring of {size}": in_a_ring(size) for size in effort.rings},
        ALL: in_a_ring(None),
        "random": at_random(),
        ".numpy()": not_at_all(lambda result: result.numpy()),
    }


def passing(call: Call, holder: Holder) -> Pass:
    """One pass on the next input."""
    x, hold = in_turn(), holder.hold

    def run() -> None:
        hold(call(x()))

    return run


def feeding(call: Call) -> Pass:
    """One pass on the result of the pass before."""
    h = call(inputs()[0])

    def run() -> None:
        nonlocal h
        h = call(h)

    return run


def compare(call: Call, holder: Holder, count: int, passes: int) -> None:
    """Raises unless everything that is held is, long after, what was computed."""
    numbers: dict[int, int] = {}
    for number in range(passes):
        result = call(inputs()[number % INPUTS])
        for handle in result if isinstance(result, tuple) else (result,):
            numbers[id(handle)] = number
        holder.hold(result)
        del result, handle
    for held in holder.held():
        for place, handle in enumerate(held if isinstance(held, tuple) else (held,)):
            check(handle, expected(count, numbers[id(handle)] % INPUTS) * (1 - 2 * place))
    holder.forget()


def rows(effort: Effort) -> Iterator[Row]:
    """For each window and length: slowest over fastest way, what keeping all costs, and growth."""
    for window in effort.windows:
        unheld: dict[int, Times] = {}
        for length in effort.lengths:
            where = f"length {length}, window {window}"
            times, written = one_output(length, window, effort)
            unheld[length], kept = times["unheld"], times.pop(ALL)
            yield slowest_over_fastest(f"holding, slowest ÷ fastest: {where}", times)
            fastest = min(map(min, times.values()))
            over = (min(kept) - fastest) / length * 1e6
            yield Row(f"holding, all kept over fastest: {where}", over, GOAL_KEPT_US, "us a task",
                      False, min(kept) * 1e6, fastest * 1e6)  # fmt: skip
            yield Row(f"planned or written when settled: {where}", written, 0.0,
                      note="" if written is not None else "the device does not tell")  # fmt: skip
        yield from growth(unheld, window)
    times = two_outputs(effort)
    yield slowest_over_fastest("holding, slowest ÷ fastest: two outputs", times)
    for name, index in (("both", None), ("the first", 0)):
        yield from kept_of_two(name, index, times["unheld"], effort)


def slowest_over_fastest(name: str, times: Mapping[str, Times]) -> Row:
    """The row of some ways."""
    fast, *_, slow = sorted(times, key=lambda way: min(times[way]))
    return ratio(name, times[slow], times[fast], GOAL, f"{slow} ÷ {fast}")


def picking(call: Call, index: int | None) -> Call:
    """A call, or one of its results: the others are gone at once."""
    return call if index is None else lambda x: call(x)[index]


def kept_of_two(name: str, index: int | None, unheld: Times, effort: Effort) -> Iterator[Row]:
    """What a pass costs of which both results are kept, or one: many held over a tenth of them, and
    over none."""
    few: list[float] = []
    many: list[float] = []
    stretch = 64  # Some make as many places at once.
    for _ in range(effort.rounds):
        # Another device each time: places of what was held before would be found again.
        with stitch.open_device(MACHINE) as device:
            pipe = stitch.Pipeline([*load(device, 1), device.load(two_output_model())])
            run, held = passing(picking(pipe, index), in_a_ring(None)), 0
            for times, wanted in ((few, effort.kept // 10), (many, effort.kept)):
                for _ in range(wanted - held):
                    run()
                started = time.perf_counter()
                for _ in range(stretch):
                    run()
                times.append((time.perf_counter() - started) / stretch)
                held = wanted + stretch
    yield ratio(f"two outputs, {name} all kept: {effort.kept} ÷ {effort.kept // 10} held",
                tuple(many), tuple(few), GOAL_KEPT_GROWTH)  # fmt: skip
    fastest = min(unheld)
    yield Row(f"holding, all kept over fastest: two outputs, {name}",
              (min(many) - fastest) / 2 * 1e6, GOAL_KEPT_US, "us a task", False,
              min(many) * 1e6, fastest * 1e6)  # fmt: skip


def growth(unheld: Mapping[int, Times], window: int) -> Iterator[Row]:
    """What a program of a chain costs, over one of the shortest chain of several."""
    base = min((length for length in unheld if length > 1), default=1)
    for length in (n for n in unheld if n > base):
        each, short = (tuple(t / n for t in unheld[n]) for n in (length, base))
        name = f"a program, length {length} ÷ length {base}, window {window}"
        yield ratio(name, each, short, GOAL_PER_PROGRAM)


def one_output(length: int, window: int, effort: Effort) -> tuple[dict[str, Times], float | None]:
    """Times of all ways on one device, and how often it planned or wrote code meanwhile."""
    with stitch.open_device(MACHINE, window=window) as device:
        programs, ways = load(device, length), holders(effort)
        passes = {name: passing(stitch.Pipeline(programs), way) for name, way in ways.items()}
        passes[FEEDBACK] = feeding(stitch.Pipeline(programs))

        def forget() -> None:
            if len(ways[ALL].held()) >= effort.kept:
                ways[ALL].forget()

        for way in ways.values():
            compare(stitch.Pipeline(programs), way, length, 3 * max(effort.rings) + 1)
        interleaved(passes, 1, replace(effort, rounds=1), forget)
        before = counts_of(device)
        times = interleaved(passes, passes_of(length, effort), replace(effort, warm=0), forget)
        after = counts_of(device)
        for way in ways.values():
            way.forget()
    if before is None or after is None:
        return times, None
    return times, float(sum(after[name] - before[name] for name in before))


def two_outputs(effort: Effort) -> dict[str, Times]:
    """Times of the ways of holding what a pipeline of two outputs gives."""
    ways = {
        "unheld": not_at_all(), "y, _ =": in_a_name(0), "y, z =": in_a_name(),
        **{f"ring of {size}": in_a_ring(size) for size in effort.rings},
        "random": at_random(),
    }  # fmt: skip
    with stitch.open_device(MACHINE) as device:
        programs = [*load(device, 1), device.load(two_output_model())]
        for way in ways.values():
            compare(stitch.Pipeline(programs), way, 2, 3 * max(effort.rings) + 1)
        passes = {name: passing(stitch.Pipeline(programs), way) for name, way in ways.items()}
        times = interleaved(passes, passes_of(2, effort), effort)
        for way in ways.values():
            way.forget()
    return times
