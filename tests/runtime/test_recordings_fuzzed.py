"""Recordings and leases under random use: what plain NumPy says, nothing held ever changes.

The steps of a `World` and more, which repeat work, hold its results, feed them back, and fail:
every handle that is held has its elements, whoever looks on.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import stitch
from stitch.errors import LayoutError, OutOfMemoryError, StitchError
from stitch.report import ChromeTrace, Recorder
from stitch.runtime import RuntimeDevice
from tests.support.grids import every, in_turn
from tests.support.handle_world import STEPS, World
from tests.support.random_work import BY_GRANULES, MACHINES, NAMED, Work
from tests.support.stitched_models import held_by


class Planted(Exception):
    """What a hook raises."""


class Drill(World):
    """A world whose steps are drawn, with failures and interrupts if it `fails`; a device that
    `forgets` drops its plans all the time."""

    steps = (
        *STEPS, *[("pipe", 2)] * 6, *[("again", 4)] * 3, *[("feed_back", 3)] * 3,
        *[("drop", 1)] * 4, ("duplicate", 1), ("deallocate", 1), ("retain", 1), ("room", 0),
        ("collect", 0), ("account", 0),
    )  # fmt: skip
    #: What is said of a value that was overwritten.
    given_away = "donated to"

    def __init__(
        self, machine: int, seed: int, *, window: int, debug: bool, fails: bool = False,
        forgets: bool = False, device: RuntimeDevice | None = None,
    ) -> None:  # fmt: skip
        super().__init__(machine, window=window, debug=debug, device=device)
        self.draw, self.fails, self.forgets = random.Random(seed), fails, forgets
        self.pipelines: list[tuple[stitch.Pipeline, list[Work]]] = []
        #: Program runs until a hook raises.
        self.fuse: int | None = None
        self.error: type[BaseException] = Planted

    def drill(self) -> None:
        if self.fails and self.draw.random() < 0.08:
            self.fuse = self.draw.randrange(4)
            self.error = self.draw.choice([Planted, KeyboardInterrupt])
        if self.forgets and self.draw.random() < 0.3:
            self.device.make_room()
        name, takes = self.draw.choice(self.steps)
        try:
            getattr(self, name)(*(self.draw.randrange(64) for _ in range(takes)))
        except (Planted, KeyboardInterrupt):
            pass
        except (OutOfMemoryError, LayoutError):
            self.refused += 1
        except StitchError:
            # Queued work that was hit earlier.
            if not self.fails:
                raise
        self.held = [h for h in self.held if h.tensor.is_allocated]
        self.check()

    def burn(self, context: object) -> None:
        """Called before each program when failures are planted."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                raise self.error("planted")

    def look(self, tensor: stitch.Tensor, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(tensor.numpy(), expected)

    # -- steps -----------------------------------------------------------------------------------

    def pipe(self, which: int, count: int) -> None:
        """A pipeline of loaded programs that fit, on an array."""
        if len(self.pipelines) < 4:
            self.load(which)
            able = [(w, p) for w, p in self.loaded if len(w.inputs) == len(w.reads) == 1]
            first = able[which % len(able)][0].inputs if able else ()
            fitting = [(w, p) for w, p in able if w.inputs == first]
            if not fitting:
                return
            stages = [fitting[(which + i) % len(fitting)] for i in range(1 + count % 4)]
            pipeline = stitch.Pipeline([program for _, program in stages])
            self.pipelines.append((pipeline, [what for what, _ in stages]))
        pipeline, works = self.pipelines[which % len(self.pipelines)]
        x = self.array(works[0].inputs[0])
        with self.attempt():
            self.hold(pipeline(x), self.through(works, x))
        if which % 7 == 0:
            self.pipelines.pop(0)

    @staticmethod
    def through(works: list[Work], x: np.ndarray) -> np.ndarray:
        for what in works:
            (x,) = what.results([x])
        return x

    def again(self, which: int, ring: int, times: int, looks: int) -> None:
        """A loop, so that the steady state is reached; some results stay held."""
        if not self.pipelines:
            return
        pipeline, works = self.pipelines[which % len(self.pipelines)]
        for _ in range(4 + times % 8):
            x = self.array(works[0].inputs[0])
            with self.attempt():
                result = pipeline(x)
                if looks % 2:
                    self.look(result, self.through(works, x))
                if ring % 4:
                    self.hold(result, self.through(works, x))
                del result
            if self.held and len(self.held) > ring % 4:
                del self.held[looks % len(self.held)]

    def feed_back(self, which: int, times: int, looks: int) -> None:
        """A state that a program overwrites, looked at or not, with handles left behind."""
        self.load(which | 3)
        able = [(w, p) for w, p in self.loaded if w.donates and len(w.inputs) == len(w.reads) == 1]
        if not able:
            return
        what, program = able[which % len(able)]
        expected = self.array(what.inputs[0])
        with self.attempt():
            value = program(expected)
            for _ in range(times % 8):
                (expected,) = what.results([expected])
                if looks % 2:
                    self.look(value, expected)
                before = value
                value = program(before)
                with pytest.raises(stitch.TaskError, match=self.given_away):
                    before.numpy()
            (expected,) = what.results([expected])
            self.hold(value, expected)
            del value

    def duplicate(self, number: int) -> None:
        held = self.pick(number)
        if held is not None:
            self.hold(copy.copy(held.tensor), held.expected, held.root)

    def deallocate(self, number: int) -> None:
        held = self.pick(number)
        if held is not None and not self.is_shared(held):
            self.held.remove(held)
            held.tensor.deallocate()
            with pytest.raises(stitch.TaskError):
                held.tensor.numpy()

    def retain(self, number: int) -> None:
        held = self.pick(number)
        if held is not None:
            held.tensor.retain = not held.tensor.retain

    def room(self) -> None:
        with self.attempt(), self.device.lock:
            self.device.run_queue()
            self.device.make_room()

    def collect(self) -> None:
        gc.collect(0)

    def account(self) -> None:
        self.device.account()

    def end(self) -> None:
        """Nothing is left of what was held."""
        self.fuse = None
        self.held.clear()
        self.loaded.clear()
        self.pipelines.clear()


def check_empty(device: RuntimeDevice) -> None:
    gc.collect()
    assert held_by(device) == []


@contextlib.contextmanager
def watched(device: RuntimeDevice, how: str) -> Iterator[None]:
    """With somebody who looks on."""
    with contextlib.ExitStack() as stack:
        if how == "listener":
            stack.callback(device.events.subscribe(lambda event: None))
        elif how == "hooks":
            stack.callback(device.hooks.register(before_program=lambda context: None))
        elif how == "operation hooks":
            stack.callback(device.hooks.register(after_operation=lambda context: None))
        elif how == "trace and record":
            trace, recorder = ChromeTrace(device), Recorder(device)
            stack.callback(trace.as_json)
            stack.callback(recorder.text)
        yield


def drilled(
    machine: int, seed: int, steps: int, *, window: int, debug: bool, fails: bool = False,
    forgets: bool = False, how: str = "nobody",
) -> tuple[int, int]:  # fmt: skip
    """Run one drill to its end; gives how many programs ran and copies were made."""
    drill = Drill(machine, seed, window=window, debug=debug, fails=fails, forgets=forgets)
    with drill.device as device:
        forget = device.hooks.register(before_program=drill.burn) if fails else None
        with watched(device, how):
            for _ in range(steps):
                drill.drill()
            drill.fuse = None
            with contextlib.suppress(StitchError):
                device.flush()
            total = device.account().total
        drill.end()
        if forget is not None:
            forget()
        del drill, forget
        check_empty(device)
    return total.programs, total.copies


@pytest.mark.parametrize("fails", [False, True], ids=["sound", "with failures"])
@pytest.mark.parametrize("seed", every(2, range(16)))
def test_nothing_that_is_held_changes(seed: int, fails: bool) -> None:
    window, debug = (1, 4, 64)[seed % 3], seed % 5 == 4
    drilled(NAMED[seed % 3], seed, 80, window=window, debug=debug, fails=fails)


@pytest.mark.parametrize(("seed", "machine"), in_turn(range(4), BY_GRANULES))
def test_granules_and_policies_change_nothing_that_is_held(machine: int, seed: int) -> None:
    drilled(machine, 300 + seed, 60, window=(4, 64)[seed % 2], debug=seed == 3, fails=seed == 2)


@pytest.fixture
def nothing_is_collected() -> Iterator[None]:
    """When garbage is collected, and with it tensors, depends on all that a process has done."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "how", ["listener", "hooks", "operation hooks", "trace and record", "no counts"]
)
def test_observers_change_neither_results_nor_copies(
    how: str, monkeypatch: pytest.MonkeyPatch, nothing_is_collected: None
) -> None:
    for seed, machine in enumerate((*NAMED, 0)):
        window = (1, 4, 64)[seed % 3]
        alone = drilled(machine, 100 + seed, 40, window=window, debug=False)
        with monkeypatch.context() as patch:
            if how == "no counts":
                # Who holds what is never read from the interpreter's counts.
                patch.setattr(sys, "getrefcount", lambda thing: 2)
            assert drilled(machine, 100 + seed, 40, window=window, debug=False, how=how) == alone


@pytest.mark.parametrize("seed", range(4))
def test_plans_that_are_dropped_all_the_time_change_nothing(seed: int) -> None:
    drilled(
        NAMED[seed % 3], 200 + seed, 60, window=4, debug=False, fails=seed % 2 == 1, forgets=True
    )


@pytest.mark.campaign("recordings")
@pytest.mark.parametrize("part", range(5))
def test_many_drills(part: int) -> None:
    for seed in range(1000 + part * 25, 1025 + part * 25):
        choice = random.Random(seed)
        machine = choice.choice((*NAMED, *range(len(MACHINES))))
        window, debug = choice.choice([1, 4, 64]), choice.random() < 0.3
        drilled(machine, seed, 150, window=window, debug=debug, fails=seed % 2 == 1)
