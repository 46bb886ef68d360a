"""Arrays in `.npy` and `.npz` files, as the commands read and write them; never unpickled.

Comes in: paths and arrays. Goes out: arrays and bytes. Must not know: slots.

NumPy writes bfloat16 as two nameless bytes (`|V2`): read, they stay bytes until a slot says that
they are bfloat16; written, they become float32, which holds them exactly and which all can read.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from stitch.cli.command import read_failure
from stitch.errors import FormatError, UsageError
from stitch.files import open_file
from stitch.program import Array, DataType

SUFFIXES = (".npy", ".npz")
#: The type under which NumPy reads bfloat16.
_NAMELESS = np.dtype("V2")


def read_array_file(path: Path) -> dict[str | None, Array]:
    """The arrays of a file: one without a name (`.npy`), or all by name (`.npz`).

    Raises `FormatError` for a file that cannot be read, is no array file, or holds objects.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(
            f"arrays are read from {' and '.join(SUFFIXES)} files",
            got=str(path),
            remedy="for raw bytes, say their shape and type: 2x2xf32=@raw.bin",
        )
    try:
        found = _npy(path) if suffix == ".npy" else _npz(path)
    except OSError as error:
        raise read_failure(path, error) from error
    except (ValueError, EOFError, KeyError, MemoryError, OverflowError) as error:
        raise _unsound(path, error) from error
    except (zipfile.BadZipFile, zlib.error, RuntimeError) as error:
        raise _unsound(path, error) from error
    for name, array in found.items():
        if array.dtype != _NAMELESS and not _is_known(array.dtype):
            raise FormatError(
                "the file holds an array of a type that Stitch does not store",
                where=str(path) if name is None else f"{path}, array {name!r}",
                expected=", ".join(t.value for t in DataType if not t.is_block),
                got=str(array.dtype),
            )
    return found


def _is_known(dtype: np.dtype[np.generic]) -> bool:
    return any(not t.is_block and t.dtype == dtype for t in DataType)


def _unsound(path: Path, error: Exception) -> FormatError:
    why = " ".join(str(error).split())[:200] or type(error).__name__
    return FormatError(
        f"this is no sound {path.suffix} file: {why}",
        where=str(path),
        remedy="write it with numpy.save or numpy.savez, without objects",
    )


def _npy(path: Path) -> dict[str | None, Array]:
    with open_file(path) as file:
        array: Array = np.lib.format.read_array(file, allow_pickle=False)
    return {None: _native(array)}


def _npz(path: Path) -> dict[str | None, Array]:
    found: dict[str | None, Array] = {}
    with open_file(path) as file, np.load(file, allow_pickle=False) as archive:
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it is no .npz archive")
        for name in archive.files:
            member = archive[name]
            if not isinstance(member, np.ndarray):
                raise ValueError(f"its member {name!r} is no array")
            found[name] = _native(member)
    return found


def _native(array: Array) -> Array:
    """Bytes in this machine's order, rows first."""
    wanted = array.dtype.newbyteorder("=")
    return np.ascontiguousarray(array, wanted).reshape(array.shape)


def typed(array: Array, data_type: DataType, what: str) -> Array:
    """The array as a slot of this type sees it: nameless two-byte elements are bfloat16.

    Raises `UsageError` where the slot says that they are something else.
    """
    if array.dtype != _NAMELESS:
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
