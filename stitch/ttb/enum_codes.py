"""The schema's enums and the program's enums, matched by name.

The schema appends only, so a code never changes its meaning.
"""

from __future__ import annotations

import enum
from typing import TypeVar

from stitch.program import (
    DataType,
    InputKind,
    MathFidelity,
    MemoryLayout,
    Orientation,
    Ownership,
    Role,
    Space,
)
from stitch.ttb.generated import ENUMS

E = TypeVar("E", bound=enum.Enum)

#: The enums that files hold; the schema's enums have the same names and members.
FILE_ENUMS: tuple[type[enum.Enum], ...] = (
    DataType, Space, MemoryLayout, Orientation, InputKind, Ownership, Role, MathFidelity,
)  # fmt: skip

#: The code of each member of each enum.
CODES: dict[enum.Enum, int] = {
    kind[name]: code for kind in FILE_ENUMS for code, name in enumerate(ENUMS[kind.__name__])
}


def members(kind: type[E]) -> tuple[E, ...]:
    """The members of an enum by their code.

    >>> members(Space)[1]
    <Space.DRAM: 'dram'>
    """
    return tuple(kind[name] for name in ENUMS[kind.__name__])
