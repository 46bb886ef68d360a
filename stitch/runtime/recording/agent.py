"""`Agent`: the runner of a task in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stitch.program import Program
from stitch.runtime.backends import Taker
from stitch.runtime.executors import PreparedProgram
from stitch.runtime.values import ConstantRecord
from stitch.tasks import Transformation


class Agent(Taker, Protocol):
    """A loaded program or a host function call, as planning uses it."""

    @property
    def program(self) -> Program | None:
        """The program; None for a host function."""

    @property
    def constants(self) -> Sequence[ConstantRecord]:
        """Its constants."""

    @property
    def with_constants(self) -> Transformation:
        """The transformation with the constants as additional inputs."""

    @property
    def content_hash(self) -> bytes:
        """Equal for programs that compute the same."""

    @property
    def least_microseconds(self) -> float | None:
        """A lower bound of a run's host time; None for a host function, which runs alone."""

    def prepared(self) -> PreparedProgram:
        """Return the executor's prepared program."""
