"""The memory records of a device: values, their buffers and instances, and output slots."""

from stitch.runtime.values.arrays import as_array, capture
from stitch.runtime.values.plan_effects import (
    Effects,
    InstanceRef,
    MemorySnapshot,
    Place,
    effects_of,
)
from stitch.runtime.values.records import (
    Lying,
    Ranges,
    Records,
    SpaceUse,
    SpaceWatch,
    dispose,
    hold_constant,
)
from stitch.runtime.values.state import (
    ArgumentRecord,
    BufferRecord,
    ConstantRecord,
    Forms,
    InputPort,
    InstanceRecord,
    OutputSlots,
    Places,
    Reader,
    Status,
    ValueRecord,
)

__all__ = [
    "ArgumentRecord", "BufferRecord", "ConstantRecord", "Effects", "Forms",
    "InputPort", "InstanceRecord", "InstanceRef", "Lying", "MemorySnapshot",
    "OutputSlots", "Place", "Places", "Ranges", "Reader", "Records", "SpaceUse",
    "SpaceWatch", "Status", "ValueRecord", "as_array", "capture", "dispose",
    "effects_of", "hold_constant",
]  # fmt: skip
