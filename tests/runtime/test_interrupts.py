"""An interrupt before a plan runs leaves its tasks in the queue, one around a move what is held.

`test_signals.py` interrupts at random times.
"""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.program import Array
from tests.support.faults import Fuse, lay
from tests.support.interrupts import interrupt_next_plan
from tests.support.stitched_models import integers, one, scaled

DOUBLED, HALVED = scaled("doubled", 2.0), scaled("halved", 0.5)


def test_an_interrupt_before_a_plan_runs_leaves_its_tasks_in_the_queue() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(DOUBLED), device.load(HALVED)
        result = one(b(one(a(device.tensor(integers())))))
        interrupt_next_plan(device)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        assert result.is_pending
        device.flush()
        assert not result.is_pending
        np.testing.assert_array_equal(result.numpy(), (integers() * 2 + 1) * 0.5 + 1)


def test_what_an_interrupted_batch_reads_is_not_dropped() -> None:
    with stitch.open_device("tiny") as device:
        program = device.load(DOUBLED)
        given = device.tensor(integers())
        result = one(program(given))
        interrupt_next_plan(device)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        del given
        device.memory_use()
        np.testing.assert_array_equal(result.numpy(), integers() * 2 + 1)


def test_a_settled_pipeline_does_not_overwrite_what_an_interrupted_batch_reads() -> None:
    with stitch.open_device("tiny") as device:
        a, b = device.load(DOUBLED), device.load(HALVED)
        pipeline = stitch.Pipeline([a])
        for _ in range(5):
            given = one(pipeline(integers()))
        result = one(b(given))
        interrupt_next_plan(device)
        with pytest.raises(KeyboardInterrupt):
            device.flush()
        # Its place is the one that the pipeline would take next.
        del given
        np.testing.assert_array_equal(one(pipeline(-integers())).numpy(), 1 - integers() * 2)
        np.testing.assert_array_equal(result.numpy(), (integers() * 2 + 1) * 0.5 + 1)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_around_any_move_loses_nothing_that_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for a large result is made by moving what is held."""
    layout = stitch.Layout(stitch.DataType.FLOAT32, stitch.Space.L1)
    given, fuse = integers((192, 16)), Fuse()
    fuse.act = interrupt
    lay(monkeypatch, fuse)
    compiled = scaled("large", 2.0, given.shape, placement=["output.y.space=l1"])
    place, places, moves = 0, 1, 0
    while place < places:
        with stitch.open_device("tiny") as device:
            program, held = device.load(compiled), list[tuple[stitch.Tensor, Array]]()
            for number in range(6):
                tensor = device.empty(stitch.TensorDesc((160, 16), layout))
                held.append((tensor, given[:160] + number))
                device.write(*held[-1])
            del tensor, held[::2]
            y = one(program(given))
            before, moved = fuse.count, fuse.transfers
            if place:
                fuse.left = place - 1
                with pytest.raises(KeyboardInterrupt):
                    device.flush()
            else:
                device.flush()
                places, moves = fuse.count - before + 1, fuse.transfers - moved
            for tensor, array in held:
                np.testing.assert_array_equal(tensor.numpy(), array)
            try:
                np.testing.assert_array_equal(y.numpy(), given * 2 + 1)
            except stitch.TaskError as error:
                assert place and "interrupt" in str(error)
            for _ in range(2):
                np.testing.assert_array_equal(one(program(given)).numpy(), given * 2 + 1)
            for tensor, array in held:
                np.testing.assert_array_equal(tensor.numpy(), array)
        place += 1
    assert moves >= 1 and places > 3
