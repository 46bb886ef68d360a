"""Storages that torch and a device both look at, so that nothing is copied between them.

What programs overwrite on the device (`overwritten.py`) is known here as results are. What torch
owns (parameters) is lent to the device: the machine `host` reads it in place, others copy it, and
the runtime compares the copy with it at every call. Torch's version counters are not asked: fused
optimizers, `.data`, NumPy and DLPack write without moving them. Calls hold the device's lock.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stitch.frontend.torch.aten_call import PART_TYPES, array_of, data_type_of
from stitch.frontend.torch.compile.graph_report import Counts
from stitch.frontend.torch.compile.subgraphs import Result
from stitch.frontend.torch.tensor_bytes import array_at, tensor_on
from stitch.live_objects import LiveObjects
from stitch.program import Array, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import Tensor, elements, export, lend, reshaped, take_back

#: Results of one output that torch may hold as views of our bytes; further ones it gets as copies,
#: for each of them is bound to places of its own.
MAX_VIEWS_HELD = 4
#: Results of fewer bytes, which no backward pass reads, torch gets as copies where the host is the
#: whole device: to see to who holds them takes longer than to copy them out, and in where they come
#: back (4 us).
COPIED_BELOW = 16 << 10
#: Places in one storage that are lent at a time, but for those that are static.
MAX_PARTS = 64
#: Calls between two looks for owners that are gone.
CALLS_BETWEEN_LOOKS = 64
#: Lent places that stay although no call since the last look has asked for them.
MAX_IDLE_PARTS = 1024

#: As what torch is given them: it does not know NumPy's bfloat16.
_BITS = np.dtype(np.int16)

#: The address of the first byte, shape and type.
Part = tuple[int, tuple[int, ...], Any]


@dataclass(slots=True, eq=False)
class Lent:
    """A place in a storage of torch's that is lent; `last_call` asked for it last."""

    tensor: Tensor
    last_call: int
    is_taken_back: bool = False


@dataclass(slots=True, eq=False)
class _Lender:
    """A storage of torch's: who it is, and its places that are lent. What it is at may change."""

    owner: StorageWeakRef
    parts: dict[Part, Lent] = field(default_factory=dict)


class Shown:
    """A tensor on the device whose bytes torch holds, from the address `start` on: a result
    (`views`: those of its output), or one that programs overwrite there, which has no parts."""

    __slots__ = ("parts", "shown", "start", "tensor", "views")

    def __init__(
        self, tensor: Tensor, shown: MutableMapping[int, Shown], views: set[int] | None = None
    ) -> None:
        self.tensor, self.shown, self.views = tensor, shown, views
        self.start = 0
        #: Tensors on parts of it.
        self.parts: dict[Part, Tensor] = {}

    def begin(self, start: int) -> None:
        """Torch has it, at this address."""
        self.start = start
        self.shown[start] = self
        if self.views is not None:
            self.views.add(start)

    def ended(self) -> None:
        """Torch has let go of its storage. Doing this twice does no harm."""
        self.shown.pop(self.start, None)
        if self.views is not None:
            self.views.discard(self.start)
        self.parts.clear()


@dataclass(slots=True, eq=False)
class ArgumentSlot:
    """One argument of a program; `is_static`: torch says that it is the same at every call;
    `is_fresh`: it is made anew for every call, and so never comes again.

    The rest is what came last: a plan is bound to a place, which pays for what comes again.
    """

    position: int
    is_static: bool
    is_fresh: bool = False
    #: Where what came last began, if it is lent, and what stands for it.
    address: int = 0
    lent: Lent | None = None
    #: Where in a result's storage a part began; the storage and address of what was unknown.
    offset: int | None = None
    storage: StorageWeakRef | None = None
    unknown: int = 0


class Asker(Protocol):
    """Who knows by himself that what he asked for last is what he wants again."""

    def look(self) -> None:
        """Say of what is lent to him when he asked for it last."""


class SharedStorage:
    """The storages that torch and one device both look at."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: By identity. An address is none: it is used again, and DLPack and NumPy make further
        #: storages at it. Its owner's weak reference keeps an identity from being used again.
        self._lenders: dict[int, _Lender] = {}
        #: Results, and what programs overwrite, by address: that is the device's, so whatever
        #: begins there has these bytes.
        self.shown: dict[int, Shown] = {}
        self._reads_in_place = device.reads_in_place
        #: What is computed nowhere cannot be copied.
        self._copied_below = COPIED_BELOW if device.reads_in_place and device.computes else 0
        #: How many calls of programs have begun.
        self.calls = 0
        #: How many lent places were taken back.
        self.taken_back = 0
        #: Who asks for many places at once.
        self._askers: LiveObjects[Asker] = LiveObjects()
        #: How many arguments were recognised, lent for the first time, or copied.
        self.recognised = self.lent = self.copied = 0
        #: The bytes of those that were copied, and of results that were.
        self.copied_nbytes = 0
        #: What became of the graphs that run on the device.
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._lenders) + len(self.shown)

    @property
    def places_lent(self) -> int:
        """How many places of torch's storages are lent."""
        return sum(len(lender.parts) for lender in self._lenders.values())

    # -- in ----------------------------------------------------------------------------------------

    def await_looks(self, asker: Asker) -> None:
        """Ask him, before anything idle is taken back, for as long as he lives."""
        # Another thread may be in the middle of a look at all of them.
        with self.device.lock:
            self._askers.add(asker)

    def argument(self, tensor: Any, slot: ArgumentSlot) -> Tensor | Array:
        """What a program is called with for a torch tensor."""
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.numel() == 0:
            return self.as_array(tensor.contiguous())
        address = tensor.data_ptr()
        storage = tensor.untyped_storage()
        place = address, tuple(tensor.shape), tensor.dtype
        # What begins where a result does is one that torch holds.
        shown = self.shown.get(storage.data_ptr()) if self.shown else None
        result = None if shown is None else self._part_of(shown, place, slot)
        if result is not None:
            self.recognised += 1
            return result
        lender = self._lenders.get(storage._cdata)
        lent = None if lender is None else lender.parts.get(place)
        if lent is not None:
            self.recognised += 1
            lent.last_call = self.calls
        elif slot.is_static or self._comes_again(slot, storage, address):
            self.lent += 1
            lent = self._lend(storage, place)
        else:
            return self.as_array(tensor)
        slot.address, slot.lent = address, lent
        return lent.tensor

    def as_array(self, tensor: Any) -> Array:
        """An array on a dense tensor, of which the program takes a copy."""
        self.copied += 1
        self.copied_nbytes += tensor.nbytes
        if tensor.dtype is torch.bfloat16:
            return array_of(tensor)
        try:
            array: Array = tensor.numpy()
        except RuntimeError:  # It has gradients, or is read with another sign.
            return array_of(tensor)
        return array

    def _comes_again(self, slot: ArgumentSlot, storage: Any, address: int) -> bool:
        """Whether the same place came last time too, and may be read there from now on."""
        if not self._reads_in_place:
            # What is no parameter has changed as a rule: a device would compare and copy it.
            return False
        last = slot.storage
        if last is not None and last.cdata == storage._cdata and slot.unknown == address:
            lender = self._lenders.get(storage._cdata)
            return lender is None or len(lender.parts) < MAX_PARTS
        slot.storage, slot.unknown = StorageWeakRef(storage), address
        return False

    def _part_of(self, shown: Shown, place: Part, slot: ArgumentSlot) -> Tensor | None:
        """The result that torch shows at a place, or a tensor on the part that it shows."""
        address, shape, dtype = place
        tensor, offset = shown.tensor, address - shown.start
        if tensor.data_type is not data_type_of(dtype):
            return None
        if not offset and tensor.shape == shape:
            return tensor
        if shown.views is None:
            return None  # What overwrites it needs it whole.
        wanders = slot.offset not in (None, offset)
        slot.offset = offset
        if wanders or offset + math.prod(shape) * dtype.itemsize > tensor.volume * dtype.itemsize:
            return None
        part = shown.parts.get(place)
        if part is None:
            desc = TensorDesc(shape, host_layout(tensor.data_type))
            part = shown.parts[place] = reshaped(self.device, tensor, desc, offset)
        return part

    def _lend(self, storage: Any, place: Part) -> Lent:
        lender = self._lenders.get(storage._cdata)
        if lender is None:
            lender = self._lenders[storage._cdata] = _Lender(StorageWeakRef(storage))
        address, shape, dtype = place
        array = array_at(address, shape, data_type_of(dtype).dtype)
        lent = Lent(lend(self.device, array, "a tensor of torch"), self.calls)
        lender.parts[place] = lent
        return lent

    # -- out ---------------------------------------------------------------------------------------

    def copies(self, output: Result) -> bool:
        """Whether torch gets a result as a copy, whatever else it holds."""
        return output.may_be_copied and 0 < output.nbytes < self._copied_below

    def copy(self, array: Array, output: Result) -> Any:
        """A result as a torch tensor on an array that is a copy of it already."""
        self.copied_nbytes += output.nbytes
        dtype = output.dtype
        if dtype in PART_TYPES:
            return torch.view_as_complex(tensor_on(array, PART_TYPES[dtype]))
        return tensor_on(array, dtype)

    def result(self, tensor: Tensor, output: Result) -> Any:
        """A result as a torch tensor, on our bytes where that is possible and worth it."""
        dtype = output.dtype
        if 0 in output.shape:
            return torch.empty(output.shape, dtype=dtype, device="cpu")
        if self.copies(output) or len(output.views) >= MAX_VIEWS_HELD:
            return self.copy(elements(tensor), output)
        if dtype in PART_TYPES:
            pairs = replace(output, dtype=PART_TYPES[dtype], shape=(*output.shape, 2))
            parts = self.result(tensor, pairs)
            return torch.view_as_complex(parts)
        shown = Shown(tensor, self.shown, output.views)
        array = export(tensor, _BITS if dtype is torch.bfloat16 else None, shown.ended)
        shared = torch.from_numpy(array)
        if shared.dtype is not dtype:
            shared = tensor_on(array, dtype)
        shown.begin(shared.data_ptr())
        return shared

    # -- accounts ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Forget the storages that torch has freed, and places that have long been left."""
        for asker in self._askers:
            asker.look()
        latest = self.calls - CALLS_BETWEEN_LOOKS
        idle: list[tuple[int, int, Part]] = []
        for owner, lender in list(self._lenders.items()):
            if lender.owner.expired():
                del self._lenders[owner]
                for lent in lender.parts.values():
                    self._take_back(lent)
                continue
            for place, lent in lender.parts.items():
                if lent.last_call < latest:
                    idle.append((lent.last_call, owner, place))
        idle.sort(key=lambda entry: entry[0])
        for _, owner, place in idle[: max(0, len(idle) - MAX_IDLE_PARTS)]:
            self._take_back(self._lenders[owner].parts.pop(place))

    def _take_back(self, lent: Lent) -> None:
        # A slot that remembers it must not pass on what is gone.
        lent.is_taken_back = True
        self.taken_back += 1
        take_back(self.device, lent.tensor)
