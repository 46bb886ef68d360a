"""YAML documents and files of arrays, checked against schemas.

A `Schema` has `Field`s, each with a `FieldType`; all problems of a document are reported at once,
with line numbers. Readers of array files load on demand.
"""

from typing import TYPE_CHECKING

from stitch.forms.json_schema import WORD, JsonType, SchemaWriter, json_schema, mapping_of
from stitch.forms.nodes import (
    Node,
    ParseContext,
    ProblemLog,
    SourceLocation,
    form_text,
    number_of,
    read_entry,
    read_yaml,
    read_yaml_bytes,
)
from stitch.forms.schema import (
    AsWritten,
    ByKey,
    Choice,
    ElementType,
    Entries,
    Field,
    FieldType,
    Flag,
    FormValues,
    ListOf,
    Name,
    NameOrPath,
    Number,
    Pairs,
    RelativePath,
    Schema,
    Shape,
    Tagged,
    Whole,
    Word,
    as_written,
    is_name,
    is_word,
)
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.forms.array_files import (
        NUMPY_SUFFIXES,
        npy_bytes,
        npz_bytes,
        read_array,
        read_array_file,
        typed,
    )
    from stitch.forms.safetensors import read_tensors, tensors_from_bytes, write_tensors
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "array_files": "NUMPY_SUFFIXES npy_bytes npz_bytes read_array read_array_file typed",
            "safetensors": "read_tensors tensors_from_bytes write_tensors",
        },
    )

__all__ = [
    "WORD", "AsWritten", "ByKey", "Choice", "ElementType", "Entries", "Field", "FieldType", "Flag",
    "JsonType", "SchemaWriter", "json_schema", "mapping_of",
    "FormValues", "ListOf", "NUMPY_SUFFIXES", "Name", "NameOrPath", "Node", "Number",
    "Pairs", "ParseContext", "ProblemLog", "RelativePath", "Schema", "Shape", "SourceLocation",
    "Tagged", "Whole", "Word", "as_written", "form_text", "is_name", "is_word",
    "npy_bytes", "npz_bytes", "number_of", "read_array", "read_array_file", "read_entry",
    "read_tensors", "read_yaml", "read_yaml_bytes", "tensors_from_bytes", "typed",
    "write_tensors",
]  # fmt: skip
