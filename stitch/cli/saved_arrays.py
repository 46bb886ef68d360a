"""Arrays in `.npy` and `.npz` files, as the commands read and write them; never unpickled.

Comes in: paths and arrays. Goes out: arrays and bytes. Must not know: slots.

NumPy writes bfloat16 as two nameless bytes (`|V2`): read, they stay bytes until a slot says that
they are bfloat16; written, they become float32, which holds them exactly and which all can read.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from stitch.errors import FormatError, StitchError, UsageError
from stitch.files import unreadable
from stitch.forms import NAMELESS, NpzFile, read_npy
from stitch.program import Array, DataType

SUFFIXES = (".npy", ".npz")
_Made = TypeVar("_Made")


def read_array_file(path: Path) -> Mapping[str | None, Array]:
    """The arrays of a file: one without a name (`.npy`), or all by name (`.npz`).

    Names are known at once, an array is read when it is asked for. Raises `FormatError`, at either
    time, for a file that cannot be read, is no array file, or holds objects; `OutOfMemoryError`.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"arrays are read from {' and '.join(SUFFIXES)} files",
            got=str(path),
            remedy="for raw bytes, say their shape and type: 2x2xf32=@raw.bin",
        )
    if suffix == ".npy":
        return {None: _read(path, None, lambda: read_npy(path))}
    return _Archive(path)


class _Archive(Mapping[str | None, Array]):
    """The arrays of a `.npz` file, each read once, when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = _guarded(path, lambda: NpzFile(path))
        self.found: dict[str, Array] = {}

    def __getitem__(self, name: str | None) -> Array:
        if name is None or name not in self.file.members:
            raise KeyError(name)
        if name not in self.found:
            self.found[name] = _read(self.path, name, lambda: self.file.read(name))
        return self.found[name]

    def __contains__(self, name: object) -> bool:
        return name in self.file.members

    def __iter__(self) -> Iterator[str]:
        return iter(self.file.members)

    def __len__(self) -> int:
        return len(self.file.members)


def _read(path: Path, name: str | None, read: Callable[[], Array]) -> Array:
    """One array; raises `FormatError` for a type that is not stored."""
    array = _guarded(path, read)
    if array.dtype != NAMELESS and not _is_known(array.dtype):
        raise FormatError(
            "the file holds an array of a type that Stitch does not store",
            where=str(path) if name is None else f"{path}, array {name!r}",
            expected=", ".join(t.value for t in DataType if not t.is_block),
            got=str(array.dtype),
        )
    return array


def _guarded(path: Path, read: Callable[[], _Made]) -> _Made:
    """What `read` gives; whatever NumPy and zipfile raise for a damaged file is a `FormatError`."""
    try:
        return read()
    except StitchError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        raise _unsound(path, error) from error


def _is_known(dtype: np.dtype[np.generic]) -> bool:
    return any(not t.is_block and t.dtype == dtype for t in DataType)


def _unsound(path: Path, error: Exception) -> FormatError:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return FormatError(
        f"this is no sound {path.suffix} file: {why}",
        where=str(path),
        remedy="write it with numpy.save or numpy.savez, without objects",
    )


def typed(array: Array, data_type: DataType, what: str) -> Array:
    """The array as a slot of this type sees it: nameless two-byte elements are bfloat16.

    Raises `UsageError` where the slot says that they are something else.
    """
    if array.dtype != NAMELESS:
        return array
    if data_type is not DataType.BFLOAT16:
        raise UsageError(
            f"{what}: the file holds two nameless bytes for each element (|V2), as NumPy writes "
            "bfloat16, and only a bfloat16 slot says that they are that",
            expected=data_type.value,
            remedy=f"write the file with .astype({data_type.value!r})",
        )
    return array.view(data_type.dtype)


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


def _readable(array: Array) -> Array:
    kind = DataType.from_dtype(array.dtype)
    if kind is DataType.BFLOAT16 or (kind.is_narrow and kind.is_floating):
        return array.astype(np.float32)
    return array.astype(np.int8 if kind.limits[0] else np.uint8) if kind.is_narrow else array
