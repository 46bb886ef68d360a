"""Some operations of a program as a program of their own, on the host.

Comes in: a program, indices of operations. Goes out: the part, with the values that come from
outside as inputs and those that others read as outputs. Must not know ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stitch.program import (
    ABSENT,
    Constant,
    InputSlot,
    Operation,
    OutputSlot,
    Program,
    Value,
    host_layout,
)
from stitch.runtime.executors.host import compute_type


class Parts:
    """The parts of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.data = program.constant_data()
        self.given = {slot.value for slot in program.outputs}
        self.readers: dict[int, list[int]] = {}
        for index, operation in enumerate(program.operations):
            for value in operation.inputs:
                self.readers.setdefault(value, []).append(index)

    def part(self, operations: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], Program]:
        """Some operations as a program, and which values are its inputs and outputs.

        Its values are numbered by first use, so that equal parts are equal programs.
        """
        writing = _Part(self, operations)
        return tuple(writing.inputs), tuple(writing.outputs), writing.program_of_part()


class _Part:
    def __init__(self, parts: Parts, operations: Sequence[int]) -> None:
        self.parts, self.program, self.data = parts, parts.program, parts.data
        self.inside = set(operations)
        self.numbers: dict[int, int] = {}
        self.values: list[Value] = []
        self.constants: list[Constant] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.operations = [self._operation(self.program.operations[i]) for i in operations]

    def _operation(self, operation: Operation) -> Operation:
        inputs = tuple(map(self._operand, operation.inputs))
        for value in operation.outputs:
            if value != ABSENT:
                self._number(value)
                if self._is_read_outside(value):
                    self.outputs.append(value)
        outputs = tuple(self.numbers.get(v, ABSENT) for v in operation.outputs)
        return replace(operation, inputs=inputs, outputs=outputs)

    def _is_read_outside(self, value: int) -> bool:
        read = self.parts.readers.get(value, ())
        return value in self.parts.given or any(i not in self.inside for i in read)

    def _operand(self, value: int) -> int:
        if value == ABSENT:
            return ABSENT
        if value not in self.numbers:
            self._number(value)
            if value in self.data:
                self.constants.append(Constant(self.numbers[value], self.data[value]))
            else:
                self.inputs.append(value)
        return self.numbers[value]

    def _number(self, value: int) -> None:
        kind = self.program.values[value].type
        # As the arrays have it: dense, in the type that it is computed in.
        name = f"v{len(self.values)}"
        self.numbers[value] = len(self.values)
        self.values.append(Value(name, kind, host_layout(compute_type(kind))))

    def program_of_part(self) -> Program:
        """The part."""
        program, numbers = self.program, self.numbers
        slots = {s.value: s for s in program.inputs}
        return Program(
            program.name,
            tuple(
                replace(slots[v], name=f"v{numbers[v]}", value=numbers[v])
                if v in slots
                else InputSlot(f"v{numbers[v]}", numbers[v])
                for v in self.inputs
            ),
            tuple(OutputSlot(f"v{numbers[v]}", numbers[v], self._alias(v)) for v in self.outputs),
            tuple(self.values),
            tuple(self.operations),
            tuple(self.constants),
            replace(program.scratch, size_per_bank=0),
            program.role,
        )

    def _alias(self, value: int) -> int | None:
        """Which of the part's inputs an output takes the place of."""
        for slot in self.program.outputs:
            if slot.value == value and slot.aliases_input is not None:
                source = self.program.inputs[slot.aliases_input].value
                return self.inputs.index(source) if source in self.inputs else None
        return None
