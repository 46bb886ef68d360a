"""The executor `fastest` takes, for each program, the executor that a clock finds fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import CompileError
from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime.executors import BoundProgram, Executor, PreparedProgram, make_executor
from stitch.runtime.executors.executor import ProgramBytes, Workspace
from stitch.runtime.executors.measured import MeasuredExecutor

X = np.arange(12, dtype=np.float32).reshape(3, 4)


class Timed(Executor):
    """NumPy's executor, a run of which takes so long by a clock that it moves itself."""

    def __init__(self, name: str, took: int | None, clock: list[int]) -> None:
        self.name, self.took, self.clock = name, took, clock
        self.numpy = make_executor("numpy")

    def host_bytes(self, program: Program) -> ProgramBytes:
        """What NumPy's takes."""
        return self.numpy.host_bytes(program)

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """NumPy's form; raises `CompileError` where no time is given."""
        if self.took is None:
            raise CompileError(f"{self.name} cannot")
        return TimedProgram(self, self.numpy.prepare(program, machine, workspace))


class TimedProgram(PreparedProgram):
    """A program whose run moves the clock."""

    def __init__(self, owner: Timed, prepared: PreparedProgram) -> None:
        self.owner, self.prepared = owner, prepared

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """NumPy's steps and one more."""
        bound = self.prepared.bind(inputs, outputs, scratch)
        return BoundProgram((self.tick, *bound.steps), (), bound.arrays, 0)

    def tick(self) -> None:
        """So much time has passed."""
        assert self.owner.took is not None
        self.owner.clock[0] += self.owner.took


def measured(**times: int | None) -> MeasuredExecutor:
    """One that tries executors which take these times."""
    now = [0]

    def make(name: str) -> Executor:
        return Timed(name, times[name], now)

    return MeasuredExecutor(make, clock=lambda: now[0])


def run(executor: MeasuredExecutor, function: Callable[[Array], Array]) -> Array:
    """What a function gives on a device with this executor."""
    with stitch.open_device("wormhole_n150", executor=executor) as device:
        tensor: Any = device.load(stitch.compile(function, [X]))(X)
        result: Array = tensor.numpy()
        return result


def test_the_fastest_is_taken_and_the_times_are_told() -> None:
    executor = measured(numpy=4_000_000, auto=2_000_000, onnxruntime=3_000_000, torch=9_000_000)
    np.testing.assert_array_equal(run(executor, lambda x: x * 2 + 1), X * 2 + 1)
    ((fastest, *others),) = executor.measured.values()
    assert fastest == ("auto", 2_000_000)
    assert [name for name, _ in others] == ["onnxruntime", "numpy", "torch"]


def test_of_equally_fast_ones_the_first_is_taken() -> None:
    executor = measured(numpy=7, auto=7, onnxruntime=7, torch=7)
    run(executor, lambda x: x + 1)
    chosen = executor.prepare(stitch.compile(lambda x: x - 1, [X]).program, _shape())
    assert isinstance(chosen, TimedProgram) and chosen.owner.name == "numpy"


def test_an_executor_that_cannot_run_a_program_is_passed_over() -> None:
    executor = measured(numpy=None, auto=5, onnxruntime=None, torch=6)
    np.testing.assert_array_equal(run(executor, lambda x: x - 1), X - 1)
    assert [name for name, _ in executor.measured.popitem()[1]] == ["auto", "torch"]


def test_where_none_can_the_first_says_why() -> None:
    executor = measured(numpy=None, auto=None, onnxruntime=None, torch=None)
    with pytest.raises(CompileError, match="numpy cannot"):
        run(executor, lambda x: x - 1)


@pytest.mark.parametrize("target", ["host", "wormhole_n150", "tiny"])
def test_programs_of_every_machine_are_measured_and_right(target: str) -> None:
    with stitch.open_device(target, executor="fastest") as device:
        program: Any = device.load(stitch.compile(lambda x: np.maximum(x @ X.T, x[:, :3]), [X],
                                             target=target))  # fmt: skip
        np.testing.assert_allclose(program(X).numpy(), np.maximum(X @ X.T, X[:, :3]), rtol=1e-6)


def _shape() -> MachineShape:
    with stitch.open_device("wormhole_n150") as device:
        return device.machine.shape
