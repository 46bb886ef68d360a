"""Agents: who defines what a task does. Programs, copies, and calls of host functions.

Comes in: programs (loaded, compiled, bare), descriptors. Goes out: frozen data that says how many
inputs a task has, what it gives, and which inputs are gone afterwards. Must not know: graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from stitch.errors import UsageError
from stitch.program import Program, TensorDesc
from stitch.tasks.host_calls import HostCall
from stitch.tasks.transformation import Transformation, transformation_of


class HasProgram(Protocol):
    """A loaded program, or a compiled model with one."""

    @property
    def program(self) -> Program:
        """The program that it runs."""


ProgramSource: TypeAlias = Program | HasProgram


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


Agent: TypeAlias = ProgramAgent | HostCall | CopyAgent


def program_agent(source: ProgramSource) -> ProgramAgent:
    """The agent of a program, or of what holds one; raises `UsageError` for anything else."""
    program = source if isinstance(source, Program) else getattr(source, "program", None)
    if not isinstance(program, Program):
        raise UsageError(
            "a task graph calls a Program, a loaded program or a compiled model",
            got=f"{type(source).__name__}: {source!r:.60}",
            remedy="graph.host(function, ..., returns=desc) for a Python function"
            if callable(source)
            else "of a binary with several programs, binary.program(name) is one",
        )
    what = transformation_of(program)
    return ProgramAgent(
        source, program, what, tuple([desc.without_address() for desc in what.outputs])
    )
