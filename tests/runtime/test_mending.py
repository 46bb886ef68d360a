"""What an interrupt leaves half done is mended by whoever comes next."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import stitch
from stitch.memory import Allocator
from stitch.runtime.values import OutputSlots, Records
from stitch.tasks import TaskSequence
from tests.support.stitched_models import integers, one, scaled


def interrupted_once(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    """The next call of a method ends in an interrupt."""
    real = getattr(kind, name)

    def stopped(*_: object, **__: object) -> None:
        monkeypatch.setattr(kind, name, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, name, stopped)


def test_a_task_that_is_half_queued_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with stitch.open_device("tiny") as device:
        double, triple = device.load(scaled("a", 2.0)), device.load(scaled("b", 3.0))
        x = device.tensor(integers())
        first = one(double(x))
        interrupted_once(monkeypatch, TaskSequence, "after")
        with pytest.raises(KeyboardInterrupt):
            triple(first)
        np.testing.assert_array_equal(one(triple(first)).numpy(), (integers() * 2 + 1) * 3 + 1)
        np.testing.assert_array_equal(first.numpy(), integers() * 2 + 1)


def test_a_result_that_was_not_taken_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stitch.open_device("tiny") as device:
        double = device.load(scaled("a", 2.0))
        y = one(double(integers()))
        interrupted_once(monkeypatch, OutputSlots, "take")
        with pytest.raises(KeyboardInterrupt):
            y.numpy()
        with pytest.raises(stitch.TaskError, match="never made"):
            y.numpy()
        np.testing.assert_array_equal(one(double(integers())).numpy(), integers() * 2 + 1)


def test_another_thread_mends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with stitch.open_device("tiny") as device:
        double = device.load(scaled("a", 2.0))
        held = one(double(integers()))
        held.numpy()
        view = held[2:]
        interrupted_once(monkeypatch, Records, "leave")
        with pytest.raises(KeyboardInterrupt):
            view.deallocate()
        read: list[np.ndarray] = []
        thread = threading.Thread(target=lambda: read.append(held.numpy()))
        thread.start()
        thread.join()
        np.testing.assert_array_equal(read[0], integers() * 2 + 1)


def test_constants_are_free_again_where_loading_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    with stitch.open_device("tiny") as device:
        interrupted_once(monkeypatch, Records, "attach")
        with pytest.raises(KeyboardInterrupt):
            device.load(scaled("a", 2.0))
        gc.collect()
        device.flush()
        assert all(a.used_nbytes == 0 for a in device.records.allocators.values())


def test_an_allocator_becomes_what_it_is_told() -> None:
    allocator = Allocator(0, 1024, 16)
    allocator.alloc(100)
    allocator.become([(0, 64), (512, 16)])
    allocator.check()
    assert allocator.buffers() == ((0, 64), (512, 16))
    assert allocator.free_nbytes == 1024 - 80
