"""Recognise TTNN binaries, without loading their reader."""

from __future__ import annotations

from stitch.flatbuffer import ForeignFormat, is_foreign

FORMAT = ForeignFormat("a TTNN binary of tt-mlir", b"TTNN", ())


def is_ttnn(head: bytes) -> bool:
    """Whether a file with this head is a TTNN binary."""
    return is_foreign(head, FORMAT)
