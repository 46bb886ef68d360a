"""Lending: bytes of another owner become tensors without a copy, and the other way round.

Where the host is the whole device its programs read those bytes in place; elsewhere the device
copies them, and keeps the copy for as long as it is equal to them (`exposure`). `export` gives a
tensor's bytes as an array, in place. Whoever calls them holds the device's lock.
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
    """A tensor on the very bytes of a C-contiguous array; see `take_back`.

    `shared_by`: where they are read in place, what takes the tensor's place is written to them.
    They are taken back when this object is gone, and the array is kept until then.
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
        # It is where it is: nobody moves it, and nobody gives its bytes back.
        buffer.pins, buffer.shared_pins = 1, int(shared_by is not None)
    tensor = device.tensor_at(buffer, 0, desc, origin, is_exposed=True)
    if shared_by is not None and buffer.address is not None:
        back = partial(memory.take_back, buffer.address)
        device.deaths.notes.await_end(shared_by, back, None, array)
    return tensor


def take_back(device: RuntimeDevice, tensor: Tensor) -> None:
    """The owner's bytes are gone: free the copies that the device made; the tensor is dead."""
    buffer = tensor._record.instances[0].buffer
    if buffer.address is not None:
        device.backend.spaces[Space.HOST].take_back(buffer.address)
    device.give_up(tensor._record, "its owner, who took the bytes back")
    # Nothing that the allocators know has changed, but what has run on it must not run again.
    device.records.touch()


def reshaped(device: RuntimeDevice, tensor: Tensor, desc: TensorDesc, offset_nbytes: int) -> Tensor:
    """A tensor of another shape on the bytes of a dense one; both share them and keep them."""
    of = tensor._record
    with device.ready(of):
        first = of.instances[0]
        assert first.desc.layout.is_dense, "only dense bytes can be read in another shape"
        whole = TensorDesc(desc.shape, first.desc.layout)
        offset = first.offset_nbytes + offset_nbytes
        return device.tensor_at(first.buffer, offset, whole, of.by, is_exposed=of.is_exposed)


def elements(tensor: Tensor) -> Array:
    """A tensor's elements in an array of their own, as `Tensor.numpy` gives them."""
    array: Array = tensor.device.elements(tensor._record)
    return array


def export(tensor: Tensor, dtype: np.dtype[Any] | None, ended: Callable[[], object]) -> Array:
    """A dense tensor's own bytes as an array of this type; both live, and the bytes stay in place,
    until nobody holds the array. Then `ended` is called: anywhere, so it leaves notes at most."""
    array: Array = tensor.device.exported(tensor._record, dtype, tensor, ended)
    return array


def share(tensor: Tensor, ended: Callable[[], object] | None = None) -> Array:
    """As `export`, for one who expects to see the bytes overwritten: what takes the tensor's place
    is written there. They stay in place while the array lives; the tensor is not kept."""
    device: RuntimeDevice = tensor.device
    shared: list[BufferRecord] = []
    array: Array = device.exported(tensor._record, ended=partial(_unshared, shared, ended))
    # Before anything else is planned: a plan made before would have copied.
    (instance,) = tensor._record.instances[:1]
    instance.buffer.shared_pins += 1
    shared.append(instance.buffer)
    device.records.generation += 1
    return array


def _unshared(shared: list[BufferRecord], ended: Callable[[], object] | None) -> None:
    """An array that shares a buffer has ended; twice does no harm."""
    while shared:
        shared.pop().shared_pins -= 1
    if ended is not None:
        ended()
