"""Functions over nests: map, forall, filter, filterall, reduce, scan and fold from either side.

They apply to the elements of the outermost list; `forall` and `filterall` to all leaves. Comes in:
a function, a nest, perhaps an initializer. Goes out: nests, states. Must not know how operations
are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.index_map import Indexed, Listed
from stitch.fractal.index_tree import IndexTree
from stitch.fractal.user_function import UserFunction, form_of, nest_of, text_of
from stitch.fractal.zipped import Nest, Zipped, as_nest, each_part


def map(f: Callable[..., Any], itr: Nest, *args: Any, **kwargs: Any) -> Any:
    """The results of a function for each element of the outermost list, in its order.

    Several results give several nests. Raises `TypeError` for what is no nest, `UsageError` for
    results that are not alike.

    >>> map(lambda x: x + x, FractalTensor([1, 2, 3])).tolist()
    [2, 4, 6]
    """
    xs = as_nest("map", itr)
    function = UserFunction("map", f, args, kwargs, xs, states=0)
    if not len(xs):
        return _none_of("map", function, xs)
    return nest_of("map", [function(x) for x in xs])


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
    return _folded("reduce", f, itr, initializer, args, kwargs, from_right=False)


scan, fold = scanl, foldl


def _states(
    call: str, f: Callable[..., Any], xs: Nest, initializer: Any, args: Sequence[Any],
    named: dict[str, Any], *, from_right: bool,
) -> Iterator[Any]:  # fmt: skip
    """The initializer, if there is one, and the states after each element as they come: a fold
    keeps none."""
    function = UserFunction(call, f, args, named, xs, states=1)
    numbers = range(len(xs))[::-1] if from_right else range(len(xs))
    if initializer is None and not numbers:
        raise UsageError(f"{call} of an empty list needs an initializer")
    state = None if initializer is None else function.result(initializer)
    if state is not None:
        yield state
    for round_, number in enumerate(numbers):
        before, element = state, xs[number]
        state = function.given(element) if before is None else function(before, element)
        if before is not None and form_of(state) != form_of(before):
            raise UsageError(
                f"the function of {call} changes the form of its state",
                where=f"round {round_}, element {number}",
                expected=text_of(before), got=text_of(state),
                remedy="give a state of the initializer's depth, shape and type",
            )  # fmt: skip
        yield state


def _scanned(
    call: str, f: Callable[..., Any], itr: Nest, initializer: Any, args: Sequence[Any],
    named: dict[str, Any], *, from_right: bool,
) -> Any:  # fmt: skip
    xs = as_nest(call, itr)
    states = [*_states(call, f, xs, initializer, args, named, from_right=from_right)]
    after = states if initializer is None else states[1:]
    if not after:
        return each_part(call, nest_of(call, states), lambda part: part[:0])
    return nest_of(call, after[::-1] if from_right else after)


def _folded(
    call: str, f: Callable[..., Any], itr: Nest, initializer: Any, args: Sequence[Any],
    named: dict[str, Any], *, from_right: bool,
) -> Any:  # fmt: skip
    xs, last = as_nest(call, itr), None
    for state in _states(call, f, xs, initializer, args, named, from_right=from_right):
        last = state
    return last


def _none_of(call: str, function: UserFunction, xs: Nest) -> Any:
    """An empty nest of what a function would give: it is tried on zeros, one in each list."""
    example = _example(xs)
    try:
        result = nest_of(call, [function(example)])
    except Exception as error:
        raise UsageError(
            f"what the function of {call} gives for an element of an empty list cannot be told",
            got=f"of an element of zeros: {type(error).__name__}: {error}",
        ) from error
    return each_part(call, result, lambda part: part[:0])


def _example(xs: Nest) -> Any:
    if isinstance(xs, Zipped):
        return tuple([_example(part) for part in xs.parts])
    zeros = np.zeros((1, *xs.leaf_shape), xs.dtype)
    index = Indexed.whole(IndexTree.of([1] * xs.depth))
    return FractalTensor.of(zeros, index)[0]


def _kept(
    call: str, predicate: Callable[..., Any], xs: Nest, args: Sequence[Any], named: dict[str, Any]
) -> Any:
    """The numbers of the elements for which a predicate is true."""
    function, kept = UserFunction(call, predicate, args, named, xs, states=0), []
    for number, x in enumerate(xs):
        said = function(x)
        is_one = not isinstance(said, tuple | FractalTensor) and said.size == 1
        if not is_one or said.dtype != np.bool_:
            raise UsageError(
                f"the predicate of {call} gives one bool", where=f"element {number}",
                got=text_of(said), remedy="compare: x > 0",
            )  # fmt: skip
        if said.item():
            kept.append(number)
    return np.array(kept, np.int64)


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
