"""The bytes of memory spaces, allocation of addresses, and copies between layouts."""

from stitch.memory.allocator import Allocator, FreeGaps
from stitch.memory.conversion import CopyKernel, prepare_copy
from stitch.memory.space_bytes import Call, MappedBytes, SpaceBytes
from stitch.memory.space_memory import (
    LENT_ADDRESSES,
    POISON_BYTE,
    Arrivals,
    ByteRanges,
    SpaceMemory,
    WriteCounter,
)

__all__ = [
    "LENT_ADDRESSES", "POISON_BYTE", "Allocator", "Arrivals", "ByteRanges", "Call",
    "CopyKernel", "FreeGaps", "MappedBytes", "SpaceBytes", "SpaceMemory", "WriteCounter",
    "prepare_copy",
]  # fmt: skip
