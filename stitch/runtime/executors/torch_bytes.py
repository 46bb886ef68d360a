"""The bytes of a memory space as one tensor of PyTorch: on a CUDA device, or on the processor.

On the processor it stands in for a card: whatever is written for one runs there by the same code,
so nothing here reads the tensor's memory in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import OutOfMemoryError
from stitch.memory import Call, MappedBytes, SpaceBytes
from stitch.program import Array, DataType, Space, TensorDesc

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


class TorchBytes(SpaceBytes):
    """One tensor of uint8 whose regions are views of it."""

    is_host = False

    def __init__(self, space: Space, nbytes: int, device: torch.device) -> None:
        """Allocate the tensor; on the processor it is committed as it is written.

        Raises:
            OutOfMemoryError: The device has too little free memory.
        """
        self.device = device
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

    def staged(self, region: Any) -> tuple[Array, list[Call], list[Call]]:
        array = np.empty(len(region), np.uint8)
        host = torch.from_numpy(array)
        return array, [partial(host.copy_, region)], [partial(region.copy_, host)]

    def copied(self, target: Any, source: Any) -> list[Call]:
        return [partial(as_tensor(target).copy_, as_tensor(source))]

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


def as_tensor(region: Any) -> torch.Tensor:
    """Return a tensor over an array's bytes; a tensor is returned unchanged."""
    if isinstance(region, torch.Tensor):
        return region
    with warnings.catch_warnings():
        # Read-only arrays are sources, which are never written.
        warnings.simplefilter("ignore")
        return torch.from_numpy(region)
