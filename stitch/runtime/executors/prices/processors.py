"""The processor that Stitch runs on: its family, as far as prices depend on it."""

from __future__ import annotations

import math
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stitch.errors import FormatError
from stitch.files import open_file

CPUINFO = Path("/proc/cpuinfo")
#: Its data caches, each with its level, kind and size.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Of many cores the first is enough.
MAX_NBYTES = 1 << 16
#: Bits of a vector by the flag that says so, the widest first.
VECTORS = (
    ("avx512f", 512), ("sve", 256), ("avx2", 256), ("avx", 256), ("asimd", 128), ("sse2", 128),
)  # fmt: skip
#: How far families are apart: by another vendor, by each halving of vectors, of the cache.
#: Vectors decide how fast everything is, the vendor whose kernels use them, the cache the rest.
VENDOR, VECTORS_HALVED, CACHE_HALVED = 2.0, 4.0, 1.0
_SIZE = re.compile(r"(\d+)([KM]?)")
_NBYTES = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True, slots=True)
class Processor:
    """A family of processors: who made it, bits of its vectors, bytes of a core's second cache.

    What is not known is empty or 0, and as near to every family as to any other.
    """

    vendor: str = ""
    vector_bits: int = 0
    cache_nbytes: int = 0

    def distance(self, other: Processor) -> float:
        """How unlike two families are.

        >>> mine = Processor("AuthenticAMD", 512, 1 << 20)
        >>> mine.distance(Processor("AuthenticAMD", 256, 1 << 19))
        5.0
        >>> mine.distance(Processor())
        0.0
        """
        apart = VENDOR if self.vendor and other.vendor and self.vendor != other.vendor else 0.0
        for mine, theirs, weight in (
            (self.vector_bits, other.vector_bits, VECTORS_HALVED),
            (self.cache_nbytes, other.cache_nbytes, CACHE_HALVED),
        ):
            if mine and theirs:
                apart += weight * abs(math.log2(mine / theirs))
        return apart

    def text(self) -> str:
        """It in words.

        >>> Processor("AuthenticAMD", 512, 1 << 20).text()
        'AuthenticAMD, vectors of 512 bits, 1024 KiB of second-level cache'
        """
        parts = [self.vendor or "a vendor that is not known"]
        if self.vector_bits:
            parts.append(f"vectors of {self.vector_bits} bits")
        if self.cache_nbytes:
            parts.append(f"{self.cache_nbytes >> 10} KiB of second-level cache")
        return ", ".join(parts)


def described(cpuinfo: str, cache_nbytes: int = 0) -> Processor:
    """The family of a processor of which Linux says this.

    >>> described("vendor_id\\t: GenuineIntel\\nflags\\t\\t: fpu sse2 avx avx2 avx512f\\n")
    Processor(vendor='GenuineIntel', vector_bits=512, cache_nbytes=0)
    """
    said: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    flags = set((said.get("flags") or said.get("Features") or "").split())
    # On Arm the first line of a core says who designed it, by a number.
    vendor = said.get("vendor_id") or said.get("CPU implementer") or ""
    return Processor(vendor, next((b for flag, b in VECTORS if flag in flags), 0), cache_nbytes)


@cache
def this_processor() -> Processor:
    """The family of the processor that this process runs on."""
    return described(_read(CPUINFO), _second_cache())


def processor_name() -> str:
    """What the maker of this processor calls it."""
    named = re.search(r"^model name\s*:\s*(.+)$", _read(CPUINFO), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _second_cache() -> int:
    for index in range(8):
        folder = CACHES / f"index{index}"
        level, kind = _read(folder / "level").strip(), _read(folder / "type").strip()
        if level == "2" and kind in ("Data", "Unified"):
            size = _SIZE.fullmatch(_read(folder / "size").strip())
            return int(size[1]) * _NBYTES[size[2]] if size else 0
    return 0


def _read(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file.read(MAX_NBYTES).decode(errors="replace")
    except (OSError, FormatError):
        return ""
