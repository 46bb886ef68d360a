"""A run ignores NumPy's floating-point errors; the caller's error state stays as it is."""

from __future__ import annotations

import threading
from contextvars import Context, ContextVar, copy_context

import numpy as np

from stitch.program import Array
from stitch.runtime.executors import with_fp_errors_ignored
from stitch.runtime.executors.executor import error_setter

ZERO = np.zeros(3, np.float32)
ANOTHER: ContextVar[str] = ContextVar("another", default="nothing")


def reciprocals(array: Array) -> Array:
    return np.reciprocal(array)


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


def test_where_numpy_keeps_more_than_one_variable_its_own_function_is_called() -> None:
    several = Context()
    several.run(ANOTHER.set, "one more")
    ignore = error_setter(several, all="ignore")

    def run() -> Array:
        ignore()
        return reciprocals(ZERO)

    with np.errstate(all="raise"):
        np.testing.assert_array_equal(copy_context().run(run), np.full(3, np.inf))
