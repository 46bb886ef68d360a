"""Transformations: what an agent does to its inputs."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

from stitch.program import Ownership, Program, Scratch, TensorDesc

_next_key = itertools.count(1).__next__


class TransformationKind(enum.Enum):
    """What computes a transformation: an executor runs programs, the backend copies, Python runs
    host functions."""

    PROGRAM = "program"
    COPY = "copy"
    HOST = "host"


@dataclass(frozen=True, slots=True, eq=False)
class Transformation:
    """What an agent does to its inputs; made once per agent and shared by all of its tasks.

    `inputs` and `outputs` are the descriptors that must hold before and after. `aliases` pairs an
    output with the donated input whose buffer it takes. `key` identifies it for plan reuse.
    `seconds`: simulated time of one run on the device's machine, beside the copies that it needs.
    `constants`: how many of the inputs, the last, are constants, which their file has.
    `input_locations` and `output_locations`: the source location of the first operation that reads
    an input, and of the one that writes an output; empty if none is known.
    """

    name: str
    kind: TransformationKind
    inputs: tuple[TensorDesc, ...]
    outputs: tuple[TensorDesc, ...]
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    donated: frozenset[int] = frozenset()
    aliases: tuple[tuple[int, int], ...] = ()
    scratch: Scratch | None = None
    key: int = field(default_factory=_next_key)
    seconds: float = 0.0
    constants: int = 0
    input_locations: tuple[str, ...] = ()
    output_locations: tuple[str, ...] = ()

    def input_name(self, index: int) -> str:
        """The name of an input slot, for messages."""
        return self.input_names[index] if index < len(self.input_names) else f"input {index}"

    def output_name(self, index: int) -> str:
        """The name of an output slot, for messages."""
        return self.output_names[index] if index < len(self.output_names) else f"output {index}"


def transformation_of(program: Program, seconds: float = 0.0) -> Transformation:
    """What a program does to its inputs; `seconds`: simulated time of one run."""
    read_at, written_at = _locations(program)
    return Transformation(
        name=program.name,
        kind=TransformationKind.PROGRAM,
        inputs=tuple([program.input_desc(i) for i in range(len(program.inputs))]),
        outputs=tuple([program.output_desc(i) for i in range(len(program.outputs))]),
        input_names=tuple([slot.name for slot in program.inputs]),
        output_names=tuple([slot.name for slot in program.outputs]),
        donated=frozenset(
            i for i, slot in enumerate(program.inputs) if slot.ownership is Ownership.DONATE
        ),
        aliases=tuple([
            (o, slot.aliases_input)
            for o, slot in enumerate(program.outputs)
            if slot.aliases_input is not None
        ]),
        scratch=program.scratch,
        seconds=seconds,
        input_locations=read_at,
        output_locations=written_at,
    )  # fmt: skip


def _locations(program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `input_locations` and `output_locations`; empty tuples if none is known."""
    readers = dict.fromkeys([slot.value for slot in program.inputs], "")
    writers = dict.fromkeys([slot.value for slot in program.outputs], "")
    for operation in reversed(program.operations):
        if operation.location:
            for value in operation.inputs:
                if value in readers:
                    readers[value] = operation.location
            for value in operation.outputs:
                if value in writers:
                    writers[value] = operation.location
    ends = (
        [readers[slot.value] for slot in program.inputs],
        [writers[slot.value] for slot in program.outputs],
    )
    first, second = [tuple(places) if any(places) else () for places in ends]
    return first, second
