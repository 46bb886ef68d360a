"""Zero-copy exchange of buffers with other libraries, in both directions.

If the host is the whole device, programs read lent buffers in place; otherwise the device copies
them and keeps the copy while it equals the original (`exposure`). `export` returns a tensor's bytes
in place. The caller of these functions holds the run lock.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from stitch.machine import footprint
from stitch.program import Array, DataType, Space, TensorDesc, host_layout
from stitch.runtime.device import RuntimeDevice
from stitch.runtime.executors import as_bytes
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import BufferRecord


def lend(
    device: RuntimeDevice, array: Array, origin: str, *, shared_by: object = None
) -> Tensor:  # fmt: skip
    """Return a tensor on the bytes of a C-contiguous array; see `take_back`.

    Args:
        device: The device that reads the array.
        array: The array to lend.
        origin: Name of the buffer in reports.
        shared_by: If given and the buffer is read in place, results may overwrite the buffer, which
            is taken back when this object is gone; the array is kept alive until then.
    """
    device.check_open()
    device.check_consistent()
    desc = TensorDesc(array.shape, host_layout(DataType.from_dtype(array.dtype)))
    memory = device.backend.spaces[Space.HOST]
    if len(device.backend.spaces) > 1:
        buffer = device.records.outside(desc, array, origin)
    else:
        size = footprint(desc, device.machine.shape).size_per_bank
        address = memory.lend(as_bytes(array))
        key = device.desc_key(desc)
        buffer = BufferRecord(Space.HOST, address, size, desc, key, origin)
        # Foreign memory: never relocated or freed by the device.
        buffer.pins, buffer.shared_pins = 1, int(shared_by is not None)
    tensor = device.tensor_at(buffer, 0, desc, origin, is_exposed=True)
    if shared_by is not None and buffer.address is not None:
        back = partial(memory.take_back, buffer.address)
        device.deaths.notes.await_end(shared_by, back, None, array)
    return tensor


def take_back(device: RuntimeDevice, tensor: Tensor) -> None:
    """End a loan: free the copies that the device made. The tensor becomes unusable."""
    buffer = tensor._record.instances[0].buffer
    if buffer.address is not None:
        device.backend.spaces[Space.HOST].take_back(buffer.address)
    device.give_up(tensor._record, "its owner, who took the bytes back")
    # The allocators saw no change, but cached runs must not use the buffer again.
    device.records.touch()


def reshaped(device: RuntimeDevice, tensor: Tensor, desc: TensorDesc, offset_nbytes: int) -> Tensor:
    """Return a tensor of another shape that shares the bytes of a dense one."""
    of = tensor._record
    with device.ready(of):
        first = of.instances[0]
        assert first.desc.layout.is_dense, "only dense bytes can be read in another shape"
        whole = TensorDesc(desc.shape, first.desc.layout)
        offset = first.offset_nbytes + offset_nbytes
        return device.tensor_at(first.buffer, offset, whole, of.by, is_exposed=of.is_exposed)


def elements(tensor: Tensor) -> Array:
    """Return a copy of a tensor's elements, as `Tensor.numpy` does."""
    array: Array = tensor.device.elements(tensor._record)
    return array


def export(tensor: Tensor, dtype: np.dtype[Any] | None, ended: Callable[[], object]) -> Array:
    """Return a dense tensor's bytes as an array of type `dtype`, in place.

    The tensor lives, and its bytes stay in place, as long as the array. `ended` is called
    afterwards, possibly from a finalizer: it may only append to a queue.
    """
    array: Array = tensor.device.exported(tensor._record, dtype, tensor, ended)
    return array


def share(tensor: Tensor, ended: Callable[[], object] | None = None) -> Array:
    """As `export`, for a consumer that expects the bytes to be overwritten.

    A result that replaces the tensor by donation is written there. The bytes stay in place while
    the array lives; the tensor is not kept alive.
    """
    device: RuntimeDevice = tensor.device
    shared: list[BufferRecord] = []
    array: Array = device.exported(tensor._record, ended=partial(_unshared, shared, ended))
    # Invalidate cached plans: one made before would copy.
    (instance,) = tensor._record.instances[:1]
    instance.buffer.shared_pins += 1
    shared.append(instance.buffer)
    device.records.generation += 1
    return array


def _unshared(shared: list[BufferRecord], ended: Callable[[], object] | None) -> None:
    """Handle the end of an array that shares a buffer; idempotent."""
    while shared:
        shared.pop().shared_pins -= 1
    if ended is not None:
        ended()
