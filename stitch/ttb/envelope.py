"""The envelope of a `.ttb` file. This docstring is its specification.

All numbers are little-endian; positions are counted from the start of the file.

    0          4 bytes   size: bytes of the flatbuffer that follows this prefix
    4          4 bytes   offset of the flatbuffer's root table, counted from position 4
    8          4 bytes   file identifier, "STCH"
    4 + size   4 bytes   CRC-32 (zlib's) of everything before it: positions 0 to 4 + size
    8 + size   0 to 63   zeros, up to the next multiple of 64, where the data starts
    data start           segments, in the order of the root's table, each at a multiple of 64,
                         zeros between them; the file ends where the last one ends

Positions 0 to 4 + size are the metadata. The `offset` of a segment in the root's table counts from
the data's start; `length` and `crc32` are those of its own bytes. Because the metadata's length
decides where the data starts, offsets could not be absolute; because the data starts at a multiple
of 64, segments are aligned to 64 bytes in the file, and so in memory when it is mapped.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stitch.errors import FormatError
from stitch.program import Array, Contents, OperationList
from stitch.ttb.binary import SegmentRow
from stitch.ttb.generated import FILE_IDENTIFIER

ALIGNMENT = 64
#: The size prefix, the root offset and the identifier: less than that is no `.ttb`.
HEAD_NBYTES = 12
_CRC_NBYTES = 4
_RECOGNITION_NBYTES = 512


@dataclass(frozen=True, slots=True)
class Envelope:
    """A file taken apart: its metadata (size prefix included) and where its data starts."""

    metadata: bytes
    data_start: int


def padded(position: int) -> int:
    """The first multiple of 64 at or after a position."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def data_start(metadata_nbytes: int) -> int:
    """Where the data starts behind metadata of a length (size prefix included)."""
    return padded(metadata_nbytes + _CRC_NBYTES)


def metadata_nbytes(head: bytes) -> int:
    """How many bytes of a file its first four say that its metadata takes, with the CRC-32 behind
    it."""
    return 4 + int.from_bytes(head[:4], "little") + _CRC_NBYTES


def metadata_crc32(head: bytes) -> int:
    """The CRC-32 that stands behind a file's metadata, in so many of its first bytes at least; what
    the file is otherwise is not looked at."""
    end = metadata_nbytes(head)
    return int.from_bytes(head[end - _CRC_NBYTES : end], "little")


def close_metadata(metadata: bytes) -> bytes:
    """Metadata with its CRC-32 and the padding behind it: a file up to its data's start."""
    sealed = metadata + zlib.crc32(metadata).to_bytes(_CRC_NBYTES, "little")
    return sealed.ljust(data_start(len(metadata)), b"\0")


def open_envelope(file: memoryview, where: str) -> Envelope:
    """Take a file apart; touches only its metadata. Raises `FormatError` naming what is wrong."""
    if bytes(file[8:HEAD_NBYTES]) != FILE_IDENTIFIER:
        recognized, remedy = recognize(bytes(file[:_RECOGNITION_NBYTES]))
        raise FormatError(
            "not a .ttb file",
            where=where,
            expected=f"the identifier {FILE_IDENTIFIER.decode()!r} at byte 8",
            got=recognized,
            remedy=remedy,
        )
    end = 4 + int.from_bytes(file[:4], "little")
    start = data_start(end)
    if end < HEAD_NBYTES or start > len(file):
        raise FormatError(
            "the file is cut off inside its metadata",
            where=where,
            expected=f"at least {start} bytes",
            got=f"{len(file)} bytes",
            remedy="copy or compile the file again",
        )
    metadata = bytes(file[:end])
    _check_crc(metadata, bytes(file[end:start]), where)
    return Envelope(metadata, start)


def _check_crc(metadata: bytes, behind: bytes, where: str) -> None:
    stored, computed = int.from_bytes(behind[:_CRC_NBYTES], "little"), zlib.crc32(metadata)
    if stored != computed:
        raise FormatError(
            "the metadata is damaged: its checksum does not match",
            where=where,
            expected=f"CRC-32 {stored:#010x}",
            got=f"{computed:#010x}",
            remedy="copy or compile the file again",
        )
    if any(behind[_CRC_NBYTES:]):
        raise FormatError(
            "the padding behind the metadata is not zero",
            where=where,
            remedy="copy or compile the file again",
        )


@dataclass(frozen=True, slots=True)
class Segments:
    """The data of a file: rows of the root's table, and the contiguous bytes of each."""

    rows: tuple[SegmentRow, ...]
    arrays: tuple[Array, ...]
    of_constant: Mapping[int, int]  # id of a `Constant` -> its segment


def collect_segments(programs: Iterable[OperationList]) -> Segments:
    """Lay the constants of all programs out behind each other; equal bytes become one segment."""
    contents, rows, end = Contents(), list[SegmentRow](), 0
    of_constant: dict[int, int] = {}
    for program in programs:
        for constant, _ in program.every_constant():
            index = of_constant[id(constant)] = contents.number(constant.data)
            if index == len(rows):
                offset = padded(end)
                end = offset + constant.data.nbytes
                rows.append(SegmentRow(offset, constant.data.nbytes, contents.crc32(index)))
    return Segments(tuple(rows), tuple(contents.arrays), of_constant)


#: Flatbuffer file identifiers, at byte 4 or, size-prefixed, at byte 8.
_IDENTIFIERS = {
    b"TTSY": "a system descriptor of tt-mlir (.ttsys)",
    b"TTNN": "a TTNN binary of tt-mlir, without its size prefix",
    b"TTM0": "a TTMetal binary of tt-mlir",
    b"TTB0": "a binary of tt-mlir",
    b"TFL3": "a TensorFlow Lite model",
    b"IREE": "an IREE VM module (.vmfb)",
    b"ET12": "an ExecuTorch program (.pte)",
    b"ORTM": "an ONNX Runtime model (.ort)",
}

_MAGICS = (
    (b"PK", "a zip archive (.npz, a torch checkpoint, ...)"),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"\x7fELF", "an ELF object"),
    (b"GGUF", "a GGUF model"),
    (b"ML\xefR", "MLIR bytecode"),
)

_REMEDIES = {
    "onnx": "compile it first: stitch-compile model.onnx -o model.ttb",
    "text": "compile a module first: stitch-compile module.yaml -o module.ttb; run a "
    "pipeline with stitch-run pipeline.yaml",
    "json": "a graph is compiled first: stitch-compile graph.json -o graph.ttb; a recording is "
    "replayed by stitch-run --replay=FILE, and checked by stitch-inspect --check_plan=FILE",
    "": "compile a module with stitch-compile to get a .ttb file",
}


def recognize(head: bytes) -> tuple[str, str]:
    """What a file that begins with `head` is, where it is not a `.ttb`, so that the error can say
    so; and what to do with it.

    >>> recognize(b"\\x93NUMPY\\x01\\x00")[0]
    'a NumPy array (.npy)'
    """
    if not head:
        return "an empty file", _REMEDIES[""]
    if head[4:8] == b"STCH":
        return "a Stitch flatbuffer without its size prefix and envelope", _REMEDIES[""]
    for magic, name in _MAGICS:
        if head.startswith(magic):
            return name, _REMEDIES[""]
    for at in (4, 8):
        if head[at : at + 4] in _IDENTIFIERS:
            return _IDENTIFIERS[head[at : at + 4]], _REMEDIES[""]
    if _is_onnx(head):
        return "an ONNX model", _REMEDIES["onnx"]
    return _text_or_data(head)


def _is_onnx(head: bytes) -> bool:
    """A protobuf `ModelProto`: field 1 (ir_version, a small number), then another known field."""
    known = (0x12, 0x1A, 0x22, 0x28, 0x32, 0x3A, 0x42, 0x72)
    return len(head) > 2 and head[0] == 0x08 and 1 <= head[1] <= 64 and head[2] in known


def _text_or_data(head: bytes) -> tuple[str, str]:
    cut = head.decode("utf-8", errors="ignore")
    printable = sum(c.isprintable() or c in "\r\n\t" for c in cut)
    if cut and printable == len(cut) and len(cut.encode()) >= len(head) - 3:
        stripped = cut.lstrip()
        if stripped[:1] in ("{", "["):
            return "JSON text", _REMEDIES["json"]
        return "text (YAML, source code, ...)", _REMEDIES["text"]
    return "data of an unknown kind", _REMEDIES[""]
