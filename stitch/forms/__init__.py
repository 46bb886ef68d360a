"""Forms that people write and files of arrays: read with line numbers, all defects at once.

Comes in: text that may be hostile, paths of array files. Goes out: values of the right type,
arrays, or what is wrong with which line. A form is rows: `Form`, `Row` and kinds of values. Must
not know: what a form is for. Files of arrays are loaded when they are asked for: the description of
a machine needs none.
"""

from typing import TYPE_CHECKING

from stitch.forms.combined_kinds import ByKey, Entries, ListOf, Pairs, Tagged
from stitch.forms.kinds import (
    AsWritten,
    Choice,
    ElementType,
    Flag,
    Kind,
    Name,
    NameOrPath,
    Number,
    RelativePath,
    Shape,
    Whole,
    Word,
    is_word,
)
from stitch.forms.nodes import (
    Node,
    ProblemLog,
    form_text,
    number_of,
    read_entry,
    read_yaml,
    read_yaml_bytes,
)
from stitch.forms.places import Place, Reading
from stitch.forms.rows import Form, FormValues, Row, as_written
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.forms.array_files import (
        NUMPY_SUFFIXES,
        NpzWriter,
        archived_arrays,
        npy_bytes,
        npz_bytes,
        read_array,
        read_array_file,
        typed,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "array_files": "NUMPY_SUFFIXES NpzWriter archived_arrays npy_bytes npz_bytes "
            "read_array read_array_file typed"
        },
    )

__all__ = [
    "NUMPY_SUFFIXES", "AsWritten", "ByKey", "Choice", "ElementType", "Entries",
    "Flag", "Form", "FormValues", "Kind", "ListOf", "Name", "NameOrPath", "Node", "NpzWriter",
    "Number",
    "Pairs", "Place", "ProblemLog", "Reading", "RelativePath", "Row", "Shape", "Tagged",
    "Whole", "Word", "archived_arrays", "as_written", "form_text", "is_word", "npy_bytes",
    "npz_bytes", "number_of", "read_array", "read_array_file", "read_yaml",
    "read_entry", "read_yaml_bytes", "typed",
]  # fmt: skip
