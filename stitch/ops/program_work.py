"""What one run of a program computes and carries: FLOPs by type, bytes by space.

Comes in: a placed program. Goes out: `ProgramWork`, from types and layouts alone. Must not know:
machines, executors: how long it takes is theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stitch.ops import indexing, shape, types
from stitch.ops.work import sums_of_products
from stitch.program import ABSENT, DataType, Program, Space

#: Families that move elements and compute nothing.
_MOVING = frozenset(
    (definition.domain, definition.name)
    for family in (indexing, shape, types)
    for definition in family.OPERATORS
)


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """`products`: FLOPs of sums of products by the type that their operands are stored in (a
    multiply and an add are two); `other_flops`: one for each element that other operators read or
    make, whichever are more; `nbytes`: what operations read and write, by space."""

    products: Mapping[DataType, int]
    other_flops: int
    nbytes: Mapping[Space, int]


def program_work(program: Program) -> ProgramWork:
    """The work of one run of a program, without padding."""
    products: Counter[DataType] = Counter()
    nbytes: Counter[Space] = Counter()
    other = 0
    for operation in program.operations:
        inputs = [None if v == ABSENT else program.values[v] for v in operation.inputs]
        outputs = [program.values[v] for v in operation.outputs if v != ABSENT]
        present = [value for value in inputs if value is not None]
        sizes = [math.prod(value.type.shape) for value in (*present, *outputs)]
        for value, size in zip((*present, *outputs), sizes, strict=True):
            layout = value.desc.layout
            nbytes[layout.space] += layout.data_type.nbytes(size)
        sums = sums_of_products(
            operation,
            [None if value is None else value.type for value in inputs],
            [value.type for value in outputs],
        )
        if sums:
            products[present[0].desc.layout.data_type] += 2 * sums
        elif (operation.domain, operation.op) not in _MOVING:
            other += max(sizes, default=0)
    return ProgramWork(products, other, nbytes)
