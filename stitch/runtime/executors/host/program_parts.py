"""Parts: some of a program's operations as a program of their own, on the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from stitch.linker import with_used_bodies
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
from stitch.runtime.executors.host.staging import compute_type


class WholeProgram:
    """A program, and what its parts ask of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.data = program.constant_data()
        self.given = {slot.value for slot in program.outputs}
        self.slots = {slot.value: slot for slot in program.inputs}
        self.readers = program.readers()


class PartOfProgram:
    """Some operations as a program; `inputs` and `outputs`: which values are its slots.

    Outputs are what other operations read, the program's outputs, and `held`, which are given
    whoever reads them. Its values are numbered by first use, so that equal parts are equal
    programs.
    """

    def __init__(
        self, whole: WholeProgram, operations: Sequence[int], held: Collection[int] = ()
    ) -> None:
        self.whole, self.program, self.data = whole, whole.program, whole.data
        self.inside = set(operations)
        self.held = held
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
                readers = self.whole.readers.get(value, set())
                if value in self.whole.given or value in self.held or readers - self.inside:
                    self.outputs.append(value)
        outputs = tuple(self.numbers.get(v, ABSENT) for v in operation.outputs)
        return replace(operation, inputs=inputs, outputs=outputs)

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
        slots = {v: self.whole.slots.get(v, InputSlot("", v)) for v in self.inputs}
        part = Program(
            program.name,
            tuple(replace(s, name=f"v{numbers[v]}", value=numbers[v]) for v, s in slots.items()),
            tuple(OutputSlot(f"v{numbers[v]}", numbers[v], self._alias(v)) for v in self.outputs),
            tuple(self.values),
            tuple(self.operations),
            tuple(self.constants),
            replace(program.scratch, size_per_bank=0),
            program.role,
            bodies=program.bodies,
        )
        return with_used_bodies(part)

    def _alias(self, value: int) -> int | None:
        """Which of the part's inputs an output takes the place of."""
        for slot in self.program.outputs:
            if slot.value == value and slot.aliases_input is not None:
                source = self.program.inputs[slot.aliases_input].value
                return self.inputs.index(source) if source in self.inputs else None
        return None
