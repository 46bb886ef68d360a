"""The runtime: a device opened on a machine, its queue, its executors, the handles on its tensors.

Comes in: binaries, arrays, calls. Goes out: tensors, perhaps pending. Must not know the compiler:
what it runs was compiled elsewhere, by anyone.
"""

from stitch.runtime.device import DEFAULT_WINDOW, RuntimeDevice
from stitch.runtime.events import (
    Event,
    PlanMade,
    PlanRun,
    PlanStopped,
    ReadBack,
    Written,
)
from stitch.runtime.executors import EXECUTORS, Executor, make_executor, program_peak
from stitch.runtime.history import WHOLE_RUN, Account, Totals, totals_of
from stitch.runtime.hooks import HookContext
from stitch.runtime.lending import export, lend, reshaped, take_back
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.pipeline import RuntimePipeline
from stitch.runtime.prepared import GraphCall, PreparedGraph
from stitch.runtime.tensor import Tensor
from stitch.runtime.tensor_access import TENSOR
from stitch.runtime.values import InputPort, SpaceUse, capture

__all__ = [
    "DEFAULT_WINDOW", "EXECUTORS", "TENSOR", "WHOLE_RUN", "Account", "Event", "Executor",
    "GraphCall", "HookContext", "InputPort", "LoadedProgram", "PlanMade", "PlanRun", "PlanStopped",
    "PreparedGraph", "ReadBack",
    "RuntimeDevice", "RuntimePipeline", "SpaceUse", "Tensor", "Totals", "Written", "capture",
    "export", "lend", "make_executor", "program_peak", "reshaped", "take_back", "totals_of",
]  # fmt: skip
