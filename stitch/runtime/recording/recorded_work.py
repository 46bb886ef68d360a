"""Work: what recordings are made of, and what of a device making and running them takes.

Comes in: nothing. Goes out: the forms of what comes from above: tasks on values, by whoever
gathered them, and a device. Must not know: queues, handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stitch.machine import Machine
from stitch.program import Program, TensorDesc
from stitch.runtime.backends import HostMemory, LocalBackend, Taker
from stitch.runtime.events import EventStream
from stitch.runtime.executors import PreparedProgram
from stitch.runtime.history import History
from stitch.runtime.hooks import Hooks
from stitch.runtime.recording.recordings import Recordings
from stitch.runtime.values import ConstantRecord, Records, ValueRecord
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


class Site(Protocol):
    """A device, as recordings know it: where they are made and run."""

    machine: Machine
    backend: LocalBackend
    host_memory: HostMemory
    records: Records
    recordings: Recordings
    events: EventStream
    history: History
    hooks: Hooks
    #: For whom code is written: which listeners and hooks there are, as a number.
    observers: int
    #: Whether kernels are not Stitch's own, and may call back.
    kernels_call_back: bool
    #: How many lanes runs may have.
    lanes: int
    #: Whether tensors may wait on the host.
    spills: bool
    copies_forbidden: int
    code_written: int

    def desc_key(self, desc: TensorDesc) -> int:
        """A small number for a descriptor."""

    def make_room(self) -> None:
        """Give back what the host's memory can do without."""

    def lost_all(self, value: ValueRecord) -> None:
        """A value lost its last instance in a plan."""
