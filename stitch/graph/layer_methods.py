"""Builder methods for reductions and layers (FlexFlow's operators), written in ONNX operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stitch.graph.emitter import axes_of, axis_of
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import Axes, Operand, SymbolicTensor
from stitch.graph.tensor_methods import ShapeMethods
from stitch.program import DataType

Pair = int | Sequence[int]


class ReductionMethods(ShapeMethods):
    """Reductions over axes. The data type stays: as in ONNX, a sum of int32 is int32."""

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
        """Apply a reduction by name: sum, mean, max, min, prod, l1, l2, sum_square, log_sum_exp."""
        kinds = {
            "sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin",
            "prod": "ReduceProd", "l1": "ReduceL1", "l2": "ReduceL2",
            "sum_square": "ReduceSumSquare", "log_sum_exp": "ReduceLogSumExp",
        }  # fmt: skip
        if kind not in kinds:
            raise mistake(f"unknown reduction {kind!r}", expected=", ".join(kinds))
        return self._reduce(kinds[kind], x, axis, keepdims)

    def reduce_sum(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        return self._reduce("ReduceSum", x, axis, keepdims)

    def reduce_mean(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        return self._reduce("ReduceMean", x, axis, keepdims)

    mean = reduce_mean

    def reduce_max(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        return self._reduce("ReduceMax", x, axis, keepdims)

    def reduce_min(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        return self._reduce("ReduceMin", x, axis, keepdims)

    def variance(self, x: Operand, axis: Axes = None, keepdims: bool = False) -> SymbolicTensor:
        """Biased variance over axes (divided by the count)."""
        tensor = self.tensor(x)
        centred = self.sub(tensor, self.reduce_mean(tensor, axis, keepdims=True))
        return self.reduce_mean(self.square(centred), axis, keepdims)

    def argmax(self, x: Operand, axis: int | None = None, keepdims: bool = False) -> SymbolicTensor:
        """Index of the first maximum along an axis, or in the flattened tensor; int64."""
        return self._arg("ArgMax", x, axis, keepdims)

    def argmin(self, x: Operand, axis: int | None = None, keepdims: bool = False) -> SymbolicTensor:
        """Index of the first minimum along an axis, or in the flattened tensor; int64."""
        return self._arg("ArgMin", x, axis, keepdims)

    def _arg(self, op: str, x: Operand, axis: int | None, keepdims: bool) -> SymbolicTensor:
        tensor = self.tensor(x)
        if axis is None:
            tensor, axis = self.reshape(tensor, (-1,)), 0
        place = axis_of(axis, len(tensor.shape), op)
        return self._one(op, tensor, axis=place, keepdims=int(keepdims))

    def softmax(self, x: Operand, axis: int = -1) -> SymbolicTensor:
        return self._one("Softmax", x, axis=None if axis == -1 else axis)

    def log_softmax(self, x: Operand, axis: int = -1) -> SymbolicTensor:
        return self._one("LogSoftmax", x, axis=None if axis == -1 else axis)


class LayerMethods(ReductionMethods):
    """Matrix products, convolutions, pooling, normalisation and attention."""

    __slots__ = ()

    def matmul(self, a: Operand, b: Operand) -> SymbolicTensor:
        """Matrix product; leading axes broadcast as in `numpy.matmul`."""
        return self._one("MatMul", *self._pair("MatMul", a, b))

    def einsum(self, equation: str, *operands: Operand) -> SymbolicTensor:
        """Einstein summation over tensors of one data type."""
        like = next((t for t in operands if isinstance(t, SymbolicTensor)), None)
        tensors = [self.tensor(t, like) for t in operands]
        self._same_type("Einsum", tensors)
        return self._one("Einsum", *tensors, equation=equation)

    def linear(
        self, x: Operand, weight: Operand, bias: Operand | None = None,
        activation: str | None = None,
    ) -> SymbolicTensor:  # fmt: skip
        """Compute x Wᵀ + b: x `[..., in]`, weight `[out, in]`, bias `[out]`."""
        tensor, matrix = self._pair("Linear", x, weight)
        if len(matrix.shape) != 2 or not tensor.shape or tensor.shape[-1] != matrix.shape[1]:
            raise mistake(
                "a linear layer's weight does not fit its input",
                expected=f"a weight [out, {tensor.shape[-1] if tensor.shape else 1}]",
                got=matrix.type.text(),
            )
        added = None if bias is None else self.tensor(bias, tensor)
        if len(tensor.shape) == 2:
            result = self._one("Gemm", tensor, matrix, added, transB=1)
        else:
            result = self.matmul(tensor, self.transpose(matrix))
            result = result if added is None else self.add(result, added)
        return self.activation(result, activation)

    def dense(
        self, x: Operand, weight: Operand, bias: Operand | None = None,
        activation: str | None = None,
    ) -> SymbolicTensor:  # fmt: skip
        """Like `linear`; if `weight` is a number of outputs, create parameters.

        They are drawn from PyTorch's distribution for a new layer, with a fixed seed.
        """
        if not isinstance(weight, int | np.integer) or isinstance(weight, bool):
            return self.linear(x, weight, bias, activation)
        tensor, count = self.tensor(x), int(weight)
        width = tensor.shape[-1] if tensor.shape else 1
        if count < 1 or bias is not None:
            raise mistake(
                "a dense layer that creates its parameters needs 1 or more outputs, no bias",
                got=f"{count} outputs, bias {bias!r:.40}",
            )
        rng, most = np.random.default_rng(len(self.operations)), 1 / math.sqrt(max(width, 1))
        matrix, added = [
            rng.uniform(-most, most, shape).astype(tensor.dtype)
            for shape in ((count, width), count)
        ]
        name = "dense" if "dense.weight" not in self._names else f"dense_{len(self.operations)}"
        parameters = self.parameter(f"{name}.weight", matrix), self.parameter(f"{name}.bias", added)
        return self.linear(tensor, *parameters, activation)

    def conv2d(
        self,
        x: Operand,
        weight: Operand,
        bias: Operand | None = None,
        *,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        activation: str | None = None,
    ) -> SymbolicTensor:
        """2-D convolution: x `[N, C, H, W]`, weight `[M, C / groups, kH, kW]`, bias `[M]`."""
        tensor, kernel = self._pair("Conv", x, weight)
        result = self._one(
            "Conv", tensor, kernel, None if bias is None else self.tensor(bias, tensor),
            strides=_pair(stride, "stride"), pads=_pair(padding, "padding") * 2,
            dilations=_pair(dilation, "dilation"), group=groups,
        )  # fmt: skip
        return self.activation(result, activation)

    def pool2d(
        self,
        x: Operand,
        kernel: Pair,
        *,
        stride: Pair | None = None,
        padding: Pair = 0,
        kind: str = "max",
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> SymbolicTensor:
        """2-D `max` or `average` pooling of `[N, C, H, W]`; `stride` defaults to `kernel`."""
        if kind not in ("max", "average"):
            raise mistake(f"unknown pooling {kind!r}", expected="max, average")
        window = _pair(kernel, "kernel")
        averaged = kind == "average"
        return self._one(
            "AveragePool" if averaged else "MaxPool",
            x,
            kernel_shape=window,
            strides=window if stride is None else _pair(stride, "stride"),
            pads=_pair(padding, "padding") * 2,
            ceil_mode=1 if ceil_mode else None,
            count_include_pad=int(count_include_pad) if averaged else None,
        )

    def batch_norm(
        self,
        x: Operand,
        scale: Operand,
        bias: Operand,
        mean: Operand,
        variance: Operand,
        *,
        epsilon: float = 1e-5,
        relu: bool = False,
    ) -> SymbolicTensor:
        """Batch normalisation for inference: x `[N, C, ...]`, statistics and weights `[C]`."""
        tensor = self.tensor(x)
        rest = [self.tensor(t, tensor) for t in (scale, bias, mean, variance)]
        result = self._one("BatchNormalization", tensor, *rest, epsilon=epsilon)
        return self.relu(result) if relu else result

    def layer_norm(
        self,
        x: Operand,
        scale: Operand | None = None,
        bias: Operand | None = None,
        *,
        axis: int = -1,
        epsilon: float = 1e-5,
    ) -> SymbolicTensor:
        """Layer normalisation over the axes from `axis` on; scale and bias have their shape."""
        tensor = self.tensor(x)
        shape = tensor.shape[axis:] if tensor.shape else ()
        weight = np.ones(shape, tensor.dtype) if scale is None else scale
        # float32 statistics would lose digits in the gradient of a float64 tensor.
        stash = DataType.FLOAT64 if tensor.data_type is DataType.FLOAT64 else DataType.FLOAT32
        return self._one(
            "LayerNormalization", tensor, self.tensor(weight, tensor),
            None if bias is None else self.tensor(bias, tensor),
            axis=axis, epsilon=epsilon, stash_type=stash,
        )  # fmt: skip

    def rms_norm(
        self, x: Operand, scale: Operand | None = None, *, axis: int = -1, epsilon: float = 1e-5
    ) -> SymbolicTensor:
        """Divide x by its root mean square over the axes from `axis` on; multiply by `scale`."""
        tensor = self.tensor(x)
        axes = tuple(range(axis, 0)) if axis < 0 else tuple(range(axis, len(tensor.shape)))
        squares = self.reduce_mean(self.square(tensor), axes, keepdims=True)
        result = self.mul(tensor, self.rsqrt(self.add(squares, epsilon)))
        return result if scale is None else self.mul(result, scale)

    def embedding(
        self, indices: Operand, table: Operand, aggregate: str | None = None
    ) -> SymbolicTensor:
        """Look up rows of a table `[entries, width]`; `aggregate` (`sum`, `mean`) reduces the last
        axis of the indices."""
        rows = self.gather(self.tensor(table), indices, 0)
        if aggregate is None or aggregate == "none":
            return rows
        if aggregate not in ("sum", "mean"):
            raise mistake(f"unknown aggregation {aggregate!r}", expected="sum, mean, none")
        return self.reduce(aggregate, rows, -2)

    def scaled_dot_product_attention(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        mask: Operand | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> SymbolicTensor:
        """softmax(Q Kᵀ scale + mask) V over `[..., length, width]`.

        A boolean mask keeps scores where it is true; any other mask is added. `causal` masks
        later positions.
        """
        q, k = self._pair("attention", query, key)
        factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        scores = self.mul(self.matmul(q, self.swapaxes(k, -1, -2)), factor)
        if causal:
            later = np.triu(np.full(scores.shape[-2:], -np.inf, np.float32), 1)
            scores = self.add(scores, later.astype(scores.dtype))
        if mask is not None:
            given = self.tensor(mask, scores)
            if given.data_type.value == "bool":
                scores = self.where(given, scores, -math.inf)
            else:
                scores = self.add(scores, given)
        return self.matmul(self.softmax(scores), value)

    def multi_head_attention(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        weights: Sequence[Operand],
        biases: Sequence[Operand | None] = (None, None, None, None),
        *,
        heads: int,
        mask: Operand | None = None,
        causal: bool = False,
    ) -> SymbolicTensor:
        """Multi-head attention over `[batch, length, width]`, as `torch.nn.MultiheadAttention`.

        `weights` (`[out, in]`) and `biases` (`[out]`) are those of query, key, value and output.
        """
        if len(weights) != 4 or len(biases) != 4:
            raise mistake(
                "attention needs weights and biases for query, key, value and output",
                expected="4 and 4",
                got=f"{len(weights)} and {len(biases)}",
            )
        q, k, v = (
            self._in_heads(self.linear(x, w, b), heads)
            for x, w, b in zip((query, key, value), weights[:3], biases[:3], strict=True)
        )
        mixed = self.scaled_dot_product_attention(q, k, v, mask, causal=causal)
        joined = self.transpose(mixed, (0, 2, 1, 3))
        batch, length = joined.shape[:2]
        flat = self.reshape(joined, (batch, length, joined.shape[2] * joined.shape[3]))
        return self.linear(flat, weights[3], biases[3])

    def _in_heads(self, x: SymbolicTensor, heads: int) -> SymbolicTensor:
        if len(x.shape) != 3 or heads < 1 or x.shape[-1] % heads:
            raise mistake(
                "attention needs [batch, length, width] and a number of heads dividing the width",
                got=f"{x.type.text()} and {heads} heads",
            )
        batch, length, width = x.shape
        split = self.reshape(x, (batch, length, heads, width // heads))
        return self.transpose(split, (0, 2, 1, 3))


def _pair(given: Pair, what: str) -> tuple[int, int]:
    pair = (given, given) if isinstance(given, int) else tuple(int(v) for v in given)
    if len(pair) != 2:
        raise mistake(f"a {what} must be one or two numbers", got=str(given))
    return pair[0], pair[1]
