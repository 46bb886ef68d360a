"""The memory records of a device: values, their buffers and instances, and output slots."""

from stitch.runtime.values.arrays import as_array, capture
from stitch.runtime.values.effects import Effects, InstanceRef, Place, effects_of
from stitch.runtime.values.memory_snapshot import MemorySnapshot
from stitch.runtime.values.notes import Notes
from stitch.runtime.values.ports import InputPort
from stitch.runtime.values.rebuilding import rebuild_bookkeeping
from stitch.runtime.values.records import Ranges, Records
from stitch.runtime.values.shared_constants import dispose, hold_constant
from stitch.runtime.values.space_use import SpaceUse
from stitch.runtime.values.space_watch import Lying, SpaceWatch
from stitch.runtime.values.state import (
    ArgumentRecord,
    BufferRecord,
    ConstantRecord,
    Forms,
    InstanceRecord,
    OutputSlots,
    Places,
    Reader,
    Status,
    ValueRecord,
)
from stitch.runtime.values.views import view_offset

__all__ = [
    "ArgumentRecord", "BufferRecord", "ConstantRecord", "Effects", "Forms",
    "InputPort", "InstanceRecord", "InstanceRef", "Lying", "MemorySnapshot",
    "Notes", "OutputSlots", "Place", "Places", "Ranges", "Reader", "Records", "SpaceUse",
    "SpaceWatch", "Status", "ValueRecord", "as_array", "capture", "dispose",
    "effects_of", "hold_constant", "rebuild_bookkeeping", "view_offset",
]  # fmt: skip
