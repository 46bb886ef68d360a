"""PyTorch's kernels of Stitch's operators, on tensors in planned places, for the CUDA executor.

A kernel returns steps that a CUDA graph can capture: they run on the current stream, wait for
nothing and read no number on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.ops import RESHAPING, are_in_range, row_numbers, slices_of, windows_of
from stitch.program import Array, Operation
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.torch_executor import CONVOLUTIONS
from stitch.runtime.executors.torch_executor import KERNELS as ATEN_KERNELS


@dataclass(frozen=True, slots=True)
class TensorCall:
    """An operation on tensors of the compute types.

    Attributes:
        operands: Tensors; None: absent. They are contiguous unless `takes_strides`.
        results: The tensors that it writes, contiguous; none overlaps an operand, but the first of
            an elementwise operation may be one.
        known: The arrays of operands that are constants.
    """

    operands: list[torch.Tensor | None]
    results: list[torch.Tensor]
    attributes: Mapping[str, Any]
    known: list[Array | None]

    @property
    def is_floating(self) -> bool:
        """Whether all operands and results are of one floating-point type."""
        kinds = {t.dtype for t in (*self.operands, *self.results) if t is not None}
        return len(kinds) == 1 and self.results[0].dtype.is_floating_point


#: Returns the steps of an operation; None to leave it to NumPy's kernel.
TensorKernel = Callable[[TensorCall], Sequence[Thunk] | None]


def _floating(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        if not call.is_floating:
            return None
        return (partial(function, *call.operands, out=call.results[0]),)

    return bind


def _comparison(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        one, other = call.operands
        assert one is not None and other is not None
        if one.dtype is not other.dtype or not one.dtype.is_floating_point:
            return None
        return (partial(function, one, other, out=call.results[0]),)

    return bind


def _extreme(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        if not call.is_floating or len(call.operands) != 2:
            return None
        return (partial(function, *call.operands, out=call.results[0]),)

    return bind


def _relu(call: TensorCall) -> Sequence[Thunk] | None:
    return (partial(torch.clamp_min, call.operands[0], 0, out=call.results[0]),)


def _where(call: TensorCall) -> Sequence[Thunk] | None:
    condition, one, other = call.operands
    assert one is not None and other is not None
    if one.dtype is not other.dtype:
        return None
    return (partial(torch.where, condition, one, other, out=call.results[0]),)


def _matmul(call: TensorCall) -> Sequence[Thunk] | None:
    (a, b), out = call.operands, call.results[0]
    if not call.is_floating or a is None or b is None:
        return None
    # A vector is a matrix of one row or column: PyTorch would resize `out` to that.
    if b.ndim == 1:
        b, out = b.unsqueeze(-1), out.unsqueeze(-1)
    if a.ndim == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
    return (partial(torch.matmul, a, b, out=out),)


def _gemm(call: TensorCall) -> Sequence[Thunk] | None:
    if not call.is_floating:
        return None
    a, b, bias = (*call.operands, None)[:3]
    assert a is not None and b is not None
    out, given = call.results[0], call.attributes
    a, b = a.t() if given["transA"] else a, b.t() if given["transB"] else b
    alpha, beta = given["alpha"], given["beta"]
    if bias is not None and beta != 0.0:
        return (partial(torch.addmm, bias, a, b, beta=beta, alpha=alpha, out=out),)
    scaled = () if alpha == 1.0 else (partial(torch.mul, out, alpha, out=out),)
    return (partial(torch.mm, a, b, out=out), *scaled)


def _reduction(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        x, given = call.operands[0], call.attributes
        assert x is not None
        if call.results[0].dtype is not x.dtype or not x.dtype.is_floating_point:
            return None
        axes = given.get("axes")
        if len(call.operands) > 1 and call.operands[1] is not None:
            known = call.known[1]
            if known is None:
                return None
            axes = tuple(int(axis) for axis in known.ravel())
        if not axes and given.get("noop_with_empty_axes"):
            return None
        over = tuple(axes or range(x.ndim))
        keeps = bool(given.get("keepdims", 1))
        return (partial(function, x, over, keeps, out=call.results[0]),) if over else None

    return bind


def _reshape(call: TensorCall) -> Sequence[Thunk] | None:
    (x, *_), out = call.operands, call.results[0]
    assert x is not None
    return (partial(out.view(x.shape).copy_, x),)


def _transpose(call: TensorCall) -> Sequence[Thunk] | None:
    (x,), out = call.operands, call.results[0]
    assert x is not None
    order = call.attributes.get("perm") or tuple(range(x.ndim))[::-1]
    return (partial(out.copy_, x.permute(order)),)


def _expand(call: TensorCall) -> Sequence[Thunk] | None:
    return (partial(call.results[0].copy_, call.operands[0]),)


def _concat(call: TensorCall) -> Sequence[Thunk] | None:
    if len({t.dtype for t in call.operands if t is not None}) != 1:
        return None
    return (partial(torch.cat, call.operands, call.attributes["axis"], out=call.results[0]),)


def _split(call: TensorCall) -> Sequence[Thunk] | None:
    x = call.operands[0]
    assert x is not None
    axis = call.attributes["axis"] % x.ndim
    parts = torch.split(x, [result.shape[axis] for result in call.results], axis)
    pairs = zip(call.results, parts, strict=True)
    return [partial(result.copy_, part) for result, part in pairs]


def _slice(call: TensorCall) -> Sequence[Thunk] | None:
    x = call.operands[0]
    assert x is not None
    part = _sliced(x, call.known)
    return None if part is None else (partial(call.results[0].copy_, part),)


def _sliced(x: torch.Tensor, known: Sequence[Array | None]) -> torch.Tensor | None:
    """Return a slice with constant bounds as a view."""
    bounds = [None if array is None else [int(i) for i in array.ravel()] for array in known[1:]]
    starts, ends, axes, steps = (*bounds, None, None)[:4]
    if starts is None or ends is None or None in (bounds[2:]):
        return None
    axes = list(range(len(starts))) if axes is None else [axis % x.ndim for axis in axes]
    steps = steps or [1] * len(starts)
    if min(steps, default=1) < 0:
        return None
    return x[slices_of(tuple(x.shape), tuple(starts), tuple(ends), tuple(axes), tuple(steps))]


def _gather(call: TensorCall) -> Sequence[Thunk] | None:
    x, rows = call.operands[0], call.known[1]
    if x is None or rows is None:
        return None  # Whether indices are in range is seen on the host.
    axis = call.attributes["axis"] % x.ndim
    if not ((rows >= -x.shape[axis]) & (rows < x.shape[axis])).all():
        return None
    flat = torch.from_numpy(np.ascontiguousarray(rows.ravel() % x.shape[axis])).to(x.device)
    out = call.results[0].view(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    return (partial(torch.index_select, x, axis, flat.to(torch.int64), out=out),)


def _window(call: TensorCall) -> Sequence[Thunk] | None:
    x, (base, strides), lengths = call.operands[0], call.known[1:], call.attributes["lengths"]
    if x is None or base is None or strides is None:
        return None  # Whether rows are in range is seen on the host.
    first, steps = int(base), [int(stride) for stride in strides]
    if not are_in_range(first, steps, lengths, len(x)):
        return None
    rows = torch.from_numpy(row_numbers(first, steps, lengths).ravel()).to(x.device)
    out = call.results[0].view(-1, *x.shape[1:])
    return (partial(torch.index_select, x, 0, rows, out=out),)


def _clip(call: TensorCall) -> Sequence[Thunk] | None:
    x, low, high = (*call.operands, None, None)[:3]
    if not call.is_floating:
        return None
    if low is None and high is None:
        return (partial(call.results[0].copy_, x),)
    return (partial(torch.clamp, x, low, high, out=call.results[0]),)


def _logical(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        return (partial(function, *call.operands, out=call.results[0]),)

    return bind


def _cast(call: TensorCall) -> Sequence[Thunk] | None:
    if not call.results[0].dtype.is_floating_point:
        return None  # NumPy says what becomes of numbers that an integer type does not have.
    return (partial(call.results[0].copy_, call.operands[0]),)


def _batch_normalization(call: TensorCall) -> Sequence[Thunk] | None:
    x, scale, shift, mean, variance = call.operands
    if not call.is_floating or len(call.results) > 1 or call.attributes.get("training_mode"):
        return None
    unused = {name: call.results[0].new_empty(0) for name in ("save_mean", "save_invstd")}
    function = torch.ops.aten.native_batch_norm.out
    epsilon = call.attributes["epsilon"]
    return (
        partial(
            function, x, scale, shift, mean, variance, False, 0.0, epsilon, out=call.results[0],
            **unused,
        ),
    )  # fmt: skip


def _max_pool(call: TensorCall) -> Sequence[Thunk] | None:
    x, given = call.operands[0], call.attributes
    if x is None or x.ndim != 4 or not call.is_floating or len(call.results) > 1:
        return None
    windows = windows_of(
        given, tuple(x.shape[2:]), tuple(given["kernel_shape"]), bool(given["ceil_mode"])
    )
    few = all(2 * pad <= size for pad, size in zip(windows.begin, windows.kernel, strict=True))
    if windows.begin != windows.end or any(windows.overhang) or not few:
        return None
    out = call.results[0]
    indices = torch.empty(out.shape, dtype=torch.int64, device=out.device)
    function = torch.ops.aten.max_pool2d_with_indices.out
    sizes = windows.kernel, windows.strides, windows.begin, windows.dilations
    return (partial(function, x, *sizes, False, out=out, indices=indices),)


def _mean_of_places(call: TensorCall) -> Sequence[Thunk] | None:
    x = call.operands[0]
    if x is None or not call.is_floating or x.ndim < 3:
        return None
    return (partial(torch.mean, x, tuple(range(2, x.ndim)), True, out=call.results[0]),)


def _aten(kernel: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        if not call.is_floating:
            return None
        steps: Sequence[Thunk] | None = kernel(call.operands, call.results, call.attributes)
        return steps

    return bind


#: Operators that a card may compute in TF32.
PRODUCTS = frozenset((("", "MatMul"), ("", "Gemm"), *CONVOLUTIONS))


def with_precision(precision: str, call: Thunk) -> None:
    """Call a kernel with PyTorch's flags for float32 products set to `ieee` or `tf32`.

    They belong to the process, and by default convolutions are in TF32: they are as before after
    the call. It takes 2 us, and nothing in a captured graph.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = products.fp32_precision, convolutions.fp32_precision
    try:
        products.fp32_precision = convolutions.fp32_precision = precision
        call()
    finally:
        products.fp32_precision, convolutions.fp32_precision = before


#: Of the kernels that the executor `torch` has, those that read arrays of the host.
_ON_HOST = {("", "Gemm"), ("", "MatMul"), ("stitch", "BatchNormalizationGradient")}
#: Kernels by domain and operator.
KERNELS: Mapping[tuple[str, str], TensorKernel] = {
    **{key: _aten(kernel) for key, kernel in ATEN_KERNELS.items() if key not in _ON_HOST},
    **{("", op): _floating(function) for op, function in {
        "Abs": torch.abs, "Add": torch.add, "Atan": torch.atan, "Ceil": torch.ceil,
        "Cos": torch.cos, "Cosh": torch.cosh,
        "Div": torch.div, "Exp": torch.exp, "Floor": torch.floor, "Log": torch.log,
        "Mul": torch.mul, "Neg": torch.neg, "Pow": torch.pow, "Round": torch.round,
        "Sign": torch.sign, "Sinh": torch.sinh, "Tan": torch.tan, "Reciprocal": torch.reciprocal,
        "Sin": torch.sin, "Sqrt": torch.sqrt, "Sub": torch.sub,
    }.items()},
    **{("", op): _comparison(function) for op, function in {
        "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
        "LessOrEqual": torch.le,
    }.items()},
    **{("", op): _logical(function) for op, function in {
        "And": torch.logical_and, "Not": torch.logical_not, "Or": torch.logical_or,
        "Xor": torch.logical_xor,
    }.items()},
    **{("", op): _extreme(f) for op, f in {"Max": torch.maximum, "Min": torch.minimum}.items()},
    **{("", op): _reduction(function) for op, function in {
        "ReduceMax": torch.amax, "ReduceMean": torch.mean, "ReduceMin": torch.amin,
        "ReduceSum": torch.sum,
    }.items()},
    **{("", op): _reshape for op in sorted(RESHAPING)},
    ("", "BatchNormalization"): _batch_normalization,
    ("", "Cast"): _cast,
    ("", "Clip"): _clip,
    ("", "Concat"): _concat,
    ("", "Expand"): _expand,
    ("", "Gather"): _gather,
    ("", "Gemm"): _gemm,
    ("", "GlobalAveragePool"): _mean_of_places,
    ("", "MatMul"): _matmul,
    ("", "MaxPool"): _max_pool,
    ("", "Relu"): _relu,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Transpose"): _transpose,
    ("", "Where"): _where,
    ("stitch", "Window"): _window,
}  # fmt: skip
#: Operators whose result may lie in an operand's place.
IN_PLACE = frozenset((
    "Abs", "Add", "Ceil", "Cos", "Div", "Exp", "Floor", "Log", "Max", "Min", "Mul", "Neg",
    "Reciprocal", "Relu", "Sin", "Sqrt", "Sub",
))  # fmt: skip


# Views --------------------------------------------------------------------------------------------


#: Operators whose kernels read operands with any strides.
_STRIDED = frozenset((
    *RESHAPING, "Abs", "Add", "And", "Cast", "Concat", "Div", "Equal", "Exp", "Expand", "Gather",
    "Greater", "Less", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Relu", "Sigmoid", "Slice",
    "Split", "Sqrt", "Sub", "Tanh", "Transpose", "Where",
))  # fmt: skip


def takes_strides(operation: Operation, operand: torch.Tensor) -> bool:
    """Whether the kernel of an operation reads this operand well as it lies."""
    if operand.is_contiguous() or (not operation.domain and operation.op in _STRIDED):
        return True
    return operation.op == "MatMul" and operand.ndim > 1 and operand.mT.is_contiguous()


#: Operators whose results may be views of their first operand.
VIEWS = frozenset(("", op) for op in (*RESHAPING, "Slice", "Split", "Transpose"))


def views_of(
    operation: Operation, x: torch.Tensor, shapes: Sequence[tuple[int, ...]],
    attributes: Mapping[str, Any], known: Sequence[Array | None],
) -> Sequence[torch.Tensor] | None:  # fmt: skip
    """Return the results of an operator of `VIEWS` as views; None if they have to be copied."""
    if operation.op == "Transpose":
        return (x.permute(attributes.get("perm") or tuple(range(x.ndim))[::-1]),)
    if operation.op == "Split":
        axis = attributes["axis"] % x.ndim
        parts: Sequence[torch.Tensor] = torch.split(x, [shape[axis] for shape in shapes], axis)
        return parts
    if operation.op == "Slice":
        part = _sliced(x, known)
        return None if part is None else (part,)
    with suppress(RuntimeError):
        return (x.view(shapes[0]),) if len(shapes) == 1 else None
    return None
