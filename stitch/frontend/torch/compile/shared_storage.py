"""Memory that torch and a device share, so that tensors are not copied between them.

Results of programs are exported to torch. Tensors that torch owns (parameters) are lent to the
device: the machine `host` reads them in place; other machines copy them, and the runtime compares
the copy in each call. Torch's version counters do not help, because fused optimizers, `.data`,
NumPy and DLPack write without incrementing them. Callers hold the device's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stitch.frontend.torch.aten_call import PART_TYPES, array_of, data_type_of
from stitch.frontend.torch.compile.graph_report import Counts
from stitch.frontend.torch.compile.subgraphs import Result
from stitch.frontend.torch.tensor_bytes import array_at, tensor_on
from stitch.program import Array, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import Tensor, elements, export, lend, reshaped, take_back

#: Maximum number of results of one output that torch holds as views of device memory; further ones
#: are copied, because each view needs output slots of its own.
MAX_VIEWS_HELD = 4
#: Smaller results (bytes) that no backward pass reads are copied if the device reads torch's memory
#: in place: tracking a view takes longer than copying it out and in again (4 us).
COPIED_BELOW = 16 << 10
#: Calls between two cleanups.
CALLS_BETWEEN_CLEANUPS = 64
#: Maximum number of tensors in one storage that stay lent after a cleanup.
MAX_PARTS = 1024

#: The type of bfloat16 in torch.from_numpy, which does not know NumPy's bfloat16.
_BITS = np.dtype(np.int16)

#: A tensor in a storage: address of the first byte, shape and type.
Part = tuple[int, tuple[int, ...], Any]


@dataclass(slots=True, eq=False)
class LentTensor:
    """A tensor of torch that is lent to the device."""

    tensor: Tensor
    is_taken_back: bool = False


@dataclass(slots=True, eq=False)
class _LentStorage:
    """A storage of torch and its lent tensors."""

    owner: StorageWeakRef
    parts: dict[Part, LentTensor] = field(default_factory=dict)


class ExportedTensor:
    """A device tensor whose memory torch holds, from the address `start` on.

    It is a result (`views`: addresses of the views of its output), or a tensor that programs
    overwrite (`views` is None), which has no parts.
    """

    __slots__ = ("exported", "parts", "start", "tensor", "views")

    def __init__(
        self, tensor: Tensor, exported: MutableMapping[int, ExportedTensor],
        views: set[int] | None = None,
    ) -> None:  # fmt: skip
        self.tensor, self.exported, self.views = tensor, exported, views
        self.start = 0
        #: Tensors on parts of its memory.
        self.parts: dict[Part, Tensor] = {}

    def register(self, start: int) -> None:
        """Record that torch holds the memory, at this address."""
        self.start = start
        self.exported[start] = self
        if self.views is not None:
            self.views.add(start)

    def unregister(self) -> None:
        """Record that torch has freed its storage; calling it twice is harmless."""
        self.exported.pop(self.start, None)
        if self.views is not None:
            self.views.discard(self.start)
        self.parts.clear()


@dataclass(slots=True, eq=False)
class ArgumentSlot:
    """One argument of a program, and its state after the last call.

    `is_static`: torch states that it is the same tensor in all calls; `is_fresh`: it is a new
    tensor in each call.
    """

    position: int
    is_static: bool
    is_fresh: bool = False
    #: Address of the last argument and its lent tensor, if it is lent.
    address: int = 0
    lent: LentTensor | None = None
    #: Offset of the last argument that was a part of a result.
    offset: int | None = None
    #: Storage and address of the last argument that was neither lent nor a result.
    storage: StorageWeakRef | None = None
    unknown: int = 0


class SharedStorage:
    """The memory that torch and one device share."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: By identity, not by address: addresses are reused, and DLPack and NumPy make further
        #: storages at one. The weak reference to the owner prevents reuse of the identity.
        self._lent: dict[int, _LentStorage] = {}
        #: Results and overwritten tensors by address. The memory is the device's, so any storage
        #: that starts at the address has these bytes.
        self.exported: dict[int, ExportedTensor] = {}
        self._reads_in_place = device.reads_in_place
        #: A device that does not compute has nothing to copy.
        self._copied_below = COPIED_BELOW if device.reads_in_place and device.computes else 0
        #: Number of calls of programs.
        self.calls = 0
        #: Number of lent tensors that were taken back.
        self.taken_back = 0
        #: Number of arguments that were lent for the first time, or copied.
        self.lent = self.copied = 0
        #: Bytes of the copied arguments and results.
        self.copied_nbytes = 0
        #: Totals of the graphs that run on the device.
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._lent) + len(self.exported)

    @property
    def places_lent(self) -> int:
        """Number of lent tensors."""
        return sum(len(storage.parts) for storage in self._lent.values())

    # -- arguments ---------------------------------------------------------------------------------

    def argument(self, tensor: Any, slot: ArgumentSlot) -> Tensor | Array:
        """The device tensor for a torch tensor, or an array of which the program gets a copy."""
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.numel() == 0:
            return self.as_array(tensor.contiguous())
        address = tensor.data_ptr()
        storage = tensor.untyped_storage()
        part = address, tuple(tensor.shape), tensor.dtype
        exported = self.exported.get(storage.data_ptr()) if self.exported else None
        result = None if exported is None else self._part_of(exported, part, slot)
        if result is not None:
            return result
        lender = self._lent.get(storage._cdata)
        lent = None if lender is None else lender.parts.get(part)
        if lent is None:
            if not (slot.is_static or self._is_repeated(slot, storage, address)):
                return self.as_array(tensor)
            self.lent += 1
            lent = self._lend(storage, part)
        slot.address, slot.lent = address, lent
        return lent.tensor

    def as_array(self, tensor: Any) -> Array:
        """An array of a dense tensor, of which the program gets a copy."""
        self.copied += 1
        self.copied_nbytes += tensor.nbytes
        if tensor.dtype is torch.bfloat16:
            return array_of(tensor)
        try:
            array: Array = tensor.numpy()
        except RuntimeError:  # It requires gradients, or its sign is inverted.
            return array_of(tensor)
        return array

    def _is_repeated(self, slot: ArgumentSlot, storage: Any, address: int) -> bool:
        """Whether the last call had the same argument, and it may be lent."""
        if not self._reads_in_place:
            # Arguments that are not parameters usually change: a device would compare and copy.
            return False
        last = slot.storage
        if last is not None and last.cdata == storage._cdata and slot.unknown == address:
            return True
        slot.storage, slot.unknown = StorageWeakRef(storage), address
        return False

    def _part_of(self, exported: ExportedTensor, part: Part, slot: ArgumentSlot) -> Tensor | None:
        """The exported tensor, or a tensor on a part of its memory; None if neither is possible."""
        address, shape, dtype = part
        tensor, offset = exported.tensor, address - exported.start
        if tensor.data_type is not data_type_of(dtype):
            return None
        if not offset and tensor.shape == shape:
            return tensor
        if exported.views is None:
            return None  # A program overwrites the whole tensor.
        is_moving = slot.offset not in (None, offset)
        slot.offset = offset
        if is_moving or offset + math.prod(shape) * dtype.itemsize > tensor.volume * dtype.itemsize:
            return None
        view = exported.parts.get(part)
        if view is None:
            desc = TensorDesc(shape, host_layout(tensor.data_type))
            view = exported.parts[part] = reshaped(self.device, tensor, desc, offset)
        return view

    def _lend(self, storage: Any, part: Part) -> LentTensor:
        lender = self._lent.get(storage._cdata)
        if lender is None:
            lender = self._lent[storage._cdata] = _LentStorage(StorageWeakRef(storage))
        address, shape, dtype = part
        array = array_at(address, shape, data_type_of(dtype).dtype)
        lent = LentTensor(lend(self.device, array, "a tensor of torch"))
        lender.parts[part] = lent
        return lent

    # -- results -----------------------------------------------------------------------------------

    def copies(self, output: Result) -> bool:
        """Whether torch always gets a copy of a result."""
        return output.may_be_copied and 0 < output.nbytes < self._copied_below

    def copy(self, array: Array, output: Result) -> Any:
        """A result as a torch tensor, from an array that is already a copy."""
        self.copied_nbytes += output.nbytes
        dtype = output.dtype
        if dtype in PART_TYPES:
            return torch.view_as_complex(tensor_on(array, PART_TYPES[dtype]))
        return tensor_on(array, dtype)

    def result(self, tensor: Tensor, output: Result) -> Any:
        """A result as a torch tensor: a view of device memory, or a copy."""
        dtype = output.dtype
        if 0 in output.shape:
            return torch.empty(output.shape, dtype=dtype, device="cpu")
        if self.copies(output) or len(output.views) >= MAX_VIEWS_HELD:
            return self.copy(elements(tensor), output)
        if dtype in PART_TYPES:
            pairs = replace(output, dtype=PART_TYPES[dtype], shape=(*output.shape, 2))
            return torch.view_as_complex(self.result(tensor, pairs))
        exported = ExportedTensor(tensor, self.exported, output.views)
        array = export(tensor, _BITS if dtype is torch.bfloat16 else None, exported.unregister)
        shared = torch.from_numpy(array)
        if shared.dtype is not dtype:
            shared = tensor_on(array, dtype)
        exported.register(shared.data_ptr())
        return shared

    # -- cleanup -----------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Take back the tensors of storages that torch has freed, and those that were lent first of
        a storage with many."""
        for identity, lender in list(self._lent.items()):
            lent, most = lender.parts, 0 if lender.owner.expired() else MAX_PARTS
            while len(lent) > most:
                self._take_back(lent.pop(next(iter(lent))))
            if not most:
                del self._lent[identity]

    def _take_back(self, lent: LentTensor) -> None:
        # A slot may still refer to it.
        lent.is_taken_back = True
        self.taken_back += 1
        take_back(self.device, lent.tensor)


# Arguments ----------------------------------------------------------------------------------------

#: For `map`: no Python code runs for arguments that have not moved.
_ADDRESS = torch.Tensor.data_ptr


@dataclass(frozen=True, slots=True, eq=False)
class _ArgumentGroups:
    """The arguments of a program in two groups.

    `pick` selects the static arguments that are lent, which are checked together, from all
    arguments; their `addresses` are valid while `taken_back` is the storage's count. `moving`: the
    other slots with their numbers.
    """

    pick: Callable[[Sequence[Any]], tuple[Any, ...]]
    addresses: list[int]
    taken_back: int
    moving: list[tuple[int, ArgumentSlot]]


class ProgramArguments:
    """Converts the arguments of one program, call by call; callers hold the device's lock."""

    __slots__ = ("_groups", "_slots", "_storage", "_values", "stay")

    def __init__(self, storage: SharedStorage, slots: Iterable[ArgumentSlot]) -> None:
        self._storage, self._slots = storage, tuple(slots)
        #: The device tensors of the last call; None for an array, which is not kept.
        self._values: list[Tensor | None] = [None] * len(self._slots)
        #: Whether all device tensors are lent and the same as in the call before.
        self.stay = False
        self._groups = self._grouped(())

    def arrays(self, tensors: Sequence[Any]) -> list[Array]:
        """Begin a call with the graph's arguments; return those that the program gets as arrays."""
        storage, values = self._storage, self._values
        storage.calls += 1
        if storage.calls % CALLS_BETWEEN_CLEANUPS == 0:
            storage.clean_up()
        arrays: list[Array] = []
        stay, regroup = True, False
        groups = self._groups
        if groups.addresses:
            is_same = list(map(_ADDRESS, groups.pick(tensors))) == groups.addresses
            if not is_same or groups.taken_back != storage.taken_back:
                groups = self._groups = self._grouped(())
                regroup = True
        for number, slot in groups.moving:
            tensor, lent, before = tensors[slot.position], slot.lent, values[number]
            if slot.is_fresh and tensor.is_contiguous():
                arrays.append(storage.as_array(tensor))
                stay &= before is None
                values[number] = None
                continue
            # A new owner of the memory does not matter: type and shape are the same, and the device
            # reads it in place or compares it.
            if (
                lent is not None
                and lent.tensor is before
                and tensor.data_ptr() == slot.address
                and not lent.is_taken_back
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                continue
            one = storage.argument(tensor, slot)
            if not isinstance(one, Tensor):
                arrays.append(one)
                stay &= before is None
                values[number] = None
                continue
            # Tensors that are not lent, such as another program's results, never stay.
            stay = False
            values[number] = one
            regroup |= slot.is_static and _is_lent(slot, one)
        self.stay = stay
        if regroup:
            slots = enumerate(self._slots)
            # One assignment: after an interrupt each slot is in one group.
            self._groups = self._grouped(
                [n for n, slot in slots if slot.is_static and _is_lent(slot, values[n])]
            )
        return arrays

    def all_of(self, arrays: Iterable[Array]) -> list[Any]:
        """The program's arguments in the call that has begun: device tensors, the arrays of
        `arrays()`, and further arrays."""
        rest = iter(arrays)
        values = [next(rest) if value is None else value for value in self._values]
        values.extend(rest)
        return values

    def _grouped(self, lasting: Sequence[int]) -> _ArgumentGroups:
        """Groups in which the slots of these numbers are checked together."""
        slots = self._slots
        together = tuple([slots[number] for number in lasting])
        # itemgetter of one position returns no tuple: pick it twice.
        picked = together * 2 if len(together) == 1 else together
        others = sorted(set(range(len(slots))).difference(lasting))
        return _ArgumentGroups(
            itemgetter(*[slot.position for slot in picked]) if picked else tuple,
            [slot.address for slot in picked], self._storage.taken_back,
            [(number, slots[number]) for number in others],
        )  # fmt: skip


def _is_lent(slot: ArgumentSlot, value: Tensor | None) -> bool:
    return slot.lent is not None and slot.lent.tensor is value
