"""Lowerings: what ATen's operators are in a computation graph, a file for each family.

Each family has a table `LOWERINGS`; here they are joined. Graphs are rewritten here where a
lowering needs it: random operators take a key (`give_key`), nodes that are one operator are joined.
Importing this package needs the package torch (an optional extra).

A new operator is a function in its family's file and a row in that file's table (docs/errands.md):
the overload that a refusal names, and the function; within `KeptWhole` where torch would take the
operator apart at a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stitch.frontend.torch.aten_call import KeptWhole, Lowering, Row
from stitch.frontend.torch.lowering import (
    activations,
    attention,
    backward_operators,
    complex_numbers,
    embedding_bags,
    grid_samples,
    norms,
    ordered_elements,
    picked_elements,
    products,
    quantized,
    random_numbers,
    reductions,
    shapes,
    single_elements,
    window_operators,
)  # fmt: skip
from stitch.frontend.torch.lowering.backward_operators import join_selected
from stitch.frontend.torch.lowering.random_numbers import (
    KEEPING,
    KEY_LIMIT,
    KEY_NAME,
    KEYED,
    REPLAYING,
    give_key,
)

aten = torch.ops.aten

_FAMILIES: tuple[Mapping[Any, Row], ...] = tuple(
    family.LOWERINGS for family in (
        single_elements, activations, reductions, shapes, picked_elements, products,
        attention, norms, window_operators, backward_operators, random_numbers,
        ordered_elements, embedding_bags, grid_samples, quantized,
    )
)  # fmt: skip
_ROWS: dict[Any, Row] = {overload: row for table in _FAMILIES for overload, row in table.items()}
assert len(_ROWS) == sum(map(len, _FAMILIES)), "an overload has two lowerings"

LOWERINGS: dict[Any, Lowering] = {
    overload: row.lowering if isinstance(row, KeptWhole) else row for overload, row in _ROWS.items()
}
COMPLEX_LOWERINGS: Mapping[Any, Lowering] = complex_numbers.LOWERINGS
_BY_NAME = {
    **products.LOWERINGS_BY_NAME, **quantized.LOWERINGS_BY_NAME,
    **single_elements.LOWERINGS_BY_NAME,
}  # fmt: skip


def lowering_of(target: Any) -> Lowering | None:
    """The lowering of an overload; of packages that may not be loaded, by its name."""
    found = LOWERINGS.get(target)
    if found is None and isinstance(target, torch._ops.OpOverload):
        return _BY_NAME.get(str(target))
    return found


def complex_lowering_of(target: Any) -> Lowering | None:
    """The lowering of an overload whose operands or result are complex numbers."""
    return COMPLEX_LOWERINGS.get(target)


#: What aot_autograd is to leave whole.
KEPT_BY_AUTOGRAD = tuple(op for op, row in _ROWS.items() if isinstance(row, KeptWhole))
#: What torch.export is to leave whole as well.
KEPT_WHOLE = tuple(op for op, row in _ROWS.items() if isinstance(row, KeptWhole) and row.exported)
#: Checks of what export already knows: they make nothing.
CHECKS = frozenset((
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default,
    aten._assert_scalar.default, aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default, torch._check,
))  # fmt: skip


__all__ = [
    "CHECKS", "COMPLEX_LOWERINGS", "KEEPING", "KEPT_BY_AUTOGRAD", "KEPT_WHOLE", "KEYED",
    "KEY_LIMIT", "KEY_NAME", "LOWERINGS", "REPLAYING", "complex_lowering_of",
    "give_key", "join_selected", "lowering_of",
]  # fmt: skip
