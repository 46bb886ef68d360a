"""PyTorch's front end: torch modules become computation graphs, and torch.compile has a backend.

`lowering/` has the table of ATen operators that all of them share; `compile/` is the backend.
Importing this package needs no torch: its names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.frontend.torch.compile import device_of, loop_over
    from stitch.frontend.torch.compile_explanation import Explanation, explain, graph_counts
    from stitch.frontend.torch.export import load_archive
    from stitch.frontend.torch.fx import (
        StaticCapture,
        captured_dynamic_module,
        captured_module,
        from_fx,
    )
    from stitch.frontend.torch.plain_values import CallStructure
    from stitch.frontend.torch.shared_storage import (
        OverwrittenTensor,
        RelocatedParameters,
        SharedStorage,
    )
    from stitch.frontend.torch.tensor_bytes import array_on, tensor_on, untraced_tensor_on
    from stitch.frontend.torch.torch_internals import pytree
    from stitch.frontend.torch.training_capture import (
        evaluation_from_torch,
        from_torch_for_training,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "compile": "device_of loop_over",
            "compile_explanation": "Explanation explain graph_counts",
            "export": "load_archive",
            "fx": "StaticCapture captured_dynamic_module captured_module from_fx",
            "plain_values": "CallStructure",
            "shared_storage": "OverwrittenTensor RelocatedParameters SharedStorage",
            "tensor_bytes": "array_on tensor_on untraced_tensor_on",
            "torch_internals": "pytree",
            "training_capture": "evaluation_from_torch from_torch_for_training",
        },
    )

__all__ = [
    "CallStructure", "Explanation", "OverwrittenTensor", "RelocatedParameters", "SharedStorage",
    "StaticCapture", "array_on", "captured_dynamic_module", "captured_module",
    "device_of", "evaluation_from_torch", "explain", "from_fx", "from_torch_for_training",
    "graph_counts", "load_archive", "loop_over", "pytree", "tensor_on", "untraced_tensor_on",
]  # fmt: skip
