"""Tensor functions for use inside functions over nests, where NumPy has none or another name.

They accept tensors and arrays, and run in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.access import join
from stitch.fractal.eager import EagerBuilder
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.modes import current_mode
from stitch.fractal.rows import leaf_rows
from stitch.fractal.zipped import Zipped
from stitch.graph import LayerMethods, SymbolicTensor
from stitch.runtime import Tensor


def cat(*parts: Any, axis: int = 0) -> Any:
    """Concatenate tensors along an axis: `[..., a, ...], [..., b, ...] -> [..., a + b, ...]`; nests
    as `join` does. One list or tuple may hold all parts.

    Raises `UsageError` for nests mixed with tensors, or along another axis than 0.

    >>> cat(np.zeros((1, 2)), np.ones((1, 3)), axis=1).tolist()
    [[0.0, 0.0, 1.0, 1.0, 1.0]]
    """
    tensors_or_nests: Sequence[Any] = parts
    if len(parts) == 1 and isinstance(parts[0], list | tuple):
        tensors_or_nests = parts[0]
    nests = [_is_nest(part) for part in tensors_or_nests]
    if not any(nests):
        builder, tensors = _tensors("cat", tensors_or_nests)
        return builder.concat(tensors, axis)
    if not all(nests) or axis != 0:
        raise UsageError(
            "cat needs tensors only, or nests only with axis 0",
            got=f"{', '.join([type(part).__name__ for part in tensors_or_nests])}; axis {axis}",
            remedy="flatten or stack the nests into tensors",
        )
    return join(*tensors_or_nests)


def stack(xs: Any, axis: int = 0) -> Any:
    """Stack the leaves of a nest of depth 1, or several tensors, along a new axis: n times `[...]`
    become `[n, ...]`. Raises `UsageError` for deeper nests, no leaves, and an invalid axis.

    >>> stack(FractalTensor([[1, 2, 3]])[0]).tolist()
    [1, 2, 3]
    """
    if isinstance(xs, FractalTensor) and xs.depth > 1:
        raise UsageError("stack needs a nest of depth 1", got=f"depth {xs.depth}",
                         remedy="flatten it, or map stack over it")  # fmt: skip
    if isinstance(xs, FractalTensor) and xs.numel:
        rows, rank = _rows(xs), len(xs.leaf_shape) + 1
        if not -rank <= axis < rank:
            raise UsageError(
                f"axis {axis} of stack is out of range", expected=f"{-rank} to {rank - 1}"
            )
        order = list(range(1, rank))
        order.insert(range(rank)[axis], 0)
        return rows if order[0] == 0 else rows.transpose(order)
    builder, tensors = _tensors("stack", list(xs))
    return builder.stack(tensors, axis)


def flatten(xs: FractalTensor) -> Any:
    """Concatenate all leaves `[n, ...]` of a nest along their first axis to `[numel * n, ...]`;
    numbers become a vector. Raises `UsageError` if there is no leaf.

    >>> flatten(FractalTensor([[1, 2], [3]])).tolist()
    [1, 2, 3]
    """
    if not isinstance(xs, FractalTensor):
        raise UsageError("flatten needs a FractalTensor", got=type(xs).__name__)
    if not xs.numel:
        raise UsageError("flatten needs at least one leaf")
    rows = _rows(xs)
    return rows.reshape(-1, *xs.leaf_shape[1:]) if xs.leaf_shape else rows


def exp(x: Any) -> Any:
    """Return e to the power of each element."""
    return _of_one("exp", x, lambda builder, tensor: builder.exp(tensor))


def relu(x: Any) -> Any:
    """Return the maximum of each element and 0."""
    return _of_one("relu", x, lambda builder, tensor: builder.relu(tensor))


def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of each element.

    >>> sigmoid(np.float32(0)).tolist()
    0.5
    """
    return _of_one("sigmoid", x, lambda builder, tensor: builder.sigmoid(tensor))


def softmax(x: Any, axis: int = -1) -> Any:
    """Return exp(x) divided by its sum along an axis."""
    return _of_one("softmax", x, lambda builder, tensor: builder.softmax(tensor, axis))


def tanh(x: Any) -> Any:
    """Return the hyperbolic tangent of each element."""
    return _of_one("tanh", x, lambda builder, tensor: builder.tanh(tensor))


def _of_one(call: str, x: Any, apply: Callable[[LayerMethods, Any], Any]) -> Any:
    builder, (tensor,) = _tensors(call, [x])
    return apply(builder, tensor)


def _tensors(call: str, values: Sequence[Any]) -> tuple[LayerMethods, list[Any]]:
    """Return the builder of the first tensor that has one, and the values as it accepts them."""
    if not values:
        raise UsageError(f"{call} needs at least one tensor")
    for value in values:
        if _is_nest(value) or not isinstance(
            value, SymbolicTensor | Tensor | np.ndarray | np.generic | bool | int | float
        ):
            raise UsageError(f"{call} needs tensors", got=type(value).__name__,
                             remedy=f"map it: ops.map(ops.{call}, xs)"
                             if _is_nest(value) else None)  # fmt: skip
    traced = [v for v in values if isinstance(v, SymbolicTensor) and v.written is None]
    first: Any = traced[0].builder.innermost(traced) if traced else None  # type: ignore[attr-defined]
    builder = first or next(
        (v.builder for v in values if isinstance(v, SymbolicTensor)), current_mode().builder
    )
    assert isinstance(builder, LayerMethods)
    return builder, [_given(builder, value) for value in values]


def _given(builder: LayerMethods, value: Any) -> Any:
    """Pass an array to an eager builder as data, not as a constant, which each program would
    hold."""
    if not isinstance(builder, EagerBuilder) or isinstance(value, SymbolicTensor):
        return value
    if isinstance(value, Tensor):
        return builder.as_leaf(value)
    return builder.as_leaf(np.asarray(value, np.float32 if type(value) is float else None))


def _is_nest(value: Any) -> bool:
    return isinstance(value, FractalTensor | Zipped) or (
        type(value) is tuple and bool(value) and all(map(_is_nest, value))
    )


def _rows(xs: FractalTensor) -> Any:
    """Return the leaves in order as one tensor `[numel, *leaf]`."""
    if isinstance(xs.data, SymbolicTensor):
        return leaf_rows(xs.data, xs.index)
    return current_mode().as_leaf(xs.leaves())
