"""Transformations: what an agent does to its inputs."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, field

from stitch.program import Scratch, TensorDesc

_next_key = itertools.count(1).__next__


class TransformationKind(enum.Enum):
    """What computes a transformation: an executor runs programs, the backend copies."""

    PROGRAM = "program"
    COPY = "copy"


@dataclass(frozen=True, slots=True, eq=False)
class Transformation:
    """What an agent does to its inputs; made once per agent and shared by all of its tasks.

    `inputs` and `outputs` are the descriptors that must hold before and after. `aliases` pairs an
    output with the donated input whose buffer it takes. `key` identifies it for plan reuse.
    `seconds`: simulated time of one run on the device's machine, beside the copies that it needs.
    `constants`: how many of the inputs, the last, are constants, which their file has.
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

    def input_name(self, index: int) -> str:
        """The name of an input slot, for messages."""
        return self.input_names[index] if index < len(self.input_names) else f"input {index}"

    def output_name(self, index: int) -> str:
        """The name of an output slot, for messages."""
        return self.output_names[index] if index < len(self.output_names) else f"output {index}"
