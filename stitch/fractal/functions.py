"""Functions over nests: map, forall, filter, filterall, reduce, scan and fold from either side.

They apply to the elements of the outermost list; `forall` and `filterall` to all leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import ExecutionMode, NestCall
from stitch.fractal.fractal_tensor import FractalTensor, as_leaves
from stitch.fractal.modes import current_mode
from stitch.fractal.rows import Indexed, IndexTree, RowList
from stitch.fractal.user_function import UserFunction, nest_of
from stitch.fractal.zipped import Nest, Zipped, as_nest, each_part


def map(f: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """Return the results of a function for each element of the outermost list.

    Several results return several nests. Raises `TypeError` for an argument that is no nest,
    `UsageError` for results of different structure.

    >>> map(lambda x: x + x, FractalTensor([1, 2, 3])).tolist()
    [2, 4, 6]
    """
    call = NestCall("map", f, args, kwargs, as_nest("map", itr))
    return _mode_of(call).run(call) if len(call.xs) else _empty_result(call)


def forall(f: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """Return the results of a function for each leaf, in the same lists; raise as `map`.

    >>> forall(lambda x: x * 2, FractalTensor([[1], [2, 3]])).tolist()
    [[2], [4, 6]]
    """
    xs = as_nest("forall", itr)
    flat, tree = _leaves("forall", xs)
    results = map(f, flat, *args, **kwargs)

    def nested(part: FractalTensor) -> FractalTensor:
        rows = part.index
        whole = IndexTree.of([*tree.lengths, *rows.tree.lengths[1:]])
        return FractalTensor.of(part.data, Indexed(whole, RowList(rows.rows())).simplified())

    return each_part("forall", results, nested)


def filter(predicate: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """Return the elements of the outermost list for which a predicate is true; of zipped nests a
    tuple.

    Raises `UsageError` for a predicate that does not return one bool.

    >>> filter(lambda x: x % 2 == 0, FractalTensor([1, 2, 3, 4])).tolist()
    [2, 4]
    """
    xs = as_nest("filter", itr)
    numbers = _selected(NestCall("filter", predicate, args, kwargs, xs, "select"))
    return each_part(
        "filter", xs, lambda part: FractalTensor.of(part.data, part.index.taken(numbers))
    )


def filterall(predicate: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """Return the leaves for which a predicate is true, in their lists, which may become empty.

    >>> filterall(lambda x: x % 2 == 0, FractalTensor([[0, 1, 2], [3], [4]])).tolist()
    [[0, 2], [], [4]]
    """
    xs = as_nest("filterall", itr)
    flat, tree = _leaves("filterall", xs)
    numbers = _selected(NestCall("filterall", predicate, args, kwargs, flat, "select"))
    mask = np.zeros(tree.numel + 1, np.int64)
    mask[numbers + 1] = 1
    widths = np.diff(np.cumsum(mask)[tree.offsets(tree.depth - 1)])
    left = IndexTree.of([*tree.lengths[:-1], widths])

    def selected(part: FractalTensor) -> FractalTensor:
        rows = RowList(part.index.rows()[numbers])
        return FractalTensor.of(part.data, Indexed(left, rows).simplified())

    return each_part("filterall", xs, selected)


def scanl(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return the states of `f(state, element)` from left to right, one after each element.

    Without an initializer the first element is the first state. Raises `UsageError` for a state
    that changes its depth, shape or type, and for an empty list without an initializer.

    >>> scanl(lambda s, x: s + x, FractalTensor([1, 2, 3, 4]), 10).tolist()
    [11, 13, 16, 20]
    """
    xs = as_nest("scanl", itr)
    return _with_state(NestCall("scanl", f, args, kwargs, xs, "scan", initializer))


def scanr(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return the states of `f(state, element)` from right to left, in the order of the elements.

    >>> scanr(lambda s, x: s - x, FractalTensor([1, 2, 3, 4]), 10).tolist()
    [0, 1, 3, 6]
    """
    xs = as_nest("scanr", itr)
    return _with_state(NestCall("scanr", f, args, kwargs, xs, "scan", initializer, from_right=True))


def foldl(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return the last state of `scanl`; for an empty list the initializer.

    >>> int(foldl(lambda s, x: s - x, FractalTensor([1, 2, 3, 4])))
    -8
    """
    xs = as_nest("foldl", itr)
    return _with_state(NestCall("foldl", f, args, kwargs, xs, "fold", initializer))


def foldr(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return the last state of `scanr`; for an empty list the initializer.

    >>> int(foldr(lambda s, x: s - x, FractalTensor([1, 2, 3, 4]), 10))
    0
    """
    xs = as_nest("foldr", itr)
    return _with_state(NestCall("foldr", f, args, kwargs, xs, "fold", initializer, from_right=True))


def reduce(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Combine the elements by an associative function; return the initializer for an empty list.

    >>> int(reduce(lambda a, b: a + b, FractalTensor([1, 2, 3, 4])))
    10
    """
    xs = as_nest("reduce", itr)
    call = NestCall("reduce", f, args, kwargs, xs, "fold", initializer, is_associative=True)
    return _with_state(call)


scan, fold = scanl, foldl


def _mode_of(call: NestCall) -> ExecutionMode:
    return current_mode(call.xs, call.initializer, call.arguments, [*call.named.values()])


def _with_state(call: NestCall) -> Any:
    """Return the result of a scan or fold; of an empty list no states, or the initializer."""
    execution = _mode_of(call)
    if len(call.xs):
        return as_leaves(execution.run(call))
    if call.initializer is None:
        raise UsageError(f"{call.name} of an empty list needs an initializer")
    first = UserFunction(call, execution, states=1).result(call.initializer)
    if call.kind == "fold":
        return as_leaves(first)
    return each_part(call.name, nest_of(call.name, [first]), lambda part: part[:0])


def _empty_result(call: NestCall) -> Any:
    """Return an empty nest of the function's results, which are inferred from an element of
    zeros."""
    try:
        result = _mode_of(call).run(replace(call, xs=_zero_element(call.xs)))
    except Exception as error:
        raise UsageError(
            f"the result type of {call.name} over an empty list cannot be inferred: its function "
            "fails on zeros",
            got=f"{type(error).__name__}: {error}",
        ) from error
    return each_part(call.name, result, lambda part: part[:0])


def _zero_element(xs: Nest) -> Nest:
    """Return a nest with one element of zeros."""
    if isinstance(xs, Zipped):
        return Zipped([_zero_element(part) for part in xs.parts])
    zeros = np.zeros((1, *xs.leaf_shape), xs.dtype)
    return FractalTensor.of(zeros, Indexed.whole(IndexTree.of([1] * xs.depth)))


def _selected(call: NestCall) -> Any:
    """Return the numbers of the elements for which a predicate is true."""
    return _mode_of(call).run(call) if len(call.xs) else np.empty(0, np.int64)


def _leaves(call: str, xs: Nest) -> tuple[Nest, IndexTree]:
    """Return all leaves in one list, and their tree; zipped nests must have one tree."""
    if isinstance(xs, Zipped):
        pairs = [_leaves(call, part) for part in xs.parts]
        for number, (_, tree) in enumerate(pairs):
            if tree != pairs[0][1]:
                raise UsageError(
                    f"{call} needs zipped nests of the same lengths at every depth",
                    got=f"part {number} differs from part 0",
                )
        return Zipped([flat for flat, _ in pairs]), pairs[0][1]
    index = Indexed(IndexTree.of([xs.numel]), RowList(xs.index.rows()))
    return FractalTensor.of(xs.data, index), xs.index.tree
