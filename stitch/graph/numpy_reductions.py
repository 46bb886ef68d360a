"""NumPy's means, variances, differences, sorting and quantiles on symbolic tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stitch.graph import numpy_ufuncs as ufuncs
from stitch.graph.emitter import axes_of, axis_of
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.numpy_ufuncs import SUM, apply_ufunc, as_tensor, as_truth, static, without_out
from stitch.graph.symbolic import SymbolicTensor
from stitch.program import DataType


def float_dtype(x: SymbolicTensor, dtype: Any = None) -> Any:
    """Return the type in which NumPy computes means."""
    if dtype is not None:
        return np.dtype(dtype)
    return x.dtype if x.data_type.is_floating else np.dtype(np.float64)


def mean(
    b: LayerMethods, a: Any, axis: Any = None, dtype: Any = None, out: Any = None,
    keepdims: bool = False, *, where: Any = True,
) -> SymbolicTensor:  # fmt: skip
    without_out(out)
    x = as_tensor(b, a)
    x = as_tensor(b, x, float_dtype(x, dtype))
    if where is True:
        return b.reduce_mean(x, axis, bool(keepdims))
    chosen = b.broadcast(as_truth(b, as_tensor(b, where)), x.shape)
    count = SUM(b, chosen, axis, x.dtype, keepdims=keepdims)
    return b.div(SUM(b, x, axis, keepdims=keepdims, where=chosen), count)


def variance(
    b: LayerMethods, a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: float = 0,
    keepdims: bool = False, *, correction: float | None = None, mean: Any = None,
) -> SymbolicTensor:  # fmt: skip
    without_out(out)
    x = as_tensor(b, a)
    x = as_tensor(b, x, float_dtype(x, dtype))
    less = ddof if correction is None else correction
    if not less and mean is None:
        return b.variance(x, axis, bool(keepdims))
    centre = b.reduce_mean(x, axis, True) if mean is None else as_tensor(b, mean, x.dtype)
    count = math.prod(x.shape[i] for i in axes_of(axis, x.ndim, "var"))
    total = b.reduce_sum(b.square(b.sub(x, centre)), axis, bool(keepdims))
    return b.div(total, float(max(count - less, 0)))


def deviation(b: LayerMethods, a: Any, *arguments: Any, **words: Any) -> SymbolicTensor:
    return b.sqrt(variance(b, a, *arguments, **words))


def arg_extreme(name: str) -> Callable[..., Any]:
    def arg(
        b: LayerMethods, a: Any, axis: int | None = None, out: Any = None, *, keepdims: bool = False
    ) -> SymbolicTensor:
        without_out(out)
        x = as_tensor(b, a)
        x = b.cast(x, DataType.UINT8) if x.dtype == np.bool_ else x
        if not x.size and (axis is None or not x.shape[axis_of(axis, x.ndim, name)]):
            raise ValueError("the reduction has no elements")
        if axis is None and keepdims:
            return b.reshape(getattr(b, name)(x, None, False), [1] * x.ndim)
        result: SymbolicTensor = getattr(b, name)(x, axis, bool(keepdims))
        return result

    return arg


def count_nonzero(
    b: LayerMethods, a: Any, axis: Any = None, *, keepdims: bool = False
) -> SymbolicTensor:
    found: SymbolicTensor = SUM(b, as_truth(b, as_tensor(b, a)), axis, keepdims=keepdims)
    return found


def without_nan(reduction: Callable[..., Any], replaced: float) -> Callable[..., Any]:
    """Return the NaN-ignoring variant of a reduction; `replaced` stands in for NaN."""

    def reduce(b: LayerMethods, a: Any, axis: Any = None, **words: Any) -> Any:
        x = as_tensor(b, a)
        if not x.data_type.is_floating:
            return reduction(b, x, axis, **words)
        is_nan = b._one("IsNaN", x)
        found = reduction(b, b.where(is_nan, replaced, x), axis, **words)
        if math.isfinite(replaced):
            return found
        keepdims = bool(words.get("keepdims", False))
        return b.where(ufuncs.ALL(b, is_nan, axis, keepdims=keepdims), math.nan, found)

    return reduce


def nan_mean(
    b: LayerMethods, a: Any, axis: Any = None, dtype: Any = None, out: Any = None,
    keepdims: bool = False,
) -> SymbolicTensor:  # fmt: skip
    x = as_tensor(b, a)
    if not x.data_type.is_floating:
        return mean(b, x, axis, dtype, out, keepdims)
    known = b.logical_not(b._one("IsNaN", x))
    return mean(b, x, axis, dtype, out, keepdims, where=known)


def accumulation(ufunc: np.ufunc) -> Callable[..., Any]:
    def accumulate(
        b: LayerMethods, a: Any, axis: int | None = None, dtype: Any = None, out: Any = None
    ) -> Any:
        without_out(out)
        return ufuncs.accumulated(b, ufunc, a, axis, dtype)

    return accumulate


def difference(b: LayerMethods, a: Any, n: int = 1, axis: int = -1) -> SymbolicTensor:
    x = as_tensor(b, a)
    place = axis_of(axis, x.ndim, "diff")
    ufunc = np.not_equal if x.dtype == np.bool_ else np.subtract
    for _ in range(n):
        later, sooner = [_part(b, x, place, *ends) for ends in ((1, None), (0, -1))]
        x = apply_ufunc(b, ufunc, later, sooner)
    return x


def _part(b: LayerMethods, x: SymbolicTensor, axis: int, start: Any, end: Any) -> SymbolicTensor:
    return b.index(x, (*[slice(None)] * axis, slice(start, end)))


# Sorting ----------------------------------------------------------------------------------------


def _ordered(b: LayerMethods, a: Any, axis: int | None) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Return the elements sorted along an axis (NaN last), and their indices."""
    x = as_tensor(b, a)
    x = b.reshape(x, (-1,)) if axis is None else x
    place = axis_of(-1 if axis is None else axis, x.ndim, "sort")
    wide = b.cast(x, DataType.UINT8) if x.dtype == np.bool_ else x
    if wide.data_type.is_floating:
        # Executors order NaN differently, so sort by `isnan` explicitly.
        is_nan = b._one("IsNaN", wide)
        _, order = b.topk(b.where(is_nan, math.inf, wide), x.shape[place], place, largest=False)
        late = b.gather_elements(b.cast(is_nan, DataType.INT32), order, place)
        _, again = b.topk(late, x.shape[place], place, largest=False)
        order = b.gather_elements(order, again, place)
    else:
        _, order = b.topk(wide, x.shape[place], place, largest=False)
    return b.gather_elements(x, order, place), order


def sort(
    b: LayerMethods, a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *,
    stable: Any = None,
) -> SymbolicTensor:  # fmt: skip
    return _ordered(b, a, axis)[0]


def argsort(
    b: LayerMethods, a: Any, axis: int | None = -1, kind: Any = None, order: Any = None, *,
    stable: Any = None,
) -> SymbolicTensor:  # fmt: skip
    return _ordered(b, a, axis)[1]


def quantile(
    b: LayerMethods, a: Any, q: Any, axis: Any = None, out: Any = None,
    overwrite_input: bool = False, method: str = "linear", keepdims: bool = False, *,
    ignores_nan: bool = False,
) -> SymbolicTensor:  # fmt: skip
    without_out(out)
    if method != "linear":
        raise ValueError(f"method={method!r} is not supported, only 'linear'")
    x = as_tensor(b, a)
    shares = np.asarray(static(q))
    if shares.dtype.kind not in "iu":  # Quantiles 0 and 1 keep the type of the elements.
        wide = np.float16 if isinstance(q, float) else shares.dtype
        x = as_tensor(b, x, np.result_type(float_dtype(x), wide))
    if (shares < 0).any() or (shares > 1).any():
        raise ValueError("quantiles must be in the range [0, 1]")
    axes = axes_of(axis, x.ndim, "quantile")
    kept = [i for i in range(x.ndim) if i not in axes]
    rows = b.reshape(b.transpose(x, [*kept, *axes]), (*[x.shape[i] for i in kept], -1))
    length, ordered = rows.shape[-1], _ordered(b, rows, -1)[0]
    found = []
    for share in shares.ravel().tolist():
        at = share * (length - 1)
        low = min(int(at), length - 1)
        ends = [b.index(ordered, (..., min(n, length - 1))) for n in (low, low + 1)]
        value = ends[0]
        if x.data_type.is_floating:
            gap = b.sub(ends[1], ends[0])
            step = b.mul(gap, at - low) if at - low < 0.5 else b.mul(gap, 1 - (at - low))
            value = b.add(ends[0], step) if at - low < 0.5 else b.sub(ends[1], step)
            value = b.where(b._one("IsNaN", b.index(ordered, (..., -1))), math.nan, value)
        if keepdims:
            value = b.reshape(value, [1 if i in axes else n for i, n in enumerate(x.shape)])
        found.append(value)
    whole = b.stack(found, 0)
    return b.reshape(whole, (*shares.shape, *found[0].shape))


def median(
    b: LayerMethods, a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False,
    keepdims: bool = False,
) -> SymbolicTensor:  # fmt: skip
    return quantile(b, a, 0.5, axis, out, keepdims=keepdims)


def percentile(b: LayerMethods, a: Any, q: Any, *arguments: Any, **words: Any) -> SymbolicTensor:
    shares = q / 100 if isinstance(q, int | float) else np.asarray(static(q)) / 100
    return quantile(b, a, shares, *arguments, **words)
