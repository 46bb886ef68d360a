"""Evaluate operations on integers that are symbolic sizes: the arithmetic of shapes.

Operators that move elements run their own kernels, on the positions of the elements instead of the
elements. Sums, products and the like are computed element by element, as expressions. The results
of all other operators are deferred: they specialise the sizes when they are read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from stitch.ops.applying import attributes_of, evaluate_operation
from stitch.program import (
    Array,
    DataType,
    DeferredData,
    Operation,
    ValueType,
    has_symbols,
    int64_array,
    integers_of,
    is_deferred,
    is_symbolic,
)

#: Operators that move elements, to the operands whose elements they move (None: of all).
_MOVING: Mapping[str, tuple[int, ...] | None] = {
    **dict.fromkeys(
        ("Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
         "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"), (0,),
    ),
    "Concat": None, "ScatterElements": (0, 2), "ScatterND": (0, 2), "Where": (1, 2),
}  # fmt: skip
_INTEGERS = (DataType.INT64, DataType.INT32)


def _quotient(a: Any, b: Any) -> Any:
    """Return the quotient rounded towards zero, which is the floor of positive numbers."""
    if a >= 0 and b > 0:
        return a // b
    return evaluate_operation(_DIV, [np.asarray(a), np.asarray(b)])[0].item()


_DIV = Operation("Div", (0, 1), (2,))
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _quotient,
    "Neg": operator.neg, "Cast": operator.pos, "Abs": lambda a: a if a >= 0 else -a,
    "Max": lambda a, *others: _extreme(operator.ge, a, others),
    "Min": lambda a, *others: _extreme(operator.le, a, others),
}  # fmt: skip
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le,
    "Greater": operator.gt, "GreaterOrEqual": operator.ge,
}  # fmt: skip
_REDUCTIONS: Mapping[str, np.ufunc] = {"ReduceProd": np.multiply, "ReduceSum": np.add}


def _extreme(is_better: Callable[[Any, Any], bool], first: Any, others: Sequence[Any]) -> Any:
    for other in others:
        first = first if is_better(first, other) else other
    return first


def symbolic_results(
    operation: Operation, operands: Sequence[Array | None], types: Sequence[ValueType]
) -> tuple[Array, ...] | None:
    """Return the results of an operation on symbolic integers; None for other operations.

    Args:
        operation: What to evaluate.
        operands: Its operands, None for an absent one.
        types: The types of its results.
    """
    given = [data for data in operands if data is not None]
    if operation.domain or not any(map(has_symbols, given)) or not _is_plain(types):
        return None
    op, integral = operation.op, all(kind.data_type in _INTEGERS for kind in types)
    if op in _MOVING and integral:
        return _moved(operation, operands, types)
    # Deferred operands may be no integers, and broadcasting them would read them.
    if not integral or any(data.dtype.kind != "i" or is_deferred(data) for data in given):
        return None
    function = _ELEMENTWISE.get(op)
    if op == "Mod" and not attributes_of(operation)["fmod"]:
        function = operator.mod
    try:
        if function is not None:
            results = np.frompyfunc(function, len(given), 1)(*map(_objects, given))
        else:
            results = _reduced(operation, operands) if op in _REDUCTIONS else None
    except ZeroDivisionError:
        return None  # The kernel has a result.
    if results is None:
        return None
    elements = list(results.reshape(-1))
    if types[0].data_type is DataType.INT32 and not all(
        -(1 << 31) <= e < 1 << 31 for e in elements
    ):
        return None  # They wrap around.
    return (int64_array(elements, types[0].shape, types[0].data_type.dtype),)


def deferred_results(
    operation: Operation, operands: Sequence[Array | None], types: Sequence[ValueType]
) -> tuple[Array, ...]:
    """Return the results of an operation on symbolic data that are computed when they are read."""

    def compute() -> tuple[Array, ...]:
        integers = [data for data in operands if data is not None]
        if operation.op in _COMPARISONS and all(map(_is_integral, integers)):
            compare = np.frompyfunc(_COMPARISONS[operation.op], 2, 1)
            return (compare(*map(_objects, integers)).astype(np.bool_).reshape(types[0].shape),)
        return evaluate_operation(
            operation, [None if a is None else np.asarray(a) for a in operands]
        )

    computed: list[tuple[Array, ...]] = []

    def result(index: int) -> Array:
        if not computed:
            computed.append(compute())
        return computed[0][index]

    return tuple([
        cast(Array, DeferredData(kind.shape, kind.data_type.dtype, partial(result, index)))
        for index, kind in enumerate(types)
    ])  # fmt: skip


def _is_plain(types: Sequence[ValueType]) -> bool:
    return not any(is_symbolic(size) for kind in types for size in kind.shape)


def _objects(data: Array) -> Array:
    """Return an array of Python integers and symbolic sizes; a vector of a scalar, because NumPy
    unpacks results without axes."""
    objects = np.empty(data.size, object)
    for index, element in enumerate(integers_of(data)):
        objects[index] = element
    return objects.reshape(data.shape or (1,))


def _moved(
    operation: Operation, operands: Sequence[Array | None], types: Sequence[ValueType]
) -> tuple[Array, ...] | None:
    """Run the kernel on positions in a list of all elements. Position 0 is the number 0."""
    which = _MOVING[operation.op]
    elements: list[Any] = [0]
    replaced: list[Array | None] = []
    for index, data in enumerate(operands):
        if data is None:
            replaced.append(None)
            continue
        if is_deferred(data) and operation.op != "Where":
            return None
        if which is None or index in which:
            first = len(elements)
            elements += integers_of(data)
            replaced.append(np.arange(first, len(elements)).reshape(data.shape))
        elif has_symbols(data):
            return None
        else:
            replaced.append(np.asarray(data))
    if attributes_of(operation).get("reduction", "none") != "none":
        return None
    return tuple([
        int64_array([elements[p] for p in positions.reshape(-1).tolist()], kind.shape,
                    kind.data_type.dtype)
        for positions, kind in zip(evaluate_operation(operation, replaced), types, strict=True)
    ])  # fmt: skip


def _reduced(operation: Operation, operands: Sequence[Array | None]) -> Array | None:
    data, axes = operands[0], operands[1] if len(operands) > 1 else None
    if data is None or has_symbols(axes):
        return None
    objects = _objects(data)
    if axes is not None and axes.size:
        over = tuple(int(axis) for axis in np.ravel(axes))
    elif attributes_of(operation)["noop_with_empty_axes"]:
        return objects
    else:
        over = tuple(range(objects.ndim))
    return np.asarray(_REDUCTIONS[operation.op].reduce(objects, axis=over, keepdims=True))


def _is_integral(data: Array) -> bool:
    return data.dtype.kind == "i" and not is_deferred(data)
