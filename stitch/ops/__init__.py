"""Operators: a definition for each (`OpDef`), and functions to infer, bind and evaluate them.

A family of operators is a file, with kernels, gradients and batching rules, and the operators that
compute gradients.
"""

from stitch.ops.activation import GELU_CUBE, GELU_HEIGHT, GELU_RATE
from stitch.ops.applying import (
    DOMAINS,
    MAX_NBYTES,
    attributes_of,
    bind,
    definition_of,
    evaluate,
    evaluate_operation,
    infer_operation,
    infer_types,
    is_defined,
    is_elementwise,
    kernel_workspace,
    lookup,
    numpy_bytes,
    operand_nbytes,
    operators,
    plugin_operators,
)
from stitch.ops.batch_normalization import batch_gradient_steps
from stitch.ops.batching import Batching, BatchingContext
from stitch.ops.definition import (
    Attribute,
    Kernel,
    KernelArguments,
    OpDef,
    Thunk,
    resolve_attributes,
)
from stitch.ops.dividing import COPIES, SUMS, DividedOperation, Part
from stitch.ops.element_types import data_type_of_code, onnx_code
from stitch.ops.gradient import Gradient, GradientContext
from stitch.ops.inference import Inference, InferenceContext, float_of, int_of, string_of
from stitch.ops.rearranging import slices_of
from stitch.ops.recurrent import recurrent_activations
from stitch.ops.reshaping import RESHAPING, known_by_type
from stitch.ops.sharding import PARALLEL_OPERATORS
from stitch.ops.steps import copy_steps
from stitch.ops.symbolic_evaluation import deferred_results, symbolic_results
from stitch.ops.types import conversion_steps, workspace_nbytes
from stitch.ops.window_of_rows import are_in_range, row_copies, row_numbers, windowed
from stitch.ops.windows import (
    pool_windows,
    sees_everywhere,
    transposed_windows,
    turned_windows,
    windows_of,
)
from stitch.ops.work import (
    OperationWork,
    estimated_steps,
    has_products,
    multiply_adds,
    program_work,
    summed_over_operations,
    work_of,
)
from stitch.ops.workspaces import (
    LINE_NBYTES,
    KernelMemory,
    bytes_from_a_line,
    computed_nbytes,
    workspace,
)

__all__ = [
    "COPIES", "DOMAINS", "GELU_CUBE", "GELU_HEIGHT", "GELU_RATE", "LINE_NBYTES", "MAX_NBYTES",
    "PARALLEL_OPERATORS", "RESHAPING", "SUMS", "Attribute", "Batching", "BatchingContext",
    "DividedOperation", "Gradient", "GradientContext", "Inference", "InferenceContext", "Kernel",
    "KernelArguments", "KernelMemory", "OpDef", "OperationWork", "Part", "Thunk", "are_in_range",
    "attributes_of", "batch_gradient_steps", "bind", "bytes_from_a_line", "computed_nbytes",
    "conversion_steps", "copy_steps", "data_type_of_code", "deferred_results", "definition_of",
    "estimated_steps", "evaluate", "evaluate_operation", "float_of", "has_products",
    "infer_operation", "infer_types", "int_of", "is_defined", "is_elementwise",
    "kernel_workspace", "known_by_type", "lookup", "multiply_adds", "numpy_bytes", "onnx_code",
    "operand_nbytes", "operators", "plugin_operators", "pool_windows", "program_work",
    "recurrent_activations", "resolve_attributes", "row_copies", "row_numbers", "sees_everywhere",
    "slices_of", "string_of", "summed_over_operations", "symbolic_results", "transposed_windows",
    "turned_windows", "windowed", "windows_of", "work_of", "workspace", "workspace_nbytes",
]  # fmt: skip
