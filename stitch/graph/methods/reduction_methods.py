"""Reductions as methods: sums, means, extremes, products, variances, argmax.

Comes in: tensors and axes (None: all). Goes out: ONNX reductions, whose axes are int64 constants.
"""

from __future__ import annotations

from stitch.graph.emitter import axes_of, axis_of
from stitch.graph.methods.shape_methods import ShapeMethods
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import Operand, SymbolicTensor
from stitch.graph.tensor_operations import Axes


class ReductionMethods(ShapeMethods):
    """Many elements become one; the data type stays (ONNX: a sum of int32 is int32)."""

    __slots__ = ()

    def _reduce(self, op: str, x: Operand, axis: Axes, keepdims: bool) -> SymbolicTensor:
        tensor = self.tensor(x)
        if axis is None:
            return self._one(op, tensor, keepdims=int(keepdims))
        axes = axes_of(axis, len(tensor.shape), op)
        if not axes:
            return self._one(op, tensor, keepdims=int(keepdims), noop_with_empty_axes=1)
        return self._one(op, tensor, list(axes), keepdims=int(keepdims))

    def reduce(
        self, kind: str, x: Operand, axis: Axes = None, keepdims: bool = False
    ) -> SymbolicTensor:
        """The reduction of that kind: sum, mean, max, min, prod, l1, l2, log_sum_exp, ..."""
        kinds = {
            "sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin",
            "prod": "ReduceProd", "l1": "ReduceL1", "l2": "ReduceL2",
            "sum_square": "ReduceSumSquare", "log_sum_exp": "ReduceLogSumExp",
        }  # fmt: skip
        if kind not in kinds:
            raise mistake(f"unknown reduction {kind!r}", expected=", ".join(kinds))
        return self._reduce(kinds[kind], x, axis, keepdims)

    def reduce_sum(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Sums over axes."""
        return self._reduce("ReduceSum", x, axis, keepdims)

    def reduce_mean(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Means over axes."""
        return self._reduce("ReduceMean", x, axis, keepdims)

    mean = reduce_mean

    def reduce_max(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Maxima over axes."""
        return self._reduce("ReduceMax", x, axis, keepdims)

    def reduce_min(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Minima over axes."""
        return self._reduce("ReduceMin", x, axis, keepdims)

    def reduce_prod(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Products over axes."""
        return self._reduce("ReduceProd", x, axis, keepdims)

    def variance(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Variances over axes, divided by the count."""
        tensor = self.tensor(x)
        centred = self.sub(tensor, self.reduce_mean(tensor, axis, keepdims=True))
        return self.reduce_mean(self.square(centred), axis, keepdims)

    def argmax(self, x: Operand, axis: int | None = None, keepdims: bool = False) -> SymbolicTensor:
        """The place of the first maximum, along an axis or in the flattened tensor; int64."""
        return self._arg("ArgMax", x, axis, keepdims)

    def argmin(self, x: Operand, axis: int | None = None, keepdims: bool = False) -> SymbolicTensor:
        """The place of the first minimum, along an axis or in the flattened tensor; int64."""
        return self._arg("ArgMin", x, axis, keepdims)

    def _arg(self, op: str, x: Operand, axis: int | None, keepdims: bool) -> SymbolicTensor:
        tensor = self.tensor(x)
        if axis is None:
            tensor, axis = self.reshape(tensor, (-1,)), 0
        place = axis_of(axis, len(tensor.shape), op)
        return self._one(op, tensor, axis=place, keepdims=int(keepdims))

    def softmax(self, x: Operand, axis: int = -1) -> SymbolicTensor:
        """Exponentials along an axis, divided by their sum."""
        return self._one("Softmax", x, axis=None if axis == -1 else axis)

    def log_softmax(self, x: Operand, axis: int = -1) -> SymbolicTensor:
        """The logarithm of the softmax."""
        return self._one("LogSoftmax", x, axis=None if axis == -1 else axis)
