"""The `.ttb` file: encode programs to bytes and decode them.

`envelope.py` and `docs/format.md` specify the format. Only this package knows the library
`flatbuffers`. `.ttnn` files of tt-mlir are read by the same verifier, as a `Binary`.
"""

from stitch.ttb.binary import (
    CURRENT,
    FEATURES,
    OPSET,
    Binary,
    Origin,
    TensorLife,
    Version,
    initial_values,
    state_names,
)
from stitch.ttb.envelope import metadata_crc32, metadata_nbytes, recognize
from stitch.ttb.file import (
    SOURCE,
    FileSizes,
    content_of,
    encode,
    inspect_sizes,
    load,
    load_any,
    save,
)
from stitch.ttb.symbolic_binary import SymbolicBinary

__all__ = [
    "CURRENT", "FEATURES", "OPSET", "SOURCE", "Binary", "FileSizes",
    "Origin", "SymbolicBinary",
    "TensorLife", "Version", "content_of", "encode",
    "initial_values", "inspect_sizes", "load", "load_any", "metadata_crc32",
    "metadata_nbytes", "recognize", "save", "state_names",
]  # fmt: skip
