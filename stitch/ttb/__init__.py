"""The `.ttb` file: programs to bytes and back; the only room that knows flatbuffers.

The format is specified in `envelope.py` and `docs/format.md`. Files of others are read by the same
verifier (`stitch.flatbuffer`): `.ttnn` as a `Binary`.
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
    ProgramSize,
    content_of,
    encode,
    inspect_sizes,
    load,
    save,
)

__all__ = [
    "CURRENT", "FEATURES", "OPSET", "SOURCE", "Binary", "FileSizes", "Origin", "ProgramSize",
    "TensorLife", "Version", "content_of", "encode",
    "initial_values", "inspect_sizes", "load", "metadata_crc32",
    "metadata_nbytes", "recognize", "save", "state_names",
]  # fmt: skip
