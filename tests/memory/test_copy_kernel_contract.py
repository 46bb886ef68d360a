"""What a prepared copy promises: its path, its staging, no allocation, clear errors."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from stitch.errors import LayoutError
from stitch.machine.shape import MachineShape, SpaceShape, footprint
from stitch.memory import CopyKernel, prepare_copy
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc, host_layout
from tests.support.dense_arrays import read_array

MACHINE = MachineShape(
    "m", (4, 4), SpaceShape(1, 0, 1 << 30, 64), SpaceShape(16, 0, 1 << 20, 16),
    SpaceShape(12, 0, 1 << 28, 32),
)  # fmt: skip
F32, BF16 = DataType.FLOAT32, DataType.BFLOAT16


def kernel(shape: tuple[int, ...], source: Layout, target: Layout) -> CopyKernel:
    return prepare_copy(TensorDesc(shape, source), TensorDesc(shape, target), MACHINE)


@pytest.mark.parametrize("shape", [(64, 128), (4, 4)])
@pytest.mark.parametrize("host", [F32, BF16])
@pytest.mark.parametrize("device", [F32, BF16])
@pytest.mark.parametrize("tile", [None, TILE_SHAPE])
def test_to_layout_makes_the_round_trip(
    shape: tuple[int, int], host: DataType, device: DataType, tile: tuple[int, int] | None
) -> None:
    """tt-mlir's to_layout test; small integers are exact in both types."""
    data = (np.arange(np.prod(shape)) % 200).reshape(shape).astype(host.dtype)
    there = kernel(shape, host_layout(host), Layout(device, Space.DRAM, tile))
    back = kernel(shape, Layout(device, Space.DRAM, tile), host_layout(host))
    region = np.zeros(there.target_footprint.nbytes, np.uint8)
    result = np.zeros_like(data)
    there.bind(data.reshape(-1).view(np.uint8), region)()
    back.bind(region, result.reshape(-1).view(np.uint8))()
    np.testing.assert_array_equal(result.astype(np.float32), data.astype(np.float32))


@pytest.mark.parametrize(("columns", "kind"), [(1024, DataType.BFP8), (1000, F32)])
def test_staging_does_not_grow_with_the_tensor(columns: int, kind: DataType) -> None:
    target = Layout(kind, Space.DRAM, TILE_SHAPE)
    small = kernel((1024, columns), host_layout(F32), target).staging_nbytes
    large = kernel((8192, columns), host_layout(F32), target).staging_nbytes
    assert large <= small
    assert kind is F32 or large > 0


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (host_layout(F32), Layout(F32, Space.DRAM, TILE_SHAPE)),
        (Layout(BF16, Space.DRAM, TILE_SHAPE), host_layout(F32)),
        (host_layout(F32), Layout(DataType.BFP8, Space.DRAM, TILE_SHAPE)),
        (Layout(DataType.BFP4, Space.DRAM, TILE_SHAPE), host_layout(F32)),
        (host_layout(F32), host_layout(DataType.INT64)),
    ],
)
def test_a_bound_copy_allocates_nothing_that_grows(source: Layout, target: Layout) -> None:
    prepared = kernel((500, 700), source, target)
    given = np.zeros(footprint(prepared.source, MACHINE).nbytes, np.uint8)
    copy = prepared.bind(given, np.zeros(prepared.target_footprint.nbytes, np.uint8))
    copy()
    tracemalloc.start()
    try:
        copy()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


def test_a_bound_copy_can_run_again_and_sees_new_bytes() -> None:
    prepared = kernel((40, 40), host_layout(F32), Layout(F32, Space.DRAM, TILE_SHAPE))
    data = np.zeros((40, 40), np.float32)
    region = np.zeros(prepared.target_footprint.nbytes, np.uint8)
    copy = prepared.bind(data.reshape(-1).view(np.uint8), region)
    for value in (1.0, 2.0):
        data[:] = value
        copy()
        assert (read_array(prepared.target, region, MACHINE) == value).all()


def test_shapes_have_to_agree() -> None:
    with pytest.raises(LayoutError, match="cannot change the shape"):
        prepare_copy(
            TensorDesc((2, 3), host_layout(F32)), TensorDesc((3, 2), host_layout(F32)), MACHINE
        )
