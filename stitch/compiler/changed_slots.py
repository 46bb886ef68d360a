"""Change the layouts of some slots of a compiled program; everything else stays in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from stitch.errors import CompileError
from stitch.linker import address_problems, check_capacity, demands
from stitch.machine import MachineShape
from stitch.program import Layout, Program

#: Layouts by side and index.
SlotLayouts: TypeAlias = Mapping[tuple[Literal["input", "output"], int], Layout]


def with_layouts(program: Program, layouts: SlotLayouts, machine: MachineShape) -> Program:
    """Return the program with other layouts for some slots; aliasing outputs follow their input.

    Raises:
        CompileError: The compiler would add a value or drop an alias, or addresses overlap.
        FormatError: The changed program is not valid.
        LayoutError: A layout is invalid.
        OutOfMemoryError: The program does not fit the machine.
    """
    problems = list(_inner_problems(program, layouts))
    values = list(program.values)
    over = {slot.aliases_input: slot.value for slot in program.outputs}
    for (side, index), layout in layouts.items():
        if side == "output":
            places = [program.outputs[index].value]
        else:
            places = [program.inputs[index].value, *([over[index]] if index in over else [])]
        for place in places:
            values[place] = replace(values[place], layout=layout)
    changed = replace(program, values=tuple(values))
    wanted = demands(changed, changed.scratch, machine)
    problems += address_problems(wanted, machine)
    where = f"program {program.name!r} on machine {machine.name!r}"
    if problems:
        raise CompileError(
            "these slots cannot change without compiling again: " + "; ".join(problems), where=where
        )
    check_capacity(wanted, machine, where)
    return changed


def _inner_problems(program: Program, layouts: SlotLayouts) -> Iterator[str]:
    """Yield slots for which the compiler would add a value or drop an alias."""
    read = {value for operation in program.operations for value in operation.inputs}
    taken = {slot.aliases_input for slot in program.outputs}
    for (side, index), layout in layouts.items():
        slot = (program.inputs if side == "input" else program.outputs)[index]
        rounds = layout.data_type is not program.values[slot.value].desc.layout.data_type
        if side == "input" and index in taken and rounds:
            yield f"input {slot.name!r} gives its buffer to an output"
        elif side == "output" and program.outputs[index].aliases_input is not None:
            yield f"output {slot.name!r} takes the buffer of an input"
        elif side == "output" and rounds and slot.value in read:
            yield f"output {slot.name!r} is read by other operations, in its own type"
