"""Programs and torch modules as functions over nests, whose compilers knew nothing of loops."""

from stitch.fractal.programs.module_states import SameObject, same_bits, state_of
from stitch.fractal.programs.programs_as_functions import as_function, called
from stitch.fractal.programs.programs_in_graphs import write_operations, written_in

__all__ = [
    "SameObject", "as_function", "called", "same_bits", "state_of", "write_operations",
    "written_in",
]  # fmt: skip
