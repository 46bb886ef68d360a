"""A site: what making and running recordings takes of a device."""

from __future__ import annotations

from typing import Protocol

from stitch.machine import Machine
from stitch.program import TensorDesc
from stitch.runtime.backends import HostMemory, LocalBackend
from stitch.runtime.events import EventStream
from stitch.runtime.history import History
from stitch.runtime.hooks import Hooks
from stitch.runtime.recording.recordings import Recordings
from stitch.runtime.values import Records, ValueRecord


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
    #: How many inter_op_threads runs may have.
    inter_op_threads: int
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
