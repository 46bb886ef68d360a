"""Lowerings: what ATen's operators are in a computation graph, a file for each family.

Comes in: for each operator a `Call` (where to write to, what torch promises for the results) and
the operands of torch's schema. Goes out: operations in the builder. Each family has a table
`LOWERINGS`; `aten_table` joins them. Graphs are rewritten here where a lowering needs it: random
operators take a key (`give_key`), nodes that are one operator are joined. Importing this package
needs the package torch (an optional extra). Must not know: exported programs, devices.

A new operator is a function in its family's file and a row in that file's table (docs/errands.md):
the overload that a refusal names, and the function; within `KeptWhole` where torch would take the
operator apart at a loss.
"""

from stitch.frontend.torch.lowering.aten_table import (
    CHECKS,
    KEPT_BY_AUTOGRAD,
    KEPT_WHOLE,
    LOWERINGS,
)
from stitch.frontend.torch.lowering.joined_nodes import fuse_transposed_products, join_selected
from stitch.frontend.torch.lowering.random_numbers import KEY_LIMIT, KEY_NAME, give_key

__all__ = [
    "CHECKS", "KEPT_BY_AUTOGRAD", "KEPT_WHOLE", "KEY_LIMIT", "KEY_NAME", "LOWERINGS",
    "fuse_transposed_products", "give_key", "join_selected",
]  # fmt: skip
