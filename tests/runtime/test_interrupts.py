"""An interrupt that comes while an earlier one, or a failure, is being put in order; and others at
single places: the next call finds everything as it was before or after."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.program import Array
from stitch.runtime.backends import local_backend
from stitch.runtime.locks import InterruptDeferred
from stitch.runtime.queue import task_queue
from stitch.runtime.recording import Recordings
from stitch.runtime.values import OutputSlots, Records
from stitch.tasks import TaskSequence
from tests.support.stitched_models import held_by, integers, one, scaled

DOUBLED, HALVED = scaled("doubled", 2.0), scaled("halved", 0.5)


def interrupt_once(
    patch: pytest.MonkeyPatch, owner: Any, name: str, *, after: int = 0
) -> Callable[[], bool]:
    """The next call of a method but so many is interrupted; says whether it was."""
    function, calls = getattr(owner, name), iter(range(after + 1))

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if next(calls, None) == after:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    patch.setattr(owner, name, interrupted)
    return lambda: next(calls, None) is None


def always_interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_queue_that_is_put_in_order_is_interrupted_again() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(DOUBLED), device.load(HALVED)
        given = device.tensor(integers())
        result = one(b(one(a(given))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.maker.plans, "planned", always_interrupt)
            # As its tasks go back into the queue, the second of them.
            is_done = interrupt_once(patch, TaskSequence, "after", after=1)
            with pytest.raises(KeyboardInterrupt):
                device.flush()
            assert is_done()
        np.testing.assert_array_equal(result.numpy(), (integers() * 2 + 1) * 0.5 + 1)


def test_half_a_task_alone_is_no_queue() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, TaskSequence, "after")
            with pytest.raises(KeyboardInterrupt):
                program(integers())
        before = device.statistics()
        device.flush()
        assert device.statistics() == before
        np.testing.assert_array_equal(one(program(integers())).numpy(), integers() * 2 + 1)


def test_half_a_task_does_not_keep_pipelines_from_their_steady_call() -> None:
    with stitch.open_device("tiny") as device:
        program, pipe = device.load(DOUBLED), stitch.Pipeline([device.load(HALVED)])
        for _ in range(4):
            pipe(integers())
        with pytest.MonkeyPatch.context() as patch:
            is_done = interrupt_once(patch, task_queue, "ValueRecord")
            with pytest.raises(KeyboardInterrupt):
                program(integers())
            assert is_done()
        pipe(integers())
        assert device.tasks.is_idle


def test_what_only_half_a_task_reads_is_freed_with_its_last_handle() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        given = one(program(integers()))
        device.flush()
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, TaskSequence, "after")
            with pytest.raises(KeyboardInterrupt):
                program(given)
        del given
        device.drain()
        assert not any(
            view["block_table"][0]["allocated"]
            and view["block_table"][0]["tensor"] == "output 'y' of 'doubled'"
            for view in device.memory_views().values()
        )
        del program
        gc.collect()
        assert held_by(device) == []


def test_what_an_interrupted_window_reads_is_not_dropped() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        given = device.tensor(integers())
        result = one(program(given))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.maker.plans, "planned", always_interrupt)
            interrupt_once(patch, device.tasks, "end_run")
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        del given
        with device.lock:
            device.drain()
        np.testing.assert_array_equal(result.numpy(), integers() * 2 + 1)


def test_a_settled_pipeline_does_not_overwrite_what_an_interrupted_window_reads() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(DOUBLED), device.load(HALVED)
        pipeline = stitch.Pipeline([a])
        for _ in range(5):
            given = one(pipeline(integers()))
        result = one(b(given))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.maker.plans, "planned", always_interrupt)
            interrupt_once(patch, device.tasks, "end_run")
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        # Its place is the one that the pipeline would take next.
        del given
        np.testing.assert_array_equal(one(pipeline(-integers())).numpy(), 1 - integers() * 2)
        np.testing.assert_array_equal(result.numpy(), (integers() * 2 + 1) * 0.5 + 1)


def test_a_settled_pipeline_recovers_where_releasing_a_result_was_interrupted() -> None:
    with stitch.open_device("tiny") as device:
        pipeline = stitch.Pipeline([device.load(DOUBLED)])
        for _ in range(4):
            pipeline(integers())
        release_value = OutputSlots.release_value

        def interrupted(lease: Any, value: Any) -> bool:
            release_value(lease, value)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OutputSlots, "release_value", interrupted)
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        result = one(pipeline(-integers()))
        np.testing.assert_array_equal(result.numpy(), 1 - integers() * 2)


def test_running_the_queue_after_an_interrupt_is_no_call_from_within() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        result = one(program(integers()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.maker.plans, "planned", always_interrupt)
            interrupt_once(patch, device.tasks, "end_run")
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        device.flush()
        assert not result.is_pending
        np.testing.assert_array_equal(result.numpy(), integers() * 2 + 1)


def test_a_plan_whose_binding_was_interrupted_is_bound_again() -> None:
    """A host array that somebody holds leaves a copy on the device: no lease serves that."""
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        given = device.tensor(integers())
        result = one(program(given))
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, device.maker, "_bound")
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        np.testing.assert_array_equal(result.numpy(), integers() * 2 + 1)
        assert device.records.leases == {}
        with device.without_copies():
            again = one(program(given))
        np.testing.assert_array_equal(again.numpy(), integers() * 2 + 1)


def test_an_interrupted_drop_of_plans_is_repeated() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        for shift in range(3):
            one(program(integers(start=shift))).numpy()
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, Recordings, "_drop")
            with pytest.raises(KeyboardInterrupt):
                device.recordings.clear()
        device.recordings.clear()
        assert device.records.leases == {}


def test_a_run_while_plans_are_dropped_may_make_new_plans() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(DOUBLED), device.load(HALVED)
        one(a(integers())).numpy()
        one(a(one(a(integers())))).numpy()
        found: list[Array] = []

        class Unlike(int):
            def __eq__(self, other: object) -> bool:
                if not found:
                    found.append(one(b(integers())).numpy())
                return False

            __hash__ = int.__hash__

        device.recordings.forget(Unlike(-1))
        np.testing.assert_array_equal(found[0], integers() * 0.5 + 1)


def moved_and_interrupted(owner: Any, name: str, *, behind: bool) -> None:
    """What is held keeps its bytes where a call is interrupted before or behind a function that its
    plan, which moves buffers, comes to; and the call works when it is made again."""
    layout = stitch.Layout(stitch.DataType.FLOAT32, stitch.Space.L1)
    given = integers((192, 16))
    with stitch.open_device("tiny") as device:
        program = device.load(scaled("large", 2.0, given.shape, placement=["output.y.space=l1"]))
        held = []
        for number in range(6):
            tensor = device.empty(stitch.TensorDesc((160, 16), layout))
            held.append((tensor, given[:160] + number))
            device.write(*held[-1])
        del tensor, held[::2]
        function, is_done = getattr(owner, name), False

        def interrupted(*arguments: Any, **named: Any) -> Any:
            nonlocal is_done
            if is_done:
                return function(*arguments, **named)
            is_done = True
            if behind:
                function(*arguments, **named)
            raise KeyboardInterrupt

        y = one(program(given))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        assert is_done
        for tensor, array in held:
            np.testing.assert_array_equal(tensor.numpy(), array)
        try:
            np.testing.assert_array_equal(y.numpy(), given * 2 + 1)
        except stitch.TaskError as error:
            assert "interrupt" in str(error)
        for _ in range(2):
            np.testing.assert_array_equal(one(program(given)).numpy(), given * 2 + 1)
        for tensor, array in held:
            np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("behind", [False, True])
def test_an_interrupt_around_a_move_loses_nothing_that_is_held(behind: bool) -> None:
    moved_and_interrupted(local_backend, "move_all", behind=behind)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", ["end_leases_at", "apply"])
def test_an_interrupt_before_the_records_know_of_a_move_loses_nothing_that_is_held(
    name: str, behind: bool
) -> None:
    moved_and_interrupted(Records, name, behind=behind)


def test_an_interrupted_result_was_never_made() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        result = one(program(integers()))
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, OutputSlots, "take")
            with pytest.raises(KeyboardInterrupt):
                result.numpy()
        with pytest.raises(stitch.TaskError, match="never made"):
            result.numpy()
        np.testing.assert_array_equal(one(program(integers())).numpy(), integers() * 2 + 1)


def test_another_thread_recovers_after_an_interrupt() -> None:
    with stitch.open_device("tiny") as device:
        held = one(device.load(DOUBLED)(integers()))
        held.settle()
        view = held[2:]
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, Records, "leave")
            with pytest.raises(KeyboardInterrupt):
                view.deallocate()
        read: list[Array] = []
        thread = threading.Thread(target=lambda: read.append(held.numpy()))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(read[0], integers() * 2 + 1)


def test_constants_are_free_again_where_loading_is_interrupted() -> None:
    with stitch.open_device("tiny") as device:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_once(patch, Records, "attach")
            with pytest.raises(KeyboardInterrupt):
                device.load(DOUBLED)
        gc.collect()
        assert held_by(device) == []


def test_a_deferred_interrupt_is_raised_once_at_the_end_of_the_outermost_block() -> None:
    handler = signal.getsignal(signal.SIGINT)
    passed: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        with InterruptDeferred():
            _thread.interrupt_main()
            passed.append("after the first")
            with InterruptDeferred():
                _thread.interrupt_main()
                passed.append("inside")
            passed.append("between the ends")
        passed.append("behind")
    assert passed == ["after the first", "inside", "between the ends"]
    assert signal.getsignal(signal.SIGINT) is handler
    with InterruptDeferred():
        pass  # Nothing is left that would be raised at its end.
