"""Bytes that PyTorch and NumPy share with a device, without a copy in either direction.

If the host is the whole device, programs read lent buffers in place; otherwise the device copies
them and keeps the copy while it equals the original. Where DRAM lies in PyTorch's memory, its
tensors there are read in place too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.errors import TaskError, UsageError
from stitch.machine import footprint
from stitch.program import Array, Layout, Space, TensorDesc
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import BufferRecord, as_array

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice

#: Tensors of PyTorch that stay lent between calls; the one that was used least recently ends.
MAX_LENT = 256
#: Types of arguments that are not tensors of a library.
_OWN = (Tensor, np.ndarray)


def lend(
    device: RuntimeDevice, array: Any, origin: str, *, shared_by: object = None,
    owner: object = None,
) -> Tensor:  # fmt: skip
    """Return a tensor on the bytes of a C-contiguous array; see `take_back`.

    Args:
        device: The device that reads the array.
        array: The array to lend, or a tensor of the library whose memory the device's DRAM is.
        origin: Name of the buffer in reports.
        shared_by: If given and the buffer is read in place, results may overwrite the buffer, which
            is taken back when this object is gone; the array is kept alive until then.
        owner: Kept until the tensor is freed; else the caller keeps the bytes alive.
    """
    device.check_open()
    device.check_consistent()
    is_array = isinstance(array, np.ndarray)
    memory = device.backend.spaces[Space.HOST if is_array else Space.DRAM]
    kind, lent = memory.data.borrowed(array)
    desc = TensorDesc(tuple(array.shape), Layout(kind, memory.space))
    if is_array and len(device.backend.spaces) > 1:
        buffer = device.records.outside(desc, array, origin)
    else:
        size = footprint(desc, device.machine.shape).size_per_bank
        address = memory.lend(lent, owner)
        key = device.desc_key(desc)
        buffer = BufferRecord(memory.space, address, size, desc, key, origin)
        # Foreign memory: never relocated or freed by the device.
        buffer.pins, buffer.shared_pins = 1, int(shared_by is not None)
    tensor = device.tensor_at(buffer, 0, desc, origin, is_exposed=True)
    if shared_by is not None and buffer.address is not None:
        back = partial(memory.take_back, buffer.address)
        device.deaths.await_end(shared_by, back, None, array)
    return tensor


def take_back(device: RuntimeDevice, tensor: Tensor) -> None:
    """End a loan: free the copies that the device made. The tensor becomes unusable."""
    buffer = tensor._record.instances[0].buffer
    if buffer.address is not None:
        device.backend.spaces[buffer.space].take_back(buffer.address)
    device.give_up(tensor._record, "its owner, who took the bytes back")
    # The allocators saw no change, but cached runs must not use the buffer again.
    device.records.generation += 1


def lent_tensor(
    device: RuntimeDevice, tensor: Any, *, copy: bool = False, owned: bool = False
) -> Tensor | None:
    """Return a device tensor on the bytes of a tensor of the library whose memory DRAM is.

    None for anything else, which programs get as an array. With `owned` it keeps the bytes
    alive, as it does those of a copy, which is made with `copy` and of a tensor that is not
    dense; else it is valid while the tensor lives. The caller holds the run lock.

    Raises:
        UsageError: It lies on another device of the library, or needs a copy although it is
            `owned` without `copy`.
        TaskError: It needs a copy while copies are forbidden.
    """
    try:
        dense = device.backend.spaces[Space.DRAM].data.lent(tensor, copy=copy)
    except Exception as error:
        device.check_lost(error)
        raise
    if dense is None:
        return None
    is_copied = dense.data_ptr() != tensor.data_ptr()
    if is_copied and owned and not copy:
        raise UsageError(
            "a tensor of PyTorch that is not contiguous cannot be read in place",
            where="device.tensor(borrow=True)", got=_strides(tensor),
            remedy="borrow x.contiguous(), or leave out borrow=True",
        )  # fmt: skip
    if is_copied and not owned and device.copies_forbidden:
        raise TaskError(
            "a tensor of PyTorch that is not contiguous needs a copy, which forbid_copies() "
            "forbids",
            got=_strides(tensor), remedy="pass x.contiguous(), or allow copies here",
        )  # fmt: skip
    if owned or is_copied:
        # A tensor of its own: the caller may give his another storage (`x.data = y`).
        return lend(device, dense, "a tensor of PyTorch", owner=dense.detach())
    # Whatever owns the address now is what the caller gave.
    key = dense.data_ptr(), dense.shape, dense.dtype
    lent = device.lent.pop(key, None)
    if lent is None or not lent.is_allocated:
        lent = lend(device, dense, "a tensor of PyTorch")
    device.lent[key] = lent
    while len(device.lent) > MAX_LENT:
        del device.lent[next(iter(device.lent))]
    return lent


def lent_arguments(
    device: RuntimeDevice, arguments: tuple[Any, ...], donated: Collection[int] = ()
) -> tuple[Any, ...]:
    """Return arguments with device tensors (see `lent_tensor`) for tensors of the library, and with
    arrays for those at the positions `donated`, which are overwritten.

    It is the tuple itself if there are none, and inside a host function, which cannot wait.
    """
    if all(type(a) in _OWN for a in arguments) or device.holds_run_lock():
        return arguments
    given: list[Tensor | Array | None]
    with device.quick_lock:
        given = [None if type(a) in _OWN else lent_tensor(device, a) for a in arguments]
    for at in donated:
        if given[at] is not None:
            given[at] = as_array(arguments[at].detach().cpu(), "a donated tensor")
    if all(one is None for one in given):
        return arguments
    return tuple([a if one is None else one for a, one in zip(arguments, given, strict=True)])


def _strides(tensor: Any) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"


def elements(tensor: Tensor) -> Array:
    """Return a copy of a tensor's elements, as `Tensor.numpy` does."""
    array: Array = tensor.device.read(tensor._record, is_inside=True)
    return array


def export(tensor: Tensor, dtype: np.dtype[Any] | None, ended: Callable[[], object]) -> Array:
    """Return a dense tensor's bytes as an array of type `dtype`, in place.

    The tensor lives, and its bytes stay in place, as long as the array. `ended` is called
    afterwards, possibly from a finalizer: it may only append to a queue.
    """
    array: Array = tensor.device.export(tensor._record, dtype, tensor, ended)
    return array


def share(tensor: Tensor, ended: Callable[[], object] | None = None) -> Array:
    """As `export`, for a consumer that expects the bytes to be overwritten.

    A result that replaces the tensor by donation is written there. The bytes stay in place while
    the array lives; the tensor is not kept alive.
    """
    device: RuntimeDevice = tensor.device
    shared: list[BufferRecord] = []
    array: Array = device.export(tensor._record, ended=partial(_unshared, shared, ended))
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
