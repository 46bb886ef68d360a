"""The runtime: devices with their queue and executors, and tensor handles.

It has layers, each of which depends only on lower ones: executors/ compute; values/ record memory
contents; backends/ allocate, copy and execute plans; execution/ caches executable plans; queue/
collects pending tasks. Above these are tensors, loaded programs, host functions (functions/), the
device, and graphs/ for calls of many tasks at once and for state between such calls. Lower layers
name the device in annotations only. Events, hooks and history are available from execution/ on.
"""

from stitch.runtime.device import RuntimeDevice
from stitch.runtime.events import (
    Event,
    PlanMade,
    PlanRun,
    PlanStopped,
    ReadBack,
    Written,
)
from stitch.runtime.executors import (
    EXECUTORS,
    LIBRARY_PRICES,
    Curve,
    Executor,
    OperationReferences,
    Prices,
    PriceTable,
    known_executors,
    load_prices,
    make_executor,
    parse_prices,
    price_names,
    processor_name,
    program_peak,
    this_processor,
)
from stitch.runtime.graphs import (
    PersistentBuffers,
    PreparedGraph,
    Replay,
    RuntimePipeline,
    StatefulExecutable,
    chain_graph,
)
from stitch.runtime.history import WHOLE_RUN, Account, Totals, totals_of
from stitch.runtime.hooks import HookContext
from stitch.runtime.host_calls import HostResult
from stitch.runtime.lending import elements, export, lend, lent_tensor, share, take_back
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.loading import check_program
from stitch.runtime.queue import comparison_of
from stitch.runtime.tensor import Tensor
from stitch.runtime.tensor_access import TENSOR
from stitch.runtime.values import InputPort, Lying, SpaceUse, as_array, capture
from stitch.runtime.views import reshaped

__all__ = [
    "EXECUTORS", "LIBRARY_PRICES", "TENSOR", "WHOLE_RUN", "Account",
    "PersistentBuffers", "Curve", "Event", "Executor", "HookContext", "HostResult", "InputPort",
    "LoadedProgram", "OperationReferences",
    "PlanMade", "PlanRun", "PlanStopped", "PreparedGraph", "PriceTable", "Prices", "ReadBack",
    "Replay", "RuntimeDevice",
    "RuntimePipeline", "SpaceUse", "Lying", "StatefulExecutable", "Tensor", "Totals", "Written",
    "as_array", "capture", "chain_graph", "check_program", "comparison_of", "elements", "export",
    "known_executors", "lend", "lent_tensor", "load_prices",
    "make_executor", "parse_prices", "price_names", "processor_name",
    "program_peak", "reshaped",
    "share", "take_back", "this_processor", "totals_of",
]  # fmt: skip
