"""Calls that are queued while another thread computes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import stitch
from stitch.program import Array, DataType, Layout, Space
from tests.support.executors.calling import CallingExecutor
from tests.support.stitched_models import (
    consuming,
    integers,
    one,
    parameters_only,
    scaled,
    used,
)

DRAM = Layout(DataType.FLOAT32, Space.DRAM)
#: What a thread is waited for at most: for ever, as far as a test is concerned.
PATIENCE = 200


class Gate:
    """A kernel of the program `slow` that runs until it is told to end."""

    def __init__(self) -> None:
        self.runs, self.may_end = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def __call__(self, name: str) -> None:
        if name == "slow":
            self.runs.set()
            assert self.may_end.wait(PATIENCE)
            if self.error is not None:
                raise self.error

    @contextmanager
    def closed(self, work: Callable[[], object]) -> Iterator[threading.Thread]:
        """Within, another thread is in the middle of the kernel; it is done at the end."""
        self.runs.clear()
        self.may_end.clear()
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert self.runs.wait(PATIENCE)
            yield thread
        finally:
            self.may_end.set()
            thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def opened(window: int = 1024, *, debug: bool = True) -> Iterator[tuple[stitch.Device, Gate]]:
    gate = Gate()
    executor = CallingExecutor(gate)
    with stitch.open_device("tiny", executor=executor, window=window, debug=debug) as device:
        yield device, gate


def affine(x: Array, times: int) -> Array:
    return x * times + 1


def test_a_hundred_calls_are_queued_before_a_kernel_ends() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        weights = device.load(parameters_only("weights", 2.0))
        base, given = used(device), device.tensor(integers())
        results: list[stitch.Tensor] = []
        results.append(one(slow(integers())))
        with gate.closed(device.flush):
            made = [one(quick(integers(start=i))) for i in range(100)]
            chained = one(quick(one(quick(given))))
            laid_out = given.to_layout(DRAM)
            remembered = [one(weights(given)) for _ in range(3)]
            (submitted,) = stitch.submit(device, quick, 0, (device.tensor(integers()),))
            copied = [stitch.to_layout(tensor, DRAM, retain=False) for tensor in made[:3]]
            assert not gate.may_end.is_set()
            assert all(tensor.is_pending for tensor in (*made, chained, laid_out, submitted))
        for i, tensor in enumerate(made):
            if i < 3:
                with pytest.raises(stitch.TaskError, match="retain=False"):
                    tensor.numpy()
            else:
                np.testing.assert_array_equal(tensor.numpy(), affine(integers(start=i), 3))
        np.testing.assert_array_equal(copied[2].numpy(), affine(integers(start=2), 3))
        np.testing.assert_array_equal(chained.numpy(), affine(affine(integers(), 3), 3))
        np.testing.assert_array_equal(laid_out.numpy(), integers())
        np.testing.assert_array_equal(results[0].numpy(), affine(integers(), 2))
        assert remembered[0].address == remembered[2].address
        np.testing.assert_array_equal(submitted.numpy(), affine(integers(), 3))
        del made, chained, laid_out, remembered, submitted, copied, tensor, given
        results.clear()
        assert used(device) == base


def test_what_is_freed_while_it_is_computed_goes_when_that_is_done() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        base = used(device)
        source = one(quick(integers()))
        device.flush()
        first, second = one(slow(source)), one(slow(source))
        with gate.closed(device.flush):
            later = one(quick(first))
            source.deallocate()
            first.deallocate()
            second.deallocate()
            for tensor in (source, first, second):
                assert not tensor.is_allocated
                with pytest.raises(stitch.TaskError, match="deallocate"):
                    quick(tensor)
        expected = affine(affine(affine(integers(), 3), 2), 3)
        np.testing.assert_array_equal(later.numpy(), expected)
        del later
        # Nobody has dropped a handle.
        assert used(device) == base
        assert source.shape == first.shape == second.shape


def test_dependants_of_a_failure_in_the_next_window_are_cancelled() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        base = used(device)
        gate.error = ArithmeticError("planted")
        told: list[BaseException] = []

        def fail() -> None:
            with pytest.raises(ArithmeticError, match="planted") as error:
                device.flush()
            told.append(error.value)

        pending = one(slow(integers()))
        same_window = one(quick(pending))
        with gate.closed(fail):
            next_window = one(quick(pending))
            after_that = one(quick(next_window))
            other = one(quick(integers()))
        assert told
        np.testing.assert_array_equal(other.numpy(), affine(integers(), 3))
        with pytest.raises(stitch.TaskError, match=r"(?s)never made.*task 'slow' failed: planted"):
            pending.numpy()
        for tensor in (same_window, next_window, after_that):
            with pytest.raises(stitch.TaskError, match=r"(?s)never made.*'quick'.*was cancelled"):
                tensor.numpy()
        gate.error = None
        np.testing.assert_array_equal(one(slow(integers())).numpy(), affine(integers(), 2))
        del pending, same_window, next_window, after_that, other, tensor
        assert used(device) == base


def test_an_interrupted_run_is_missed_by_what_was_queued_for_its_results() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        base, gate.error = used(device), KeyboardInterrupt()
        pending = one(slow(integers()))

        def fail() -> None:
            with pytest.raises(KeyboardInterrupt):
                device.flush()

        with gate.closed(fail):
            following, other = one(quick(pending)), one(quick(integers()))
        np.testing.assert_array_equal(other.numpy(), affine(integers(), 3))
        for tensor in (pending, following):
            with pytest.raises(stitch.TaskError, match=r"(?s)never made.*interrupted"):
                tensor.numpy()
        gate.error = None
        del pending, following, other, tensor
        assert used(device) == base


def test_closing_while_others_queue_fails_their_results_clearly() -> None:
    gate = Gate()
    device = stitch.open_device("tiny", executor=CallingExecutor(gate), debug=True)
    slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
    pending = one(slow(integers()))
    with gate.closed(device.close):
        queued = one(quick(integers()))
    for tensor in (pending, queued):
        with pytest.raises(stitch.TaskError, match="is closed"):
            tensor.numpy()
    assert not queued.is_pending
    with pytest.raises(stitch.TaskError, match="is closed"):
        quick(integers())


def test_an_interrupt_while_a_plan_is_made_leaves_the_queue_and_what_came_behind_it() -> None:
    with opened() as (device, _):
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        eats = device.load(consuming("eats", -1.0))
        base = used(device)
        first = [one(a(integers())), one(b(integers()))]
        second: list[stitch.Tensor] = []

        def interrupt(_: object) -> None:
            if second:
                return

            def queue() -> None:
                second.extend([one(b(first[0])), one(eats(first[1])), one(a(integers(start=7)))])

            thread = threading.Thread(target=queue)
            thread.start()
            thread.join(PATIENCE)
            raise KeyboardInterrupt

        end = device.on_plan(interrupt)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        end()
        assert all(tensor.is_pending for tensor in (first[0], *second))
        np.testing.assert_array_equal(first[0].numpy(), affine(integers(), 2))
        expected = (
            affine(affine(integers(), 2), 3), -affine(integers(), 3), affine(integers(start=7), 2)
        )  # fmt: skip
        for tensor, array in zip(second, expected, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        del tensor
        first.clear()
        second.clear()
        assert used(device) == base


def uses(device: stitch.Device, program: stitch.runtime.LoadedProgram, ready: stitch.Tensor,
         pipeline: stitch.Pipeline) -> tuple[Callable[[], object], ...]:  # fmt: skip
    return (
        lambda: program(integers()), lambda: program(ready), ready.numpy, ready.deallocate,
        lambda: ready[0], lambda: device.write(ready, integers()), device.flush, device.wait,
        device.close, lambda: pipeline(integers()), lambda: np.from_dlpack(ready),
        lambda: ready.to_layout(DRAM), lambda: device.tensor(integers()), device.account,
        lambda: stitch.submit(device, program, 0, (ready,)),
    )  # fmt: skip


@pytest.mark.parametrize("runs", [1, 6])
@pytest.mark.parametrize("way", ["queue", "pipeline"])
def test_a_kernel_that_uses_its_device_is_refused(way: str, runs: int) -> None:
    refused: list[str] = []

    def back(name: str) -> None:
        if name == "calls" and is_calling:
            for use in uses(device, quick, ready, pipeline):
                with pytest.raises(stitch.TaskError, match="cannot be used by a hook, kernel"):
                    use()
                refused.append(name)

    is_calling = False
    executor = CallingExecutor(back)
    with stitch.open_device("tiny", executor=executor, debug=True) as device:
        calls, quick = device.load(scaled("calls", 2.0)), device.load(scaled("quick", 3.0))
        pipeline = stitch.Pipeline([calls])
        ready = one(quick(integers()))
        device.flush()
        run = calls if way == "queue" else pipeline
        for i in range(runs):
            is_calling = i == runs - 1
            result = one(run(integers()))
            np.testing.assert_array_equal(result.numpy(), affine(integers(), 2))
        assert len(refused) == len(uses(device, quick, ready, pipeline))
        np.testing.assert_array_equal(ready.numpy(), affine(integers(), 3))
        # The device is held by whoever looks for leaks, and it holds its executor.
        executor.told = len


def test_a_listener_may_use_the_device_after_a_run_but_not_while_planning() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny", debug=True) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        pipeline = stitch.Pipeline([b])
        ready = one(b(integers()))
        device.flush()

        def listen(event: stitch.runtime.Event) -> None:
            kind = type(event).__name__
            if kind == "PlanMade":
                for use in uses(device, b, ready, pipeline):
                    with pytest.raises(stitch.TaskError, match="in the middle of a plan"):
                        use()
            elif kind == "PlanRun" and "PlanRun" not in seen:
                seen.append(kind)
                np.testing.assert_array_equal(ready.numpy(), affine(integers(), 3))
                np.testing.assert_array_equal(made.numpy(), affine(integers(), 2))
                np.testing.assert_array_equal(one(b(made)).numpy(), affine(made.numpy(), 3))
            seen.append(kind)

        end = device.events.subscribe(listen)
        made = one(a(integers()))
        device.flush()
        end()
        np.testing.assert_array_equal(one(a(integers())).numpy(), affine(integers(), 2))
    assert seen.count("PlanMade") == 2 and seen.count("PlanRun") == 3
