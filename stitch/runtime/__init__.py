"""The runtime: a device opened on a machine, its queue, its executors, the handles on its tensors.

It is built in floors, each of which knows only those below it: executors/ compute; values/ are the
records of what lies where; backends/ allocate, copy and run on behalf of plans; recording/ makes
work that runs again; queue/ gathers the tasks that wait. On these stand tensors, loaded programs,
functions/ of the host, the device, graphs/, which call many tasks in one go, and loops/, which
hold what lies between two such calls. Where a floor needs something of the device, it says by a
Protocol what that is. Events, hooks and history are known from recording/ on.
"""

from stitch.runtime.aggregation import AGGREGATE
from stitch.runtime.device import DEFAULT_WINDOW, RuntimeDevice
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
    load_prices,
    make_executor,
    parse_prices,
    price_names,
    processor_name,
    program_peak,
    this_processor,
)
from stitch.runtime.functions import HostResult
from stitch.runtime.graphs import PreparedGraph, Replay, chain_graph
from stitch.runtime.history import WHOLE_RUN, Account, Totals, totals_of
from stitch.runtime.hooks import HookContext
from stitch.runtime.lending import elements, export, lend, reshaped, share, take_back
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.loading import check_program
from stitch.runtime.loops import PersistentBuffers, StatefulExecutable
from stitch.runtime.pipeline import RuntimePipeline
from stitch.runtime.queue import comparison_of
from stitch.runtime.tensor import Tensor
from stitch.runtime.tensor_access import TENSOR
from stitch.runtime.values import InputPort, Lying, SpaceUse, capture

__all__ = [
    "AGGREGATE", "DEFAULT_WINDOW", "EXECUTORS", "LIBRARY_PRICES", "TENSOR", "WHOLE_RUN", "Account",
    "PersistentBuffers", "Curve", "Event", "Executor", "HookContext", "HostResult", "InputPort",
    "LoadedProgram", "OperationReferences",
    "PlanMade", "PlanRun", "PlanStopped", "PreparedGraph", "PriceTable", "Prices", "ReadBack",
    "Replay", "RuntimeDevice",
    "RuntimePipeline", "SpaceUse", "Lying", "StatefulExecutable", "Tensor", "Totals", "Written",
    "capture", "chain_graph", "check_program", "comparison_of", "elements", "export", "lend",
    "load_prices",
    "make_executor", "parse_prices", "price_names", "processor_name", "program_peak", "reshaped",
    "share", "take_back", "this_processor", "totals_of",
]  # fmt: skip
