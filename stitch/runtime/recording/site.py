"""`Site`: the parts of a device that create and run executables."""

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
    """A device, as executables use it."""

    machine: Machine
    backend: LocalBackend
    host_memory: HostMemory
    records: Records
    recordings: Recordings
    events: EventStream
    history: History
    hooks: Hooks
    #: Bits of the active listeners and hooks: code is generated per combination.
    observers: int
    #: Whether kernels are user code, which may call back.
    kernels_call_back: bool
    #: Number of threads for independent sections of a plan.
    inter_op_threads: int
    #: Whether tensors may be evicted to host memory.
    spills: bool
    copies_forbidden: int
    code_written: int

    def desc_key(self, desc: TensorDesc) -> int:
        """Return a small integer that identifies the descriptor."""

    def make_room(self) -> None:
        """Release host memory that the device can do without."""

    def lost_all(self, value: ValueRecord) -> None:
        """Mark a value that lost its last instance in a plan."""
