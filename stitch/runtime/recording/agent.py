"""An agent: what runs a task of a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stitch.program import Program
from stitch.runtime.backends import Taker
from stitch.runtime.executors import PreparedProgram
from stitch.runtime.values import ConstantRecord
from stitch.tasks import Transformation


class Agent(Taker, Protocol):
    """A loaded program, or a call of a host function, as those know it who plan its runs."""

    @property
    def program(self) -> Program | None:
        """What it runs; None for a host function."""

    @property
    def constants(self) -> Sequence[ConstantRecord]:
        """What it reads beside its inputs."""

    @property
    def with_constants(self) -> Transformation:
        """What it does where its constants are inputs, after its own."""

    @property
    def content_hash(self) -> bytes:
        """The same for programs that compute the same."""

    @property
    def least_microseconds(self) -> float | None:
        """What a run takes of the host's time, at least; None for a host function, beside which
        nothing runs."""

    def prepared(self) -> PreparedProgram:
        """The executor's form of it."""
