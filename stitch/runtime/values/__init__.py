"""Values: what handles refer to, the buffers that they lie in, and who has leases on these.

Comes in: descriptors, host arrays, effects of plans. Goes out: records, changed all at once. Must
not know devices, bindings, queues.
"""

from stitch.runtime.values.arrays import as_array, capture
from stitch.runtime.values.effects import Effects, InstanceRef, Place, effects_of
from stitch.runtime.values.leases import AnyLease, Lease, LeaseHolder
from stitch.runtime.values.mending import mend
from stitch.runtime.values.notes import Notes
from stitch.runtime.values.picture import Picture
from stitch.runtime.values.ports import InputPort
from stitch.runtime.values.records import Ranges, Records
from stitch.runtime.values.shared_constants import hold_constant, let_go
from stitch.runtime.values.space_use import SpaceUse
from stitch.runtime.values.space_watch import Lying, SpaceWatch
from stitch.runtime.values.state import (
    ArgumentRecord,
    BufferRecord,
    ConstantRecord,
    Forms,
    InstanceRecord,
    Places,
    Reader,
    Status,
    Store,
    ValueRecord,
)
from stitch.runtime.values.views import view_offset

__all__ = [
    "AnyLease", "ArgumentRecord", "BufferRecord", "ConstantRecord", "Effects", "Forms", "InputPort",
    "InstanceRecord", "InstanceRef", "Lease", "LeaseHolder", "Notes", "Picture", "Place", "Places",
    "Ranges", "Reader", "Records", "SpaceUse", "SpaceWatch", "Lying", "Status", "Store",
    "ValueRecord", "as_array", "capture", "effects_of", "hold_constant", "let_go", "mend",
    "view_offset",
]  # fmt: skip
