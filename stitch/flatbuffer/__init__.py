"""A verifier and reader for flatbuffers of any schema.

Nothing is written here, and the library `flatbuffers`, which has no verifier, is not needed.
"""

from stitch.flatbuffer.foreign import (
    FieldOrder,
    ForeignFile,
    ForeignFormat,
    Release,
    is_foreign,
    read_foreign,
    unknown_order,
    verified,
    whole_file,
)
from stitch.flatbuffer.verify import (
    FieldKind,
    FieldSpec,
    ProblemList,
    Record,
    Schema,
    TableSpec,
    Verifier,
)

__all__ = [
    "FieldKind", "FieldOrder", "FieldSpec", "ForeignFile", "ForeignFormat", "ProblemList", "Record",
    "Release", "Schema", "TableSpec", "Verifier", "is_foreign", "read_foreign", "unknown_order",
    "verified", "whole_file",
]  # fmt: skip
