"""Read and write array files (`.npy`, `.npz`, `.safetensors`) without pickle.

NumPy writes bfloat16 as two-byte void (`|V2`): it is read as bytes until the caller names the type
bfloat16, and written as float32, which is exact.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from stitch.budget import claim, keep
from stitch.errors import FormatError, StitchError, UsageError, closest
from stitch.files import identity, nearest_file, open_file, unreadable
from stitch.forms.safetensors import read_tensor
from stitch.program import Array, DataType

NUMPY_SUFFIXES = (".npy", ".npz")
_SUFFIXES = (*NUMPY_SUFFIXES, ".safetensors")
_Read = TypeVar("_Read")
#: Returns whether to read the data of an array, by name (None: the only one) and shape.
Accepts = Callable[[str | None, tuple[int, ...]], bool]


def _any_shape(_name: str | None, _shape: tuple[int, ...]) -> bool:
    return True


def read_array(
    path: Path,
    name: str | None = None,
    data_type: DataType | None = None,
    shape: tuple[int, ...] | None = None,
) -> Array:
    """Read one array of a file; raise `FormatError`.

    Args:
        path: The file.
        name: The array, optional if there is only one.
        data_type: Its declared type; bfloat16 accepts two-byte void.
        shape: Its declared shape: data of another shape is not read (see `read_array_file`).
    """
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise FormatError(
            f"{path.name}: unknown type of an array file", got=path.suffix,
            expected=", ".join(_SUFFIXES),
        )  # fmt: skip
    if identity(path) is None:
        near = nearest_file(path, _SUFFIXES)
        raise FormatError(f"there is no file {path.name}", remedy=near or None)
    if suffix == ".safetensors":
        return _stored(
            path, name, lambda: read_tensor(path, lambda names: _chosen(path, name, names))
        )
    arrays = read_array_file(path, lambda _, found: shape is None or found == shape)
    if suffix == ".npz":
        array = arrays[_chosen(path, name, map(str, arrays))]
    elif name is not None:
        raise FormatError(f"{path.name} holds one array, without a name", got=name)
    else:
        array = arrays[None]
    if array.dtype == NAMELESS and data_type is not DataType.BFLOAT16:
        title = path.name if name is None else f"array {name!r} of {path.name}"
        raise FormatError(
            f"{title}: its elements are two bytes without a type (|V2), as NumPy writes bfloat16; "
            "declare it with type: bfloat16"
        )
    return array if data_type is None else typed(array, data_type, path.name)


def read_array_file(path: Path, accepts: Accepts = _any_shape) -> Mapping[str | None, Array]:
    """Return the arrays of a file by name (`.npy`: None), each read on access.

    Args:
        path: The file.
        accepts: For a refused shape the array is zeros of that shape, which take no memory: the
            caller reports the shape before the data of a large array is read.

    Raises:
        FormatError: Now or on access, the file is unreadable, malformed, or has objects.
        OutOfMemoryError: On access.
    """
    suffix = path.suffix.lower()
    if suffix not in NUMPY_SUFFIXES:
        raise UsageError(
            "unknown type of an array file", expected=" or ".join(NUMPY_SUFFIXES), got=str(path),
            remedy="for raw bytes, add shape and type: 2x2xf32=@raw.bin",
        )  # fmt: skip
    if suffix == ".npy":
        return {None: _stored(path, None, lambda: read_npy(path, accepts))}
    return _guarded(path, None, lambda: _Archive(path, accepts))


def typed(array: Array, data_type: DataType, what: str) -> Array:
    """View two-byte void as bfloat16; raise `UsageError` if the slot has another type."""
    if array.dtype != NAMELESS:
        return array
    if data_type is not DataType.BFLOAT16:
        raise UsageError(
            f"{what}: the file has two-byte elements without a type (|V2), as NumPy writes "
            "bfloat16, which only a bfloat16 slot takes",
            expected=data_type.value,
            remedy=f"write the file with .astype({data_type.value!r})",
        )
    return array.view(data_type.dtype)


class _Archive(Mapping[str | None, Array]):
    """The arrays of a `.npz` file, read on access."""

    def __init__(self, path: Path, accepts: Accepts) -> None:
        self.path, self._accepts = path, accepts
        with self._opened() as archive:
            members = archive.namelist()
        #: Members of the archive by array name.
        self.members = {name.removesuffix(_MEMBER): name for name in members}
        self._read: dict[str, Array] = {}

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with open_file(self.path) as file, zipfile.ZipFile(file) as archive:
            yield archive

    def __getitem__(self, name: str | None) -> Array:
        if name is None or name not in self.members:
            raise KeyError(name)
        if name not in self._read:
            self._read[name] = _stored(self.path, name, lambda: self._array(name))
        return self._read[name]

    def _array(self, name: str) -> Array:
        member = self.members[name]
        with self._opened() as archive:
            with archive.open(member) as file:
                header = _header(file, archive.getinfo(member).file_size)
            if not self._accepts(name, header.shape):
                return header
            with archive.open(member) as file:
                return _claimed(file, header, f"reading array {name!r} of {str(self.path)!r}")

    def __contains__(self, name: object) -> bool:
        return name in self.members

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


def _chosen(path: Path, name: str | None, names: Iterable[str]) -> str:
    listed = sorted(names)
    if name is None and len(listed) == 1:
        return listed[0]
    if name is None or name not in listed:
        what = "one array must be named" if name is None else f"there is no array {name!r}"
        raise FormatError(
            f"{path.name}: {what}", expected=", ".join(listed[:20]) or "at least one array",
            remedy=(closest(name, listed) or None) if name is not None else "add name: ...",
        )  # fmt: skip
    return name


def _stored(path: Path, name: str | None, read: Callable[[], Array]) -> Array:
    """Read one array; raise `FormatError` for an unsupported type."""
    array = _guarded(path, name, read)
    if array.dtype != NAMELESS and all(t.is_block or t.dtype != array.dtype for t in DataType):
        raise FormatError(
            "unsupported type of an array", where=_where(path, name), got=str(array.dtype),
            expected=", ".join(t.value for t in DataType if not t.is_block),
        )  # fmt: skip
    return array


def _guarded(path: Path, name: str | None, read: Callable[[], _Read]) -> _Read:
    """Call `read`; turn all errors of the libraries into `FormatError`."""
    try:
        return read()
    except StitchError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        # NumPy raises TokenError, SyntaxError, zlib.error ... for damaged files.
        why = " ".join(str(error).split())[:200] or type(error).__name__
        is_numpy = path.suffix.lower() in NUMPY_SUFFIXES
        raise FormatError(
            f"this is no sound {path.suffix} file: {why}", where=_where(path, name),
            remedy="write it with numpy.save or numpy.savez, without objects" if is_numpy else None,
        ) from error  # fmt: skip


def _where(path: Path, name: str | None) -> str:
    return str(path) if name is None else f"{path}, array {name!r}"


#: The type as which NumPy stores bfloat16.
NAMELESS = np.dtype("V2")
_MEMBER = ".npy"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path, accepts: Accepts = _any_shape) -> Array:
    """Read a `.npy` file; `accepts` as of `read_array_file`."""
    with open_file(path) as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        header = _header(file, nbytes)
        if not accepts(None, header.shape):
            return header
        file.seek(0)
        return _claimed(file, header, f"reading {str(path)!r}")


def npy_bytes(array: Array) -> bytes:
    """Encode an array as a `.npy` file, types that NumPy lacks in a wider one."""
    stream = io.BytesIO()
    np.save(stream, _readable(array), allow_pickle=False)
    return stream.getvalue()


def npz_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Encode arrays as a `.npz` file, deterministically."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            # Without a date: equal arrays give equal files.
            archive.writestr(zipfile.ZipInfo(f"{name}{_MEMBER}"), npy_bytes(array))
    return stream.getvalue()


def _header(file: IO[bytes], nbytes: int) -> Array:
    """Return zeros of a header's shape and type, without memory; check them against `nbytes`."""
    version = np.lib.format.read_magic(file)
    header = _HEADERS.get(version)
    if header is None:
        raise ValueError(f"unsupported header version {version}")
    shape, _, dtype = header(file)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in shape):
        raise ValueError(f"its shape is {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if dtype.hasobject:
        raise ValueError("it holds objects, which are never unpickled")
    if min(shape, default=0) < 0 or wanted > nbytes:
        raise ValueError(f"its header promises {wanted} bytes, and it holds {nbytes}")
    return np.broadcast_to(np.zeros((), dtype), shape)


def _claimed(file: IO[bytes], header: Array, what: str) -> Array:
    taken = claim(header.nbytes, what)
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
