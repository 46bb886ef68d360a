"""What was made here and has a file's form, called on a device of its own.

Comes in: a binary. Goes out: files, readable text, results of the first program. Must not know:
graphs, compiling, training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stitch.argument_kinds import PATH, takes
from stitch.errors import UsageError
from stitch.program import Program, summary
from stitch.report import open_device
from stitch.runtime import LoadedProgram, Tensor
from stitch.ttb import Binary, encode, save

#: Programs that a model's `repr` names.
MAX_SHOWN = 3


class ModelOfBinary:
    """What was made here and has a file's form: it is saved, loaded on devices, and called."""

    __slots__ = ()

    binary: Binary
    #: How the machine is spelled that a call opens.
    target: str
    #: Who computes there: for whom loops were scheduled; None: who computes by default.
    executor: str | None
    #: The program on a device of its own, from the first call on.
    _loaded: list[LoadedProgram]

    def __repr__(self) -> str:
        programs = [f"  {summary(program)}" for program in self.binary.programs[:MAX_SHOWN]]
        more = len(self.binary.programs) - MAX_SHOWN
        tail = [f"  and {more} more"] if more > 0 else []
        head = f"<{type(self).__name__} for {self.target}:"
        return "\n".join([head, *programs, *tail]) + ">"

    @property
    def program(self) -> Program:
        """The one program; raises `UsageError` for a training, which has several."""
        if len(self.binary.programs) != 1:
            raise UsageError(
                f"this model has {len(self.binary.programs)} programs",
                remedy="take one of model.binary.programs",
            )
        return self.binary.programs[0]

    @takes(path=PATH)
    def save(self, path: str | Path) -> None:
        """Write the `.ttb` file, whole or not at all."""
        save(self.binary, path)

    def encode(self) -> bytes:
        """The bytes that `save` would write."""
        return encode(self.binary)

    def text(self) -> str:
        """The programs as readable text."""
        return "".join(program.text() for program in self.binary.programs)

    def run_alone(
        self, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the first program on a device of the model's own target."""
        if not self._loaded:
            words: dict[str, Any] = {} if self.executor is None else {"executor": self.executor}
            self._loaded.append(open_device(self.target, **words).load(self))
        return self._loaded[0](*arguments, **named)
