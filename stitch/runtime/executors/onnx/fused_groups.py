"""Groups of operations that are one operator of ONNX's, for which ONNX Runtime has a faster kernel.

Comes in: a program. Goes out: which operation ends such a group, and which lie inside and are left
out. ONNX Runtime fuses some groups itself, but knows them in few spellings. Must not know sessions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stitch.program import Operation, Program


@dataclass(frozen=True, slots=True)
class Fused:
    """One group: the operator that stands for it, and the indices of the others inside it."""

    op: str
    attributes: tuple[tuple[str, str], ...]
    input: int
    inside: frozenset[int]


def fusions(program: Program) -> dict[int, Fused]:
    """The groups by the index of their last operation.

    Gelu by tanh: `(0.5 x) (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, as GPT-2 has it.
    """
    links = _Links(program)
    groups = {}
    for index, operation in enumerate(program.operations):
        if operation.op == "Tanh" and not operation.domain:
            match = links.gelu_around(index, operation)
            if match is not None:
                groups[match[0]] = match[1]
    return groups


class _Links:
    """Which operation makes each value of a program, and which read it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.constants = program.constant_data()
        self.makers = {v: i for i, o in enumerate(program.operations) for v in o.outputs}
        self.readers = program.readers()
        self.given = {slot.value for slot in program.outputs}

    def gelu_around(self, tanh: int, operation: Operation) -> tuple[int, Fused] | None:
        """The Gelu of which this Tanh is the middle, and the index of its last operation."""
        inner = self.scaled(operation.inputs[0], math.sqrt(2 / math.pi))
        above = self.only_reader(operation.outputs[0], "Add")
        if inner is None or above is None:
            return None
        if not any(self.is_number(v, 1.0) for v in self.program.operations[above].inputs):
            return None
        last = self.only_reader(self.program.operations[above].outputs[0], "Mul")
        if last is None:
            return None
        raised = self.program.operations[above].outputs[0]
        halves = [v for v in self.program.operations[last].inputs if v != raised]
        half = self.scaled(halves[0], 0.5) if len(halves) == 1 else None
        if half is None or self.program.values[half[0]].type.data_type.compute_dtype != np.float32:
            return None
        x = half[0]
        cubic = self.with_cubic_term(inner[0], x)
        if cubic is None:
            return None
        inside = frozenset((tanh, above, inner[1], half[1], *cubic))
        if any(self.is_seen_outside(index, inside | {last}) for index in inside):
            return None
        return last, Fused("Gelu", (("approximate", "tanh"),), x, inside)

    def with_cubic_term(self, value: int, x: int) -> tuple[int, ...] | None:
        """The operations that make `x + 0.044715 x^3`; None where others do."""
        for a, b, maker in self.operands(value, "Add"):
            term = self.scaled(b, 0.044715) if a == x else None
            if term is None:
                continue
            for square, again, cube in self.operands(term[0], "Mul"):
                for one, two, squared in self.operands(square, "Mul"):
                    if one == two == again == x:
                        return maker, term[1], cube, squared
            for base, exponent, cube in self.operands(term[0], "Pow"):
                if base == x and self.is_number(exponent, 3.0):
                    return maker, term[1], cube
        return None

    def operands(self, value: int, op: str) -> Iterator[tuple[int, int, int]]:
        """Both orders of the operands of what makes a value, if that is `op`, and its index."""
        index = self.makers.get(value)
        if index is None:
            return
        operation = self.program.operations[index]
        if operation.op == op and not operation.domain and len(operation.inputs) == 2:
            first, second = operation.inputs
            yield first, second, index
            if first != second and op != "Pow":
                yield second, first, index

    def scaled(self, value: int, number: float) -> tuple[int, int] | None:
        """What is multiplied by a number to make a value, and the index of the product."""
        for a, b, index in self.operands(value, "Mul"):
            if self.is_number(b, number):
                return a, index
        return None

    def is_number(self, value: int, number: float) -> bool:
        """Whether a value is one constant number, to the digits of float32."""
        data = self.constants.get(value)
        return data is not None and data.size == 1 and math.isclose(
            float(data.reshape(())), number, rel_tol=1e-6
        )  # fmt: skip

    def only_reader(self, value: int, op: str) -> int | None:
        """The index of the one operation that reads a value, if it is `op`."""
        readers = self.readers.get(value, set())
        reader = next(iter(readers)) if len(readers) == 1 else None
        if reader is None or self.program.operations[reader].op != op:
            return None
        return None if self.program.operations[reader].domain else reader

    def is_seen_outside(self, index: int, group: frozenset[int]) -> bool:
        """Whether something beside the group reads what an operation makes."""
        results = self.program.operations[index].outputs
        return any(v in self.given or self.readers.get(v, set()) - group for v in results)
