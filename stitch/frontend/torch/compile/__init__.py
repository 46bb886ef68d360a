"""The backend of torch.compile: graphs of dynamo run as stitched programs.

Comes in: fx graphs by way of aot_autograd, torch tensors at every call. Goes out: `stitch_backend`
(torch's entry point `stitch` names it) and `device_of`, the device on which it runs them. Importing
this package needs the package torch (an optional extra). Must not know: exported programs.
"""

from stitch.frontend.torch.compile.dynamo_backend import (
    CompileSettings,
    compiled_graph,
    device_of,
    shared_storage_of,
    stitch_backend,
    without_onednn,
)
from stitch.frontend.torch.compile.graph_report import Counts, Fallback, GraphReport
from stitch.frontend.torch.compile.optimizer_loop import OptimizerLoop, loop_over

__all__ = [
    "CompileSettings", "Counts", "Fallback", "GraphReport", "OptimizerLoop", "compiled_graph",
    "device_of", "loop_over", "shared_storage_of", "stitch_backend", "without_onednn",
]  # fmt: skip
