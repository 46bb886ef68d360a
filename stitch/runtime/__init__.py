"""The runtime: a device opened on a machine, its queue, its executors, the handles on its tensors.

Comes in: binaries, arrays, calls. Goes out: tensors, perhaps pending. Must not know the compiler:
what it runs was compiled elsewhere, by anyone.
"""

from stitch.runtime.device import DEFAULT_WINDOW, Device
from stitch.runtime.events import (
    Event,
    MovedAside,
    PlanMade,
    PlanRun,
    PlanStopped,
    ReadBack,
    Written,
)
from stitch.runtime.history import WHOLE_RUN, Account, Totals, totals_of
from stitch.runtime.hooks import HookContext
from stitch.runtime.program import LoadedProgram
from stitch.runtime.tensor import Tensor
from stitch.runtime.tensor_access import TENSOR

__all__ = [
    "DEFAULT_WINDOW", "TENSOR", "WHOLE_RUN", "Account", "Device", "Event", "HookContext",
    "LoadedProgram", "MovedAside", "PlanMade", "PlanRun", "PlanStopped", "ReadBack", "Tensor",
    "Totals", "Written", "totals_of",
]  # fmt: skip
