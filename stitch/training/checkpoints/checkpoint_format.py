"""Tensors by name in one file: the safetensors format, written and read here.

The layout (https://huggingface.co/docs/safetensors): the length of the header in 8 bytes, little
endian; the header, JSON that maps names to `{dtype, shape, data_offsets}` and `__metadata__` to a
mapping of texts, padded with spaces; then the data without holes.

The package itself is an extra that only front ends need; a checkpoint must not depend on one, and
is written in pieces, so that no second copy of the weights is made in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from stitch.errors import FormatError, Problem, StitchError
from stitch.files import Sink, read_bytes, unreadable
from stitch.program import Array, DataType

METADATA = "__metadata__"
#: Beyond this a header is not taken seriously (the same limit as in the package).
MAX_HEADER_NBYTES = 100_000_000
MAX_PROBLEMS = 20
_NAMES = {
    DataType.FLOAT64: "F64", DataType.FLOAT32: "F32", DataType.FLOAT16: "F16",
    DataType.BFLOAT16: "BF16", DataType.INT64: "I64", DataType.INT32: "I32",
    DataType.INT16: "I16", DataType.INT8: "I8", DataType.UINT64: "U64", DataType.UINT32: "U32",
    DataType.UINT16: "U16", DataType.UINT8: "U8", DataType.BOOL: "BOOL",
    DataType.FLOAT8_E4M3FN: "F8_E4M3", DataType.FLOAT8_E5M2: "F8_E5M2",
}  # fmt: skip
_TYPES = {name: kind for kind, name in _NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensors:
    """What such a file holds: arrays by name, and texts."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, str]


def write_tensors(
    file: Sink, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write the file's bytes, the same for the same arrays; raises `StitchError`, `OSError`."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for name in ordered:
        array = tensors[name]
        kind = _NAMES.get(DataType.from_dtype(array.dtype))
        if kind is None or name == METADATA:
            raise StitchError(
                f"tensor {name!r} cannot be stored as safetensors",
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
    """The arrays and texts of a file; raises `FormatError` listing every defect."""
    place = Path(path)
    try:
        data = read_bytes(place)
    except OSError as error:
        raise unreadable(place, error) from error
    return tensors_from_bytes(data, str(place))


def tensors_from_bytes(data: bytes, where: str) -> StoredTensors:
    """The arrays (read-only views) and texts in bytes; raises `FormatError`."""
    header, body = _header(data, where)
    metadata = header.pop(METADATA, {})
    problems: list[Problem] = []
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.append(Problem("bad_metadata", METADATA, "it is no mapping of texts"))
        metadata = {}
    ranges = {}
    for name, entry in header.items():
        defects = list(_defects(name, entry, len(body)))
        problems += defects
        if not defects:
            ranges[name] = entry["data_offsets"]
    problems += _gaps(ranges, len(body)) if not problems else ()
    if problems:
        raise FormatError(
            "this is no sound safetensors file",
            where=where,
            problems=tuple(problems[:MAX_PROBLEMS]),
        )
    tensors = {
        name: np.frombuffer(body[start:end], _TYPES[header[name]["dtype"]].dtype).reshape(
            header[name]["shape"]
        )
        for name, (start, end) in ranges.items()
    }
    return StoredTensors(MappingProxyType(tensors), MappingProxyType(metadata))


def _header(data: bytes, where: str) -> tuple[dict[str, Any], memoryview]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER_NBYTES):
        raise FormatError(
            "this is no safetensors file", where=where,
            expected="a header's length, then a header of that length",
            got=f"{len(data)} bytes" + (f", a header of {size}" if len(data) >= 8 else ""),
        )  # fmt: skip
    try:
        header = json.loads(data[8 : 8 + size].decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"this is no safetensors file: its header is not JSON ({error})", where=where
        ) from error
    if not isinstance(header, dict):
        raise FormatError("this is no safetensors file: its header is no mapping", where=where)
    return header, memoryview(data)[8 + size :]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands twice")
    return fields


def _defects(name: str, entry: Any, nbytes: int) -> Iterator[Problem]:
    where = f"tensor {name[:80]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        yield Problem("bad_entry", where, "it has dtype, shape and data_offsets, nothing else")
        return
    kind = _TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if kind is None:
        yield Problem("bad_type", where, f"there is no type {str(entry['dtype'])[:40]!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape) or len(shape) > 32:
        yield Problem("bad_shape", where, "its shape is a list of at most 32 whole numbers")
        return
    if not _counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= nbytes:
        yield Problem("bad_offsets", where, f"its bytes lie outside of the {nbytes} that there are")
        return
    if kind is not None and offsets[1] - offsets[0] != math.prod(shape) * kind.itemsize:
        yield Problem("bad_length", where, f"{offsets[1] - offsets[0]} bytes are not its shape's")


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _gaps(ranges: Mapping[str, list[int]], nbytes: int) -> Iterator[Problem]:
    """Tensors lie one behind the other, without holes and overlaps."""
    at = 0
    for name, (start, end) in sorted(ranges.items(), key=lambda item: tuple(item[1])):
        if start != at:
            kind = "overlap" if start < at else "hole"
            yield Problem(kind, f"tensor {name[:80]!r}", f"it begins at {start}, expected {at}")
        at = max(at, end)
    if at != nbytes:
        yield Problem("hole", "the end", f"{nbytes - at} bytes belong to no tensor")
