"""Call user functions on elements, check their results, and run them element by element."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import ExecutionMode, NestCall
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.programs import as_function
from stitch.fractal.zipped import Zipped
from stitch.graph import SymbolicTensor
from stitch.program import can_change
from stitch.runtime import LoadedProgram, Tensor


class UserFunction:
    """A user function with its further arguments, called with tensors of an execution mode.

    A zipped element is passed as one tuple, or part by part if the function has enough parameters.
    """

    __slots__ = ("_arguments", "_execution", "_function", "_is_spread", "_named", "call")

    def __init__(self, call: NestCall, execution: ExecutionMode, *, states: int) -> None:
        """`states`: the number of arguments before the element. Raises `UsageError` if not
        callable."""
        function, arguments, named = call.function, call.arguments, call.named
        if not callable(function):
            raise UsageError(
                f"the first argument of {call.name} must be a function",
                got=f"{type(function).__name__}: {function!r:.60}",
            )
        self.call, self._execution = call.name, execution
        self._function = as_function(function, execution.builder)
        self._arguments, self._named = arguments, named
        parts = len(call.xs.parts) if isinstance(call.xs, Zipped) else 1
        self._is_spread = parts > 1 and _takes_parts(
            function if isinstance(function, LoadedProgram) else self._function,
            states, parts, len(arguments), named,
        )  # fmt: skip

    def __call__(self, *arguments: Any) -> Any:
        """Call the function with an element, after the state if there is one."""
        *states, element = map(self.as_leaf, arguments)
        elements = element if self._is_spread else (element,)
        return self.result(self._function(*states, *elements, *self._arguments, **self._named))

    def as_leaf(self, value: Any) -> Any:
        """Convert leaves to tensors of the mode."""
        if isinstance(value, tuple):
            return tuple([self.as_leaf(each) for each in value])
        if isinstance(value, FractalTensor | Zipped):
            return value
        return self._execution.as_leaf(value)

    def result(self, value: Any) -> Any:
        """Convert a result: leaves to tensors, lists to tuples. Raises `UsageError`."""
        if isinstance(value, tuple | list):
            return tuple([self.result(each) for each in value])
        if isinstance(value, Zipped):
            return tuple([self.result(each) for each in value.parts])
        if isinstance(value, FractalTensor):
            return value
        if isinstance(value, SymbolicTensor):
            return self._execution.as_leaf(value)
        if isinstance(value, Tensor | np.ndarray | np.generic | bool | int | float):
            array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
            if type(value) is float:
                array = array.astype(np.float32)
            # Copy: the function may overwrite its array later.
            return self._execution.as_leaf(array.copy() if can_change(array) else array)
        raise UsageError(
            f"the function of {self.call} must return tensors, numbers or FractalTensors",
            got=f"{type(value).__name__}: {' '.join(repr(value).split())[:60]}",
            remedy="add a `return` statement" if value is None else None,
        )


def nest_of(call: str, results: Sequence[Any]) -> Any:
    """Return the results of all calls as one nest, or a tuple of nests.

    Raises `UsageError` for results of different structure.
    """
    first = results[0]
    for number, result in enumerate(results):
        if type_structure(result) != type_structure(first):
            raise UsageError(
                f"the results of the function of {call} have different structures",
                where=f"element {number}",
                expected=f"{structure_text(first)}, as for element 0",
                got=structure_text(result),
            )
    if isinstance(first, tuple):
        parts = [[result[k] for result in results] for k in range(len(first))]
        return tuple([nest_of(call, part) for part in parts])
    return FractalTensor(list(results))


def type_structure(value: Any) -> Any:
    """Return depth, leaf shape and leaf type, which must not change between rounds."""
    if isinstance(value, tuple):
        return tuple([type_structure(each) for each in value])
    if isinstance(value, FractalTensor):
        return value.depth, value.leaf_shape, value.dtype
    return 0, value.shape, value.dtype


def structure_text(value: Any) -> str:
    """Return `type_structure` in words."""
    if isinstance(value, tuple):
        return f"({', '.join(map(structure_text, value))})"
    depth, shape, dtype = type_structure(value)
    leaf = f"{dtype}{list(shape)}"
    return leaf if not depth else f"a FractalTensor of depth {depth} over {leaf}"


def _takes_parts(
    function: Callable[..., Any], states: int, parts: int, more: int, named: dict[str, Any]
) -> bool:
    """Return whether a function has a parameter for each part of an element."""
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
    # A function with one required parameter takes the tuple: defaults are not parts.
    return states + 1 + more < len(needed) <= states + parts + more <= len(places)


# --------------------------------------------------------------------------------------------------
# Running functions element by element.


class Sequential:
    """Runs functions element by element; `builder` creates and computes their tensors."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def as_leaf(self, data: Any) -> Any:
        return self.builder.as_leaf(data)

    def run(self, call: NestCall) -> Any:
        if call.kind == "map":
            function = UserFunction(call, self, states=0)
            return nest_of(call.name, [function(x) for x in call.xs])
        if call.kind == "select":
            return self._selected(call)
        if call.kind == "fold":
            return deque(self._states(call), maxlen=1)[0]
        states = [*self._states(call)]
        after = states if call.initializer is None else states[1:]
        return nest_of(call.name, after[::-1] if call.from_right else after)

    def _states(self, call: NestCall) -> Iterator[Any]:
        """Yield the initializer, if there is one, and the state after each element."""
        xs, function = call.xs, UserFunction(call, self, states=1)
        numbers = range(len(xs))[::-1] if call.from_right else range(len(xs))
        state = None if call.initializer is None else function.result(call.initializer)
        if state is not None:
            yield state
        for round_, number in enumerate(numbers):
            before, element = state, xs[number]
            state = function.as_leaf(element) if before is None else function(before, element)
            if before is not None:
                check_state(call, before, state, f"round {round_}, element {number}")
            yield state

    def _selected(self, call: NestCall) -> Any:
        function, numbers = UserFunction(call, self, states=0), []
        for number, x in enumerate(call.xs):
            result = function(x)
            check_bool(call, result, f"element {number}")
            if result.item():
                numbers.append(number)
        return np.array(numbers, np.int64)


def check_state(call: NestCall, before: Any, after: Any, where: str) -> None:
    """Raise `UsageError` for a state that changes its depth, shape or type."""
    if type_structure(after) != type_structure(before):
        raise UsageError(
            f"the function of {call.name} changes depth, shape or type of its state", where=where,
            expected=structure_text(before), got=structure_text(after),
            remedy="return a state of the initializer's depth, shape and type",
        )  # fmt: skip


def check_bool(call: NestCall, result: Any, where: str) -> None:
    """Raise `UsageError` for a predicate's result that is not one bool."""
    is_one = not isinstance(result, tuple) and type_structure(result)[0] == 0 and result.size == 1
    if not is_one or result.dtype != np.bool_:
        raise UsageError(
            f"the predicate of {call.name} must return one bool", where=where,
            got=structure_text(result), remedy="return a comparison, such as x > 0",
        )  # fmt: skip
