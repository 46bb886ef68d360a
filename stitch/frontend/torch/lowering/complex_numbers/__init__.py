"""Complex numbers: what ATen's operators on them are, on pairs of real and imaginary parts.

`LOWERINGS` has what stands beside an overload for complex elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.frontend.torch.aten_call import Lowering
from stitch.frontend.torch.lowering.complex_numbers import (
    complex_arithmetic,
    complex_movements,
    fourier_transforms,
)

_FAMILIES: tuple[Mapping[Any, Lowering], ...] = tuple(
    family.LOWERINGS for family in (complex_arithmetic, complex_movements, fourier_transforms)
)
LOWERINGS: dict[Any, Lowering] = {
    overload: row for table in _FAMILIES for overload, row in table.items()
}
assert len(LOWERINGS) == sum(map(len, _FAMILIES)), "an overload has two lowerings"

__all__ = ["LOWERINGS"]
