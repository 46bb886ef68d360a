"""Static linking: several programs → one, with the same results to the last bit.

What a wire becomes: the output and the input turn into one plain value. A tensor that passes
through a wire is rounded whenever its storage type narrows (logical type → stored by the producer →
stored for the consumer → logical type); each such step that changes the type becomes a `Cast`, so
nothing is rounded more or less often than before. A wire that stores a block format (bfp8, bfp4) is
refused with a `LinkError`: elements round together with their neighbours there, which no `Cast`
says; such programs stay apart and are stitched at run time.

What was whose is kept as seams: an executor that fuses operations can then compute each program as
it was apart, and give the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from stitch.errors import LinkError
from stitch.linker.alias_proofs import AliasProofs
from stitch.linker.capacity import address_problems, check_capacity, demands
from stitch.linker.dead_code import live_operations, only_operations, renumbered, used_values
from stitch.linker.expansion import expansion_nbytes
from stitch.linker.joined import JoinedProgram
from stitch.linker.scratch import choose_scratch, pack_scratch, place_intermediates
from stitch.linker.wires import Port, Wire, check_ports, check_wires
from stitch.machine import MachineShape
from stitch.program import ABSENT, OperationList, Program, Role, Scratch, Seam, Space

# --------------------------------------------------------------------------------------------------
# The seams of a program that was linked: which operations are whose, and what each part gave.


def seams_of(
    whole: OperationList,
    firsts: Sequence[int],
    given: Collection[int],
    live: Sequence[int],
    numbers: Mapping[int, int],
) -> tuple[Seam, ...]:
    """The seams of what is left of a list: `live` operations, values under their new `numbers`.

    `firsts`: where parts begin in the whole list, rising, the first at 0; `given`: the values that
    were outputs of a part, or were held by one. What another part reads was given, too. A part
    without operations is gone; one part that holds nothing is no seam.
    """
    parts = [bisect_right(firsts, index) - 1 for index in range(len(whole.operations))]
    made = {
        v: parts[index]
        for index, operation in enumerate(whole.operations)
        for v in operation.outputs
        if v != ABSENT
    }
    alive = frozenset(live)
    gave = set(given)
    gives = {slot.value for slot in whole.outputs}
    for index, operation in enumerate(whole.operations):
        for v in operation.inputs:
            if v in made and made[v] != parts[index]:
                gave.add(v)
                if index in alive:
                    gives.add(v)
            elif v in made and index not in alive:
                gave.add(v)
    held: dict[int, list[int]] = {}
    for v in sorted(gave - gives):
        if v in made and v in numbers:
            held.setdefault(made[v], []).append(numbers[v])
    begins: dict[int, int] = {}
    for now, index in enumerate(live):
        begins.setdefault(parts[index], now)
    seams = [Seam(first, tuple(held.get(part, ()))) for part, first in begins.items()]
    return tuple(seams) if len(seams) > 1 or any(seam.held for seam in seams) else ()


def link_programs(
    programs: Sequence[Program],
    wires: Sequence[Wire],
    *,
    machine: MachineShape,
    name: str,
    keep: Collection[Port] | None = None,
    strict_types: bool = False,
) -> Program:
    """One program that does what the programs do one after the other along the wires.

    `keep`: the outputs that stay outputs, None for those that feed no wire. Operations that only
    served dropped outputs go. Fixed addresses of slots that stay are kept. An alias is kept where
    it still can be proved. Raises `LinkError` for wires that do not fit, point backwards, store a
    block format, or whose slots' fixed addresses collide, and for opaque programs;
    `OutOfMemoryError` where the whole does not fit the machine.
    """
    _refuse_opaque(programs)
    check_wires(programs, wires, strict_types)
    fed = {(w.producer, w.output) for w in wires}
    if keep is None:
        kept = {
            (p, o)
            for p, program in enumerate(programs)
            for o in range(len(program.outputs))
            if (p, o) not in fed
        }
    else:
        kept = set(keep)
        check_ports(kept, programs)
    joined = JoinedProgram(programs, wires, frozenset(kept), frozenset(fed))
    for index in range(len(programs)):
        joined.add(index)
    roles = {program.role for program in programs}
    return _finish(joined, name, machine, roles.pop() if len(roles) == 1 else Role.FORWARD)


def _refuse_opaque(programs: Sequence[Program]) -> None:
    for program in programs:
        if program.is_opaque:
            raise LinkError(
                f"program {program.name!r} is opaque: its operations are names of another "
                "compiler's, and stay in their binary",
                remedy="stitch it at run time, as it is: stitch-inspect a.ttnn b.ttb",
            )


def _finish(joined: JoinedProgram, name: str, machine: MachineShape, role: Role) -> Program:
    """Drops what no output needs, packs the scratch, proves aliases, checks that all of it fits."""
    where = f"program {name!r}"
    whole = joined.body(name)
    live = live_operations(whole)
    body = only_operations(whole, live)
    numbers = used_values(body)
    body = renumbered(body, numbers)
    plan = pack_scratch(body.values, body.operations, body.placed_values())
    everything = demands(body, Scratch(Space.HOST, 0), machine)
    slots = [d for d in everything if d.space is Space.L1]
    scratch = choose_scratch(
        expansion_nbytes(body, plan),
        machine,
        l1_slots_per_bank=sum(d.size_per_bank for d in slots),
        l1_below=min((d.address for d in slots if d.address is not None), default=None),
    )
    values = place_intermediates(body.values, plan, scratch)
    program = Program(
        name, body.inputs, body.outputs, values, body.operations, body.constants, scratch, role,
        seams_of(whole, joined.firsts, joined.given, live, numbers),
        bodies=body.bodies,
    )  # fmt: skip
    program = _with_aliases(program, joined)
    wanted = demands(program, scratch, machine)
    problems = list(address_problems(wanted, machine))
    if problems:
        raise LinkError(
            "the fixed addresses of these programs collide:\n  - " + "\n  - ".join(problems),
            where=where,
            remedy="stitch them at run time instead: they need these regions at different times",
        )
    check_capacity(wanted, machine, where)
    return program


def _with_aliases(program: Program, joined: JoinedProgram) -> Program:
    """The program with those of the parts' aliases that can still be proved in the whole."""
    outputs = list(program.outputs)
    taken: set[int] = set()
    proofs = AliasProofs(program)
    for output, port in joined.aliases.items():
        slot = joined.slots.get(port)
        if slot is None or slot in taken:
            continue
        ours = program.values[outputs[output].value]
        theirs = program.values[program.inputs[slot].value]
        if ours.layout == theirs.layout and proofs.obstacle(output, slot) is None:
            outputs[output] = replace(outputs[output], aliases_input=slot)
            taken.add(slot)
    return replace(program, outputs=tuple(outputs))
