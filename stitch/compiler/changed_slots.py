"""Change the layouts of some slots of a compiled program, as compiling it again would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from stitch.compiler.placement import L1_SHARE
from stitch.errors import CompileError
from stitch.linker import address_problems, check_capacity, choose_scratch, demands
from stitch.machine import MachineShape, room_per_bank
from stitch.program import InputKind, Layout, Program, Space

#: Layouts by side and index.
SlotLayouts: TypeAlias = Mapping[tuple[Literal["input", "output"], int], Layout]


def with_layouts(program: Program, layouts: SlotLayouts, machine: MachineShape) -> Program:
    """Return the program with other layouts for some slots; aliasing outputs follow their input.

    Raises:
        CompileError: The compiler would place other values differently as well.
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
    problems += _placement_problems(program, changed, machine)
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


def _placement_problems(before: Program, after: Program, machine: MachineShape) -> Iterator[str]:
    """Yield what the compiler might place differently.

    The placement options are not known here, so every set of options is considered. An opaque
    program was placed by another compiler with unknown rules: nothing is yielded for it.
    """
    if machine.l1 is None or before.is_opaque:
        return
    used, now = _slots_in_l1(before, machine), _slots_in_l1(after, machine)
    scratch = before.scratch
    nbytes = scratch.size_per_bank * machine.space(scratch.space).banks
    # The scratch gets least of L1 if all slots are pinned there, and most if none is.
    pinned = now if now >= used else 0
    if nbytes and choose_scratch(nbytes, machine, l1_slots_per_bank=pinned).space is not (
        scratch.space
    ):
        yield "the scratch may be placed in another space"
    bottom = scratch.size_per_bank if scratch.space is Space.L1 else 0
    most = machine.l1.capacity * L1_SHARE[0] // L1_SHARE[1] - bottom
    if now > used and now > most:
        yield "other slots may have to leave L1"
    for value in _slots_moved_to_dram(before):
        size = _size_in_l1(before, value, machine)
        if now + size <= most < used + size:
            yield f"{before.values[value].name!r} may be placed in L1"


def _slots_in_l1(program: Program, machine: MachineShape) -> int:
    """Return the bytes per bank of L1 that slots use."""
    slots = [*(s.value for s in program.inputs),
             *(s.value for s in program.outputs if s.aliases_input is None)]  # fmt: skip
    descs = [program.values[value].desc for value in slots]
    here = [desc for desc in descs if desc.layout.space is Space.L1]
    return sum(room_per_bank(desc, machine) for desc in here)


def _slots_moved_to_dram(program: Program) -> Iterator[int]:
    """Yield the slots in DRAM that are placed in L1 by default if they fit."""
    values = [s.value for s in program.inputs if s.kind is InputKind.ACTIVATION]
    values += [s.value for s in program.outputs if s.aliases_input is None]
    for value in values:
        if program.values[value].desc.layout.space is Space.DRAM:
            yield value


def _size_in_l1(program: Program, value: int, machine: MachineShape) -> int:
    desc = program.values[value].desc
    layout = replace(desc.layout, space=Space.L1, address=None)
    return room_per_bank(replace(desc, layout=layout), machine)
