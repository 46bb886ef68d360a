"""Lowerings of ATen operators to operations of a computation graph, one file for each family.

To add an operator, write a function in its family's file and a row in that file's table
`LOWERINGS` (docs/errands.md): the overload that the error names, and the function; in `KeptWhole`
if torch must not decompose the operator. Some graphs are rewritten before lowering: random
operators get a key (`give_key`), sums of selected gradients are joined (`join_selected`).
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
from stitch.frontend.torch.lowering.backward_operators import POOL_DECOMPOSITIONS, join_selected
from stitch.frontend.torch.lowering.picked_elements import embedded
from stitch.frontend.torch.lowering.random_numbers import (
    KEY_LIMIT,
    KEY_NAME,
    KEYED,
    RESTORE_STATE,
    SAVE_STATE,
    give_key,
)
from stitch.frontend.torch.lowering.single_elements import detached
from stitch.frontend.torch.torch_internals import OpOverload, check

aten = torch.ops.aten

_FAMILIES: tuple[Mapping[Any, Row], ...] = tuple(
    family.LOWERINGS for family in (
        single_elements, activations, reductions, shapes, picked_elements, products,
        attention, norms, window_operators, backward_operators, random_numbers,
        ordered_elements, quantized,
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
    """The lowering of an overload, or None; overloads of packages that load late go by name."""
    found = LOWERINGS.get(target)
    if found is None and isinstance(target, OpOverload):
        return _BY_NAME.get(str(target))
    return found


def complex_lowering_of(target: Any) -> Lowering | None:
    """The lowering of an overload for complex operands or results, or None."""
    return COMPLEX_LOWERINGS.get(target)


#: Operators that aot_autograd must not decompose.
KEPT_BY_AUTOGRAD = tuple(op for op, row in _ROWS.items() if isinstance(row, KeptWhole))
#: Operators that torch.export must not decompose either.
KEPT_WHOLE = tuple(op for op, row in _ROWS.items() if isinstance(row, KeptWhole) and row.exported)
#: Checks without results, of facts that the traced shapes imply.
CHECKS = frozenset((
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default,
    aten._assert_scalar.default, aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default, check,
))  # fmt: skip


__all__ = [
    "CHECKS", "COMPLEX_LOWERINGS", "KEPT_BY_AUTOGRAD", "KEPT_WHOLE", "KEYED", "KEY_LIMIT",
    "KEY_NAME", "LOWERINGS", "POOL_DECOMPOSITIONS", "RESTORE_STATE", "SAVE_STATE",
    "complex_lowering_of", "detached", "embedded", "give_key", "join_selected", "lowering_of",
]  # fmt: skip
