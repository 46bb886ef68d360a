"""Memory that torch and a device share, so that tensors are not copied between them.

Results of programs are exported to torch. Tensors that torch owns are lent to the device: the
machine `host` reads them in place; other machines copy them, and the runtime compares the copy in
each call. Torch's version counters do not help, because fused optimizers, `.data`, NumPy and DLPack
write without incrementing them. Tensors that programs overwrite (`OverwrittenTensor`) are shared in
both directions. Unless stated otherwise, callers hold the device's lock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from stitch.frontend.torch.aten_call import PART_TYPES, array_of, data_type_of
from stitch.frontend.torch.graph_report import Counts
from stitch.frontend.torch.tensor_bytes import array_at, array_on, tensor_on, untraced_tensor_on
from stitch.frontend.torch.torch_internals import DisableTorchFunction, disable_current_modes
from stitch.program import Array, Space, TensorDesc, host_layout
from stitch.report import Device
from stitch.runtime import Tensor, elements, export, lend, lent_tensor, reshaped, share, take_back

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


@dataclass(frozen=True, slots=True)
class Result:
    """An output of a program; `strides`: None for a dense row-major tensor; `may_be_copied`: no
    backward pass reads it."""

    index: int
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    may_be_copied: bool
    #: Addresses of the tensors that torch holds as views of device memory.
    views: set[int] = field(default_factory=set)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)


@dataclass(slots=True, eq=False)
class _LentStorage:
    """A storage of torch, with the device tensors on its parts."""

    owner: StorageWeakRef
    parts: dict[Part, Tensor] = field(default_factory=dict)


class _Exported:
    """Device memory that torch holds from the address `start` on, with its device tensor.

    It is a result, or a tensor that programs overwrite, which has no parts.
    """

    __slots__ = ("is_overwritten", "parts", "start", "tensor")

    def __init__(self, tensor: Tensor, *, is_overwritten: bool = False) -> None:
        self.tensor: Tensor | None = tensor
        self.is_overwritten, self.start = is_overwritten, 0
        self.parts: dict[Part, Tensor] = {}


@dataclass(slots=True, eq=False)
class ArgumentSlot:
    """One argument of a program, and its state after the last call.

    `is_static`: torch states that it is the same tensor in all calls; `is_fresh`: it is a new
    tensor in each call.
    """

    position: int
    is_static: bool
    is_fresh: bool = False
    #: Address of the last argument and its device tensor, if it is lent.
    address: int = 0
    lent: Tensor | None = None
    #: Offset of the last argument that was a part of a result.
    offset: int | None = None
    #: Storage and address of the last argument that was neither lent nor a result.
    storage: StorageWeakRef | None = None
    unknown: int = 0


class SharedStorage:
    """The memory that torch and one device share: a registry of torch's storages."""

    def __init__(self, device: Device) -> None:
        self.device = device
        #: By identity, not by address: addresses are reused, and DLPack and NumPy make further
        #: storages at one. The weak reference to the owner prevents reuse of the identity.
        self._lent: dict[int, _LentStorage] = {}
        #: By address: this memory is the device's, so any storage that starts there has its bytes.
        self._exported: dict[int, _Exported] = {}
        self._reads_in_place = device.reads_in_place
        #: Whether torch's tensors are read in place on the device, and where these lie.
        self.lends = device.lends
        data: Any = device.backend.spaces[Space.DRAM].data if device.lends else None
        self.place = data.device if device.lends else torch.device("cpu")
        #: A device that does not compute has nothing to copy.
        self._copied_below = COPIED_BELOW if device.reads_in_place and device.computes else 0
        #: Number of calls of programs.
        self.calls = 0
        #: Changes when lent tensors were taken back.
        self.generation = 0
        #: Number of arguments that were lent for the first time, or copied.
        self.lent = self.copied = 0
        #: Bytes of the copied arguments and results.
        self.copied_nbytes = 0
        #: Totals of the graphs that run on the device.
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._lent) + len(self._exported)

    @property
    def places_lent(self) -> int:
        """Number of lent tensors."""
        return sum(len(storage.parts) for storage in self._lent.values())

    # -- arguments ---------------------------------------------------------------------------------

    def argument(self, tensor: Any, slot: ArgumentSlot) -> Tensor | Array:
        """The device tensor for a torch tensor, or an array of which the program gets a copy."""
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.numel() == 0:
            return self._passed(tensor)
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        part = address, tuple(tensor.shape), tensor.dtype
        exported = self._exported.get(storage.data_ptr()) if self._exported else None
        if exported is not None:
            value = self._part_of(exported, part, slot)
            return self._passed(tensor) if value is None else value
        lender = self._lent.get(storage._cdata)
        lent = None if lender is None else lender.parts.get(part)
        if lent is None:
            if self.lends and not slot.is_static:
                one = self._passed(tensor)
                slot.address, slot.lent = address, one if isinstance(one, Tensor) else None
                return one
            if not (slot.is_static or self._is_repeated(slot, storage, address)):
                return self.as_array(tensor)
            self.lent += 1
            lent = self._lend(tensor, storage, part)
        slot.address, slot.lent = address, lent
        return lent

    def _passed(self, tensor: Any) -> Tensor | Array:
        """A tensor in place, or as a copy there, if it lies where the device's memory is; else as
        an array."""
        placed = lent_tensor(self.device, tensor) if self.lends else None
        return self.as_array(tensor.contiguous()) if placed is None else placed

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

    def _part_of(self, exported: _Exported, part: Part, slot: ArgumentSlot) -> Tensor | None:
        """The exported tensor, or a tensor on a part of its memory; None if neither is possible."""
        address, shape, dtype = part
        tensor, offset = exported.tensor, address - exported.start
        if tensor is None or tensor.data_type is not data_type_of(dtype):
            return None
        if not offset and tensor.shape == shape:
            return tensor
        is_moving = slot.offset not in (None, offset)
        slot.offset = offset
        end = offset + math.prod(shape) * dtype.itemsize
        # A program that overwrites a tensor overwrites all of it.
        if is_moving or exported.is_overwritten or end > tensor.volume * dtype.itemsize:
            return None
        view = exported.parts.get(part)
        if view is None:
            desc = TensorDesc(shape, host_layout(tensor.data_type))
            view = exported.parts[part] = reshaped(self.device, tensor, desc, offset)
        return view

    def _lend(self, tensor: Any, storage: Any, part: Part) -> Tensor:
        lender = self._lent.get(storage._cdata)
        if lender is None:
            lender = self._lent[storage._cdata] = _LentStorage(StorageWeakRef(storage))
        address, shape, dtype = part
        is_there = self.lends and tensor.device == self.place
        array = tensor if is_there else array_at(address, shape, data_type_of(dtype).dtype)
        one = lender.parts[part] = lend(self.device, array, "a tensor of torch")
        return one

    # -- memory of the device ----------------------------------------------------------------------

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
            return torch.empty(output.shape, dtype=dtype, device=self.place)
        if self.copies(output) or len(output.views) >= MAX_VIEWS_HELD:
            if self.lends and dtype not in PART_TYPES:
                return tensor_on(export(tensor, None, list), dtype).clone()
            return self.copy(elements(tensor), output)
        if dtype in PART_TYPES:
            pairs = replace(output, dtype=PART_TYPES[dtype], shape=(*output.shape, 2))
            return torch.view_as_complex(self.result(tensor, pairs))
        exported = _Exported(tensor)
        ended = partial(self._forget, exported, output.views)
        is_bits = dtype is torch.bfloat16 and not self.lends
        array = export(tensor, _BITS if is_bits else None, ended)
        shared = tensor_on(array, dtype) if self.lends else torch.from_numpy(array)
        if shared.dtype is not dtype:
            shared = tensor_on(array, dtype)
        start = exported.start = shared.data_ptr()
        self._exported[start] = exported
        output.views.add(start)
        return shared

    def overwritten(self, tensor: Tensor, dtype: Any) -> tuple[Any, _Exported]:
        """A torch tensor on the memory of a device tensor that programs overwrite."""
        exported = _Exported(tensor, is_overwritten=True)
        shared = untraced_tensor_on(share(tensor, partial(self.forget, exported)), dtype)
        exported.start = shared.data_ptr()
        self._exported[exported.start] = exported
        return shared, exported

    def forget(self, exported: _Exported) -> None:
        """Record that torch has freed device memory, or that its tensor is invalid; calling it
        twice is harmless."""
        self._exported.pop(exported.start, None)
        exported.tensor = None
        exported.parts.clear()

    def _forget(self, exported: _Exported, views: set[int]) -> None:
        self.forget(exported)
        views.discard(exported.start)

    # -- cleanup -----------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Take back the tensors of storages that torch has freed, and those that were lent first of
        a storage with many."""
        for identity, lender in list(self._lent.items()):
            parts, most = lender.parts, 0 if lender.owner.expired() else MAX_PARTS
            while len(parts) > most:
                # Before the tensor is unusable: slots may refer to it.
                self.generation += 1
                take_back(self.device, parts.pop(next(iter(parts))))
            if not most:
                del self._lent[identity]


# Arguments ----------------------------------------------------------------------------------------

#: For `map`: no Python code runs for arguments that have not moved.
_ADDRESS = torch.Tensor.data_ptr


class ProgramArguments:
    """Converts the arguments of one program, call by call; callers hold the device's lock."""

    __slots__ = (
        "_addresses", "_all", "_generation", "_moving", "_passing", "_pick", "_static", "_storage",
        "_values", "stay",
    )  # fmt: skip

    def __init__(self, storage: SharedStorage, slots: Iterable[ArgumentSlot]) -> None:
        self._storage, self._all = storage, list(enumerate(slots))
        #: The lent tensors of the last call, and all device tensors of one that has begun; None for
        #: an array.
        self._values: list[Tensor | None] = [None] * len(self._all)
        #: The numbers of the device tensors of the last call that are not lent, such as another
        #: program's results: they are not kept.
        self._passing: list[int] = []
        #: Whether all device tensors are lent and the same as in the call before.
        self.stay = False
        self._generation = storage.generation
        #: Static arguments are checked together, by their addresses in the last call; None if one
        #: of them was not lent.
        self._static = [(number, slot) for number, slot in self._all if slot.is_static]
        self._moving = [(number, slot) for number, slot in self._all if not slot.is_static]
        self._addresses: list[int] | None = None
        picked = [slot.position for _, slot in self._static]
        # itemgetter of one position returns no tuple: pick it twice.
        picked = picked * 2 if len(picked) == 1 else picked
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]]
        self._pick = itemgetter(*picked) if picked else lambda _: ()

    def arrays(self, tensors: Sequence[Any]) -> list[Array]:
        """Begin a call with the graph's arguments; return those that the program gets as arrays."""
        storage, values = self._storage, self._values
        storage.calls += 1
        if storage.calls % CALLS_BETWEEN_CLEANUPS == 0:
            storage.clean_up()
        arrays: list[Array] = []
        stay = not self._passing
        self._passing = passing = []
        if self._generation != storage.generation:
            for _, slot in self._all:
                slot.lent = None
            self._generation, self._addresses = storage.generation, None
        addresses, slots = list(map(_ADDRESS, self._pick(tensors))), self._moving
        if addresses != self._addresses:
            # Until all are converted: the call may be interrupted.
            self._addresses, slots = None, self._all
        for number, slot in slots:
            tensor, lent, before = tensors[slot.position], slot.lent, values[number]
            if slot.is_fresh and tensor.is_contiguous() and not storage.lends:
                arrays.append(storage.as_array(tensor))
                stay &= before is None
                values[number] = None
                continue
            # A new owner of the memory does not matter: type and shape are the same, and the device
            # reads it in place or compares it.
            if (
                lent is not None
                and lent is before
                and tensor.data_ptr() == slot.address
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
            stay = False
            values[number] = one
            if one is not slot.lent:
                passing.append(number)
        self.stay = stay
        if self._addresses is None and all(
            slot.lent is not None and slot.lent is values[number] for number, slot in self._static
        ):
            self._addresses = addresses
        return arrays

    def all_of(self, arrays: Iterable[Array]) -> list[Any]:
        """The program's arguments in the call that has begun: device tensors, the arrays of
        `arrays()`, and further arrays."""
        rest = iter(arrays)
        values = [next(rest) if value is None else value for value in self._values]
        values.extend(rest)
        for number in self._passing:
            self._values[number] = None
        return values


# Tensors that programs overwrite ------------------------------------------------------------------


class OverwrittenTensor:
    """A tensor of torch whose memory programs overwrite; the memory lives as long as this object.

    A device that reads torch's memory in place overwrites that, else `tensor` is on the device's.
    Callers need no lock. Raises what allocating on the device raises.
    """

    __slots__ = ("__weakref__", "_exported", "_storage", "start", "tensor", "value")

    def __init__(self, storage: SharedStorage, tensor: Any, desc: TensorDesc) -> None:
        device, plain = storage.device, tensor.detach()
        self._storage = storage
        self._exported: _Exported | None = None
        #: The device tensor; each run that overwrites it replaces it.
        self.value: Tensor
        is_there = storage.lends and plain.device == storage.place
        if (
            (device.reads_in_place or is_there) and plain.numel() and plain.is_contiguous()
            and data_type_of(plain.dtype) is desc.layout.data_type
        ):  # fmt: skip
            kind, array = desc.layout.data_type.dtype, plain
            if not is_there:
                array = array_at(plain.data_ptr(), tuple(plain.shape), kind)
            with device.lock:
                self.value = lend(device, array, "a tensor of torch", shared_by=self)
        else:
            plain = plain.contiguous()
            self.value = device.empty(desc.without_address())
            device.write(self.value, array_on(plain.cpu()))
            if plain.numel():
                with device.lock:
                    plain, self._exported = storage.overwritten(self.value, plain.dtype)
        #: Its address; torch may resize the storage.
        self.start, self.tensor = plain.data_ptr(), plain

    def is_at(self, tensor: Any) -> bool:
        """Whether a tensor of torch has this memory, shape and strides."""
        own = self.tensor
        return bool(
            tensor.data_ptr() == self.start
            and tensor.shape == own.shape
            and tensor.stride() == own.stride()
        )

    def replace_value(self, value: Tensor) -> None:
        """Record the device tensor after a run."""
        self.value = value
        if self._exported is not None:
            self._exported.tensor = value

    def invalidate(self) -> None:
        """Record that a run failed, so that torch's memory is valid and the device tensor is not,
        or that the caller holds the device tensor from now on."""
        del self.value
        if self._exported is not None:
            self._storage.forget(self._exported)
            self._exported = None


class RelocatedParameters:
    """Parameters that share a device's memory, with their original tensors."""

    __slots__ = ("_originals",)

    def __init__(self) -> None:
        #: By the id of the parameter.
        self._originals: dict[int, tuple[Any, Any]] = {}

    def relocate(self, parameter: Any, tensor: Any) -> None:
        """Make a parameter share a tensor's memory, and its values."""
        self._originals.setdefault(id(parameter), (parameter, parameter.data))
        parameter.data = tensor
        torch.autograd.graph.increment_version(parameter)

    def restore(self) -> None:
        """Copy the current values to the original tensors, and give these to the parameters.

        Calling it again continues after an interrupt; torch may be tracing other code.
        """
        with DisableTorchFunction(), disable_current_modes(), torch.no_grad():
            while self._originals:
                number, (parameter, original) = next(iter(self._originals.items()))
                if original.shape == parameter.shape:
                    original.copy_(parameter.data)
                else:  # The parameter was given another shape meanwhile.
                    original = parameter.data.clone()
                parameter.data = original
                del self._originals[number]
