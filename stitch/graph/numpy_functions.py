"""NumPy's functions on symbolic tensors: `np.exp(x)` adds the operation that means the same.

Comes in: a NumPy function and its arguments. Goes out: the builder's tensor, or `CompileError`
naming the function. Reductions keep the data type (NumPy widens small integers). Must not know:
how operators are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.graph.emitter import axes_of
from stitch.graph.methods import LayerMethods
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import SymbolicTensor

Meaning = Callable[..., object]


def call_ufunc(
    builder: LayerMethods,
    ufunc: np.ufunc,
    method: str,
    inputs: tuple[object, ...],
    arguments: Mapping[str, object],
) -> object:
    """The meaning of `ufunc(*inputs)` or `ufunc.reduce(...)`; raises `CompileError`."""
    if method == "reduce" and ufunc.__name__ in _REDUCTIONS:
        kind = _REDUCTIONS[ufunc.__name__]
        given = {k: v for k, v in arguments.items() if v is not None or k == "axis"}
        given.setdefault("axis", 0)
        return _checked(ufunc.__name__, getattr(builder, f"reduce_{kind}"), inputs, given)
    meaning = _UFUNCS.get(ufunc.__name__)
    if method != "__call__" or meaning is None or arguments:
        extra = f" with {', '.join(arguments)}" if arguments else ""
        call = "" if method == "__call__" else f".{method}"
        raise _unsupported(f"numpy.{ufunc.__name__}{call}{extra}", _UFUNCS)
    return _checked(ufunc.__name__, getattr(builder, meaning), inputs, {})


def call_function(
    builder: LayerMethods,
    function: Callable[..., object],
    inputs: tuple[object, ...],
    arguments: Mapping[str, object],
) -> object:
    """The meaning of a NumPy function that is no ufunc; raises `CompileError`."""
    meaning = _FUNCTIONS.get(function)
    if meaning is None:
        name = f"{getattr(function, '__module__', 'numpy')}.{function.__name__}"
        raise _unsupported(name, [f.__name__ for f in _FUNCTIONS])
    return _checked(function.__name__, meaning, (builder, *inputs), arguments)


def _checked(
    name: str, meaning: Meaning, inputs: tuple[object, ...], arguments: Mapping[str, object]
) -> object:
    try:
        return meaning(*inputs, **arguments)
    except TypeError as error:
        raise mistake(
            f"numpy.{name} on symbolic tensors does not take these arguments: {error}",
            remedy="leave out dtype=, out=, where= and the like; use .cast(...) for types",
        ) from error


def _unsupported(name: str, known: Sequence[str] | Mapping[str, str]) -> CompileError:
    return mistake(
        f"{name} has no meaning on symbolic tensors",
        expected=", ".join(sorted(known)),
        remedy="write it with these, or add the operator with builder.op",
    )


_REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
_UFUNCS = {
    "add": "add", "subtract": "sub", "multiply": "mul", "divide": "div",
    "true_divide": "div", "floor_divide": "floordiv", "remainder": "mod", "power": "pow",
    "float_power": "pow", "maximum": "maximum", "minimum": "minimum", "matmul": "matmul",
    "negative": "neg", "absolute": "abs", "fabs": "abs", "sign": "sign", "exp": "exp",
    "log": "log", "sqrt": "sqrt", "square": "square", "reciprocal": "reciprocal", "sin": "sin",
    "cos": "cos", "tanh": "tanh", "floor": "floor", "ceil": "ceil", "rint": "round",
    "equal": "equal", "not_equal": "not_equal", "less": "less", "less_equal": "less_or_equal",
    "greater": "greater", "greater_equal": "greater_or_equal", "logical_and": "logical_and",
    "logical_or": "logical_or", "logical_xor": "logical_xor", "logical_not": "logical_not",
    "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
    "invert": "logical_not",
}  # fmt: skip


def _reshape(b: LayerMethods, a: Any, shape: Any, *, order: str = "C") -> object:
    if order != "C":
        raise TypeError(f"order={order!r}")
    return b.reshape(a, [int(shape)] if isinstance(shape, int | np.integer) else shape)


def _split(b: LayerMethods, ary: Any, indices_or_sections: Any, axis: int = 0) -> object:
    tensor = b.tensor(ary)
    length = tensor.shape[axis]
    if isinstance(indices_or_sections, int):
        if indices_or_sections < 1 or length % indices_or_sections:
            raise TypeError(f"{indices_or_sections} parts do not divide an axis of {length}")
        return list(b.split(tensor, length // indices_or_sections, axis))
    cuts = [0, *(min(int(i), length) for i in indices_or_sections), length]
    return list(b.split(tensor, [end - start for start, end in pairwise(cuts)], axis))


def _moveaxis(b: LayerMethods, a: Any, source: Any, destination: Any) -> object:
    rank = len(b.tensor(a).shape)
    from_axes = axes_of(source, rank, "moveaxis")
    to_axes = axes_of(destination, rank, "moveaxis")
    if len(from_axes) != len(to_axes):
        raise TypeError("as many destinations as sources are needed")
    kept = [axis for axis in range(rank) if axis not in from_axes]
    for place, axis in sorted(zip(to_axes, from_axes, strict=True)):
        kept.insert(place, axis)
    return b.transpose(a, kept)


def _take(b: LayerMethods, a: Any, indices: Any, axis: int | None = None) -> object:
    return b.gather(b.reshape(a, (-1,)) if axis is None else a, indices, axis or 0)


def _full_like(b: LayerMethods, a: Any, fill_value: float) -> SymbolicTensor:
    tensor = b.tensor(a)
    return b.tensor(np.full(tensor.shape, fill_value, tensor.dtype))


def _reduction(name: str) -> Meaning:
    def reduce(b: LayerMethods, a: Any, axis: Any = None, *, keepdims: bool = False) -> object:
        return getattr(b, name)(a, axis, bool(keepdims))

    return reduce


_FUNCTIONS: Mapping[Callable[..., object], Meaning] = {
    np.where: lambda b, condition, x, y: b.where(condition, x, y),
    np.concatenate: lambda b, arrays, axis=0: b.concat(arrays, axis),
    np.stack: lambda b, arrays, axis=0: b.stack(arrays, axis),
    np.reshape: _reshape,
    np.ravel: lambda b, a: b.reshape(a, (-1,)),
    np.transpose: lambda b, a, axes=None: b.transpose(a, axes),
    np.swapaxes: lambda b, a, axis1, axis2: b.swapaxes(a, axis1, axis2),
    np.moveaxis: _moveaxis,
    np.squeeze: lambda b, a, axis=None: b.squeeze(a, axis),
    np.expand_dims: lambda b, a, axis: b.unsqueeze(a, axis),
    np.broadcast_to: lambda b, array, shape: b.broadcast(array, shape),
    np.split: _split,
    np.take: _take,
    np.take_along_axis: lambda b, arr, indices, axis: b.gather_elements(arr, indices, axis),
    np.flip: lambda b, m, axis=None: b.reverse(m, axis),
    np.clip: lambda b, a, a_min=None, a_max=None: b.clip(a, a_min, a_max),
    np.dot: lambda b, a, other: b.dot(a, other),
    np.sum: _reduction("reduce_sum"),
    np.mean: _reduction("reduce_mean"),
    np.max: _reduction("reduce_max"),
    np.min: _reduction("reduce_min"),
    np.amax: _reduction("reduce_max"),
    np.amin: _reduction("reduce_min"),
    np.prod: _reduction("reduce_prod"),
    np.var: _reduction("variance"),
    np.std: lambda b, a, axis=None, *, keepdims=False: b.sqrt(b.variance(a, axis, keepdims)),
    np.argmax: _reduction("argmax"),
    np.argmin: _reduction("argmin"),
    np.zeros_like: lambda b, a: _full_like(b, a, 0),
    np.ones_like: lambda b, a: _full_like(b, a, 1),
    np.full_like: _full_like,
    np.shape: lambda b, a: b.tensor(a).shape,
    np.ndim: lambda b, a: len(b.tensor(a).shape),
    np.einsum: lambda b, equation, *operands: b.einsum(equation, *operands),
}
