"""Names what a file is when it is not a `.ttb`, so that the error can say so.

Comes in: the first bytes of a file. Goes out: a sentence's worth of what they are.
"""

from __future__ import annotations

#: Flatbuffer file identifiers, at byte 4 or, size-prefixed, at byte 8.
_IDENTIFIERS = {
    b"TTNN": "a TTNN binary of tt-mlir",
    b"TTM0": "a TTMetal binary of tt-mlir",
    b"TTB0": "a binary of tt-mlir",
    b"TFL3": "a TensorFlow Lite model",
    b"IREE": "an IREE VM module (.vmfb)",
    b"ET12": "an ExecuTorch program (.pte)",
    b"ORTM": "an ONNX Runtime model (.ort)",
}

_MAGICS = (
    (b"PK\x03\x04", "a zip archive (.npz, a torch checkpoint, ...)"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"\x7fELF", "an ELF object"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF-", "a PDF document"),
    (b"\x1f\x8b", "gzip-compressed data"),
    (b"BZh", "bzip2-compressed data"),
    (b"\xfd7zXZ\x00", "xz-compressed data"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed data"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"GGUF", "a GGUF model"),
    (b"ML\xefR", "MLIR bytecode"),
    (b"BC\xc0\xde", "LLVM bitcode"),
    (b"MZ", "a Windows executable"),
    (b"\xcf\xfa\xed\xfe", "a Mach-O object"),
    (b"SQLite format 3\x00", "an SQLite database"),
)

_REMEDIES = {
    "onnx": "compile it first: stitch-compile model.onnx -o model.ttb",
    "text": "compile it first: stitch-compile module.yaml -o module.ttb",
    "json": "a graph is compiled first: stitch-compile graph.json -o graph.ttb; a recording is "
    "replayed by stitch-run --replay=FILE, and checked by stitch-inspect --check_plan=FILE",
    "": "compile a module with stitch-compile to get a .ttb file",
}


def recognize(head: bytes, nbytes: int) -> tuple[str, str]:
    """What a file of `nbytes` bytes that begins with `head` is, and what to do with it.

    >>> recognize(b"\\x93NUMPY\\x01\\x00", 4096)[0]
    'a NumPy array (.npy)'
    """
    if nbytes == 0:
        return "an empty file", _REMEDIES[""]
    if head[4:8] == b"STCH":
        return "a Stitch flatbuffer without its size prefix and envelope", _REMEDIES[""]
    for magic, name in _MAGICS:
        if head.startswith(magic):
            return name, _REMEDIES[""]
    for at in (4, 8):
        if head[at : at + 4] in _IDENTIFIERS:
            return _IDENTIFIERS[head[at : at + 4]], _REMEDIES[""]
    if _is_safetensors(head, nbytes):
        return "a safetensors file", _REMEDIES[""]
    if _is_onnx(head):
        return "an ONNX model", _REMEDIES["onnx"]
    if len(head) > 2 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return "a Python pickle", _REMEDIES[""]
    return _text_or_data(head)


def _is_safetensors(head: bytes, nbytes: int) -> bool:
    """Its header: eight bytes of length, then a JSON object of that length."""
    return head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= nbytes - 8


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
