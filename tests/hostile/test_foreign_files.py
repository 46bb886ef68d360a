"""Files of other formats are recognised, and the error says what they are."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from stitch.errors import FormatError
from stitch.ttb import load


def npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.arange(3))
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "an empty file"),
    "bare ttnn": (b"\x1c\0\0\0TTNN" + bytes(60), "TTNN binary of tt-mlir, without its size"),
    "ttmetal": (b"\x10\0\0\0\x1c\0\0\0TTM0" + bytes(60), "TTMetal binary"),
    "tflite": (b"\x1c\0\0\0TFL3" + bytes(60), "TensorFlow Lite"),
    "iree": (b"\x1c\0\0\0IREE" + bytes(60), "IREE VM module"),
    "executorch": (b"\x1c\0\0\0ET12" + bytes(60), "ExecuTorch"),
    "bare flatbuffer": (b"\x1c\0\0\0STCH" + bytes(60), "without its size prefix"),
    "onnx": (b"\x08\x0a\x12\x07pytorch\x3a\x03abc", "an ONNX model"),
    "zip": (npz(), "zip archive"),
    "npy": (npy(), "NumPy array"),
    "elf": (b"\x7fELF\x02\x01\x01" + bytes(60), "ELF object"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(60), "GGUF"),
    "mlir": (b"ML\xefR\x03" + bytes(60), "MLIR bytecode"),
    "yaml": (b"name: module\noperations:\n  - op: Gemm\n", "text (YAML"),
    "utf-8 text": ("größe: 3\n".encode() * 100, "text (YAML"),
    "json": (b'{"graph": []}', "JSON text"),
    "short": (b"\x01\x02\x03", "data of an unknown kind"),
    "noise": (bytes(range(255, 0, -1)), "data of an unknown kind"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_foreign_file_is_named(kind: str, tmp_path: Path) -> None:
    data, name = FILES[kind]
    path = tmp_path / "foreign.ttb"
    path.write_bytes(data)
    for source in (data, path):
        with pytest.raises(FormatError) as caught:
            load(source)
        text = str(caught.value)
        assert "not a .ttb file" in text
        assert name in text
        assert "stitch-compile" in text
    assert str(path) in text


def test_an_onnx_model_comes_with_the_command_that_compiles_it() -> None:
    with pytest.raises(FormatError, match=r"stitch-compile model\.onnx"):
        load(FILES["onnx"][0])
