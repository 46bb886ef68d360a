"""Arrays out of files: `.npy`, `.npz` and `.safetensors`, never unpickled.

Comes in: a path and, where a file holds several, a name. Goes out: the array, or a `FormatError`
that names file and array. safetensors is an optional extra, imported only for its files.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stitch.errors import FormatError, LayoutError, OutOfMemoryError, closest
from stitch.files import nearest_file, open_file
from stitch.forms.numpy_files import NAMELESS, NpzFile, read_npy
from stitch.program import Array, DataType

SUFFIXES = (".npy", ".npz", ".safetensors")


def read_array(path: Path, name: str | None = None, data_type: DataType | None = None) -> Array:
    """One array of a file; `name` may be left out if there is only one. Raises `FormatError`.

    NumPy writes bfloat16 as two nameless bytes (`|V2`): they are that where `data_type` says so.
    """
    readers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise FormatError(
            f"{path.name}: arrays are read from {', '.join(SUFFIXES)} files", got=path.suffix
        )
    try:
        array = reader(path, name)
        if array.dtype == NAMELESS:
            array = _bfloat16(array, data_type)
        DataType.from_dtype(array.dtype)
    except FileNotFoundError as error:
        near = nearest_file(path, SUFFIXES)
        raise FormatError(f"there is no file {path.name}", remedy=near or None) from error
    except LayoutError as error:
        raise FormatError(f"{_title(path, name)}: {error.what}") from error
    except (FormatError, OutOfMemoryError):
        raise
    except Exception as error:
        # Damaged files make NumPy raise what it likes (TokenError, SyntaxError, zlib.error ...).
        raise FormatError(f"{_title(path, name)} cannot be read: {error}") from error
    return array


def _bfloat16(array: Array, data_type: DataType | None) -> Array:
    if data_type is not DataType.BFLOAT16:
        raise LayoutError(
            "it holds two nameless bytes for each element (|V2), as NumPy writes bfloat16; "
            "declare it with type: bfloat16"
        )
    return np.ascontiguousarray(array).view(data_type.dtype).reshape(array.shape)


def _title(path: Path, name: str | None) -> str:
    return path.name if name is None else f"array {name!r} of {path.name}"


def _npy(path: Path, name: str | None) -> Array:
    if name is not None:
        raise FormatError(f"{path.name} holds one array, without a name", got=name)
    return read_npy(path)


def _npz(path: Path, name: str | None) -> Array:
    archive = NpzFile(path)
    return archive.read(_chosen(path, name, archive.members))


def _safetensors(path: Path, name: str | None) -> Array:
    try:
        from stitch.forms import safetensors
    except ImportError as error:
        raise FormatError(
            f"{path.name}: reading .safetensors needs the package safetensors",
            remedy="pip install safetensors",
        ) from error
    open_file(path).close()  # The package opens it by its name, and would wait for a pipe.
    return safetensors.read(path, lambda names: _chosen(path, name, names))


def _chosen(path: Path, name: str | None, names: Iterable[str]) -> str:
    known = sorted(names)
    if name is None and len(known) == 1:
        return known[0]
    if name is None or name not in known:
        asked = "no name is given" if name is None else f"there is no array {name!r}"
        raise FormatError(
            f"{path.name}: {asked}",
            expected=", ".join(known[:20]) or "an archive that is not empty",
            remedy=(closest(name, known) or None) if name is not None else "add name: ...",
        )
    return name
