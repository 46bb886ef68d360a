"""After an exception in a run that overwrites, values are as before or after it, or an error says
what was lost.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.program import Array
from stitch.runtime.execution import overwriting
from stitch.runtime.execution.overwriting import OverwritingRun
from stitch.training import TrainingInstance
from tests.support.stitched_models import consuming, integers, one
from tests.support.training.models import batches, compiled

ERRORS = [KeyboardInterrupt, MemoryError, RuntimeError]
Thunks = Sequence[Callable[[], object]]


class Overdue(BaseException):
    """What a watchdog sets in the thread that it watches."""


def raising(thunk: Callable[[], object], error: type[BaseException], times: int = 1) -> Any:
    """A thunk that raises before it does anything, so often."""
    left = times

    def run() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error("planted")
        thunk()

    vars(run)["is_repeatable"] = True
    return run


@contextmanager
def with_thunks(change: Callable[[Thunks], Thunks]) -> Iterator[list[int]]:
    """Runs that overwrite run these thunks instead; how many each has."""
    run, counts = OverwritingRun.run, list[int]()

    def changed(self: OverwritingRun, arrays: Sequence[Any], sure: bool = True) -> Any:
        thunks = self._thunks
        counts.append(len(thunks))
        self._thunks = tuple(change(thunks))
        try:
            return run(self, arrays, sure)
        finally:
            self._thunks = thunks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OverwritingRun, "run", changed)
        yield counts


def at(place: int, make: Callable[[Any], Any]) -> Callable[[Thunks], Thunks]:
    return lambda thunks: [make(t) if i == place else t for i, t in enumerate(thunks)]


class Steps:
    """A training, and the states that it comes to where nothing is raised."""

    def __init__(self, target: str, settled: int = 6) -> None:
        self.model, self.other = (compiled(stitch.Adam(lr=0.01), target=target) for _ in range(2))
        self.instance, self.reference = self.model.start(), self.other.start()
        self.data = batches(3)
        for _ in range(settled):
            self.passes()
            self.step()
            self.follow()

    def _pass(self, model: Any, number: int) -> None:
        x, y = self.data[number % 3]
        model.training.loss(model(x), y).backward()

    def passes(self) -> None:
        self._pass(self.model, self.instance.steps)

    def step(self) -> None:
        assert self.model.training is not None
        self.model.training.optimizer.step()
        self.model.training.optimizer.zero_grad()

    def follow(self) -> None:
        """The reference takes the same step."""
        assert self.other.training is not None
        self._pass(self.other, self.reference.steps)
        self.other.training.optimizer.step()
        self.other.training.optimizer.zero_grad()

    def is_after(self) -> bool:
        """Whether weights and counts are those after the next step of the reference; else they are
        those before it."""
        own, before = state(self.instance), state(self.reference)
        self.follow()
        after = state(self.reference)
        is_after = own == after
        assert is_after or own == before, "as before or after none of the steps"
        return is_after

    def close(self) -> None:
        self.instance.close()
        self.reference.close()


def state(instance: TrainingInstance) -> list[bytes]:
    return [
        np.ascontiguousarray(array).tobytes()
        for name, array in sorted(instance.state_dict().items())
        if name != "training.forwards"
    ]


def end(steps: Steps, is_after: bool) -> None:
    """Go on after a step that raised, on the gradients that there are."""
    if not is_after:
        steps.step()
    elif steps.instance.steps:
        steps.instance.zero_grad()


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.campaign("injection"))])
@pytest.mark.parametrize("target", ["host", "wormhole_n150"])
@pytest.mark.parametrize("error", ERRORS)
def test_weights_are_as_before_or_after_a_step_whatever_raises_at_any_kernel(
    error: type[BaseException], target: str, every: int
) -> None:
    steps, seen, place, count = Steps(target), set[bool](), 0, 1
    while place < count:
        steps.passes()
        planted = at(place, lambda thunk: raising(thunk, error))
        with with_thunks(planted) as counts, pytest.raises(error, match="planted"):
            steps.step()
        is_after = steps.is_after()
        seen.add(is_after)
        end(steps, is_after)
        count, place = counts[0], place + every
    assert seen == {False, True} and count > 10
    steps.passes()
    steps.step()
    assert steps.is_after()
    steps.close()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_kernel_that_fails_whenever_it_is_called_loses_no_more_than_it_must_and_says_so(
    error: type[BaseException],
) -> None:
    steps = Steps("wormhole_n150")
    kept = steps.instance.state_dict()
    steps.passes()
    with with_thunks(at(1, lambda thunk: raising(thunk, error, 99))), pytest.raises(error):
        steps.step()
    assert not steps.is_after()
    last = lambda thunks: [*thunks[:-2], raising(thunks[-2], error, 99), thunks[-1]]  # noqa: E731
    with with_thunks(last), pytest.raises(error):
        steps.step()
    with pytest.raises(
        stitch.TaskError, match=r"(?s)lost.*where: '.*': an update failed.*load_state_dict"
    ):
        steps.instance.state_dict()
    steps.instance.load_state_dict(kept)
    steps.instance.zero_grad()
    steps.passes()
    steps.step()
    assert state(steps.instance) == state(steps.reference)
    steps.close()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("settled", [1, 6])
def test_weights_are_as_before_where_a_step_cannot_be_planned(
    error: type[BaseException], settled: int
) -> None:
    steps = Steps("wormhole_n150", settled=settled)
    steps.passes()
    steps.instance.device.flush()
    device: Any = steps.instance.device
    device.plan_cache.clear()

    def fail(*arguments: object) -> None:
        raise error("planted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.maker, "binding", fail)
        with pytest.raises(error, match="planted"):
            steps.step()
    # An interrupt leaves the step in the queue, so it comes yet.
    assert steps.is_after() == (error is KeyboardInterrupt)
    end(steps, is_after=error is KeyboardInterrupt)
    assert state(steps.instance) == state(steps.reference)
    steps.close()


@pytest.mark.parametrize("moment", ["before_operation", "after_operation", "after_program"])
@pytest.mark.parametrize("error", ERRORS)
def test_a_hook_that_raises_in_an_update_leaves_weights_before_or_after_it(
    moment: str, error: type[BaseException]
) -> None:
    steps = Steps("wormhole_n150", settled=3)
    for call in (1, 9):
        steps.passes()
        steps.instance.device.flush()
        left = call if moment.endswith("operation") else 1

        def hook(context: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise error("planted")

        undo = steps.instance.device.hooks.register(**{moment: hook})
        with pytest.raises(error, match="planted"):
            steps.step()
        undo()
        end(steps, steps.is_after())
        assert state(steps.instance) == state(steps.reference)
    steps.close()


def test_an_exception_of_another_thread_in_the_middle_of_an_update_comes_after_it() -> None:
    steps = Steps("wormhole_n150")
    steps.passes()
    inside, is_set, thread = threading.Event(), threading.Event(), threading.get_ident()

    def watch() -> None:
        inside.wait()
        raised = ctypes.py_object(Overdue)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
        is_set.set()

    def slow(thunk: Callable[[], object]) -> Any:
        def run() -> None:
            inside.set()
            is_set.wait()
            thunk()

        vars(run)["is_repeatable"] = True
        return run

    watchdog = threading.Thread(target=watch)
    watchdog.start()
    late = lambda thunks: [*thunks[:-5], slow(thunks[-5]), *thunks[-4:]]  # noqa: E731
    with with_thunks(late), pytest.raises(Overdue):
        steps.step()
    watchdog.join()
    assert steps.is_after()
    steps.close()


@pytest.mark.parametrize("error", ERRORS)
def test_what_was_donated_to_a_settled_pipeline_that_raises_stays_the_callers(
    error: type[BaseException],
) -> None:
    with stitch.open_device("tiny") as device:
        pipe = stitch.Pipeline([device.load(consuming("eat", 2.0))])
        held: Array = integers()
        state = one(pipe(held))
        held = held * 2
        for _ in range(4):
            state, held = one(pipe(state)), held * 2
        seen, place, count = set[bool](), 0, 1
        while place < count:
            planted = at(place, lambda thunk: raising(thunk, error))
            with with_thunks(planted) as counts, pytest.raises(error, match="planted"):
                pipe(state)
            found = state.numpy()
            is_after = bool((found == held * 2).all())
            np.testing.assert_array_equal(found, held * 2 if is_after else held)
            seen.add(is_after)
            state, held = one(pipe(state)), found * 2
            count, place = counts[0], place + 1
        np.testing.assert_array_equal(state.numpy(), held)
        assert seen == {False, True}


def test_a_kernel_that_may_have_overwritten_what_it_reads_is_not_called_again() -> None:
    a, b = np.ones(3), np.ones(3)

    def add(x: Array, y: Array, out: Array) -> None:
        np.add(x, y, out)

    is_repeatable = overwriting._is_repeatable
    assert is_repeatable(partial(np.add, a, b, a))
    assert is_repeatable(partial(add, a, b, np.empty(3)))
    assert not is_repeatable(partial(add, a, b, a))
    assert not is_repeatable(partial(add, a, b, out=a[:2]))
    assert not is_repeatable(lambda: None)
