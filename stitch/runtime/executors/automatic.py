"""The automatic executor: for each program the executor that is faster there.

Comes in: a program. Goes out: its prepared form by ONNX Runtime where that is installed, can run
the program, and pays; by NumPy elsewhere. The choice rests on the program's operators and shapes
and on what is installed, never on a clock: the same program is always computed in the same way.

A call of ONNX Runtime costs about 1 us more than the few NumPy calls of a small program; it gains
that back in products, and in operators that NumPy needs many passes for. Measured on one thread
(us, NumPy and ONNX Runtime): Gemm and Relu 1x64x64 3.0 and 3.4, 16x64x64 4.2 and 4.5, 16x128x128
8.7 and 7.5, 64x784x512 526 and 328; Gelu of 64 elements 6.2 and 3.0; Sigmoid of 64 2.5 and 2.9, of
16,384 17 and 9; eight additions and products of 64 5.4 and 5.1, of 262,144 450 and 791. So one
point is wanted, and given for 131,072 multiply-adds, for every operator of many passes, for 4,096
elements of one of a few passes; nothing is given for plain arithmetic.

Some operators speak for NumPy, as ONNX has no such operator, or a slow kernel: the gradient of a
2x2 MaxPool of 64x16x28x28 takes 2.2 ms and 4.8 ms (its indices alone 3.3), Where of 802,816
elements 0.4 and 1.2. A point is about 1 us in long programs: so much is taken away for their
elements.
"""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec

from stitch.errors import CompileError
from stitch.machine import MachineShape
from stitch.program import Operation, Program
from stitch.runtime.executors.executor import Executor, PreparedProgram
from stitch.runtime.executors.numpy_executor import NumpyExecutor

#: Products worth one point.
MULTIPLY_ADDS = 131_072
#: Elements of an operator of a few passes worth one point.
ELEMENTS = 4096
#: Operators that NumPy needs many passes or Python loops for.
MANY_PASSES = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumProd", "CumSum", "Erf",
    "Gelu", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "LogSoftmax", "MaxPool", "Mish", "RMSNormalization", "Softmax", "TopK",
})  # fmt: skip
#: Operators whose functions NumPy computes more slowly.
FEW_PASSES = frozenset({
    "Celu", "Elu", "Exp", "HardSigmoid", "HardSwish", "Log", "Selu", "Sigmoid", "Softplus", "Swish",
})  # fmt: skip
#: Elements of the longest operand for which one point is taken away.
SLOWER = {("stitch", "MaxPoolGradient"): 300, ("", "Where"): 1024}


class AutomaticExecutor(Executor):
    """Chooses an executor for each program; without ONNX Runtime it is the NumPy executor.

    `intra_op_threads` are for ONNX Runtime; raises `UsageError` for fewer than one.
    """

    name = "auto"

    def __init__(self, intra_op_threads: int = 1) -> None:
        self.numpy = NumpyExecutor()
        self.onnxruntime: Executor | None = None
        if find_spec("onnxruntime") is not None and find_spec("onnx") is not None:
            module = import_module("stitch.runtime.executors.onnxruntime")
            self.onnxruntime = module.OnnxRuntimeExecutor(intra_op_threads)

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a program ready by the executor chosen; raises `CompileError`."""
        if self.onnxruntime is not None and points(program) >= 1:
            try:
                return self.onnxruntime.prepare(program, machine)
            except CompileError:
                # It lacks an operator; if the program is at fault, NumPy's executor says so.
                pass
        return self.numpy.prepare(program, machine)


def points(program: Program) -> float:
    """How much speaks for ONNX Runtime: from 1 on, it is chosen (see above)."""
    return sum(_points(program, operation) for operation in program.operations)


def _points(program: Program, operation: Operation) -> float:
    slower = SLOWER.get((operation.domain, operation.op))
    if slower is not None:
        shapes = [program.values[v].type.shape for v in operation.inputs if v >= 0]
        return -max(map(math.prod, shapes)) / slower
    if operation.domain:
        return 0
    found = multiply_adds(program, operation) / MULTIPLY_ADDS
    if operation.op in MANY_PASSES:
        return found + 1
    if operation.op in FEW_PASSES:
        return found + math.prod(program.values[operation.outputs[0]].type.shape) / ELEMENTS
    return found


def multiply_adds(program: Program, operation: Operation) -> int:
    """Multiply-adds of a matrix product or convolution; 0 for other operators."""
    shapes = [program.values[v].type.shape if v >= 0 else () for v in operation.inputs]
    if operation.op == "MatMul":
        return math.prod(program.values[operation.outputs[0]].type.shape) * shapes[0][-1]
    if operation.op == "Gemm":
        inner = shapes[0][0 if operation.attributes.get("transA") else 1]
        return math.prod(program.values[operation.outputs[0]].type.shape) * inner
    if operation.op == "Conv":
        made = math.prod(program.values[operation.outputs[0]].type.shape)
        return made * math.prod(shapes[1][1:])
    if operation.op == "ConvTranspose":
        return math.prod(shapes[0]) * math.prod(shapes[1][1:])
    return 0
