"""What is queued while another thread computes: it waits for nobody, and is as right as ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

import stitch
from stitch.program import Array, DataType, InputKind, Layout, Space
from stitch.runtime.recording import running
from tests.support.executors.calling import CallingExecutor
from tests.support.stitched_models import (
    consuming,
    integers,
    model,
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
        self.fails = False

    def __call__(self, name: str) -> None:
        if name == "slow":
            self.runs.set()
            assert self.may_end.wait(PATIENCE)
            if self.fails:
                raise ArithmeticError("planted")

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
        assert remembered[0]._record is remembered[2]._record
        np.testing.assert_array_equal(submitted.numpy(), affine(integers(), 3))
        del made, chained, laid_out, remembered, submitted, copied, tensor, given
        results.clear()
        assert used(device) == base


def test_a_real_kernel_does_not_hold_up_who_queues() -> None:
    """NumPy multiplies, and gives the interpreter to others, until all is queued."""
    wide = np.ones((512, 512), np.float32)
    runs, may_end = threading.Event(), threading.Event()

    def multiply(name: str) -> None:
        while name == "slow" and not may_end.is_set():
            np.dot(wide, wide)
            runs.set()

    executor = CallingExecutor(multiply)
    with stitch.open_device("host", executor=executor, window=1024) as device:
        slow = device.load(scaled("slow", 2.0, target=device.machine))
        quick = device.load(scaled("quick", 3.0, target=device.machine))
        computed = one(slow(integers()))
        thread = threading.Thread(target=device.flush)
        thread.start()
        assert runs.wait(PATIENCE)
        made = [one(quick(integers(start=i))) for i in range(100)]
        assert computed.is_pending
        may_end.set()
        thread.join(PATIENCE)
        np.testing.assert_array_equal(computed.numpy(), affine(integers(), 2))
        np.testing.assert_array_equal(made[99].numpy(), affine(integers(start=99), 3))


def test_results_that_are_still_computed_are_read_by_what_is_queued_meanwhile() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        eats = device.load(consuming("eats", -1.0))
        base = used(device)
        pending, given = one(slow(integers())), one(quick(integers()))
        with gate.closed(device.flush):
            again = one(quick(pending))
            eaten = one(eats(given))
            dropped = one(quick(pending))
            del dropped
        np.testing.assert_array_equal(pending.numpy(), affine(integers(), 2))
        with pytest.raises(stitch.TaskError, match="donated to 'eats'"):
            given.numpy()
        np.testing.assert_array_equal(again.numpy(), affine(affine(integers(), 2), 3))
        np.testing.assert_array_equal(eaten.numpy(), -affine(integers(), 3))
        del pending, given, again, eaten
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


@pytest.mark.parametrize("option", ["to be remembered", "to be retained"])
def test_what_is_requested_of_a_result_while_it_is_computed_is_no_option_for_the_next(
    option: str,
) -> None:
    def triple(b: stitch.ComputationGraphBuilder) -> None:
        b.output("y", b.input("w", (4, 64), "float32", InputKind.PARAMETER) * 3)

    with opened(debug=False) as (device, gate):
        slow = device.load(scaled("slow", 2.0, placement=("output.y.space=l1",)))
        weights = device.load(model("weights", triple, placement=("input.w.space=l1",)))
        pipeline = stitch.Pipeline([slow])
        gate.may_end.set()
        for i in range(4):
            x = integers(start=i)
            result = one(pipeline(x))
            assert not result.retain
            np.testing.assert_array_equal(one(weights(result)).numpy(), affine(x, 2) * 3)
            del result
            again = one(slow(x))
            with gate.closed(device.flush):
                if option == "to be retained":
                    again.retain = True
                else:
                    remembered = one(weights(again))
            if option == "to be remembered":
                np.testing.assert_array_equal(remembered.numpy(), affine(x, 2) * 3)
                del remembered
            del again


def test_what_depends_on_a_failure_says_so_also_from_the_next_window() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        base = used(device)
        gate.fails = True
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
        gate.fails = False
        np.testing.assert_array_equal(one(slow(integers())).numpy(), affine(integers(), 2))
        del pending, same_window, next_window, after_that, other, tensor
        assert used(device) == base


def test_what_misses_results_is_missed_in_turn_from_one_window_to_the_next() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        base, gate.fails = used(device), True
        first = one(slow(integers()))

        def fail() -> None:
            with pytest.raises(ArithmeticError, match="planted"):
                device.flush()

        with gate.closed(fail):
            made, second = one(slow(integers(start=1))), one(quick(first))
        gate.fails = False
        with gate.closed(device.flush):
            # Its own window has not come to it yet, and will not make it.
            assert second.is_pending
            third, other = one(quick(second)), one(quick(made))
        for tensor in (first, second, third):
            with pytest.raises(stitch.TaskError, match=r"(?s)never made.*'slow' failed: planted"):
                tensor.numpy()
        expected = affine(integers(start=1), 2)
        np.testing.assert_array_equal(made.numpy(), expected)
        np.testing.assert_array_equal(other.numpy(), affine(expected, 3))
        del first, second, third, made, other, tensor
        assert used(device) == base


def test_an_interrupted_run_is_missed_by_what_was_queued_for_its_results() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        base, gate.fails = used(device), True
        pending = one(slow(integers()))

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        def fail() -> None:
            with pytest.raises(KeyboardInterrupt):
                device.flush()

        with pytest.MonkeyPatch.context() as patch, gate.closed(fail):
            # An interrupt, just as what the failure leaves is put in order.
            patch.setattr(running, "after_failure", interrupt)
            following, other = one(quick(pending)), one(quick(integers()))
        np.testing.assert_array_equal(other.numpy(), affine(integers(), 3))
        for tensor in (pending, following):
            with pytest.raises(stitch.TaskError, match=r"(?s)never made.*interrupted"):
                tensor.numpy()
        gate.fails = False
        del pending, following, other, tensor
        assert used(device) == base


def test_what_a_task_that_cannot_run_reads_stays_for_one_that_it_is_donated_to() -> None:
    with opened() as (device, _):
        in_l1 = ("input.x.space=l1", "output.y.space=l1")
        quick = device.load(scaled("quick", 3.0, placement=in_l1))
        eats = device.load(consuming("eats", -1.0, placement=in_l1))
        value = one(quick(integers()))
        device.flush()
        with stitch.forbid_copies(device):
            copied, eaten = value.to_layout(DRAM), one(eats(value))
            with pytest.raises(stitch.TaskError, match="copies are forbidden"):
                device.flush()
        np.testing.assert_array_equal(eaten.numpy(), -affine(integers(), 3))
        with pytest.raises(stitch.TaskError, match="copies are forbidden"):
            copied.numpy()


def test_a_pipeline_runs_beside_a_queue_that_fills_and_learns_its_own_work_only() -> None:
    with opened() as (device, gate):
        slow, quick = device.load(scaled("slow", 2.0)), device.load(scaled("quick", 3.0))
        pipeline = stitch.Pipeline([slow, quick])
        made: list[stitch.Tensor] = []
        for i in range(5):
            x = integers(start=i)
            with gate.closed(lambda x=x: made.append(one(pipeline(x)))):  # type: ignore[misc]
                queued = one(quick(x))
            np.testing.assert_array_equal(queued.numpy(), affine(x, 3))
            np.testing.assert_array_equal(made[i].numpy(), affine(affine(x, 2), 3))
        gate.may_end.set()
        assert {len(plan.request.tasks) for plan, _ in device.history.plans} == {1, 2}


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

        def interrupt(*_: object) -> None:
            def queue() -> None:
                second.extend([one(b(first[0])), one(eats(first[1])), one(a(integers(start=7)))])

            thread = threading.Thread(target=queue)
            thread.start()
            thread.join(PATIENCE)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.maker.plans, "planned", interrupt)
            with pytest.raises(KeyboardInterrupt):
                device.flush()
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
def test_a_kernel_cannot_use_its_device_and_is_told_so(way: str, runs: int) -> None:
    refused: list[str] = []

    def back(name: str) -> None:
        if name == "calls" and is_calling:
            for use in uses(device, quick, ready, pipeline):
                with pytest.raises(stitch.TaskError, match="a hook cannot use it, nor can a ker"):
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


@pytest.mark.parametrize("runs", [1, 6])
def test_a_hook_of_an_operation_cannot_call_the_pipeline_that_it_is_part_of(runs: int) -> None:
    refused: list[str] = []
    with stitch.open_device("tiny", debug=True) as device:
        calls, quick = device.load(scaled("calls", 2.0)), device.load(scaled("quick", 3.0))
        pipeline = stitch.Pipeline([calls])
        ready = one(quick(integers()))
        device.flush()

        def hook(_: object) -> None:
            if is_calling:
                for use in uses(device, quick, ready, pipeline):
                    with pytest.raises(stitch.TaskError, match="a hook cannot use it") as error:
                        use()
                    refused.append(str(error.value))

        is_calling = False
        end = device.hooks.register(before_operation=hook)
        for i in range(runs):
            is_calling = i == runs - 1
            np.testing.assert_array_equal(one(pipeline(integers())).numpy(), affine(integers(), 2))
        end()
        assert len(refused) == 2 * len(uses(device, quick, ready, pipeline))


def test_who_listens_may_use_the_device_after_a_run_and_not_while_a_plan_is_made() -> None:
    seen: list[str] = []
    with stitch.open_device("tiny", debug=True) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        pipeline = stitch.Pipeline([b])
        ready = one(b(integers()))
        device.flush()

        def listen(event: stitch.runtime.events.Event) -> None:
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


def test_a_thread_that_a_hook_starts_may_queue_while_the_hook_waits_for_it() -> None:
    with stitch.open_device("tiny", debug=True) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        made: list[stitch.Tensor] = []

        def hook(_: object) -> None:
            thread = threading.Thread(target=lambda: made.append(one(b(integers()))))
            thread.start()
            thread.join(PATIENCE)

        end = device.hooks.register(before_program=hook)
        first = one(a(integers()))
        np.testing.assert_array_equal(first.numpy(), affine(integers(), 2))
        end()
        np.testing.assert_array_equal(made[0].numpy(), affine(integers(), 3))


@pytest.mark.parametrize("window", [1, 3, 64])
def test_eight_threads_queue_and_read_their_own(window: int) -> None:
    problems: list[BaseException] = []
    with stitch.open_device("tiny", window=window) as device:
        a, b = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        base = used(device)
        ready = threading.Barrier(8)

        def work(offset: int) -> None:
            try:
                ready.wait(PATIENCE)
                for i in range(40):
                    x = integers(start=offset + i)
                    h = one(a(x))
                    rows = [one(b(h)), one(a(h)), one(b(x))]
                    expected = affine(x, 2)
                    for tensor, array in zip(
                        rows, (affine(expected, 3), affine(expected, 2), affine(x, 3)), strict=True
                    ):
                        np.testing.assert_array_equal(tensor.numpy(), array)
                    np.testing.assert_array_equal(h.numpy(), expected)
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if problems:
            raise problems[0]
        assert used(device) == base
