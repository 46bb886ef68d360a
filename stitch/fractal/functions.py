"""Functions over nests: map, forall, filter, filterall, reduce, scan and fold from either side.

They apply to the elements of the outermost list; `forall` and `filterall` to all leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import ExecutionMode, NestCall
from stitch.fractal.fractal_tensor import FractalTensor, as_leaves
from stitch.fractal.modes import mode_in_use
from stitch.fractal.rows import Indexed, IndexTree, Listed
from stitch.fractal.user_function import UserFunction, nest_of
from stitch.fractal.zipped import Nest, Zipped, as_nest, each_part


def map(f: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """The results of a function for each element of the outermost list, in its order.

    Several results give several nests. Raises `TypeError` for what is no nest, `UsageError` for
    results that are not alike.

    >>> map(lambda x: x + x, FractalTensor([1, 2, 3])).tolist()
    [2, 4, 6]
    """
    xs, call, way = (
        as_nest("map", itr),
        NestCall("map", f, args, kwargs),
        mode_in_use(itr, args, [*kwargs.values()]),
    )
    return way.mapped(call, xs) if len(xs) else _none_of(call, way, xs)


def forall(f: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """The results of a function for each leaf, in the nest of these; raises as `map`.

    >>> forall(lambda x: x * 2, FractalTensor([[1], [2, 3]])).tolist()
    [[2], [4, 6]]
    """
    xs = as_nest("forall", itr)
    flat, tree = _leaves("forall", xs)
    results = map(f, flat, *args, **kwargs)

    def nested(part: FractalTensor) -> FractalTensor:
        rows = part.index
        whole = IndexTree.of([*tree.lengths, *rows.tree.lengths[1:]])
        return FractalTensor.of(part.data, Indexed(whole, Listed(rows.rows())).narrowed())

    return each_part("forall", results, nested)


def filter(predicate: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """The elements of the outermost list for which a predicate is true; of zipped nests a tuple.

    Raises `UsageError` for a predicate that gives no bool.

    >>> filter(lambda x: x % 2 == 0, FractalTensor([1, 2, 3, 4])).tolist()
    [2, 4]
    """
    xs = as_nest("filter", itr)
    kept = _kept("filter", predicate, xs, args, kwargs)
    return each_part("filter", xs, lambda part: FractalTensor.of(part.data, part.index.taken(kept)))


def filterall(predicate: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """The leaves for which a predicate is true, in their lists, of which some may be empty then.

    >>> filterall(lambda x: x % 2 == 0, FractalTensor([[0, 1, 2], [3], [4]])).tolist()
    [[0, 2], [], [4]]
    """
    xs = as_nest("filterall", itr)
    flat, tree = _leaves("filterall", xs)
    kept = _kept("filterall", predicate, flat, args, kwargs)
    mask = np.zeros(tree.numel + 1, np.int64)
    mask[kept + 1] = 1
    widths = np.diff(np.cumsum(mask)[tree.offsets(tree.depth - 1)])
    left = IndexTree.of([*tree.lengths[:-1], widths])
    return each_part(
        "filterall", xs,
        lambda p: FractalTensor.of(p.data, Indexed(left, Listed(p.index.rows()[kept])).narrowed()),
    )  # fmt: skip


def scanl(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The states of `f(state, element)` from left to right, after each element.

    Without an initializer the first element is the first state. Raises `UsageError` for a state
    that changes its depth, shape or type, and for an empty list without an initializer.

    >>> scanl(lambda s, x: s + x, FractalTensor([1, 2, 3, 4]), 10).tolist()
    [11, 13, 16, 20]
    """
    return _scanned("scanl", f, itr, initializer, args, kwargs, from_right=False)


def scanr(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The states of `f(state, element)` from right to left, each at the place of its element.

    >>> scanr(lambda s, x: s - x, FractalTensor([1, 2, 3, 4]), 10).tolist()
    [0, 1, 3, 6]
    """
    return _scanned("scanr", f, itr, initializer, args, kwargs, from_right=True)


def foldl(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The last state of `scanl`; of an empty list the initializer.

    >>> int(foldl(lambda s, x: s - x, FractalTensor([1, 2, 3, 4])))
    -8
    """
    return _folded("foldl", f, itr, initializer, args, kwargs, from_right=False)


def foldr(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The last state of `scanr`, that at the first place; of an empty list the initializer.

    >>> int(foldr(lambda s, x: s - x, FractalTensor([1, 2, 3, 4]), 10))
    0
    """
    return _folded("foldr", f, itr, initializer, args, kwargs, from_right=True)


def reduce(
    f: Callable[..., Any], itr: Nest, initializer: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """The elements joined by an associative function, in their order; of an empty list the
    initializer.

    >>> int(reduce(lambda a, b: a + b, FractalTensor([1, 2, 3, 4])))
    10
    """
    return _folded(
        "reduce", f, itr, initializer, args, kwargs, from_right=False, is_associative=True
    )


scan, fold = scanl, foldl


def _scanned(
    call: str, f: Callable[..., Any], itr: Nest, initializer: Any, args: tuple[Any, ...],
    named: dict[str, Any], *, from_right: bool,
) -> Any:  # fmt: skip
    xs, way = as_nest(call, itr), mode_in_use(itr, initializer, args, [*named.values()])
    told = NestCall(call, f, args, named)
    if len(xs):
        return way.scanned(told, xs, initializer, from_right=from_right)
    first = _initial(told, way, xs, initializer)
    return each_part(call, nest_of(call, [first]), lambda part: part[:0])


def _folded(
    call: str, f: Callable[..., Any], itr: Nest, initializer: Any, args: tuple[Any, ...],
    named: dict[str, Any], *, from_right: bool, is_associative: bool = False,
) -> Any:  # fmt: skip
    xs, way = as_nest(call, itr), mode_in_use(itr, initializer, args, [*named.values()])
    told = NestCall(call, f, args, named)
    if not len(xs):
        return as_leaves(_initial(told, way, xs, initializer))
    last = way.folded(told, xs, initializer, from_right=from_right, is_associative=is_associative)
    return as_leaves(last)


def _initial(call: NestCall, way: ExecutionMode, xs: Nest, initializer: Any) -> Any:
    """The only state of an empty list."""
    if initializer is None:
        raise UsageError(f"{call.name} of an empty list needs an initializer")
    return UserFunction(call, way, xs, states=1).result(initializer)


def _none_of(call: NestCall, way: ExecutionMode, xs: Nest) -> Any:
    """An empty nest of what a function would give: it is tried on zeros, one in each list."""
    try:
        result = way.mapped(call, _example(xs))
    except Exception as error:
        raise UsageError(
            f"what the function of {call.name} gives for an element of an empty list cannot be "
            "told",
            got=f"of an element of zeros: {type(error).__name__}: {error}",
        ) from error
    return each_part(call.name, result, lambda part: part[:0])


def _example(xs: Nest) -> Nest:
    """As many zeros as make one element."""
    if isinstance(xs, Zipped):
        return Zipped([_example(part) for part in xs.parts])
    zeros = np.zeros((1, *xs.leaf_shape), xs.dtype)
    return FractalTensor.of(zeros, Indexed.whole(IndexTree.of([1] * xs.depth)))


def _kept(
    call: str, predicate: Callable[..., Any], xs: Nest, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """The numbers of the elements for which a predicate is true."""
    if not len(xs):
        return np.empty(0, np.int64)
    return mode_in_use(xs, args, [*named.values()]).kept(NestCall(call, predicate, args, named), xs)


def _leaves(call: str, xs: Nest) -> tuple[Nest, IndexTree]:
    """All leaves in one list, and the tree that they lie in; zipped nests have one tree."""
    if isinstance(xs, Zipped):
        pairs = [_leaves(call, part) for part in xs.parts]
        for number, (_, tree) in enumerate(pairs):
            if tree != pairs[0][1]:
                raise UsageError(
                    f"{call} takes zipped nests of the same lengths throughout",
                    got=f"part {number} differs from part 0",
                )
        return Zipped([flat for flat, _ in pairs]), pairs[0][1]
    index = Indexed(IndexTree.of([xs.numel]), Listed(xs.index.rows()))
    return FractalTensor.of(xs.data, index), xs.index.tree
