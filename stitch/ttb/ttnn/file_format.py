"""What a TTNN binary is known by."""

from __future__ import annotations

from stitch.flatbuffer import ForeignFormat, is_foreign

FORMAT = ForeignFormat("a TTNN binary of tt-mlir", b"TTNN", ())


def is_ttnn(head: bytes) -> bool:
    """Whether a file that begins so is a TTNN binary."""
    return is_foreign(head, FORMAT)
