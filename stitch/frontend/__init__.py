"""Front ends: foreign modules become computation graphs.

Comes in: YAML files, ONNX models, PyTorch modules. Goes out: `ComputationGraph`. Each front end is
a folder of its own and is imported on demand. Must not know: compiler, runtime.
"""
