"""Bytes that others own become tensors without a copy, and stay theirs."""

from __future__ import annotations

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError
from stitch.planner.checker.plan_check import check_plan
from stitch.program import TensorDesc, host_layout
from stitch.runtime import LoadedProgram, RuntimeDevice, lend, reshaped, take_back
from tests.support.stitched_models import held_by, one, writes_seen

X = np.arange(32, dtype=np.float32).reshape(4, 8)


def _scaled(device: RuntimeDevice) -> LoadedProgram:
    example = (np.zeros((4, 8), np.float32),)
    return device.load(stitch.compile(lambda v: v * 2.0, example, target=device.machine))


def test_the_host_machine_reads_lent_bytes_where_they_lie() -> None:
    with stitch.open_device("host", debug=True) as device:
        program, array = _scaled(device), X.copy()
        tensor = lend(device, array, "an array")
        for number in range(3):
            array[...] = number
            np.testing.assert_array_equal(one(program(tensor)).numpy(), array * 2)
        assert device.statistics().plans_made == 1
        assert writes_seen(device) == (0, 0)
        ((made, _),) = device.account().plans
        assert check_plan(made) == ()


def test_a_device_copies_lent_bytes_again_only_when_they_have_changed() -> None:
    with stitch.open_device("wormhole_n150") as device:
        program, array = _scaled(device), X.copy()
        tensor = lend(device, array, "an array")
        results = []
        for last in (31.0, 31.0, 5.0, 5.0):
            array[-1, -1] = last
            results.append(float(one(program(tensor)).numpy()[-1, -1]))
        assert results == [62.0, 62.0, 10.0, 10.0]
        assert device.account().writes_seen == 2


@pytest.mark.parametrize("target", ["host", "wormhole_n150"])
def test_what_was_taken_back_cannot_be_used(target: str) -> None:
    with stitch.open_device(target) as device:
        program = _scaled(device)
        before = held_by(device)
        tensor = lend(device, X.copy(), "an array")
        one(program(tensor)).numpy()
        take_back(device, tensor)
        with pytest.raises(TaskError, match="took the bytes back"):
            program(tensor)
        device.flush()
        assert held_by(device) == before


def test_a_tensor_of_another_shape_shares_the_bytes() -> None:
    with stitch.open_device("wormhole_n150") as device:
        program = _scaled(device)
        made = one(program(X))
        part = reshaped(device, made, TensorDesc((2, 8), host_layout(made.data_type)), 64)
        np.testing.assert_array_equal(part.numpy(), X[2:] * 2)
        device.write(made, X)
        np.testing.assert_array_equal(part.numpy(), X[2:])
