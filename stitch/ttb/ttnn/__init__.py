"""TTNN binaries of tt-mlir, read-only: what a file of any known version says, as a `Binary`.

Comes in: the bytes of a `.ttnn` file. Goes out: a `Binary` whose programs are opaque (slots,
layouts, operations as names, lifetimes), with what has no counterpart here; or a `FormatError`.
Must not know: devices, plans. Which versions are known: `field_history.py`.
"""

from stitch.ttb.ttnn.program_file import is_ttnn, read_ttnn

__all__ = ["is_ttnn", "read_ttnn"]
