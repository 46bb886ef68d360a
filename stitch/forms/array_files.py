"""Read and write files of arrays: `.npy`, `.npz` and `.safetensors`, without pickle.

NumPy writes bfloat16 as two-byte void (`|V2`): it is read as bytes until the caller names the type
bfloat16, and written as float32, which holds it exactly and which every reader knows.
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
from stitch.program import Array, DataType

#: NumPy's own files, which are read and written.
NUMPY_SUFFIXES = (".npy", ".npz")
_SUFFIXES = (*NUMPY_SUFFIXES, ".safetensors")
_Read = TypeVar("_Read")
#: Whether the caller takes an array of this name (None: the only one) and shape.
Accepts = Callable[[str | None, tuple[int, ...]], bool]


def _any_shape(_name: str | None, _shape: tuple[int, ...]) -> bool:
    return True


def read_array(
    path: Path,
    name: str | None = None,
    data_type: DataType | None = None,
    shape: tuple[int, ...] | None = None,
) -> Array:
    """One array of a file; `name` may be left out if there is only one. Raises `FormatError`.

    Nameless bytes are bfloat16 where `data_type` says so, else an error. Of an array of another
    shape than `shape` no data is read, as `read_array_file` says.
    """
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise FormatError(
            f"{path.name}: arrays are read from {', '.join(_SUFFIXES)} files", got=path.suffix
        )
    if identity(path) is None:
        near = nearest_file(path, _SUFFIXES)
        raise FormatError(f"there is no file {path.name}", remedy=near or None)
    if suffix == ".safetensors":
        return _safetensors(path, name)
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
            f"{title}: it holds two nameless bytes for each element (|V2), as NumPy writes "
            "bfloat16; declare it with type: bfloat16"
        )
    return array if data_type is None else typed(array, data_type, path.name)


def read_array_file(path: Path, accepts: Accepts = _any_shape) -> Mapping[str | None, Array]:
    """The arrays of a file: one without a name (`.npy`), or all by name (`.npz`).

    Names are known at once, an array is read when it is asked for. An array whose shape `accepts`
    refuses is given without its data: zeros of the header's shape and type, which take no memory.
    The caller's own check then refuses that shape before a byte of a large array is read. Raises
    `FormatError`, at either time, for a file that cannot be read, is no array file, or holds
    objects; `OutOfMemoryError`.
    """
    suffix = path.suffix.lower()
    if suffix not in NUMPY_SUFFIXES:
        raise UsageError(
            f"arrays are read from {' and '.join(NUMPY_SUFFIXES)} files",
            got=str(path),
            remedy="for raw bytes, say their shape and type: 2x2xf32=@raw.bin",
        )
    if suffix == ".npy":
        return {None: _stored(path, None, lambda: read_npy(path, accepts))}
    return _guarded(path, None, lambda: _Archive(path, accepts))


def archived_arrays(path: Path) -> Mapping[str | None, Array]:
    """The arrays of a `.npz` file, whatever its name; each is read anew when it is asked for, and
    nothing is kept. Raises what `read_array_file` raises."""
    return _guarded(path, None, lambda: _Archive(path, keeps=False))


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


class _Archive(Mapping[str | None, Array]):
    """The arrays of a `.npz` file: names are known at once, each is read when it is asked for."""

    def __init__(self, path: Path, accepts: Accepts = _any_shape, *, keeps: bool = True) -> None:
        """`keeps`: what was read once is there from then on."""
        self.path, self._accepts, self._keeps = path, accepts, keeps
        with self._opened() as archive:
            members = archive.namelist()
        #: The archive's members by the names of the arrays.
        self.members = {name.removesuffix(_MEMBER): name for name in members}
        self._read: dict[str, Array] = {}

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with open_file(self.path) as file, zipfile.ZipFile(file) as archive:
            yield archive

    def __getitem__(self, name: str | None) -> Array:
        if name is None or name not in self.members:
            raise KeyError(name)
        if name in self._read:
            return self._read[name]
        array = _stored(self.path, name, lambda: self._array(name))
        if self._keeps:
            self._read[name] = array
        return array

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


def _safetensors(path: Path, name: str | None) -> Array:
    try:
        from stitch.forms import safetensors
    except ImportError as error:
        raise FormatError(
            f"{path.name}: reading .safetensors needs the package safetensors",
            remedy="pip install safetensors",
        ) from error
    open_file(path).close()  # The package opens it by its name, and would wait for a pipe.
    return _stored(
        path, name, lambda: safetensors.read(path, lambda names: _chosen(path, name, names))
    )


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


def _stored(path: Path, name: str | None, read: Callable[[], Array]) -> Array:
    """One array; raises `FormatError` for a type that is not stored."""
    array = _guarded(path, name, read)
    if array.dtype != NAMELESS and not _is_known(array):
        raise FormatError(
            "the file holds an array of a type that Stitch does not store",
            where=_place(path, name),
            expected=", ".join(t.value for t in DataType if not t.is_block),
            got=str(array.dtype),
        )
    return array


def _is_known(array: Array) -> bool:
    return any(not t.is_block and t.dtype == array.dtype for t in DataType)


def _guarded(path: Path, name: str | None, read: Callable[[], _Read]) -> _Read:
    """What `read` gives; whatever the libraries raise for a damaged file is a `FormatError`."""
    try:
        return read()
    except StitchError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:
        # Damaged files make NumPy raise what it likes (TokenError, SyntaxError, zlib.error ...).
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise FormatError(
            f"this is no sound {path.suffix} file: {why}",
            where=_place(path, name),
            remedy="write it with numpy.save or numpy.savez, without objects"
            if path.suffix.lower() in NUMPY_SUFFIXES
            else None,
        ) from error


def _place(path: Path, name: str | None) -> str:
    return str(path) if name is None else f"{path}, array {name!r}"


#: The type under which NumPy reads bfloat16, which it writes as two nameless bytes.
NAMELESS = np.dtype("V2")
_MEMBER = ".npy"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path, accepts: Accepts = _any_shape) -> Array:
    """The array of a `.npy` file; `accepts` as of `read_array_file`."""
    with open_file(path) as file:
        nbytes = file.seek(0, 2)
        file.seek(0)
        header = _header(file, nbytes)
        if not accepts(None, header.shape):
            return header
        file.seek(0)
        return _claimed(file, header, f"reading {str(path)!r}")


def npy_bytes(array: Array) -> bytes:
    """The bytes of a `.npy` file; types that NumPy lacks are written in one that holds them."""
    stream = io.BytesIO()
    np.save(stream, _readable(array), allow_pickle=False)
    return stream.getvalue()


def npz_bytes(arrays: Mapping[str, Array]) -> bytes:
    """The bytes of a `.npz` file, the same for the same arrays."""
    stream = io.BytesIO()
    writer = NpzWriter(stream.write)
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close()
    return stream.getvalue()


class NpzWriter:
    """Writes a `.npz` file array by array, into whatever takes bytes one after the other."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._archive = _WrittenArchive(_Stream(write), "w", zipfile.ZIP_STORED)

    def add(self, name: str, array: Array) -> None:
        """One more array."""
        # A fixed date: the same results give the same file.
        self._archive.writestr(zipfile.ZipInfo(f"{name}{_MEMBER}"), npy_bytes(array))

    def close(self) -> None:
        """That was all; twice does no harm."""
        self._archive.close()


class _WrittenArchive(zipfile.ZipFile):
    """An archive that is ended by `close` alone: what nobody closed is not wanted, and where it
    would be written is perhaps closed by now."""

    def __del__(self) -> None:
        """No end of the file."""


class _Stream(io.RawIOBase):
    """A file that is only written to, from its beginning to its end."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._write = write

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        piece = bytes(data)
        self._write(piece)
        return len(piece)


def _header(file: IO[bytes], nbytes: int) -> Array:
    """Zeros of the shape and type that a header states, without memory; the file, of `nbytes`, has
    to hold as many bytes as they would take."""
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
