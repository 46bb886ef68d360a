"""What NumPy or torch writes to exported bytes is read by the next run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.program import Array, Layout, Space
from stitch.runtime import RuntimeDevice
from tests.support.stitched_models import integers, one, parameters_only

X = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
TARGETS = ("host", "wormhole_n150")


def _doubled(device: RuntimeDevice, shape: tuple[int, ...] = X.shape, **options: Any) -> Any:
    example = (np.zeros(shape, np.float32),)
    model = stitch.compile(lambda v: v * 2.0, example, target=device.machine, **options)
    program = device.load(model)
    return lambda tensor: one(program(tensor)).numpy()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("take", [np.from_dlpack, lambda t: torch.from_dlpack(t).numpy()])
def test_writes_to_an_exported_host_array_are_read_by_the_next_call(take: Any, target: str) -> None:
    with stitch.open_device(target) as device:
        double, tensor = _doubled(device), device.tensor(X)
        double(tensor)
        shown = take(tensor)
        for number in range(3):
            shown[-1, -1] = number
            np.testing.assert_array_equal(double(tensor), shown * 2)
            np.testing.assert_array_equal(tensor.numpy(), shown)


def test_writes_to_an_exported_result_void_its_copies_and_nothing_else_does() -> None:
    with stitch.open_device("wormhole_n150") as device:
        double = _doubled(device)
        tensor = stitch.to_layout(device.tensor(X), Layout(stitch.DataType.FLOAT32, Space.DRAM))
        double(tensor)
        shown = np.from_dlpack(tensor)
        writes = device.account().writes_seen
        for _ in range(3):
            np.testing.assert_array_equal(double(tensor), X * 2)
        assert device.account().writes_seen == writes
        shown[0, 7] = -1.0
        np.testing.assert_array_equal(double(tensor), shown * 2)
        assert device.account().writes_seen == writes + 1


def test_what_is_written_to_an_exported_result_is_seen_in_a_view_that_was_made_before() -> None:
    with stitch.open_device("wormhole_n150") as device:
        tensor = stitch.to_layout(device.tensor(X), Layout(stitch.DataType.FLOAT32, Space.DRAM))
        tensor.settle()
        part = tensor[8:40]
        double = _doubled(device, shape=part.shape)
        double(part)
        shown = np.from_dlpack(tensor)
        shown[8, 7] = -1.0
        np.testing.assert_array_equal(double(part), shown[8:40] * 2)


def test_dropping_an_exported_array_invalidates_stale_copies() -> None:
    with stitch.open_device("wormhole_n150") as device:
        double = _doubled(device)
        tensor = stitch.to_layout(device.tensor(X), Layout(stitch.DataType.FLOAT32, Space.DRAM))
        double(tensor)
        shown = np.from_dlpack(tensor)
        shown[0, 0] = 99.0
        del shown
        device.flush()
        assert double(tensor)[0, 0] == 198.0


def test_a_write_to_a_part_of_a_host_array_is_seen_in_the_whole() -> None:
    with stitch.open_device("wormhole_n150") as device:
        double, tensor = _doubled(device), device.tensor(X)
        double(tensor)
        part = tensor[32:]
        device.write(part, -X[32:])
        np.testing.assert_array_equal(double(tensor), np.concatenate([X[:32], -X[32:]]) * 2)
        np.from_dlpack(part[:1])[...] = 5.0
        assert (double(tensor)[32] == 10.0).all()


def test_a_borrowed_array_is_copied_again_only_when_it_has_changed() -> None:
    with stitch.open_device("wormhole_n150") as device:
        double, array = _doubled(device), X.copy()
        tensor = device.tensor(array, borrow=True)
        double(tensor)
        before = device.account().writes_seen
        double(tensor)
        assert device.account().writes_seen == before
        array[-1, -1] = 7.0
        np.testing.assert_array_equal(double(tensor), array * 2)
        assert device.account().writes_seen == before + 1


def test_a_write_between_a_call_and_its_run_is_read() -> None:
    with stitch.open_device("wormhole_n150") as device:
        program = device.load(stitch.compile(lambda v: v * 2.0, (X,), target=device.machine))
        array = X.copy()
        tensor = device.tensor(array, borrow=True)
        one(program(tensor)).numpy()
        pending = one(program(tensor))
        array[-1, -1] = 7.0
        np.testing.assert_array_equal(pending.numpy(), array * 2)


@pytest.mark.parametrize("turn", [np.transpose, np.flipud])
def test_bytes_that_cannot_be_compared_are_copied_every_time(turn: Any) -> None:
    array: Array = turn(X.copy())
    with stitch.open_device("wormhole_n150") as device:
        double = _doubled(device)
        tensor = device.tensor(array, borrow=True)
        for number in range(3):
            array[0, 0] = number
            np.testing.assert_array_equal(double(tensor), array * 2)


def test_a_copy_in_tiles_is_never_trusted() -> None:
    with stitch.open_device("wormhole_n150") as device:
        tiles = device.load(
            stitch.compile(
                lambda v: v * 2.0, (X,), target=device.machine,
                placement="input.v.layout=tile",
            )
        )  # fmt: skip
        array = X.copy()
        tensor = device.tensor(array, borrow=True)
        for number in range(3):
            array[33, 33] = number
            np.testing.assert_array_equal(one(tiles(tensor)).numpy(), array * 2)


def test_negative_zero_and_other_not_a_numbers_are_other_bytes() -> None:
    with stitch.open_device("wormhole_n150") as device:
        model = stitch.compile(lambda v: v / 0.0, (np.zeros(8, np.float32),), target=device.machine)
        program, array = device.load(model), np.full(8, 0.0, np.float32)
        tensor = device.tensor(array, borrow=True)
        copies = []
        for value in (1.0, 0.0, -0.0, np.nan, np.nan):
            before = device.account().writes_seen
            array[:] = value
            one(program(tensor)).numpy()
            copies.append(device.account().writes_seen - before)
        assert copies == [1, 1, 1, 1, 0]


def test_exporting_a_parameter_evicts_its_cached_results() -> None:
    with stitch.open_device("tiny") as device:
        program, tensor = device.load(parameters_only("k", 3.0)), device.tensor(integers())
        one(program(tensor)).numpy()
        one(program(tensor)).numpy()
        assert device.account().total.programs == 1
        np.from_dlpack(tensor)[...] = 5.0
        assert (one(program(tensor)).numpy() == 15.0).all()
