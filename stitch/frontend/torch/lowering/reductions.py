"""ATen reductions: sums, extremes, variances, norms; also softmax, scans and sorting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stitch.frontend.torch.aten_call import Call, Row, built, rounded_once
from stitch.frontend.torch.lowering.single_elements import truth
from stitch.graph import ComputationGraphBuilder as Builder
from stitch.graph import SymbolicTensor
from stitch.program import DataType

aten = torch.ops.aten
Dims = int | Sequence[int] | None
Two = tuple[SymbolicTensor, SymbolicTensor | None]


def _axes(dims: Dims) -> Dims:
    """An empty list of axes means all axes in torch."""
    return None if isinstance(dims, Sequence) and not dims else dims


def _reduce(
    kind: str, call: Call, x: SymbolicTensor, dim: Dims = None, keepdim: bool = False, **_: Any
) -> SymbolicTensor:
    tensor = call.cast(x)
    if not tensor.shape:
        return tensor
    if kind in _EMPTY_VALUES and not _reduced_count(tensor, dim):
        return call.filled(_EMPTY_VALUES[kind])
    return call.builder.reduce(kind, tensor, _axes(dim), keepdim)


#: Results of reductions of no elements; torch refuses the other kinds.
_EMPTY_VALUES = {"sum": 0, "prod": 1, "mean": math.nan}


def _reduced_count(x: SymbolicTensor, dim: Dims) -> int:
    """Number of elements that are reduced to one."""
    axes = _axes(dim)
    listed = range(len(x.shape)) if axes is None else [axes] if isinstance(axes, int) else axes
    return math.prod(x.shape[axis] for axis in listed)


def _any(call: Call, x: SymbolicTensor, dim: Dims = None, keepdim: bool = False) -> SymbolicTensor:
    b, flags = call.builder, truth(call, x)
    if not flags.shape:
        return flags
    if 0 in flags.shape:
        # The maximum of no integers is not a truth value.
        return call.filled(False)
    ones = b.cast(flags, DataType.INT32)
    return b.cast(b.reduce("max", ones, _axes(dim), keepdim), DataType.BOOL)


@rounded_once
def _variance(
    call: Call, x: SymbolicTensor, dim: Dims = None, *, correction: float | None = 1,
    keepdim: bool = False,
) -> SymbolicTensor:  # fmt: skip
    axes, count = _axes(dim), _reduced_count(x, dim)
    divisor = count - (1 if correction is None else correction)
    mean = call.builder.variance(x, axes, keepdim)
    if divisor > 0:
        factor = count / divisor
        return mean if factor == 1 else call.builder.mul(mean, factor)
    # The sum of squares divided by zero: infinite, or NaN if the sum is zero.
    return call.builder.div(mean, 0.0)


@rounded_once
def _variance_mean(call: Call, x: SymbolicTensor, dim: Dims = None, **options: Any) -> Two:
    mean = _reduce("mean", call, x, dim, bool(options.get("keepdim", False)))
    return _variance(call, x, dim, **options), mean


@rounded_once
def _norm(
    call: Call, x: SymbolicTensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, **_: Any
) -> SymbolicTensor:
    b, tensor = call.builder, call.cast(x)
    if ord != 0 and (not tensor.shape or _reduced_count(tensor, dim) == 1):
        # Powers of it could overflow.
        return b.reshape(b.abs(tensor), call.shape)
    if ord in (1, 2):
        return b.reduce(f"l{int(ord)}", tensor, _axes(dim), keepdim)
    size = b.abs(tensor)
    if math.isinf(ord):
        return b.reduce("max" if ord > 0 else "min", size, _axes(dim), keepdim)
    if ord == 0:
        return b.reduce(
            "sum", b.cast(b.not_equal(tensor, 0), tensor.data_type), _axes(dim), keepdim
        )
    return b.pow(b.reduce("sum", b.pow(size, ord), _axes(dim), keepdim), 1.0 / ord)


def _extreme(kind: str, call: Call, x: SymbolicTensor, dim: int, keepdim: bool = False) -> Two:
    b = call.builder
    if not x.shape:
        return x, b.constant(0)
    find = b.argmax if kind == "max" else b.argmin
    numbers = call.cast(x, DataType.INT32) if x.data_type is DataType.BOOL else x
    index = find(numbers, dim, keepdim) if 1 in call.used else None
    return call.cast(b.reduce(kind, numbers, dim, keepdim)), index


def _arg(
    kind: str, call: Call, x: SymbolicTensor, dim: int | None = None, keepdim: bool = False
) -> SymbolicTensor:
    b = call.builder
    if not x.shape:
        return b.constant(0)
    find = b.argmax if kind == "max" else b.argmin
    return b.reshape(find(x, dim, keepdim and dim is not None), call.shape)


def _scan(op: str, call: Call, x: SymbolicTensor, dim: int, dtype: Any = None) -> SymbolicTensor:
    b, tensor = call.builder, call.cast(x)
    if not tensor.shape:
        return tensor
    return b.op(op, tensor, b.constant(dim % len(tensor.shape)))


def _softmax(
    kind: str, call: Call, x: SymbolicTensor, dim: int, *_: Any, **__: Any
) -> SymbolicTensor:
    b, tensor = call.builder, call.cast(x)
    if not tensor.shape:
        return call.filled(0.0 if kind == "log" else 1.0)
    axis = dim % len(tensor.shape)
    last = -1 if axis == len(tensor.shape) - 1 else axis
    return b.log_softmax(tensor, last) if kind == "log" else b.softmax(tensor, last)


def _sort(call: Call, x: SymbolicTensor, dim: int = -1, descending: bool = False, **_: Any) -> Two:
    return call.builder.topk(x, x.shape[dim], dim, descending)


LOWERINGS: dict[Any, Row] = {
    aten.sum.dim_IntList: partial(_reduce, "sum"),
    aten.mean.default: partial(_reduce, "mean"), aten.mean.dim: partial(_reduce, "mean"),
    aten.prod.default: partial(_reduce, "prod"), aten.prod.dim_int: partial(_reduce, "prod"),
    aten.amax.default: partial(_reduce, "max"), aten.amin.default: partial(_reduce, "min"),
    aten.max.default: partial(_reduce, "max"), aten.min.default: partial(_reduce, "min"),
    aten.any.default: _any, aten.any.dim: _any, aten.any.dims: _any,
    aten.var.correction: _variance, aten.var_mean.correction: _variance_mean,
    aten.linalg_vector_norm.default: _norm,
    aten.max.dim: partial(_extreme, "max"), aten.min.dim: partial(_extreme, "min"),
    aten.argmax.default: partial(_arg, "max"), aten.argmin.default: partial(_arg, "min"),
    aten.cumsum.default: partial(_scan, "CumSum"), aten.cumprod.default: partial(_scan, "CumProd"),
    aten._softmax.default: partial(_softmax, "plain"),
    aten._log_softmax.default: partial(_softmax, "log"),
    aten.topk.default: built(Builder.topk), aten.sort.default: _sort, aten.sort.stable: _sort,
}  # fmt: skip
