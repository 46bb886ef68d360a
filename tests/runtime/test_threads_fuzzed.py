"""Random use of one device by several threads: each finds what NumPy says, and nothing leaks."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import stitch
from stitch.errors import StitchError
from tests.runtime.test_recordings_fuzzed import Drill, check_empty
from tests.support.grids import every
from tests.support.handle_world import fate
from tests.support.random_work import ALL_MACHINES, NAMED

THREADS = 4
#: What a thread is waited for at most.
PATIENCE = 200


class SharedDrill(Drill):
    """A drill beside others: what it has queued may fail in their windows, if anything does."""

    given_away = "donated to|failed|cancelled|interrupted"
    #: Whoever writes the bytes of a space itself must be alone.
    steps = tuple(step for step in Drill.steps if step[0] != "poke")

    def check(self) -> None:
        """What is ready stays so, and is right."""
        self.held = [h for h in self.held if not self._may_have_failed(h.tensor)]
        for held in self.held:
            if held.is_ready:
                np.testing.assert_array_equal(held.tensor.numpy(), held.expected)
                for array in held.exports:
                    np.testing.assert_array_equal(array, held.expected)
            else:
                is_gone = not held.tensor.is_allocated and not self._may_have_failed(held.tensor)
                assert not is_gone, fate(held.tensor)

    def _may_have_failed(self, tensor: stitch.Tensor) -> bool:
        """Whether it was never made: by a planted failure, or for lack of room."""
        if tensor.is_allocated:
            return False
        text = fate(tensor)
        is_refused = "pinned" in text or "OutOfMemory" in text
        return "was never made" in text and (self.fails or is_refused)


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """As often as the interpreter lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def drilled_together(
    machine: int, seed: int, steps: int, *, window: int, debug: bool, fails: bool
) -> None:
    """Run drills side by side to their ends; raise what the first of them raised."""
    problems: list[BaseException] = []
    with stitch.open_device(ALL_MACHINES[machine], window=window, debug=debug) as device:
        drills = [
            SharedDrill(
                machine, 1000 * seed + i, window=window, debug=debug, fails=fails, device=device
            )
            for i in range(THREADS)
        ]
        ready = threading.Barrier(THREADS)
        burning = drills[0].burn
        forget = device.hooks.register(before_program=burning) if fails else None

        def run(drill: SharedDrill) -> None:
            try:
                ready.wait(PATIENCE)
                for _ in range(steps):
                    if problems:
                        return
                    drill.drill()
            except BaseException as problem:
                problems.append(problem)
            finally:
                drill.fuse = None

        threads = [threading.Thread(target=run, args=(drill,)) for drill in drills]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        if forget is not None:
            forget()
        if problems:
            raise problems[0]
        with contextlib.suppress(StitchError):
            device.flush()
        for drill in drills:
            drill.check()
            drill.end()
        del drills, drill, burning, forget, threads, thread
        check_empty(device)


@pytest.mark.parametrize("fails", [False, True], ids=["sound", "with failures"])
@pytest.mark.parametrize("seed", every(2, range(6)))
def test_threads_with_one_queue_find_what_each_would_alone(seed: int, fails: bool) -> None:
    window, debug = (4, 64, 1)[seed % 3], seed % 4 > 1
    drilled_together(NAMED[seed % 3], seed, 25, window=window, debug=debug, fails=fails)


@pytest.mark.campaign("threads")
@pytest.mark.parametrize("part", range(3))
def test_many_drills_side_by_side(part: int) -> None:
    for seed in range(100 + part * 12, 112 + part * 12):
        choice = random.Random(seed)
        drilled_together(
            choice.choice(NAMED), seed, 80, window=choice.choice([1, 4, 64]),
            debug=choice.random() < 0.4, fails=choice.random() < 0.4,
        )  # fmt: skip
