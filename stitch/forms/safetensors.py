"""Read and write safetensors files: a header in JSON, then arrays back to back."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import numpy as np

from stitch.budget import claimed_array
from stitch.errors import FormatError, StitchError
from stitch.files import Sink, open_file, read_bytes, unreadable
from stitch.frozen_json import from_plain, located, read_json
from stitch.program import MAX_RANK, Array, DataType

METADATA = "__metadata__"
#: The largest header, as in the safetensors package.
MAX_HEADER_NBYTES = 100_000_000
_NAMES = {
    DataType.FLOAT64: "F64", DataType.FLOAT32: "F32", DataType.FLOAT16: "F16",
    DataType.BFLOAT16: "BF16", DataType.INT64: "I64", DataType.INT32: "I32",
    DataType.INT16: "I16", DataType.INT8: "I8", DataType.UINT64: "U64", DataType.UINT32: "U32",
    DataType.UINT16: "U16", DataType.UINT8: "U8", DataType.BOOL: "BOOL",
    DataType.FLOAT8_E4M3FN: "F8_E4M3", DataType.FLOAT8_E5M2: "F8_E5M2",
    DataType.FLOAT8_E8M0: "F8_E8M0",
}  # fmt: skip
_TYPES = {name: kind for kind, name in _NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensors:
    """The contents of a safetensors file."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str]


class _Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_tensors(
    file: Sink, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; equal arrays give equal bytes.

    Raises `StitchError` for a data type that safetensors has not, `OSError`.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name in ordered:
        array = tensors[name]
        kind = _NAMES.get(DataType.from_dtype(array.dtype))
        if kind is None or name == METADATA:
            raise StitchError(
                f"safetensors has no data type for tensor {name!r}",
                expected=", ".join(_TYPES), got=str(array.dtype),
            )  # fmt: skip
        end = start + array.nbytes
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in ordered:
        if tensors[name].nbytes:
            dense = np.ascontiguousarray(tensors[name]).reshape(-1)
            file.write(dense.view(np.uint8).data)


def read_tensors(path: str | Path) -> StoredTensors:
    """Read a safetensors file; raise `FormatError`."""
    place = Path(path)
    try:
        data = read_bytes(place)
    except OSError as error:
        raise unreadable(place, error) from error
    return tensors_from_bytes(data, str(place))


def tensors_from_bytes(data: bytes, where: str) -> StoredTensors:
    """Read tensors (as read-only views) and metadata from bytes; raise `FormatError`."""
    file = io.BytesIO(data)
    entries, metadata = _header(file, where)
    body = memoryview(data)[file.tell() :]
    tensors = {
        name: np.frombuffer(body[slice(*one.data_offsets)], _TYPES[one.dtype].dtype).reshape(
            one.shape
        )
        for name, one in entries.items()
    }
    return StoredTensors(MappingProxyType(tensors), MappingProxyType(metadata))


def read_tensor(path: Path, choose: Callable[[Iterable[str]], str]) -> Array:
    """Read the array that `choose` selects by name; raise `FormatError`, `OSError`."""
    with open_file(path) as file:
        entries, _ = _header(file, str(path))
        name = choose(entries)
        one = entries[name]
        what = f"reading array {name!r} of {str(path)!r}"
        array = claimed_array(one.shape, _TYPES[one.dtype].dtype, what)
        file.seek(one.data_offsets[0], io.SEEK_CUR)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(file.read(array.nbytes), np.uint8)
    return array


def _header(file: IO[bytes], where: str) -> tuple[Mapping[str, _Entry], Mapping[str, str]]:
    """Read the header and check it against the file's length; tensors are stored back to back."""
    nbytes = file.seek(0, io.SEEK_END) - 8
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if size > min(nbytes, MAX_HEADER_NBYTES):
        raise FormatError(
            "not a safetensors file: the header is truncated or too long", where=where,
            expected=f"8 bytes of length, then a header of at most {MAX_HEADER_NBYTES} bytes",
            got=f"{nbytes + 8} bytes, a header of {size}",
        )  # fmt: skip
    with located(where):
        header = from_plain(dict[str, Any], read_json(file.read(size), "safetensors file"), "")
    metadata = from_plain(dict[str, str], header.get(METADATA, {}), f"{where}, {METADATA}")
    entries = {
        name: from_plain(_Entry, entry, f"{where}, tensor {name[:80]!r}")
        for name, entry in header.items() if name != METADATA
    }  # fmt: skip
    at = 0
    for name, one in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        kind, (start, end) = _TYPES.get(one.dtype), one.data_offsets
        is_shape = min(one.shape, default=0) >= 0 and len(one.shape) <= MAX_RANK
        if kind is None or not is_shape or end - start != math.prod(one.shape) * kind.itemsize:
            raise FormatError(
                "a tensor's type or shape does not fit its bytes",
                where=f"{where}, tensor {name[:80]!r}", got=str(one)[:200],
            )  # fmt: skip
        if start != at:
            raise FormatError(
                f"tensors do not lie back to back: one begins at {start}, expected {at}",
                where=f"{where}, tensor {name[:80]!r}",
            )
        at = end
    if at != nbytes - size:
        raise FormatError(f"{nbytes - size - at} bytes belong to no tensor", where=where)
    return entries, metadata
