"""Element by element: each operation is computed as it is written, so that a debugger sees numbers
and errors name the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import NestCall
from stitch.fractal.user_function import UserFunction, form_of, nest_of, text_of
from stitch.fractal.zipped import Nest


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
