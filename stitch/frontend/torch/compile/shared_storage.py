"""Storages that torch and a device both look at, so that nothing is copied between them.

Comes in: torch tensors of a call, results of programs. Goes out: what a program is called with (a
Stitch tensor where the bytes are known, else an array), and results as torch tensors on our bytes.
A result is pinned and kept for as long as torch holds its storage. What torch owns (parameters) is
lent to the device: the machine `host` reads it in place, others copy it, and the runtime compares
the copy with it at every call. Torch's version counters are not asked: fused optimizers, `.data`,
NumPy and DLPack write without moving them. Calls hold the device's lock. Must not know: graphs.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stitch.errors import InternalError
from stitch.frontend.torch.aten_call import array_of, data_type_of
from stitch.program import Array, DataType, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import Tensor
from stitch.runtime.lending import lend, reshaped, take_back
from stitch.runtime.values import BufferRecord

#: Results of one output that torch may hold as views of our bytes; further ones it gets as copies,
#: for each place that is held forces a plan of its own.
MAX_VIEWS_HELD = 4
#: Places in one storage that are lent at a time, but for those that are static.
MAX_PARTS = 64
#: Calls between two looks for owners that are gone.
CALLS_BETWEEN_LOOKS = 64
#: Lent places that stay although no call since the last look has asked for them.
MAX_IDLE_PARTS = 1024

_BFLOAT16 = DataType.BFLOAT16.dtype

#: The address of the first byte, shape and type.
Part = tuple[int, tuple[int, ...], Any]


@dataclass(slots=True, eq=False)
class _Held:
    """One storage: who it is, its tensors by place.

    `result`: the Stitch tensor whose bytes these are, from the address `start` on. None for
    storages that torch owns: what they are at may change under them.
    """

    owner: StorageWeakRef
    result: Tensor | None = None
    start: int = 0
    parts: dict[Part, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ArgumentSlot:
    """One argument of a program; `is_static`: torch says that it is the same at every call.

    The rest is what came last: a plan is made for a place, so it pays for what comes again.
    """

    position: int
    is_static: bool
    #: Where in a result's storage a part began; the storage and address of what was unknown.
    offset: int | None = None
    storage: StorageWeakRef | None = None
    address: int = 0
    #: A static tensor, where it began, its storage, that one's entry, and what stands for it.
    static: tuple[Callable[[], Any], int, int, _Held, Tensor] | None = None


class _Watch(weakref.ref[Array]):
    """Sees the end of the array that torch holds for a result."""

    __slots__ = ("buffer", "held", "owner", "views")
    #: The storage that has the array.
    owner: int
    held: _Held
    views: deque[None]
    #: What is pinned as long as torch holds the array.
    buffer: BufferRecord


class SharedStorage:
    """The storages that torch and one device both look at."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: By identity. An address is none: it is used again, and DLPack and NumPy make further
        #: storages at it. Its owner's weak reference keeps an identity from being used again.
        self._held: dict[int, _Held] = {}
        self._watches: dict[int, _Watch] = {}
        self._reads_in_place = len(device.backend.spaces) == 1
        self._calls = 0
        #: How many arguments were recognised, lent for the first time, or copied.
        self.recognised = self.lent = self.copied = 0

    def __len__(self) -> int:
        return len(self._held)

    # -- in ----------------------------------------------------------------------------------------

    def argument(self, tensor: Any, slot: ArgumentSlot) -> Tensor | Array:
        """What a program is called with for a torch tensor."""
        if slot.static is not None:
            same, address, owner, entry, given = slot.static
            # In place, so whatever was written to it; the common case, and so the short one.
            if same() is tensor and tensor.data_ptr() == address and self._held.get(owner) is entry:
                self.recognised += 1
                return given
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.numel() == 0:
            self.copied += 1
            return array_of(tensor.contiguous())
        storage = tensor.untyped_storage()
        owner = storage._cdata
        held = self._held.get(owner)
        known = None if held is None else self._known(held, tensor, slot)
        if known is not None:
            self.recognised += 1
        elif slot.is_static or self._comes_again(slot, storage, tensor.data_ptr()):
            self.lent += 1
            known = self._lent(storage, tensor)
        else:
            self.copied += 1
            return array_of(tensor)
        if slot.is_static and self._reads_in_place:
            entry = self._held[owner]
            slot.static = weakref.ref(tensor), tensor.data_ptr(), owner, entry, known
        return known

    def _comes_again(self, slot: ArgumentSlot, storage: Any, address: int) -> bool:
        """Whether the same place came last time too, and may be read there from now on."""
        if not self._reads_in_place:
            # What is no parameter has changed as a rule: a device would compare and copy it.
            return False
        last = slot.storage
        if last is not None and last.cdata == storage._cdata and slot.address == address:
            held = self._held.get(storage._cdata)
            return held is None or len(held.parts) < MAX_PARTS
        slot.storage, slot.address = StorageWeakRef(storage), address
        return False

    def _known(self, held: _Held, tensor: Any, slot: ArgumentSlot) -> Tensor | None:
        """The tensor of a place in a storage that is known."""
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        part = held.parts.get(place)
        if part is not None or held.result is None:
            return part
        kind, offset = data_type_of(tensor.dtype), place[0] - held.start
        wanders = slot.offset not in (None, offset)
        slot.offset = offset
        if kind is not held.result.data_type or wanders:
            return None
        desc = TensorDesc(place[1], host_layout(kind))
        return held.parts.setdefault(place, reshaped(self.device, held.result, desc, offset))

    def _lent(self, storage: Any, tensor: Any) -> Tensor:
        held = self._held.get(storage._cdata)
        if held is None or held.result is not None:
            held = self._held[storage._cdata] = _Held(StorageWeakRef(storage))
        address, shape = tensor.data_ptr(), tuple(tensor.shape)
        kind = data_type_of(tensor.dtype)
        # Not tensor.numpy(): an array that owned the storage would keep it alive in every plan.
        buffer = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(address)
        array = np.frombuffer(buffer, kind.dtype).reshape(shape)
        part = lend(self.device, array, "a tensor of torch")
        held.parts[address, shape, tensor.dtype] = part
        return part

    # -- out ---------------------------------------------------------------------------------------

    def result(self, tensor: Tensor, dtype: Any, views: deque[None]) -> Any:
        """A result as a torch tensor, on our bytes where that is possible.

        `views` counts what torch still holds of the same output.
        """
        record, device = tensor._record, self.device
        if len(views) >= MAX_VIEWS_HELD or not record.desc.elements:
            return torch_tensor(device.read(record), dtype)
        instance = record.instances[0]
        array = device.dense(instance)
        assert array is not None, "outputs of these programs are row-major"
        shown = array.view(np.int16) if array.dtype == _BFLOAT16 else array.view()
        shared = torch_tensor(shown, dtype)
        storage = shared.untyped_storage()
        start, owner = shared.data_ptr(), storage._cdata
        held = self._held[owner] = _Held(StorageWeakRef(storage), tensor, start)
        held.parts[start, record.desc.shape, dtype] = tensor
        watch = _Watch(shown, self._let_go)
        watch.owner, watch.held, watch.views = owner, held, views
        # As `Device.export` does, whose finalizers take longer than all of this.
        device.expose(record)
        watch.buffer = instance.buffer
        watch.buffer.pins += 1
        device.records.epoch += 1
        views.append(None)
        self._watches[id(watch)] = watch
        return shared

    def _let_go(self, watch: Any) -> None:
        """Torch has freed the storage of a result. Runs anywhere, so it leaves notes at most."""
        self._watches.pop(id(watch), None)
        watch.views.pop()
        held = watch.held
        if self._held.get(watch.owner) is held:
            self._held.pop(watch.owner, None)
        held.parts.clear()
        held.result = None
        self.device.unpinned.append(watch.buffer)

    # -- accounts ----------------------------------------------------------------------------------

    def called(self) -> None:
        """A program is about to be called: now and then look for owners that are gone."""
        self._calls += 1
        if self._calls % CALLS_BETWEEN_LOOKS == 0:
            self.look()

    def look(self) -> None:
        """Forget the storages that torch has freed, and places that have long been left."""
        lent = [(owner, held) for owner, held in list(self._held.items()) if held.result is None]
        latest = self.device.queued.number - CALLS_BETWEEN_LOOKS
        idle: list[tuple[int, int, Part]] = []
        for owner, held in lent:
            if held.owner.expired():
                del self._held[owner]
                for part in held.parts.values():
                    take_back(self.device, part)
                continue
            for place, part in held.parts.items():
                used = part._record.last_used
                if used < latest:
                    idle.append((used, owner, place))
        idle.sort(key=lambda entry: entry[0])
        for _, owner, place in idle[: max(0, len(idle) - MAX_IDLE_PARTS)]:
            held = self._held[owner]
            take_back(self.device, held.parts.pop(place))
            # Another entry: a slot that remembers this one must not pass on what is gone.
            self._held[owner] = _Held(held.owner, parts=held.parts)


def torch_tensor(array: Array, dtype: Any) -> Any:
    """A torch tensor on the bytes of an array, which has this dtype already.

    NumPy has no bfloat16 that torch knows: its bits pass as int16. Raises `InternalError` for an
    array of any other type than the one asked for.
    """
    is_bfloat16 = dtype is torch.bfloat16
    if is_bfloat16 and array.dtype == _BFLOAT16:
        array = array.view(np.int16)
    tensor = torch.from_numpy(array)
    if is_bfloat16 and tensor.dtype is torch.int16:
        return tensor.view(torch.bfloat16)
    if tensor.dtype is not dtype:
        raise InternalError(
            "internal error: a result has another type than torch was promised",
            expected=str(dtype), got=str(array.dtype), remedy="please report it",
        )  # fmt: skip
    return tensor
