"""Flatbuffers of any schema, verified before anything of them is believed.

Comes in: bytes, and the tables of a schema (ours, or those of another project's file by its
version). Goes out: plain records, or a `FormatError` with every defect. Must not know: what a field
means, who reads files of a kind. Nothing is written here, and the library `flatbuffers`, which has
no verifier, is not needed.
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
