"""The bytes of a memory space: a mapping of this process, or memory that a library allocates.

The runtime copies between any two of them. Where the processor cannot read a space (`is_host`),
conversions go by way of host arrays: `staged`.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any, TypeAlias

import numpy as np

from stitch.errors import OutOfMemoryError
from stitch.memory.cells import Bytes
from stitch.program import Array, DataType, Space, TensorDesc

Call: TypeAlias = Callable[[], object]
#: Freed ranges of at least this size are returned to the system; smaller ones stay in the caches.
RELEASE_NBYTES = 32 << 20
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class SpaceBytes(ABC):
    """The bytes of one space. A region is a one-dimensional array of uint8.

    Attributes:
        is_host: Whether regions are NumPy arrays; else they are tensors of a library.
        dlpack_device: Kind and number of the device, as DLPack numbers them.
    """

    is_host: bool
    dlpack_device: tuple[int, int]

    @abstractmethod
    def region(self, start: int, stop: int) -> Any:
        """Return a writable view of a range of bytes."""

    @abstractmethod
    def moves(self, start: int, target: SpaceBytes, target_start: int, nbytes: int) -> list[Call]:
        """Return calls that copy bytes to this or another space; the two may overlap.

        They run no Python code and allocate nothing.
        """

    @abstractmethod
    def dense(self, region: Any, desc: TensorDesc) -> Any:
        """Return the dense tensor at the start of a region, in place; it exports itself by DLPack.

        Raises `BufferError` if the library does not have its type.
        """

    def lent(self, tensor: Any, *, copy: bool = False) -> Any:
        """Return a tensor of the library as a dense one on this device: itself where it is one,
        else, or with `copy`, a copy. None for anything else: it is an array of the host.

        Raises:
            UsageError: It lies on another device of the library.
        """
        return None

    @abstractmethod
    def borrowed(self, dense: Any) -> tuple[DataType, Any]:
        """Return type and bytes of a dense array or tensor, as a region of this kind."""

    @abstractmethod
    def staged(self, region: Any) -> tuple[Bytes, list[Call], list[Call]]:
        """Return a host array as long as a region, the calls that fill it from the region, and
        those that write it back. On the host it is the region itself, without calls."""

    @abstractmethod
    def copied(self, target: Any, source: Any) -> list[Call]:
        """Return the calls that copy a region to one of equal length; one of them is this space's,
        the other may be a NumPy array."""

    @abstractmethod
    def entry(
        self, region: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Sequence[Call], Array, Sequence[Call]]:
        """Return an array for the elements of a host array that enters a region, the calls to make
        before it is written, and those that copy it there.

        On the host it is the region itself, without calls.
        """

    @abstractmethod
    def discard(self, start: int, stop: int) -> None:
        """Return a large range to the system where that is possible; its content is undefined."""


class MappedBytes(SpaceBytes):
    """A lazily committed mapping of this process."""

    is_host = True
    dlpack_device = 1, 0

    def __init__(self, space: Space, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            self._mapping = mmap.mmap(-1, nbytes, flags=flags, prot=prot)
        except OSError as error:
            raise _no_addresses(space, nbytes, error) from error
        self._view = memoryview(self._mapping)
        self.array: Bytes = np.frombuffer(self._mapping, np.uint8)

    def region(self, start: int, stop: int) -> Bytes:
        return self.array[start:stop]

    def moves(self, start: int, target: SpaceBytes, target_start: int, nbytes: int) -> list[Call]:
        if not isinstance(target, MappedBytes):
            into = target.region(target_start, target_start + nbytes)
            return target.copied(into, self.region(start, start + nbytes))
        # memoryview slices copy by memmove; NumPy would copy overlapping bytes twice.
        source_view = self._view[start : start + nbytes]
        target_view = target._view[target_start : target_start + nbytes]
        return [partial(setitem, target_view, slice(None), source_view)]

    def dense(self, region: Any, desc: TensorDesc) -> Array:
        kind = desc.layout.data_type
        flat: Array = region[: desc.elements * kind.itemsize].view(kind.dtype)
        return flat.reshape(desc.shape)

    def borrowed(self, dense: Any) -> tuple[DataType, Bytes]:
        return DataType.from_dtype(dense.dtype), dense.reshape(-1).view(np.uint8)

    def staged(self, region: Any) -> tuple[Bytes, list[Call], list[Call]]:
        return region, [], []

    def copied(self, target: Any, source: Any) -> list[Call]:
        return [partial(np.copyto, target, source)]

    def entry(
        self, region: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> tuple[Sequence[Call], Array, Sequence[Call]]:
        return (), region.view(dtype).reshape(shape), ()

    def discard(self, start: int, stop: int) -> None:
        # Only pages that are wholly inside the range: others may hold live bytes.
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = min(stop, len(self._mapping)) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


def _no_addresses(space: Space, nbytes: int, error: OSError) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"cannot map {nbytes} bytes of address space for {space.value}: {error.strerror or error}",
        expected=f"{nbytes} bytes of address space; memory is committed only as it is used",
        remedy="raise the limit on address space (ulimit -v unlimited, RLIMIT_AS) and limit memory "
        "by open_device(max_memory=) or --max_memory, or describe a smaller machine",
    )
