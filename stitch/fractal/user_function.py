"""Calls of user functions: what elements become for them, and what becomes of their results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import ExecutionMode, NestCall
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.programs import as_function
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import SymbolicTensor
from stitch.program import can_change
from stitch.runtime import LoadedProgram, Tensor


class UserFunction:
    """A function with what it is given beside elements; its tensors are those of a way.

    A zipped element is given as one tuple, or part by part where the function has a parameter for
    each.
    """

    __slots__ = ("_arguments", "_function", "_is_spread", "_named", "_way", "call")

    def __init__(self, call: NestCall, way: ExecutionMode, itr: Nest, *, states: int) -> None:
        """`states`: how many arguments stand before an element. Raises `UsageError` for what cannot
        be called."""
        function, arguments, named = call.function, call.arguments, call.named
        if not callable(function):
            raise UsageError(
                f"{call.name} takes a function first",
                got=f"{type(function).__name__}: {function!r:.60}",
            )
        self.call, self._way = call.name, way
        self._function = as_function(function, way.builder)
        self._arguments, self._named = arguments, named
        parts = len(itr.parts) if isinstance(itr, Zipped) else 1
        self._is_spread = parts > 1 and _takes_parts(
            function if isinstance(function, LoadedProgram) else self._function,
            states, parts, len(arguments), named,
        )  # fmt: skip

    def __call__(self, *given: Any) -> Any:
        """The result for an element, after the state if there is one."""
        *states, element = map(self.given, given)
        elements = element if self._is_spread else (element,)
        return self.result(self._function(*states, *elements, *self._arguments, **self._named))

    def given(self, value: Any) -> Any:
        """What the function is given for a value: leaves as tensors with data."""
        if isinstance(value, tuple):
            return tuple([self.given(each) for each in value])
        if isinstance(value, FractalTensor | Zipped):
            return value
        return self._way.given(value)

    def result(self, value: Any) -> Any:
        """A result: a leaf as a tensor with data, several as a tuple. Raises `UsageError`."""
        if isinstance(value, tuple | list):
            return tuple([self.result(each) for each in value])
        if isinstance(value, Zipped):
            return tuple([self.result(each) for each in value.parts])
        if isinstance(value, FractalTensor):
            return value
        if isinstance(value, SymbolicTensor):
            return self._way.given(value)
        if isinstance(value, Tensor | np.ndarray | np.generic | bool | int | float):
            array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
            if type(value) is float:
                array = array.astype(np.float32)
            # A function may write into its own array again.
            return self._way.given(array.copy() if can_change(array) else array)
        raise UsageError(
            f"the function of {self.call} gives tensors, numbers or FractalTensors",
            got=f"{type(value).__name__}: {' '.join(repr(value).split())[:60]}",
            remedy="end it with `return` and its result" if value is None else None,
        )


def nest_of(call: str, results: Sequence[Any]) -> Any:
    """The results of one call after the other as one nest, deeper than each by one; where each is
    several, a nest for each of these. Raises `UsageError` for results that are not alike."""
    first = results[0]
    for number, result in enumerate(results):
        if form_of(result) != form_of(first):
            raise UsageError(
                f"the results of the function of {call} are not alike",
                where=f"element {number}",
                expected=f"{text_of(first)}, as for element 0",
                got=text_of(result),
            )
    if isinstance(first, tuple):
        parts = [[result[k] for result in results] for k in range(len(first))]
        return tuple([nest_of(call, part) for part in parts])
    return FractalTensor(list(results))


def form_of(value: Any) -> Any:
    """What does not change from round to round: depth, and shape and type of leaves."""
    if isinstance(value, tuple):
        return tuple([form_of(each) for each in value])
    if isinstance(value, FractalTensor):
        return value.depth, value.leaf_shape, value.dtype
    return 0, value.shape, value.dtype


def text_of(value: Any) -> str:
    """The same in words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))})"
    depth, shape, dtype = form_of(value)
    leaf = f"{dtype}{list(shape)}"
    return leaf if not depth else f"a FractalTensor of depth {depth} over {leaf}"


def _takes_parts(
    function: Callable[..., Any], states: int, parts: int, more: int, named: dict[str, Any]
) -> bool:
    """Whether a function has a parameter for each part of an element."""
    if isinstance(function, LoadedProgram):
        return function.takes > states + 1 + more + len(named)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return True
    places = [p for p in parameters if p.kind in kinds and p.name not in named]
    needed = [p for p in places if p.default is inspect.Parameter.empty]
    # What is enough for one tuple takes one: parameters with a default are no parts.
    return states + 1 + more < len(needed) <= states + parts + more <= len(places)


# --------------------------------------------------------------------------------------------------
# Running functions element by element.


class Sequential:
    """Runs functions element by element; `builder` makes and computes the tensors that they are
    given."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def given(self, data: Any) -> Any:
        """A leaf, with data."""
        return self.builder.given(data)

    def mapped(self, call: NestCall, xs: Nest) -> Any:
        """The results one after the other."""
        function = UserFunction(call, self, xs, states=0)
        return nest_of(call.name, [function(x) for x in xs])

    def scanned(self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool) -> Any:
        """The states one after the other."""
        states = [*self._states(call, xs, initializer, from_right)]
        after = states if initializer is None else states[1:]
        return nest_of(call.name, after[::-1] if from_right else after)

    def folded(
        self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool, is_associative: bool
    ) -> Any:
        """The last state; no other is kept."""
        last = None
        for state in self._states(call, xs, initializer, from_right):
            last = state
        return last

    def _states(
        self, call: NestCall, xs: Nest, initializer: Any, from_right: bool
    ) -> Iterator[Any]:
        """The initializer, if there is one, and the states after each element as they come."""
        function = UserFunction(call, self, xs, states=1)
        numbers = range(len(xs))[::-1] if from_right else range(len(xs))
        state = None if initializer is None else function.result(initializer)
        if state is not None:
            yield state
        for round_, number in enumerate(numbers):
            before, element = state, xs[number]
            state = function.given(element) if before is None else function(before, element)
            if before is not None:
                check_state(call, before, state, f"round {round_}, element {number}")
            yield state

    def kept(self, call: NestCall, xs: Nest) -> Any:
        """The numbers of the elements for which a predicate is true."""
        function, kept = UserFunction(call, self, xs, states=0), []
        for number, x in enumerate(xs):
            said = function(x)
            check_bool(call, said, f"element {number}")
            if said.item():
                kept.append(number)
        return np.array(kept, np.int64)


def check_state(call: NestCall, before: Any, after: Any, where: str) -> None:
    """Raises `UsageError` for a state that changes its depth, shape or type."""
    if form_of(after) != form_of(before):
        raise UsageError(
            f"the function of {call.name} changes the form of its state", where=where,
            expected=text_of(before), got=text_of(after),
            remedy="give a state of the initializer's depth, shape and type",
        )  # fmt: skip


def check_bool(call: NestCall, said: Any, where: str) -> None:
    """Raises `UsageError` for what a predicate must not give."""
    is_one = not isinstance(said, tuple) and form_of(said)[0] == 0 and said.size == 1
    if not is_one or said.dtype != np.bool_:
        raise UsageError(
            f"the predicate of {call.name} gives one bool", where=where, got=text_of(said),
            remedy="compare: x > 0",
        )  # fmt: skip
