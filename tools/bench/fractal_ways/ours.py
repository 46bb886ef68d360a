"""Ours: a case compiled, by each executor, with the schedule that is chosen and with each by name
that some loop takes; in mode parallel; in mode sequential.

Whatever schedules there are is asked of the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import stitch
from fractal_ways.cases import Absent, Case, Run, Way, check_alike, numbers, reason_of
from fractal_ways.measuring import interleaved, once
from fractal_ways.results import NAMED, OURS, SLOW, TRACED, Figure, Row
from stitch import fractal as ops
from stitch.compiler import SCHEDULES, CompileOptions, compile_graph
from stitch.errors import StitchError
from stitch.fractal import CompiledNest
from stitch.program import Array

MACHINE, CHOSEN = "host", "chosen"


def loops_of(nest: CompiledNest) -> str:
    """The schedules of its loops, the outermost first, each once."""
    return ", ".join(dict.fromkeys(note.schedule for note in nest.loops)) or "no loops"


def schedules_for(chosen: CompiledNest, executor: str) -> Iterator[str]:
    """The schedules that some loop of a network takes when it is asked to, and that make another
    program than the one that is chosen."""
    machine = stitch.machine.load_machine(MACHINE)
    known = [_meaning(chosen.loops)]
    for schedule in SCHEDULES:
        options = CompileOptions(schedule=schedule, executor=executor)
        loops = compile_graph(chosen.graph, machine, options).loops
        if any(note.schedule == schedule for note in loops) and _meaning(loops) not in known:
            known.append(_meaning(loops))
            yield schedule


def _meaning(loops: Any) -> list[tuple[str, int, str]]:
    return [(note.where, note.count, note.schedule) for note in loops]


def ways_of(
    case: Case, executors: Sequence[str], stack: ExitStack
) -> Iterator[tuple[Way, Array] | Absent]:
    """Each way with its result; refusals with their reason."""
    for executor in executors:
        words: dict[str, Any] = {"target": MACHINE, "executor": executor}
        chosen = ops.compile(case.network, *case.given, **words)
        named = [s for s in schedules_for(chosen, executor) if s not in case.too_slow]
        for schedule in (None, *named):
            name = f"stitch {executor}, {schedule or CHOSEN}"
            try:
                nest = ops.compile(case.network, *case.given, schedule=schedule, **words)
                nest.on(stack.enter_context(stitch.open_device(MACHINE, executor=executor)))
                run = _read(nest, case.given)
                side = OURS if schedule is None else NAMED
                yield Way(name, side, run, loops_of(nest)), numbers(run())
            except StitchError as error:
                yield Absent(name, reason_of(error))
    device = stack.enter_context(stitch.open_device(MACHINE, executor=executors[0]))
    run = _in_mode("parallel", case, device)
    name = f"stitch {executors[0]}, in mode parallel"
    try:
        yield Way(name, TRACED, run), numbers(run())
    except StitchError as error:
        yield Absent(name, reason_of(error))


def beside_sequential(case: Case, rounds: int) -> tuple[list[Row], Figure]:
    """A small case one operation after the other, once, and compiled, on NumPy; raises
    `AssertionError` where they differ."""
    with ExitStack() as stack:
        device = stack.enter_context(stitch.open_device(MACHINE, executor="numpy"))
        found: list[Array] = []
        slow = _in_mode("sequential", case, device)
        spent = once(lambda: found.append(numbers(slow())))
        nest = ops.compile(case.network, *case.given, target=MACHINE)
        nest.on(device)
        run = _read(nest, case.given)
        check_alike(f"{case.name}, sequential", found[0], numbers(run()))
        (fast,) = interleaved([run], rounds)
    rows = [
        Row.of(f"mode sequential, once, {case.text}", SLOW, spent),
        Row.of(f"compiled, numpy, {case.text}", SLOW, fast, loops_of(nest)),
    ]
    ratio = spent.processor / max(fast.processor, 1e-9)
    return rows, Figure("mode sequential / compiled, small", ratio, "x")


def _read(nest: CompiledNest, given: tuple[Any, ...]) -> Run:
    """A call whose numbers are read: what nobody reads is never computed."""
    return lambda: [_leaves(part) for part in _several(nest(*given))]


def _in_mode(mode: str, case: Case, device: Any) -> Run:
    def run() -> Any:
        with ops.mode(mode, device=device):
            return [_leaves(part) for part in _several(case.network(*case.given))]

    return run


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _leaves(value: Any) -> Any:
    return value.leaves() if isinstance(value, ops.FractalTensor) else value.numpy()
