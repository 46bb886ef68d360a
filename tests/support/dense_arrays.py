"""Dense arrays into the bytes of a tensor, and out of them, by the copies that are tested."""

from __future__ import annotations

import numpy as np

from stitch.machine import MachineShape
from stitch.memory import prepare_copy
from stitch.program import Array, TensorDesc, host_layout


def read_array(desc: TensorDesc, region: Array, machine: MachineShape) -> Array:
    """A new dense array of what a footprint holds (float32 for block formats)."""
    array = np.empty(desc.shape, desc.layout.data_type.in_arrays.dtype)
    dense = TensorDesc(desc.shape, host_layout(desc.layout.data_type.in_arrays))
    prepare_copy(desc, dense, machine).bind(region, _raw(array))()
    return array


def write_array(array: Array, desc: TensorDesc, region: Array, machine: MachineShape) -> None:
    """Writes a dense array into a footprint, in the layout that `desc` describes."""
    wanted = desc.layout.data_type.in_arrays
    assert (array.shape, array.dtype) == (desc.shape, wanted.dtype)
    dense = TensorDesc(desc.shape, host_layout(wanted))
    prepare_copy(dense, desc, machine).bind(_raw(np.ascontiguousarray(array)), region)()


def _raw(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
