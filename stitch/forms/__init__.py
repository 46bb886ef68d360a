"""Forms that people write and files of arrays: read with line numbers, all defects at once.

Comes in: text that may be hostile, paths of array files. Goes out: values of the right type,
arrays, or what is wrong with which line. Must not know: what a form is for.
"""

from stitch.forms.array_files import NUMPY_SUFFIXES, read_array, read_array_file, typed
from stitch.forms.fields import Fields
from stitch.forms.nodes import Node, ProblemLog, number_of, read_yaml
from stitch.forms.numpy_files import npy_bytes, npz_bytes

__all__ = [
    "NUMPY_SUFFIXES", "Fields", "Node", "ProblemLog", "npy_bytes", "npz_bytes", "number_of",
    "read_array", "read_array_file", "read_yaml", "typed",
]  # fmt: skip
