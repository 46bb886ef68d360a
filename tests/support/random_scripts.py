"""Scripts of random use of a device: drawn from a seed, run beside the NumPy model, shrunk.

Uses the public API alone, so that `tools/random_scripts` also runs them on an older tree.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Any

import stitch
from stitch.errors import StitchError
from tests.support.handle_world import STEPS, Planted, World, check_spaces
from tests.support.random_work import ALL_MACHINES, BY_GRANULES, MACHINES, NAMED

Step = tuple[str, tuple[int, ...]]
WINDOWS = (1, 8, 64)
#: Executors that promise equal bits on whole numbers, the usual one more often.
EXECUTORS = ("numpy", "numpy", "numpy", "onnxruntime", "auto", "torch")
STEPS_OF_A_SCRIPT = 40
THREADS = 3
#: Seconds that threads are waited for.
PATIENCE = 60


@dataclass(frozen=True)
class Script:
    """How a device is opened, and the steps of each thread that uses it.

    `closes`: one of several threads closes the device while the others work. `may_fail`: hooks
    raise errors.
    """

    seed: int
    machine: int
    window: int
    executor: str
    debug: bool
    may_fail: bool
    closes: bool
    threads: tuple[tuple[Step, ...], ...]

    @property
    def steps(self) -> int:
        return sum(map(len, self.threads))


@dataclass(frozen=True)
class Outcome:
    """What a script did: calls, copies that ran, and refusals for want of room.

    `copies` is None where their number depends on the turns that threads take.
    """

    passes: int
    copies: int | None
    refused: int


def script(seed: int) -> Script:
    """The script of a seed."""
    draw = Random(seed)
    machine = draw.choice((*NAMED, *range(len(MACHINES)), *BY_GRANULES))
    window, executor = draw.choice(WINDOWS), draw.choice(EXECUTORS)
    debug, may_fail = draw.random() < 0.25, draw.random() < 0.25
    is_threaded, closes, is_long = seed % 8 == 7, draw.random() < 0.5, seed % 100 == 50
    threads = []
    for _ in range(THREADS if is_threaded else 1):
        count = STEPS_OF_A_SCRIPT // (2 if is_threaded else 1)
        steps = [_step(draw, "load", 1) for _ in range(2)]
        steps += [_step(draw, *draw.choice(STEPS)) for _ in range(count)]
        if is_long:
            steps.insert(draw.randrange(count), _step(draw, "hold_long", 1))
        threads.append(tuple(steps))
    return Script(
        seed, machine, window, executor, debug, may_fail, closes and is_threaded, tuple(threads)
    )


def _step(draw: Random, name: str, takes: int) -> Step:
    return name, tuple(draw.randrange(4096) for _ in range(takes))


@contextmanager
def turns_often() -> Iterator[None]:
    """Let threads take turns as often as the interpreter allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run(script: Script, *, opens: Callable[..., stitch.Device] = stitch.open_device) -> Outcome:
    """Run a script; raise `AssertionError`, or what was raised, where a promise is broken."""
    device = opens(
        ALL_MACHINES[script.machine], window=script.window, executor=script.executor,
        debug=script.debug,
    )  # fmt: skip
    try:
        if len(script.threads) > 1:
            return _run_together(script, device)
        return _run_alone(script, device)
    finally:
        device.close()


def _run_alone(script: Script, device: stitch.Device) -> Outcome:
    world = World(script.machine, device=device, may_fail=script.may_fail)
    world.is_alone = True
    seen = [device.statistics()]
    for name, numbers in script.threads[0]:
        world.take(name, numbers)
        seen.append(device.statistics())
    world.take("flush", ())
    check_statistics(seen)
    check_account(device)
    outcome = Outcome(world.passes, device.account().total.copies, world.refused)
    world.end()
    del world
    check_empty(device)
    return outcome


def _run_together(script: Script, device: stitch.Device) -> Outcome:
    """Each thread takes its steps; errors of one may come out of calls of another."""
    worlds = [World(script.machine, device=device, may_fail=True) for _ in script.threads]
    problems: list[BaseException] = []
    ready = threading.Barrier(len(worlds))

    def work(world: World, steps: tuple[Step, ...], closes: bool) -> None:
        try:
            ready.wait(PATIENCE)
            for name, numbers in steps:
                if problems or device.is_closed:
                    return
                world.take(name, numbers)
            if closes:
                device.close()
        except (Planted, StitchError) as error:
            if not (device.is_closed and script.closes):
                problems.append(error)
        except BaseException as error:
            if not (device.is_closed and script.closes):
                problems.append(error)

    threads = [
        threading.Thread(target=work, args=(world, steps, script.closes and not i), daemon=True)
        for i, (world, steps) in enumerate(zip(worlds, script.threads, strict=True))
    ]
    with turns_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "threads hang"
    if problems:
        raise problems[0]
    outcome = Outcome(
        sum(world.passes for world in worlds), None, sum(world.refused for world in worlds)
    )
    for world in worlds:
        if not device.is_closed:
            world.take("flush", ())
        world.end()
    del worlds, world, threads, thread, work
    check_empty(device)
    return outcome


def check_statistics(seen: list[Any]) -> None:
    """Counts of `statistics()` never fall, and each plan that is kept was bound."""
    for before, after in pairwise(seen):
        for name in before.__slots__:
            assert getattr(before, name) <= getattr(after, name), f"{name} fell: {before} {after}"
    assert seen[-1].executables_made <= seen[-1].bindings_made, seen[-1]


def check_account(device: stitch.Device) -> None:
    """The copies and bytes that `account()` adds up are those that the spaces counted."""
    account = device.account()
    counted = (account.total.copies, account.total.nbytes)
    seen = (account.writes_seen, account.nbytes_seen)
    assert counted == seen, f"copies and bytes: {counted}, seen by the spaces: {seen}"


def check_empty(device: stitch.Device) -> None:
    """Raise `AssertionError` if anything is left in a space."""
    check_spaces(device)
    if any(use.buffers for use in device.memory_use().values()):
        gc.collect()
    left = {space.value: use.buffers for space, use in device.memory_use().items() if use.buffers}
    assert not left, f"left behind: {left}"


def shrunk(script: Script, breaks: Callable[[Script], bool], most: int = 400) -> Script:
    """A script of fewer steps that breaks as well: steps are dropped, in ever smaller blocks."""
    size = max(map(len, script.threads))
    while size and most:
        for thread, steps in enumerate(script.threads):
            start = 0
            while start < len(script.threads[thread]) and most:
                steps = script.threads[thread]
                fewer = (*steps[:start], *steps[start + size :])
                threads = (*script.threads[:thread], fewer, *script.threads[thread + 1 :])
                smaller = replace(script, threads=threads)
                most -= 1
                if breaks(smaller):
                    script = smaller
                else:
                    start += size
        size //= 2
    return script
