"""Read, write and map `.ttb` files."""

from __future__ import annotations

import contextlib
import gc
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stitch.argument_kinds import ArgumentKind
from stitch.errors import IncompatibleError, StitchError
from stitch.files import Sink, Source, atomic_write, open_source
from stitch.flatbuffer import ProblemList, Schema, TableSpec, Verifier
from stitch.program import dense_bytes
from stitch.ttb.binary import CURRENT, DAMAGED, FEATURES, Binary, SegmentRow, Version
from stitch.ttb.decoding import Decoder
from stitch.ttb.envelope import (
    HEAD_NBYTES,
    Envelope,
    Segments,
    close_metadata,
    collect_segments,
    open_envelope,
)
from stitch.ttb.generated import ROOT, SCHEMA, TABLES
from stitch.ttb.symbolic_binary import SymbolicBinary
from stitch.ttb.ttnn import is_ttnn

#: What holds programs: to load, to submit, to look at.
SOURCE = ArgumentKind(
    "a path, bytes, a binary or a compiled model",
    lambda value: isinstance(
        getattr(value, "binary", value), str | os.PathLike | bytes | bytearray | memoryview | Binary
    ),
    "compile a module first: stitch.compile(module, (x,))",
)

#: What is read of a file before its version is known: fields that no version will change.
_PEEK_FIELDS = ("version", "producer", "requires")
_PEEK = Schema(
    ROOT,
    {
        ROOT: TableSpec(ROOT, tuple(f for f in TABLES[ROOT].fields if f.name in _PEEK_FIELDS)),
        "Version": TABLES["Version"],
    },
    {},
)


def content_of(binary: Binary | SymbolicBinary) -> Callable[[Sink], None]:
    """What writes a `.ttb` file, segment by segment; raises as `encode` does."""
    segments = _segments_of(binary)
    head = close_metadata(_encoded(binary, segments))

    def write(sink: Sink) -> None:
        sink.write(head)
        for piece in _pieces(segments):
            sink.write(piece)

    return write


def _segments_of(binary: Binary | SymbolicBinary) -> Segments:
    if isinstance(binary, SymbolicBinary):
        return collect_segments((binary.stored_constants(),))
    return collect_segments(binary.programs)


def _encoded(binary: Binary | SymbolicBinary, segments: Segments) -> bytes:
    # What writes is loaded for writing: most processes only read.
    from stitch.ttb.encoding import encode_metadata

    return encode_metadata(binary, segments)


def encode(binary: Binary | SymbolicBinary) -> bytes:
    """The bytes of a `.ttb` file; the same for equal binaries, in every process.

    Raises `StitchError` for what the format cannot hold (a name that is too long, for instance).
    """
    stream = io.BytesIO()
    content_of(binary)(stream)
    return stream.getvalue()


def save(binary: Binary | SymbolicBinary, path: str | Path) -> None:
    """Write a `.ttb` file, segment by segment, whole or not at all.

    Raises `StitchError` with the path where it cannot be written; then nothing is left behind, and
    a file that was there before stays as it was.
    """
    atomic_write(path, content_of(binary))


def _pieces(segments: Segments) -> Iterator[bytes | memoryview]:
    """The data, piece by piece: padding and segments in turn."""
    end = 0
    for row, array in zip(segments.rows, segments.arrays, strict=True):
        yield bytes(row.offset - end)
        yield dense_bytes(array).data
        end = row.offset + row.nbytes


def load(source: Source, *, verify: Literal["metadata", "full"] = "metadata") -> Binary:
    """Read a `.ttb` file: map a path, or take bytes as they are; constants are never copied. A TTNN
    binary of tt-mlir is read too, as opaque programs.

    Verifies all metadata before decoding any of it. Constants are read-only views of the mapping;
    their checksums are tested with `verify="full"`, else by `Binary.verify_segments`. Raises
    `FormatError` with every defect found, `IncompatibleError` for another version, an unknown
    feature or a program with named sizes; whatever the bytes, nothing else.
    """
    where, binary = _read(source, verify)
    if isinstance(binary, SymbolicBinary):
        raise binary.needs_sizes(where)
    return binary


def load_any(
    source: Source, *, verify: Literal["metadata", "full"] = "metadata"
) -> Binary | SymbolicBinary:
    """Read a `.ttb` file as `load` does, also one with named sizes, whose constants' checksums are
    tested at once."""
    return _read(source, verify)[1]


def _read(source: Source, verify: str) -> tuple[str, Binary | SymbolicBinary]:
    if verify not in ("metadata", "full"):
        raise StitchError(f"unknown verification {verify!r}", expected="metadata or full")
    where, file = open_source(source)
    if is_ttnn(bytes(file[:HEAD_NBYTES])):
        return where, _read_ttnn(file, where)
    binary = decode_file(where, file, open_envelope(file, where))
    if verify == "full" and isinstance(binary, Binary):
        binary.verify_segments()
    return where, binary


def decode_file(where: str, file: memoryview, envelope: Envelope) -> Binary | SymbolicBinary:
    """Version, features, verification, decoding: in this order, each only if the last was well."""
    _check_version(where, envelope.metadata)
    problems = ProblemList()
    with _collector_at_rest():
        root = Verifier(envelope.metadata, problems, SCHEMA).root()
        problems.raise_if_any("the file's metadata is not sound", where=where, remedy=DAMAGED)
        assert root is not None, "the verifier gave neither a record nor a problem"
        data = file[envelope.data_start :]
        binary: Binary | SymbolicBinary | None
        if root[-1] is None:
            binary = Decoder(data, problems, where).binary(root)
        else:
            # What reads them is loaded for the first one: most processes see none.
            from stitch.ttb.symbolic_decoding import SymbolicDecoder

            binary = SymbolicDecoder(data, problems, where).symbolic_binary(root)
    problems.raise_if_any("the file's contents do not fit together", where=where, remedy=DAMAGED)
    assert binary is not None, "the decoder gave neither a binary nor a problem"
    return binary


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Loading makes many objects and no cycles: looking for some costs a sixth of the time."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_version(where: str, metadata: bytes) -> None:
    """Refuse another version or an unknown feature; unsound metadata is left to the verifier."""
    problems = ProblemList()
    root = Verifier(metadata, problems, _PEEK).root()
    if root is None or problems.count:
        return
    version, producer, requires = Version(*root[0]), root[1] or "an unknown producer", root[2]
    if version.major != CURRENT.major or version.minor > CURRENT.minor:
        newer = version > CURRENT
        raise IncompatibleError(
            f"the file is of format version {version}, this reader is of {CURRENT}",
            where=where,
            expected=f"a version from {CURRENT.major}.0 to {CURRENT}",
            got=f"{version}, written by {producer}",
            remedy="install a newer Stitch" if newer
            else "compile the module again with this Stitch",
        )  # fmt: skip
    unknown = [name for name in requires if name not in FEATURES]
    if unknown:
        raise IncompatibleError(
            "the file requires features that this reader does not know: " + ", ".join(unknown),
            where=where,
            expected=", ".join(sorted(FEATURES)) or "no features",
            got=f"written by {producer}",
            remedy="install a newer Stitch, or compile without these features",
        )


@dataclass(frozen=True, slots=True)
class FileSizes:
    """The bytes of a file by part; `metadata`, `sealing` and `data` sum up to `total`.

    `sealing` is the checksum and the padding behind the metadata; `data` is the segments with the
    `padding` between them.
    """

    total: int
    metadata: int
    sealing: int
    data: int
    padding: int
    segments: tuple[int, ...]


def inspect_sizes(source: Source | Binary | SymbolicBinary) -> FileSizes:
    """The size of a file (or of the file that a binary would be), part by part, in bytes."""
    metadata_nbytes, start, rows = _measured(source)
    lengths = tuple(row.nbytes for row in rows)
    data = max((row.offset + row.nbytes for row in rows), default=0)
    return FileSizes(
        total=start + data,
        metadata=metadata_nbytes,
        sealing=start - metadata_nbytes,
        data=data,
        padding=data - sum(lengths),
        segments=lengths,
    )


def _read_ttnn(file: memoryview, where: str) -> Binary:
    # What reads them is loaded for the first one: most processes see none.
    from stitch.ttb.ttnn import read_ttnn

    return read_ttnn(file, where)


def _measured(source: Source | Binary | SymbolicBinary) -> tuple[int, int, tuple[SegmentRow, ...]]:
    """The bytes of a file's metadata, where its data starts, and its segments."""
    binary: Binary | SymbolicBinary
    if isinstance(source, Binary | SymbolicBinary):
        binary = source
    else:
        where, file = open_source(source)
        if not is_ttnn(bytes(file[:HEAD_NBYTES])):
            envelope = open_envelope(file, where)
            binary = decode_file(where, file, envelope)
            if isinstance(binary, SymbolicBinary):
                rows = binary.rows
            else:
                rows = binary.segments.rows if binary.segments is not None else ()
            return len(envelope.metadata), envelope.data_start, rows
        binary = _read_ttnn(file, where)
    if isinstance(binary, Binary) and binary.origin is not None:
        # All of it is one flatbuffer: the constants that it holds, its operations make.
        return binary.origin.nbytes, binary.origin.nbytes, ()
    segments = _segments_of(binary)
    metadata = _encoded(binary, segments)
    return len(metadata), len(close_metadata(metadata)), segments.rows
