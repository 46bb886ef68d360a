"""The bytes of a memory space as one tensor of PyTorch: on a CUDA device, or on the processor.

On the processor it stands in for a card: whatever is written for one runs there by the same code,
so nothing here reads the tensor's memory in place.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import OutOfMemoryError, UsageError
from stitch.memory import Call, MappedBytes, SpaceBytes
from stitch.program import Array, DataType, Space, TensorDesc, Value
from stitch.runtime.executors.cuda_graphs import Graphs, Launch, entry
from stitch.runtime.executors.index_faults import IndexFaults

#: Overlapping ranges are moved in pieces of this size, by way of bytes beside the space.
PIECE_NBYTES = 16 << 20
#: PyTorch's types, of those that it converts as NumPy does.
TORCH_TYPES: Mapping[DataType, torch.dtype] = {
    DataType.FLOAT32: torch.float32, DataType.FLOAT64: torch.float64,
    DataType.FLOAT16: torch.float16, DataType.BFLOAT16: torch.bfloat16,
    DataType.INT8: torch.int8, DataType.INT16: torch.int16, DataType.INT32: torch.int32,
    DataType.INT64: torch.int64, DataType.UINT8: torch.uint8, DataType.UINT16: torch.uint16,
    DataType.UINT32: torch.uint32, DataType.UINT64: torch.uint64, DataType.BOOL: torch.bool,
}  # fmt: skip
_DATA_TYPES = {dtype: data_type for data_type, dtype in TORCH_TYPES.items()}


class TorchBytes(SpaceBytes):
    """One tensor of uint8 whose regions are views of it."""

    is_host = False

    def __init__(
        self, space: Space, nbytes: int, device: torch.device, graphs: Graphs | None = None,
        faults: IndexFaults | None = None,
    ) -> None:  # fmt: skip
        """Allocate the tensor; on the processor it is committed as it is written.

        `faults`: what the host checks whenever it has read the tensor.

        Raises:
            OutOfMemoryError: The device has too little free memory.
        """
        self.device, self._graphs = device, graphs or Graphs()
        self._checks: list[Call] = [] if faults is None else [faults.check]
        self._mapped = MappedBytes(space, nbytes) if device.type == "cpu" else None
        try:
            with torch.inference_mode(False):
                if self._mapped is None:
                    self._tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
                else:
                    self._tensor = torch.from_numpy(self._mapped.region(0, nbytes))
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemoryError(
                f"{device} cannot allocate {nbytes} bytes: {str(error).splitlines()[0]}",
                expected=f"{nbytes} bytes in one piece",
                remedy="free memory there, or describe a machine with less DRAM and open it with "
                f"executor={str(device)!r}",
            ) from error
        self._piece: torch.Tensor | None = None
        kind, number = self._tensor.__dlpack_device__()
        self.dlpack_device = int(kind), number

    def region(self, start: int, stop: int) -> torch.Tensor:
        return self._tensor[start:stop]

    def dense(self, region: Any, desc: TensorDesc) -> torch.Tensor:
        dtype = TORCH_TYPES.get(desc.layout.data_type)
        if dtype is None:
            raise BufferError(f"PyTorch has no type for {desc.text()}: use .numpy()")
        flat: torch.Tensor = region[: desc.elements * dtype.itemsize].view(dtype)
        return flat.view(desc.shape)

    def lent(self, tensor: Any, *, copy: bool = False) -> torch.Tensor | None:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            return None
        if tensor.device != self.device:
            if tensor.device.type == "cpu":
                return None
            raise UsageError(
                f"a tensor on {tensor.device} was given to a device whose memory is on "
                f"{self.device}",
                expected=f"a tensor on {self.device}, or on the processor", got=str(tensor.device),
                remedy=f"tensor.to({str(self.device)!r})",
            )  # fmt: skip
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            return None
        if tensor.is_complex() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
            tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if tensor.dtype not in _DATA_TYPES:
            return None
        if copy or not tensor.is_contiguous():
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        return tensor

    def borrowed(self, dense: Any) -> tuple[DataType, torch.Tensor]:
        return _DATA_TYPES[dense.dtype], bytes_at(dense.data_ptr(), dense.nbytes, self.device)

    def staged(self, region: Any) -> tuple[Array, list[Call], list[Call]]:
        array = np.empty(len(region), np.uint8)
        host = torch.from_numpy(array)
        filled: list[Call] = [partial(host.copy_, region), *self._checks]
        return array, filled, [partial(region.copy_, host)]

    def copied(self, target: Any, source: Any) -> list[Call]:
        both = isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor)
        call = Launch if both else partial
        checks = [] if isinstance(target, torch.Tensor) else self._checks
        return [call(as_tensor(target).copy_, as_tensor(source)), *checks]

    def entry(
        self, region: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Sequence[Call], Array, Sequence[Call]]:
        made = entry(region, dtype, shape)
        return self._graphs.waits, made.array, (made,)

    def moves(self, start: int, target: SpaceBytes, target_start: int, nbytes: int) -> list[Call]:
        if target is not self or abs(target_start - start) >= nbytes:
            into = target.region(target_start, target_start + nbytes)
            return self.copied(into, self.region(start, start + nbytes))
        if self._piece is None:
            self._piece = torch.empty(PIECE_NBYTES, dtype=torch.uint8, device=self.device)
        calls: list[Call] = []
        offsets = range(0, nbytes, PIECE_NBYTES)
        # What a piece overwrites was moved before it.
        for offset in offsets if target_start < start else reversed(offsets):
            end = min(offset + PIECE_NBYTES, nbytes)
            beside = self._piece[: end - offset]
            calls += self.copied(beside, self.region(start + offset, start + end))
            calls += self.copied(self.region(target_start + offset, target_start + end), beside)
        return calls

    def discard(self, start: int, stop: int) -> None:
        # Of a card it is one allocation, which lives as long as the device.
        if self._mapped is not None:
            self._mapped.discard(start, stop)


class _Place:
    """Bytes on a card, as its libraries exchange them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at an address without a reference to their owner, whom every plan that reads
    them would keep alive."""
    with torch.inference_mode(False):
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            buffer: Any = (ctypes.c_char * nbytes).from_address(address)
            return torch.from_numpy(np.frombuffer(buffer, np.uint8))
        return torch.as_tensor(_Place(address, nbytes), device=device)


def as_tensor(region: Any) -> torch.Tensor:
    """Return a tensor over an array's bytes; a tensor is returned unchanged."""
    if isinstance(region, torch.Tensor):
        return region
    with warnings.catch_warnings():
        # Read-only arrays are sources, which are never written.
        warnings.simplefilter("ignore")
        return torch.from_numpy(region)


def uploaded(array: Array, value: Value, device: torch.device) -> torch.Tensor:
    """Return an array of a value on a device, in the value's compute type."""
    data = np.array(array.astype(value.type.data_type.compute_dtype))
    return torch.from_numpy(data).to(device)
