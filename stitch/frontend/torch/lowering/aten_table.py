"""The one table from ATen overloads to their lowerings.

Comes in: a table of each family. Goes out: `LOWERINGS`; `KEPT_WHOLE` and `KEPT_BY_AUTOGRAD`:
operators that torch is not to take apart; `CHECKS`. Must not know: fx nodes.
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
    filled_tensors,
    joined_nodes,
    layer_products,
    norms,
    picked_elements,
    pooled_windows,
    random_numbers,
    reductions,
    resizing,
    shapes,
    single_elements,
)

aten = torch.ops.aten

_FAMILIES: tuple[Mapping[Any, Row], ...] = (
    single_elements.LOWERINGS,
    activations.LOWERINGS,
    reductions.LOWERINGS,
    shapes.LOWERINGS,
    picked_elements.LOWERINGS,
    filled_tensors.LOWERINGS,
    resizing.LOWERINGS,
    layer_products.LOWERINGS,
    attention.LOWERINGS,
    norms.LOWERINGS,
    pooled_windows.LOWERINGS,
    backward_operators.LOWERINGS,
    random_numbers.LOWERINGS,
    joined_nodes.LOWERINGS,
)
_ROWS: dict[Any, Row] = {overload: row for table in _FAMILIES for overload, row in table.items()}
assert len(_ROWS) == sum(map(len, _FAMILIES)), "an overload has two lowerings"

LOWERINGS: dict[Any, Lowering] = {
    overload: row.lowering if isinstance(row, KeptWhole) else row for overload, row in _ROWS.items()
}
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
