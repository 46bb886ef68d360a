"""The math fidelity that was asked for, written to the operations of a program that have one.

Comes in: a program, a math fidelity. Goes out: the program, every sum of products of it, also in
bodies, with that fidelity. Must not know: machines, and how long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stitch.ops import has_products
from stitch.program import MathFidelity, Operation, Program


def with_math_fidelity(program: Program, fidelity: MathFidelity) -> Program:
    """The program with a math fidelity at each operation that sums products."""
    if fidelity is MathFidelity.BY_TYPE:
        return program

    def told(operations: Sequence[Operation]) -> tuple[Operation, ...]:
        return tuple(
            replace(operation, math_fidelity=fidelity) if has_products(operation) else operation
            for operation in operations
        )

    bodies = tuple(replace(body, operations=told(body.operations)) for body in program.bodies)
    return replace(program, operations=told(program.operations), bodies=bodies)
