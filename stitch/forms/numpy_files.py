"""NumPy's files: what they hold is read from their headers first, then only what is asked for.

Comes in: paths of `.npy` and `.npz` files; arrays. Goes out: names and arrays; each array is
claimed from the budget before it is read, so a small archive of zeros does not become gigabytes
unasked. Its bytes are in this machine's order, rows first. Damaged files raise what NumPy and
zipfile raise, readers say which file it was. Out of arrays: the bytes of a file. Must not know:
slots.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from stitch.budget import claim, keep
from stitch.files import open_file
from stitch.program import Array, DataType

#: The type under which NumPy reads bfloat16, which it writes as two nameless bytes.
NAMELESS = np.dtype("V2")
_MEMBER = ".npy"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path) -> Array:
    """The array of a `.npy` file."""
    with open_file(path) as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        wanted = _promised(file, nbytes)
        file.seek(0)
        return _claimed(file, wanted, f"reading {str(path)!r}")


class NpzFile:
    """A `.npz` archive: the names of its arrays are known at once, each is read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._archive() as archive:
            members = archive.namelist()
        #: The archive's members by the names of the arrays.
        self.members = {name.removesuffix(_MEMBER): name for name in members}

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        with open_file(self.path) as file, zipfile.ZipFile(file) as archive:
            yield archive

    def read(self, name: str) -> Array:
        """One of its arrays; raises `KeyError` for another name."""
        member = self.members[name]
        with self._archive() as archive:
            with archive.open(member) as file:
                wanted = _promised(file, archive.getinfo(member).file_size)
            with archive.open(member) as file:
                return _claimed(file, wanted, f"reading array {name!r} of {str(self.path)!r}")


def npy_bytes(array: Array) -> bytes:
    """The bytes of a `.npy` file; types that NumPy lacks are written in one that holds them."""
    stream = io.BytesIO()
    np.save(stream, _readable(array), allow_pickle=False)
    return stream.getvalue()


def npz_bytes(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a `.npz` file, the same for the same arrays."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # A fixed date: the same results give the same file.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), npy_bytes(array))
    return stream.getvalue()


def _promised(file: IO[bytes], nbytes: int) -> int:
    """The bytes of the array that a header promises; the file has to hold as many."""
    version = np.lib.format.read_magic(file)
    header = _HEADERS.get(version)
    if header is None:
        raise ValueError(f"its header is of version {version}, which is for structured types")
    shape, _, dtype = header(file)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
        raise ValueError(f"its shape is {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError("it holds objects, which are never unpickled")
    if min(shape, default=0) < 0 or wanted > nbytes:
        raise ValueError(f"its header promises {wanted} bytes, and it holds {nbytes}")
    return wanted


def _claimed(file: IO[bytes], nbytes: int, what: str) -> Array:
    taken = claim(nbytes, what)
    stored: Any = np.lib.format.read_array(file, allow_pickle=False)
    array: Array = np.ascontiguousarray(stored, stored.dtype.newbyteorder("=")).reshape(
        stored.shape
    )
    keep(array, taken)
    return array


def _readable(array: Array) -> Array:
    kind = DataType.from_dtype(array.dtype)
    if kind is DataType.BFLOAT16 or (kind.is_narrow and kind.is_floating):
        return array.astype(np.float32)
    return array.astype(np.int8 if kind.limits[0] else np.uint8) if kind.is_narrow else array
