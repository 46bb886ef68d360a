"""A run ignores NumPy's floating-point errors; its caller's state and context stay as they are."""

from __future__ import annotations

import threading
from contextvars import Context, ContextVar, copy_context

import numpy as np
import pytest

from stitch.program import Array
from stitch.runtime.executors import with_fp_errors_ignored
from stitch.runtime.executors.executor import error_setter

ZERO = np.zeros(3, np.float32)
ANOTHER: ContextVar[str] = ContextVar("another", default="nothing")


def reciprocals(array: Array) -> Array:
    return np.reciprocal(array)


def test_nothing_is_raised_within_and_the_callers_state_is_as_before() -> None:
    with np.errstate(all="raise"):
        before = np.geterr()
        np.testing.assert_array_equal(with_fp_errors_ignored(reciprocals, ZERO), np.full(3, np.inf))
        assert np.geterr() == before
        with pytest.raises(FloatingPointError):
            reciprocals(ZERO)


def test_what_is_raised_within_comes_out_and_leaves_the_callers_state() -> None:
    def fails(_: Array) -> None:
        raise KeyboardInterrupt

    with np.errstate(all="raise"):
        before = np.geterr()
        with pytest.raises(KeyboardInterrupt):
            with_fp_errors_ignored(fails, ZERO)
        assert np.geterr() == before


def test_a_run_within_a_run_and_runs_of_other_threads_are_as_quiet() -> None:
    inside, goes_on = threading.Barrier(3), threading.Barrier(3)
    found: list[Array] = []

    def waits(array: Array) -> None:
        inside.wait(60)
        goes_on.wait(60)
        found.append(with_fp_errors_ignored(reciprocals, array))

    with np.errstate(all="raise"):
        # Both threads run in copies of one context, entered at the same time.
        threads = [
            threading.Thread(target=copy_context().run, args=(with_fp_errors_ignored, waits, ZERO))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        inside.wait(60)
        with_fp_errors_ignored(reciprocals, ZERO)
        goes_on.wait(60)
        for thread in threads:
            thread.join(60)
    assert [array.tolist() for array in found] == [[np.inf] * 3] * 2


def test_a_run_sees_its_callers_context_variables_as_they_are_now() -> None:
    token = ANOTHER.set("the caller's")
    try:
        assert with_fp_errors_ignored(lambda _: ANOTHER.get(), ZERO) == "the caller's"
    finally:
        ANOTHER.reset(token)
    assert with_fp_errors_ignored(lambda _: ANOTHER.get(), ZERO) == "nothing"


def test_where_numpy_keeps_more_than_one_variable_its_own_function_is_called() -> None:
    several = Context()
    several.run(ANOTHER.set, "one more")
    ignore = error_setter(several, all="ignore")

    def run() -> Array:
        ignore()
        return reciprocals(ZERO)

    with np.errstate(all="raise"):
        np.testing.assert_array_equal(copy_context().run(run), np.full(3, np.inf))
