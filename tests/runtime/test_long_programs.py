"""Compiling and first running a long program take work in proportion to its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.model import CompiledModel
from stitch.packing import Interval, Packing, pack_intervals
from stitch.runtime.executors.host import arrangement
from tests.support.grids import every
from tests.support.lines_run import lines_run

FEW = 200
X = np.ones(16, np.float32)


def fan(count: int) -> Callable[[Any], Any]:
    """A function of `2 * count` operations: half of the results live until all are computed."""

    def function(x: Any) -> Any:
        values = [x]
        for _ in range(count):
            values.append(np.exp(values[-1]))
        result = x
        for value in values[1:]:
            result = result + value
        return result

    return function


def compiled(count: int) -> CompiledModel:
    return stitch.compile(fan(count), [X], target="host")


def first_run(model: CompiledModel, executor: str = "numpy") -> None:
    with stitch.open_device("host", executor=executor) as device:
        device.load(model)(X).numpy()


def test_a_first_run_packs_the_values_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []

    def counted(intervals: Sequence[Interval]) -> Packing:
        packed.append(len(intervals))
        return pack_intervals(intervals)

    monkeypatch.setattr(arrangement, "pack_intervals", counted)
    first_run(compiled(FEW))
    assert packed == [FEW]


def test_compiling_four_times_the_operations_takes_four_times_the_lines() -> None:
    compiled(1)  # Imports and caches of the process.
    assert lines_run(lambda: compiled(4 * FEW)) < 4.5 * lines_run(lambda: compiled(FEW))


@pytest.mark.parametrize("executor", every(2, ["auto", "numpy"]))
def test_first_runs_of_four_times_the_operations_take_four_times_the_lines(executor: str) -> None:
    first_run(compiled(1), executor)
    few, many = (lines_run(partial(first_run, compiled(n), executor)) for n in (FEW, 4 * FEW))
    assert many < 4.5 * few
