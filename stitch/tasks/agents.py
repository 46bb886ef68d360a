"""Agents define what a task does: programs, copies, and calls of host functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

from stitch.errors import UsageError
from stitch.program import Program, TensorDesc
from stitch.tasks.host_calls import HostCall
from stitch.tasks.transformation import Transformation, transformation_of
from stitch.ttb import Binary


class HasProgram(Protocol):
    """A loaded program, or a compiled model with one."""

    @property
    def program(self) -> Program:
        """Return the program."""


#: Of a binary, its only program.
ProgramSource: TypeAlias = Program | HasProgram | Binary


@dataclass(frozen=True, slots=True)
class ProgramAgent:
    """A program; `source` is the caller's object, perhaps a loaded program."""

    source: ProgramSource = field(compare=False)
    program: Program
    transformation: Transformation = field(compare=False, repr=False)
    #: The descriptors of its values, without addresses.
    descs: tuple[TensorDesc, ...] = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """Return the program's name."""
        return self.program.name

    @property
    def takes(self) -> int:
        """Return the number of inputs."""
        return len(self.program.inputs)

    @property
    def makes(self) -> int:
        """How many outputs it has."""
        return len(self.descs)

    @property
    def consumes(self) -> frozenset[int]:
        """Return the donated inputs."""
        return self.transformation.donated

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """(Output, input) pairs that share their bytes."""
        return self.transformation.aliases

    def outputs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """Return the descriptors of the outputs, for any layouts of the inputs."""
        return self.descs

    def input_name(self, index: int) -> str:
        """Return the name of an input slot."""
        return self.transformation.input_name(index)


@dataclass(frozen=True, slots=True)
class CopyAgent:
    """A copy into another layout: `to_layout`."""

    desc: TensorDesc
    name: ClassVar[str] = "to_layout"
    takes: ClassVar[int] = 1
    makes: ClassVar[int] = 1
    #: The source stays valid, and shares no bytes with the copy.
    consumes: ClassVar[frozenset[int]] = frozenset()
    aliases: ClassVar[tuple[tuple[int, int], ...]] = ()

    def outputs(self, inputs: Sequence[TensorDesc]) -> tuple[TensorDesc, ...]:
        """Return the descriptor of the copy."""
        return (self.desc,)

    def input_name(self, index: int) -> str:
        """Return the name of the input in errors."""
        return "tensor"


class TaskRow(NamedTuple):
    """A task: its agent, and the numbers of the values that it reads and produces."""

    agent: Agent
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def gone(self) -> frozenset[int]:
        """Return the positions of the consumed inputs."""
        return self.agent.consumes


@dataclass(frozen=True, slots=True)
class MergedAgent:
    """A composition of transformations: several tasks merged into one.

    Values are numbered as in a table: the inputs of the merged task, then the outputs of the
    members, in order. `kept` are its outputs. No member is merged itself.
    """

    takes: int
    members: tuple[TaskRow, ...]
    kept: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the names of its members, at most `NAMES_SHOWN`."""
        names = [member.agent.name for member in self.members[:NAMES_SHOWN]]
        more = len(self.members) - len(names)
        return "+".join(names) + (f"+{more} more" if more else "")

    @property
    def makes(self) -> int:
        """How many outputs it has."""
        return len(self.kept)

    @property
    def consumes(self) -> frozenset[int]:
        """Return the inputs that a member consumes."""
        taken = {member.inputs[i] for member in self.members for i in member.agent.consumes}
        return frozenset(number for number in taken if number < self.takes)

    @property
    def aliases(self) -> tuple[tuple[int, int], ...]:
        """Return (output, input) pairs that share bytes, also through several members."""
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
        """Return the descriptors of the outputs, member by member."""
        descs = list(inputs)
        for agent, read, _ in self.members:
            descs.extend(agent.outputs([descs[number] for number in read]))
        return tuple([descs[number] for number in self.kept])

    def input_name(self, index: int) -> str:
        """Return the slot of the first member that reads an input."""
        for member in self.members:
            if index in member.inputs:
                slot = member.agent.input_name(member.inputs.index(index))
                return f"{member.agent.name}.{slot}"
        return f"input {index}"


Agent: TypeAlias = ProgramAgent | HostCall | CopyAgent | MergedAgent
#: Members that a merged task's name names.
NAMES_SHOWN = 3


def program_agent(source: ProgramSource) -> ProgramAgent:
    """Return the agent of a program, binary or model; raise `UsageError` for other objects."""
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
