"""Front ends: foreign modules become computation graphs.

Each front end is a folder of its own and is loaded when it is asked for.
"""

from typing import TYPE_CHECKING

from stitch.frontend.modules import (
    SUFFIXES,
    TrainableSource,
    is_torch,
    onnx_dimensions,
    opened,
    read_dynamic,
    read_graph,
    read_module,
    read_trainable,
    torch_device,
)
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.frontend.torch import (
        CallStructure,
        Explanation,
        OverwrittenTensor,
        RelocatedParameters,
        SharedStorage,
        array_on,
        explain,
        from_fx,
        graph_counts,
        loop_over,
        pytree,
        tensor_on,
        untraced_tensor_on,
    )
    from stitch.frontend.yaml import (
        MODULE_KEYS,
        load_module,
        module_from_text,
        module_json_schema,
    )
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "torch": "CallStructure Explanation OverwrittenTensor RelocatedParameters "
            "SharedStorage array_on explain from_fx graph_counts loop_over pytree tensor_on "
            "untraced_tensor_on",
            "yaml": "MODULE_KEYS load_module module_from_text module_json_schema",
        },
    )

__all__ = [
    "MODULE_KEYS", "CallStructure", "Explanation", "OverwrittenTensor", "RelocatedParameters",
    "SUFFIXES", "SharedStorage", "TrainableSource", "array_on", "explain", "from_fx",
    "graph_counts", "is_torch", "load_module", "loop_over", "module_from_text",
    "module_json_schema", "onnx_dimensions", "opened", "pytree", "read_graph", "read_dynamic",
    "read_module", "read_trainable", "tensor_on", "torch_device", "untraced_tensor_on",
]  # fmt: skip
