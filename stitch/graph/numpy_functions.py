"""NumPy's functions other than ufuncs, on symbolic tensors.

Arguments and result types are NumPy's. A function that only moves elements, and has no ONNX
operator of its own, is applied to the indices of the elements while tracing; the graph then gathers
the elements at the resulting indices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from stitch.graph import numpy_ufuncs as ufuncs
from stitch.graph.emitter import axes_of, axis_of
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.numpy_reductions import (
    accumulation,
    arg_extreme,
    argsort,
    count_nonzero,
    deviation,
    difference,
    float_dtype,
    mean,
    median,
    nan_mean,
    percentile,
    quantile,
    sort,
    variance,
    without_nan,
)
from stitch.graph.numpy_ufuncs import (
    SUM,
    alike,
    apply_ufunc,
    as_tensor,
    as_truth,
    call_ufunc,
    checked,
    common_dtype,
    dtype_of,
    static,
    strong,
    without_out,
)
from stitch.graph.symbolic import SymbolicTensor
from stitch.graph.tensor_methods import indices_of
from stitch.program import Array, DataType, is_symbolic, size_of

__all__ = ["call_function", "call_ufunc"]


def call_function(
    builder: LayerMethods,
    function: Callable[..., object],
    inputs: tuple[object, ...],
    arguments: Mapping[str, object],
) -> Any:
    """Return the result of a NumPy function; raise `CompileError` if it is not supported."""
    module = str(getattr(function, "__module__", None) or "numpy")
    name = f"{module}.{function.__name__}"
    found: Any = checked(name, _FUNCTIONS.get(function), (builder, *inputs), arguments)
    given = next((one for one in inputs if isinstance(one, SymbolicTensor)), None)
    if given is None:
        return found
    if function in _VIEWS:
        parts = found if isinstance(found, list | tuple) else [found]
        for part in parts:
            part.view_of(given)
    elif found is given and type(given) is SymbolicTensor:
        return SymbolicTensor(given.builder, given.index)  # NumPy returns a new array.
    return found


def _zero(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    return b.constant(np.zeros((), x.dtype))


# Moving elements --------------------------------------------------------------------------------


def _moved(function: Callable[..., Any]) -> Callable[..., Any]:
    """Implement a function that only moves elements of its first argument."""

    def move(b: LayerMethods, a: Any, *arguments: Any, **words: Any) -> Any:
        x = as_tensor(b, a)
        numbers = np.arange(x.size, dtype=np.int64).reshape(x.shape)
        told = {word: static(value) for word, value in words.items()}
        return _gathered(b, b.reshape(x, (-1,)), function(numbers, *static(arguments), **told))

    return move


def _joined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Implement a function that only moves elements of a list of tensors."""

    def move(b: LayerMethods, tensors: Any, *arguments: Any, **words: Any) -> Any:
        parts, begin, numbers = alike(b, *tensors), 0, []
        for part in parts:
            numbers.append(np.arange(begin, begin + part.size, dtype=np.int64).reshape(part.shape))
            begin += part.size
        whole = b.concat([b.reshape(part, (-1,)) for part in parts], 0)
        return _gathered(b, whole, function(numbers, *static(arguments), **words))

    return move


def _gathered(b: LayerMethods, flat: SymbolicTensor, numbers: Any) -> Any:
    if isinstance(numbers, list | tuple):
        return type(numbers)([_gathered(b, flat, each) for each in numbers])
    return b.gather(flat, np.asarray(numbers, np.int64), 0)


def _along(function: Callable[..., Any]) -> Callable[..., Any]:
    """Implement a function that only moves elements along one axis."""

    def move(b: LayerMethods, a: Any, given: Any, axis: int | None = None) -> SymbolicTensor:
        x = as_tensor(b, a)
        flat = b.reshape(x, (-1,)) if axis is None else x
        place = axis_of(0 if axis is None else axis, flat.ndim, function.__name__)
        numbers = function(np.arange(flat.shape[place], dtype=np.int64), static(given))
        return b.gather(flat, numbers, place)

    return move


def _roll(b: LayerMethods, a: Any, shift: Any, axis: Any = None) -> SymbolicTensor:
    x = as_tensor(b, a)
    if axis is None:
        flat = b.reshape(x, (-1,))
        return b.reshape(b.gather(flat, np.roll(np.arange(x.size), static(shift)), 0), x.shape)
    for by, place in np.broadcast(static(shift), axis):
        at = axis_of(int(place), x.ndim, "roll")
        x = b.gather(x, np.roll(np.arange(x.shape[at]), int(by)), at)
    return x


def _repeat(b: LayerMethods, a: Any, repeats: Any, axis: int | None = None) -> Any:
    return _along(np.repeat)(b, a, repeats, axis)


def _tile(b: LayerMethods, A: Any, reps: Any) -> SymbolicTensor:
    x, counts = as_tensor(b, A), [int(n) for n in np.atleast_1d(static(reps))]
    rank = max(x.ndim, len(counts))
    x = b.reshape(x, (*[1] * (rank - x.ndim), *x.shape))
    counts = [1] * (rank - len(counts)) + counts
    if min(counts, default=1) < 0:
        raise ValueError("negative dimensions are not allowed")
    return x if all(n == 1 for n in counts) else b._one("Tile", x, counts)


def _pad(
    b: LayerMethods, array: Any, pad_width: Any, mode: Any = "constant", *,
    constant_values: Any = 0, reflect_type: str = "even",
) -> SymbolicTensor:  # fmt: skip
    x, pad_width = as_tensor(b, array), static(pad_width)
    if isinstance(pad_width, Mapping):
        pad_width = [pad_width.get(i, pad_width.get(i - x.ndim, (0, 0))) for i in range(x.ndim)]
        pad_width = [(w, w) if isinstance(w, int) else w for w in pad_width]
    widths = np.broadcast_to(np.asarray(pad_width), (x.ndim, 2)).astype(np.int64)
    if (widths < 0).any():
        raise ValueError("index can't contain negative values")
    if mode == "constant":
        values = np.broadcast_to(np.asarray(static(constant_values)), (x.ndim, 2))
        if len(set(values.ravel().tolist())) <= 1:
            value = values.ravel()[0].astype(x.dtype) if values.size else np.zeros((), x.dtype)
            pads = [*widths[:, 0].tolist(), *widths[:, 1].tolist()]
            return b._one("Pad", x, pads, b.constant(np.asarray(value, x.dtype)))
        for axis in range(x.ndim):
            ends = []
            for side in range(2):
                shape = [int(widths[axis, side]) if i == axis else n for i, n in enumerate(x.shape)]
                ends.append(b.constant(np.full(shape, values[axis, side]).astype(x.dtype)))
            x = b.concat([ends[0], x, ends[1]], axis)
        return x
    if mode not in ("edge", "reflect", "symmetric", "wrap") or reflect_type != "even":
        raise ValueError(f"mode={mode!r}; supported: constant, edge, reflect, symmetric, wrap")
    for axis, (before, after) in enumerate(widths.tolist()):
        if before or after:
            numbers: Any = np.pad(np.arange(x.shape[axis]), (before, after), mode=mode)
            x = b.gather(x, numbers, axis)
    return x


def _reshape(
    b: LayerMethods, a: Any, shape: Any, order: str = "C", *, copy: bool | None = None
) -> SymbolicTensor:
    wanted = [size_of(n) for n in (shape if isinstance(shape, Iterable) else [shape])]
    x = as_tensor(b, a)
    if order in ("C", "A"):
        return b.reshape(x, wanted)
    if order != "F":
        raise ValueError(f"order={order!r}")
    return b.transpose(b.reshape(b.transpose(x), wanted[::-1]))


def _ravel(b: LayerMethods, a: Any, order: str = "C") -> SymbolicTensor:
    return _reshape(b, a, (-1,), "C" if order == "K" else order)


def _split(b: LayerMethods, ary: Any, indices_or_sections: Any, axis: int = 0) -> object:
    x = as_tensor(b, ary)
    place = axis_of(axis, x.ndim, "split")
    length, indices_or_sections = x.shape[place], static(indices_or_sections)
    count = indices_or_sections if isinstance(indices_or_sections, int | np.integer) else 1
    if count < 1 or length % count:
        raise ValueError(f"an axis of length {length} cannot be split into {count} equal parts")
    numbers = np.array_split(np.arange(length), indices_or_sections)
    sizes = [len(part) for part in numbers]
    if sum(sizes) == length:
        return list(b.split(x, sizes, place))
    return [b.gather(x, part, place) for part in numbers]


def _array_split(b: LayerMethods, ary: Any, indices_or_sections: Any, axis: int = 0) -> object:
    x = as_tensor(b, ary)
    place = axis_of(axis, x.ndim, "array_split")
    parts = np.array_split(np.arange(x.shape[place]), static(indices_or_sections))
    return [b.gather(x, part, place) for part in parts]


def _moveaxis(b: LayerMethods, a: Any, source: Any, destination: Any) -> object:
    x = as_tensor(b, a)
    from_axes = axes_of(source, x.ndim, "moveaxis")
    to_axes = axes_of(destination, x.ndim, "moveaxis")
    if len(from_axes) != len(to_axes):
        raise TypeError(f"{len(from_axes)} source axes, but {len(to_axes)} destinations")
    kept = [axis for axis in range(x.ndim) if axis not in from_axes]
    for place, axis in sorted(zip(to_axes, from_axes, strict=True)):
        kept.insert(place, axis)
    return b.transpose(x, kept)


def _squeeze(b: LayerMethods, a: Any, axis: Any = None) -> SymbolicTensor:
    x = as_tensor(b, a)
    if axis is not None and any(x.shape[i] != 1 for i in axes_of(axis, x.ndim, "squeeze")):
        raise ValueError("an axis to squeeze must have length 1")
    return b.squeeze(x, axis)


def _concatenate(
    b: LayerMethods, arrays: Any, axis: int | None = 0, out: Any = None, *, dtype: Any = None,
    casting: str = "same_kind",
) -> SymbolicTensor:  # fmt: skip
    without_out(out)
    parts = alike(b, *arrays)
    parts = [b.cast(part, dtype) for part in parts] if dtype is not None else parts
    if axis is None:
        parts, axis = [b.reshape(part, (-1,)) for part in parts], 0
    if not all(part.ndim for part in parts):
        raise ValueError("zero-dimensional arrays cannot be concatenated")
    return b.concat(parts, axis)


def _stack(
    b: LayerMethods, arrays: Any, axis: int = 0, out: Any = None, *, dtype: Any = None
) -> SymbolicTensor:
    without_out(out)
    parts = alike(b, *arrays)
    parts = [b.cast(part, dtype) for part in parts] if dtype is not None else parts
    if any(part.shape != parts[0].shape for part in parts):
        raise ValueError("all input arrays must have the same shape")
    return b.stack(parts, axis)


def _at_least(rank: int) -> Callable[..., Any]:
    function = (np.atleast_1d, np.atleast_2d, np.atleast_3d)[rank - 1]

    def wide(b: LayerMethods, *arrays: Any) -> Any:
        tensors = [as_tensor(b, array) for array in arrays]
        found = [b.reshape(x, function(np.empty(x.shape, np.bool_)).shape) for x in tensors]
        return found[0] if len(found) == 1 else tuple(found)

    return wide


def _take(
    b: LayerMethods, a: Any, indices: Any, axis: int | None = None, out: Any = None,
    mode: str = "raise",
) -> object:  # fmt: skip
    without_out(out)
    x = as_tensor(b, a)
    flat = b.reshape(x, (-1,)) if axis is None else x
    place = axis_of(axis or 0, flat.ndim, "take")
    length = flat.shape[place]
    numbers = as_tensor(b, indices) if ufuncs._has_tensors(indices) else indices
    if isinstance(numbers, SymbolicTensor):
        if numbers.dtype.kind not in "iu":
            raise TypeError("indices are whole numbers")
        numbers = b.cast(numbers, DataType.INT64)
        if mode == "wrap":
            numbers = b.mod(numbers, length)
        elif mode == "clip":
            numbers = b.clip(numbers, 0, length - 1)
    elif is_symbolic(length) and mode == "raise" and np.asarray(indices).dtype.kind in "iu":
        numbers = indices_of(np.asarray(indices), length, place)
    else:
        numbers = np.take(np.arange(length), numbers, mode=mode)  # type: ignore[call-overload]
    return b.gather(flat, numbers, place)


def _take_along_axis(b: LayerMethods, arr: Any, indices: Any, axis: int | None = -1) -> object:
    x, numbers = as_tensor(b, arr), as_tensor(b, indices)
    if axis is None:
        x, axis = b.reshape(x, (-1,)), 0
    place = axis_of(axis, x.ndim, "take_along_axis")
    wide = np.broadcast_shapes(
        *[(*t.shape[:place], 1, *t.shape[place + 1 :]) for t in (x, numbers)]
    )
    x, numbers = [
        b.broadcast(t, (*wide[:place], t.shape[place], *wide[place + 1 :])) for t in (x, numbers)
    ]
    return b.gather_elements(x, b.cast(numbers, DataType.INT64), place)


def _masked(function: Callable[..., Array]) -> Callable[..., Any]:
    """`tril` or `triu`."""

    def mask(b: LayerMethods, m: Any, k: int = 0) -> SymbolicTensor:
        x = as_tensor(b, m)
        shape = x.shape if x.ndim > 1 else (x.size, x.size)
        kept = function(np.ones(shape[-2:], np.bool_), k)
        return b.where(b.constant(kept), x, _zero(b, x))

    return mask


def _diag(b: LayerMethods, v: Any, k: int = 0) -> SymbolicTensor:
    x = as_tensor(b, v)
    if x.ndim == 2:
        found: SymbolicTensor = _moved(np.diag)(b, x, k)
        return found
    numbers = np.diag(np.arange(1, x.size + 1), k)
    padded = b.concat([b.reshape(_zero(b, x), (1,)), x], 0)
    return b.gather(padded, numbers, 0)


def _full_like(
    b: LayerMethods, a: Any, fill_value: Any, dtype: Any = None, order: str = "K",
    subok: bool = True, shape: Any = None, *, device: Any = None,
) -> SymbolicTensor:  # fmt: skip
    x = as_tensor(b, a)
    wanted = x.shape if shape is None else tuple(np.atleast_1d(shape).tolist())
    return b.broadcast(as_tensor(b, fill_value, x.dtype if dtype is None else dtype), wanted)


def _likes(value: int) -> Callable[..., Any]:
    return lambda b, a, dtype=None, *rest, **words: _full_like(b, a, value, dtype, *rest, **words)


# Elements ---------------------------------------------------------------------------------------


def _where(b: LayerMethods, condition: Any, x: Any = None, y: Any = None) -> SymbolicTensor:
    if x is None or y is None:
        raise TypeError("the shape of where(condition) depends on data: pass x and y")
    return b.where(as_truth(b, as_tensor(b, condition)), *alike(b, x, y))


def _clip(
    b: LayerMethods, a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *,
    min: Any = None, max: Any = None, dtype: Any = None,
) -> SymbolicTensor:  # fmt: skip
    without_out(out)
    low, high = a_min if min is None else min, a_max if max is None else max
    given = [each for each in (low, high) if each is not None]
    known = as_tensor(b, a) if isinstance(a, SymbolicTensor) else None
    if known is not None and known.dtype.kind in "iu":
        # Python integers at or beyond the limits of the type do not bound anything.
        ends = np.iinfo(known.dtype)
        low = None if type(low) is int and low <= ends.min else low
        high = None if type(high) is int and high >= ends.max else high
        given = [each for each in (low, high) if each is not None]
    x, *bounds = alike(b, a, *given)
    if dtype is not None:
        x, *bounds = [b.cast(each, np.dtype(dtype)) for each in (x, *bounds)]
    if not bounds:
        return x
    rest = iter(bounds)
    return b.clip(x, *[None if each is None else next(rest) for each in (low, high)])


def _round(b: LayerMethods, a: Any, decimals: int = 0, out: Any = None) -> SymbolicTensor:
    without_out(out)
    x = as_tensor(b, a)
    if not x.data_type.is_floating:
        if x.dtype == np.bool_:
            return b.cast(x, DataType.FLOAT16)
        if decimals >= 0:
            return x
        scale = 10.0**-decimals
        wide = b.round(b.div(b.cast(x, DataType.FLOAT64), scale))
        return b.cast(b.mul(wide, scale), x.data_type)
    if decimals == 0:
        return b.round(x)
    scale = 10.0 ** abs(decimals)
    if decimals > 0:
        return b.div(b.round(b.mul(x, scale)), scale)
    return b.mul(b.round(b.div(x, scale)), scale)


def _nan_to_num(
    b: LayerMethods, x: Any, copy: bool = True, nan: float = 0.0, posinf: float | None = None,
    neginf: float | None = None,
) -> SymbolicTensor:  # fmt: skip
    tensor = as_tensor(b, x)
    if not tensor.data_type.is_floating:
        return tensor
    limits = ml_dtypes.finfo(tensor.dtype)  # type: ignore[no-untyped-call]
    high = float(limits.max) if posinf is None else posinf
    low = float(limits.min) if neginf is None else neginf
    found = b.where(b._one("IsNaN", tensor), nan, tensor)
    found = b.where(b.equal(tensor, math.inf), high, found)
    return b.where(b.equal(tensor, -math.inf), low, found)


def _isclose(
    b: LayerMethods, a: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8,
    equal_nan: bool = False,
) -> SymbolicTensor:  # fmt: skip
    x, y = [
        as_tensor(b, each, np.result_type(common_dtype(a, other), np.float32))
        for each in (a, other)
    ]
    near = b.less_or_equal(b.abs(b.sub(x, y)), b.add(b.mul(b.abs(y), rtol), atol))
    near = b.logical_or(b.logical_and(near, apply_ufunc(b, np.isfinite, y)), b.equal(x, y))
    if equal_nan:
        near = b.logical_or(near, b._one("And", b._one("IsNaN", x), b._one("IsNaN", y)))
    return near


def _array_equal(b: LayerMethods, a1: Any, a2: Any, equal_nan: bool = False) -> Any:
    x, y = as_tensor(b, a1), as_tensor(b, a2)
    if x.shape != y.shape:
        return False
    same = apply_ufunc(b, np.equal, x, y)
    if equal_nan:
        both = apply_ufunc(b, np.isnan, x), apply_ufunc(b, np.isnan, y)
        same = b.logical_or(same, b._one("And", *both))
    return ufuncs.ALL(b, same)


def _allclose(b: LayerMethods, *arguments: Any, **words: Any) -> Any:
    return ufuncs.ALL(b, _isclose(b, *arguments, **words))


# Products ---------------------------------------------------------------------------------------


def _outer(b: LayerMethods, a: Any, other: Any, out: Any = None) -> Any:
    without_out(out)
    x, y = strong(b, a, other)
    return apply_ufunc(b, np.multiply, b.reshape(x, (-1, 1)), b.reshape(y, (1, -1)))


def _dot(b: LayerMethods, a: Any, other: Any, out: Any = None) -> Any:
    without_out(out)
    x, y = strong(b, a, other)
    if not x.shape or not y.shape:
        return apply_ufunc(b, np.multiply, x, y)
    if y.ndim > 2:
        return _tensordot(b, x, y, ((-1,), (-2,)))
    return ufuncs.matmul(b, x, y)


def _inner(b: LayerMethods, a: Any, other: Any) -> Any:
    x, y = strong(b, a, other)
    if not x.shape or not y.shape:
        return apply_ufunc(b, np.multiply, x, y)
    return _tensordot(b, x, y, ((-1,), (-1,)))


def _tensordot(b: LayerMethods, a: Any, other: Any, axes: Any = 2) -> SymbolicTensor:
    x, y = strong(b, a, other)
    if isinstance(axes, int | np.integer):
        axes = list(range(x.ndim - int(axes), x.ndim)), list(range(int(axes)))
    of_x, of_y = axes_of(axes[0], x.ndim, "tensordot"), axes_of(axes[1], y.ndim, "tensordot")
    if [x.shape[i] for i in of_x] != [y.shape[i] for i in of_y]:
        raise ValueError("shape-mismatch for sum")
    left = [i for i in range(x.ndim) if i not in of_x]
    right = [i for i in range(y.ndim) if i not in of_y]
    count = math.prod(x.shape[i] for i in of_x)
    shape = (*[x.shape[i] for i in left], *[y.shape[i] for i in right])
    rows = b.reshape(b.transpose(x, [*left, *of_x]), (math.prod(x.shape[i] for i in left), count))
    columns = b.reshape(
        b.transpose(y, [*of_y, *right]), (count, math.prod(y.shape[i] for i in right))
    )
    return b.reshape(ufuncs.matmul(b, rows, columns), shape)


def _trace(
    b: LayerMethods, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None,
    out: Any = None,
) -> SymbolicTensor:  # fmt: skip
    without_out(out)
    diagonal = _moved(np.diagonal)(b, a, offset, axis1, axis2)
    found: SymbolicTensor = SUM(b, diagonal, -1, dtype)
    return found


def _einsum(
    b: LayerMethods, equation: Any, *operands: Any, optimize: Any = False
) -> SymbolicTensor:
    if not isinstance(equation, str):
        raise TypeError("the equation must be a string")
    return b.einsum(equation, *alike(b, *operands))


def _norm(
    b: LayerMethods, x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False
) -> SymbolicTensor:
    tensor = as_tensor(b, x)
    tensor = as_tensor(b, tensor, float_dtype(tensor))
    if axis is None and ord is not None and tensor.ndim not in (1, 2):
        raise ValueError("improper number of dimensions to norm")
    axes = axes_of(axis, tensor.ndim, "norm")
    is_matrix = len(axes) == 2 and ord is not None
    if ord is None or (ord == "fro" and is_matrix):
        return b.sqrt(b.reduce_sum(b.square(tensor), axes, bool(keepdims)))
    if is_matrix:
        if ord not in (1, -1, math.inf, -math.inf):
            raise ValueError(f"ord={ord!r} of a matrix; supported: None, 'fro', 1, -1, inf, -inf")
        summed = axes[0] if abs(ord) == 1 else axes[1]
        sums = b.reduce_sum(b.abs(tensor), [summed], True)
        found = (b.reduce_max if ord > 0 else b.reduce_min)(sums, axes, True)
        return found if keepdims else b.squeeze(found, axes)
    if len(axes) != 1 or isinstance(ord, str):
        raise ValueError(f"ord={ord!r} is not supported for a vector")
    return _vector_norm(b, tensor, axis=axes, keepdims=keepdims, ord=ord)


def _vector_norm(
    b: LayerMethods, x: Any, *, axis: Any = None, keepdims: bool = False, ord: Any = 2
) -> SymbolicTensor:
    tensor = as_tensor(b, x)
    tensor = as_tensor(b, tensor, float_dtype(tensor))
    axes, keep = axes_of(axis, tensor.ndim, "norm"), bool(keepdims)
    if ord in (math.inf, -math.inf):
        return (b.reduce_max if ord > 0 else b.reduce_min)(b.abs(tensor), axes, keep)
    if ord == 0:
        return b.reduce_sum(b.cast(b.not_equal(tensor, 0), tensor.data_type), axes, keep)
    if ord == 1:
        return b.reduce_sum(b.abs(tensor), axes, keep)
    if ord == 2:
        return b.sqrt(b.reduce_sum(b.square(tensor), axes, keep))
    return b.pow(b.reduce_sum(b.pow(b.abs(tensor), float(ord)), axes, keep), 1.0 / ord)


def _det(b: LayerMethods, a: Any) -> SymbolicTensor:
    x = as_tensor(b, a)
    return b._one("Det", as_tensor(b, x, float_dtype(x)))


def _identity(b: LayerMethods, a: Any, *_: Any, **__: Any) -> SymbolicTensor:
    return as_tensor(b, a)


def _size(b: LayerMethods, a: Any, axis: Any = None) -> int:
    x = as_tensor(b, a)
    return math.prod(x.shape[i] for i in axes_of(axis, x.ndim, "size"))


def _signed_infinity(sign: float) -> Callable[..., Any]:
    def is_infinite(b: LayerMethods, x: Any, out: Any = None) -> Any:
        without_out(out)
        return apply_ufunc(b, np.equal, x, sign * math.inf)

    return is_infinite


#: Functions whose results share memory with their argument in NumPy.
_VIEWS = frozenset({
    np.reshape, np.ravel, np.transpose, np.matrix_transpose,
    np.swapaxes, np.moveaxis, np.squeeze, np.expand_dims, np.broadcast_to, np.split,
    np.array_split, np.hsplit, np.vsplit, np.dsplit, np.unstack, np.flip, np.fliplr, np.flipud,
    np.rot90, np.diagonal, np.real, np.atleast_1d, np.atleast_2d,
    np.atleast_3d,
})  # fmt: skip

_FUNCTIONS: Mapping[Callable[..., object], Callable[..., Any]] = {
    np.where: _where, np.clip: _clip, np.round: _round, np.around: _round,
    np.fix: lambda b, x: apply_ufunc(b, np.trunc, x), np.nan_to_num: _nan_to_num,
    np.isclose: _isclose, np.allclose: _allclose, np.array_equal: _array_equal,
    np.isposinf: _signed_infinity(1), np.isneginf: _signed_infinity(-1),
    np.real: _identity, np.copy: _identity, np.positive: _identity,
    np.imag: lambda b, val: _full_like(b, val, 0),
    np.concatenate: _concatenate, np.stack: _stack, np.vstack: _joined(np.vstack),
    np.hstack: _joined(np.hstack), np.dstack: _joined(np.dstack),
    np.column_stack: _joined(np.column_stack),
    np.append: lambda b, arr, values, axis=None: _concatenate(b, (
        _ravel(b, arr) if axis is None else arr, _ravel(b, values) if axis is None else values,
    ), axis or 0),
    np.atleast_1d: _at_least(1), np.atleast_2d: _at_least(2), np.atleast_3d: _at_least(3),
    np.reshape: _reshape, np.ravel: _ravel,
    np.transpose: lambda b, a, axes=None: b.transpose(as_tensor(b, a), axes),
    np.matrix_transpose: lambda b, x: b.swapaxes(as_tensor(b, x), -1, -2),
    np.swapaxes: lambda b, a, axis1, axis2: b.swapaxes(as_tensor(b, a), axis1, axis2),
    np.moveaxis: _moveaxis, np.squeeze: _squeeze,
    np.expand_dims: lambda b, a, axis: b.unsqueeze(as_tensor(b, a), axis),
    np.broadcast_to: lambda b, array, shape, subok=False: b.broadcast(
        as_tensor(b, array), [shape] if isinstance(shape, int) else shape),
    np.broadcast_arrays: lambda b, *arrays, subok=False: tuple(
        b.broadcast(x, np.broadcast_shapes(*[t.shape for t in tensors]))
        for tensors in [[as_tensor(b, a) for a in arrays]] for x in tensors),
    np.meshgrid: lambda b, *xi, **words: [
        b.gather(b.reshape(as_tensor(b, x), (-1,)), numbers, 0) for x, numbers in zip(
            xi, np.meshgrid(*[np.arange(as_tensor(b, x).size) for x in xi], **words), strict=True)],
    np.split: _split, np.array_split: _array_split, np.hsplit: _moved(np.hsplit),
    np.vsplit: _moved(np.vsplit), np.dsplit: _moved(np.dsplit), np.unstack: _moved(np.unstack),
    np.take: _take, np.take_along_axis: _take_along_axis,
    np.flip: lambda b, m, axis=None: b.reverse(as_tensor(b, m), axis),
    np.fliplr: _moved(np.fliplr), np.flipud: _moved(np.flipud), np.rot90: _moved(np.rot90),
    np.roll: _roll, np.repeat: _repeat, np.tile: _tile, np.pad: _pad, np.resize: _moved(np.resize),
    np.delete: _moved(np.delete), np.diagonal: _moved(np.diagonal),
    np.diag: _diag, np.diagflat: lambda b, v, k=0: _diag(b, _ravel(b, v), k),
    np.compress: lambda b, condition, a, axis=None, out=None: _along(
        lambda numbers, chosen: np.compress(chosen, numbers))(b, a, condition, axis),
    np.tril: _masked(np.tril), np.triu: _masked(np.triu),
    np.zeros_like: _likes(0), np.ones_like: _likes(1), np.full_like: _full_like,
    np.empty_like: _likes(0),
    np.sum: SUM, np.prod: ufuncs.PRODUCT, np.amax: ufuncs.MAXIMUM,
    np.amin: ufuncs.MINIMUM, np.max: ufuncs.MAXIMUM, np.min: ufuncs.MINIMUM,
    np.any: ufuncs.ANY, np.all: ufuncs.ALL, np.mean: mean, np.var: variance, np.std: deviation,
    np.count_nonzero: count_nonzero,
    np.argmax: arg_extreme("argmax"), np.argmin: arg_extreme("argmin"),
    np.nansum: without_nan(SUM, 0), np.nanprod: without_nan(ufuncs.PRODUCT, 1),
    np.nanmax: without_nan(ufuncs.MAXIMUM, -math.inf),
    np.nanmin: without_nan(ufuncs.MINIMUM, math.inf), np.nanmean: nan_mean,
    np.nancumsum: without_nan(accumulation(np.add), 0),
    np.cumsum: accumulation(np.add), np.cumprod: accumulation(np.multiply), np.diff: difference,
    np.sort: sort, np.argsort: argsort, np.median: median, np.quantile: quantile,
    np.percentile: percentile,
    np.dot: _dot, np.inner: _inner, np.outer: _outer, np.tensordot: _tensordot,
    np.einsum: _einsum, np.trace: _trace, np.linalg.norm: _norm, np.linalg.det: _det,
    np.shape: lambda b, a: as_tensor(b, a).shape, np.ndim: lambda b, a: as_tensor(b, a).ndim,
    np.size: _size, np.result_type: lambda b, *values: np.result_type(*map(dtype_of, values)),
}  # fmt: skip
