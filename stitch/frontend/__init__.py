"""Front ends: foreign modules become computation graphs.

Comes in: YAML files, ONNX models, PyTorch modules. Goes out: `ComputationGraph`. Each front end is
a folder of its own; those of optional extras are imported on demand. Must not know: compiler,
runtime.
"""

from stitch.frontend.modules import batched_shapes, read_graph, read_trainable, torch_device
from stitch.frontend.yaml import MODULE_KEYS, load_module, module_from_text

__all__ = [
    "MODULE_KEYS", "batched_shapes", "load_module", "module_from_text", "read_graph",
    "read_trainable", "torch_device",
]  # fmt: skip
