"""The backend of torch.compile: dynamo's graphs run as stitched programs.

The optimizer loop, which needs `stitch.training`, is loaded at its first use.
"""

from typing import TYPE_CHECKING

from stitch.frontend.torch.compile.backend import (
    CompileSettings,
    compiled_graph,
    device_of,
    shared_storage_of,
    stitch_backend,
    without_onednn,
)
from stitch.frontend.torch.graph_report import Counts, Fallback, GraphReport
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.frontend.torch.compile.optimizer_loop import OptimizerLoop, loop_over
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"optimizer_loop": "OptimizerLoop loop_over"})

__all__ = [
    "CompileSettings", "Counts", "Fallback", "GraphReport", "OptimizerLoop", "compiled_graph",
    "device_of", "loop_over", "shared_storage_of", "stitch_backend", "without_onednn",
]  # fmt: skip
