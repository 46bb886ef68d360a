"""Flatbuffers of any schema, verified before anything of them is believed.

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
from stitch.flatbuffer.problems import ProblemList
from stitch.flatbuffer.table_spec import FieldKind, FieldSpec, Schema, TableSpec
from stitch.flatbuffer.verify import Record, Verifier

__all__ = [
    "FieldKind", "FieldOrder", "FieldSpec", "ForeignFile", "ForeignFormat", "ProblemList", "Record",
    "Release", "Schema", "TableSpec", "Verifier", "is_foreign", "read_foreign", "unknown_order",
    "verified", "whole_file",
]  # fmt: skip
