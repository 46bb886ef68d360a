"""Agents define what a task does: programs, copies, and calls of host functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from stitch.errors import UsageError
from stitch.program import Program, TensorDesc
from stitch.tasks.host_calls import HostCall
from stitch.tasks.transformation import Transformation, transformation_of
from stitch.ttb import Binary


class HasProgram(Protocol):
    """A loaded program, or a compiled model with one."""

    @property
    def program(self) -> Program:
        """The program that it runs."""


#: Of a binary, its only program.
ProgramSource: TypeAlias = Program | HasProgram | Binary


@dataclass(frozen=True, slots=True)
class ProgramAgent:
    """A program; `source` is what the user gave: perhaps it is loaded already."""

    source: ProgramSource = field(compare=False)
    program: Program
    transformation: Transformation = field(compare=False, repr=False)
    #: What its values are described by, wherever they lie.
    descs: tuple[TensorDesc, ...] = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """The program's name, for messages."""
        return self.program.name

    @property
    def takes(self) -> int:
        """How many inputs it has."""
        return len(self.program.inputs)

    @property
    def makes(self) -> int:
        """How many outputs it has."""
        return len(self.descs)

    @property
    def consumes(self) -> frozenset[int]:
        """The inputs that it is given for good."""
        return self.transformation.donated

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """(Output, input) pairs that share their bytes."""
        return self.transformation.aliases

    def outputs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """What it gives, whatever its inputs were stored as."""
        return self.descs

    def input_name(self, index: int) -> str:
        """The name of an input slot, for messages."""
        return self.transformation.input_name(index)


@dataclass(frozen=True, slots=True)
class CopyAgent:
    """A copy into another layout: `to_layout`."""

    desc: TensorDesc

    @property
    def name(self) -> str:
        """What copies are called in messages."""
        return "to_layout"

    @property
    def takes(self) -> int:
        """One input."""
        return 1

    @property
    def makes(self) -> int:
        """How many outputs it has."""
        return 1

    @property
    def consumes(self) -> frozenset[int]:
        """Nothing: what is copied stays."""
        return frozenset()

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """Nothing shares bytes."""
        return ()

    def outputs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """The copy."""
        return (self.desc,)

    def input_name(self, index: int) -> str:
        """For messages."""
        return "tensor"


class TaskRow(NamedTuple):
    """A task: its agent, and the numbers of the values that it reads and produces."""

    agent: Agent
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def gone(self) -> frozenset[int]:
        """The positions of the inputs that are gone afterwards."""
        return self.agent.consumes


@dataclass(frozen=True, slots=True)
class MergedAgent:
    """A composition of transformations: tasks that have become one.

    The members' values are numbered as in a table: the inputs of the whole, then what the members
    make, in order. `kept`: those that are its outputs. No member is merged itself.
    """

    takes: int
    members: tuple[TaskRow, ...]
    kept: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of its members, for messages: at most `NAMES_SHOWN` of them."""
        names = [member.agent.name for member in self.members[:NAMES_SHOWN]]
        more = len(self.members) - len(names)
        return "+".join(names) + (f"+{more} more" if more else "")

    @property
    def makes(self) -> int:
        """How many outputs it has."""
        return len(self.kept)

    @property
    def consumes(self) -> frozenset[int]:
        """The inputs that a member takes over."""
        taken = {member.inputs[i] for member in self.members for i in member.agent.consumes}
        return frozenset(number for number in taken if number < self.takes)

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """(Output, input) pairs that share their bytes, through the members between them."""
        source = {
            member.outputs[o]: member.inputs[i]
            for member in self.members
            for o, i in member.agent.aliases
        }
        found = []
        for output, number in enumerate(self.kept):
            while number in source:
                number = source[number]
            if number < self.takes:
                found.append((output, number))
        return tuple(found)

    def outputs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """What the members make of the inputs, one after the other."""
        descs = list(inputs)
        for agent, read, _ in self.members:
            descs.extend(agent.outputs([descs[number] for number in read]))
        return tuple([descs[number] for number in self.kept])

    def input_name(self, index: int) -> str:
        """The slot of the first member that reads it, for messages."""
        for member in self.members:
            if index in member.inputs:
                slot = member.agent.input_name(member.inputs.index(index))
                return f"{member.agent.name}.{slot}"
        return f"input {index}"


Agent: TypeAlias = ProgramAgent | HostCall | CopyAgent | MergedAgent
#: Members that a merged task's name names.
NAMES_SHOWN = 3


def program_agent(source: ProgramSource) -> ProgramAgent:
    """The agent of a program, or of what holds one; raises `UsageError` for anything else."""
    program: object = source
    if isinstance(source, Binary):
        program = _only_program(source)
    elif not isinstance(source, Program):
        program = getattr(source, "program", None)
    if not isinstance(program, Program):
        raise UsageError(
            "a task graph calls a Program, a loaded program, a compiled model or a Binary of one "
            "program",
            got=f"{type(source).__name__}: {source!r:.60}",
            remedy="graph.host(function, ..., returns=desc) for a Python function"
            if callable(source)
            else "stitch.load(path) reads a file",
        )
    what = transformation_of(program)
    return ProgramAgent(
        source, program, what, tuple([desc.without_address() for desc in what.outputs])
    )


def _only_program(binary: Binary) -> Program:
    if len(binary.programs) > 1:
        names = [program.name for program in binary.programs]
        raise UsageError(
            f"a task graph calls one program, not a Binary of {len(names)} programs",
            got=", ".join(names), remedy=f"choose one: binary.program({names[0]!r})",
        )  # fmt: skip
    return binary.programs[0]
