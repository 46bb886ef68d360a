"""Functions over nests in a graph under construction: each becomes loops, its function is run once
for each form of its elements.

A `map` is a scan without states, whose cells may run at the same time; a `scan` or `fold` is a scan
over each stretch of elements and states of one form; a `reduce` joins neighbours, all pairs at a
time. Comes in: calls, nests over values of the graph. Goes out: nests, states over such. Must not
know devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.fractal.current import NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.sequential import check_state
from stitch.fractal.user_function import UserFunction, form_of, text_of
from stitch.fractal.value_forms import ValueForm, element_form, is_uniform, rows_of
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import NoDataError, SymbolicTensor, scan, user_location
from stitch.runtime import Tensor

#: So many elements are traced one by one, where a function asks for the numbers in them.
MAX_WRITTEN_OUT = 1024


class LengthsOfDataError(CompileError):
    """Lengths depend on data, which there is none of while a graph is built."""


class _OtherLengths(Exception):
    """A state has other lengths after a round."""


class Traced:
    """Writes functions over nests down in a graph, or in a body of it.

    `shows_numbers`: whole numbers that are known are given to functions as such.
    """

    def __init__(self, builder: Any, *, shows_numbers: bool = False) -> None:
        self.builder, self.shows_numbers = builder, shows_numbers

    def given(self, data: Any) -> Any:
        """A leaf as a value of the graph; what has data becomes part of it."""
        if self.shows_numbers and not isinstance(data, SymbolicTensor | Tensor):
            array = np.asarray(data)
            if not array.shape and array.dtype.kind in "iub":
                return array[()]
        return self.tensor(data)

    def tensor(self, data: Any) -> SymbolicTensor:
        """Data as a value of the graph."""
        if isinstance(data, SymbolicTensor) and data.written is None:
            return data
        found: SymbolicTensor = self.builder.tensor(
            data.numpy() if isinstance(data, Tensor) else data
        )
        return found

    def mapped(self, call: NestCall, xs: Nest) -> Any:
        """One loop for each form of elements."""
        pieces = []
        for numbers in _alike(xs):
            try:
                piece = self._cells(call, xs, numbers)
            except NoDataError:
                if len(numbers) > MAX_WRITTEN_OUT or not self._has_numbers(xs):
                    raise
                shown = Traced(self.builder, shows_numbers=True)
                with using(shown):
                    pieces += [shown._cell(call, xs, number) for number in numbers]
            else:
                pieces.append(piece)
        return _joined(call, pieces)

    def scanned(self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool) -> Any:
        """One loop for each stretch of one form, whose rounds give their states."""
        return _joined(call, self._rounds(call, xs, initializer, from_right, keeps=True)[1])

    def folded(
        self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool, is_associative: bool
    ) -> Any:
        """The last state; of an associative function neighbours are joined, all at a time."""
        if is_associative and len(xs) > 2 and len(_alike(xs)) == 1:
            try:
                return self._reduced(call, xs, initializer)
            except _OtherLengths:
                pass
        return self._rounds(call, xs, initializer, from_right, keeps=False)[0]

    def kept(self, call: NestCall, xs: Nest) -> Any:
        """Raises `LengthsOfDataError`."""
        raise LengthsOfDataError(
            f"how many elements {call.name} keeps depends on data, which there is none of while a "
            "graph is built",
            where=user_location() or getattr(call.function, "__name__", "its predicate"),
            remedy="call it outside of the function that is traced, or keep all elements and "
            "weigh them by a mask",
        )

    # Cells -------------------------------------------------------------------------------------

    def _cells(self, call: NestCall, xs: Nest, numbers: Sequence[int]) -> _Piece:
        """A loop without states."""
        form = element_form(xs, numbers[0])
        made: list[ValueForm] = []

        def cell(_: Any, elements: Sequence[SymbolicTensor]) -> Any:
            inside = Traced(elements[0].builder)
            with using(inside):
                value = UserFunction(call, inside, xs, states=0)(form.value(iter(elements)))
                form_after, tensors = inside.flat(value)
            made.append(form_after)
            return [], tensors

        _, results = scan(self.builder, cell, [], self._sequences(xs, numbers))
        return _Piece(numbers, made[0], list(results))

    def _cell(self, call: NestCall, xs: Nest, number: int) -> _Piece:
        """One element, here."""
        value = UserFunction(call, self, xs, states=0)(xs[number])
        form, tensors = self.flat(value)
        return _Piece([number], form, [self.builder.unsqueeze(t, 0) for t in tensors])

    def _has_numbers(self, xs: Nest) -> bool:
        """Whether some elements are numbers that are known."""
        parts = xs.parts if isinstance(xs, Zipped) else (xs,)
        return any(
            self._has_numbers(part) if isinstance(part, Zipped)
            else isinstance(part.data, np.ndarray) and part.dtype.kind in "iub"
            for part in parts
        )  # fmt: skip

    def _sequences(self, xs: Nest, numbers: Sequence[int]) -> list[SymbolicTensor]:
        """Elements of one form, a tensor for each leaf or nest of an element."""
        if isinstance(xs, Zipped):
            return [t for part in xs.parts for t in self._sequences(part, numbers)]
        first, end = numbers[0], numbers[-1] + 1
        part = xs[first:end] if len(numbers) == end - first else xs[list(numbers)]
        rows = rows_of(part, self.tensor(part.data))
        form = element_form(xs, numbers[0])
        if form.tree is None:
            return [rows]
        return [rows.reshape(len(numbers), form.tree.numel, *rows.shape[1:])]

    def flat(self, value: Any) -> tuple[ValueForm, list[SymbolicTensor]]:
        """The form of a value, and the tensors that it is made of."""
        tensors: list[SymbolicTensor] = []

        def walk(part: Any) -> None:
            if isinstance(part, tuple):
                for each in part:
                    walk(each)
            elif isinstance(part, FractalTensor):
                tensors.append(rows_of(part, self.tensor(part.data)))
            else:
                tensors.append(self.tensor(part))

        walk(value)
        return ValueForm.of(value), tensors

    # Rounds ------------------------------------------------------------------------------------

    def _rounds(
        self, call: NestCall, xs: Nest, initializer: Any, from_right: bool, *, keeps: bool
    ) -> tuple[Any, list[_Piece]]:
        """The last state, and all of them if they are kept."""
        order = list(range(len(xs)))[:: -1 if from_right else 1]
        pieces: list[_Piece] = []
        function = UserFunction(call, self, xs, states=1)
        if initializer is None:
            first, order = order[0], order[1:]
            state = function.given(xs[first])
            form, tensors = self.flat(state)
            pieces.append(_Piece([first], form, [self.builder.unsqueeze(t, 0) for t in tensors]))
        else:
            state = function.result(initializer)
        asks = False
        while order:
            stretch, round_ = _stretch(xs, order), len(xs) - len(order)
            done = None
            if len(stretch) > 1 and not asks:
                try:
                    done = self._stretch(call, xs, state, stretch, round_, from_right, keeps)
                except NoDataError:  # It asks for numbers, and will in other rounds.
                    if not self._has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
                        raise
                    asks = True
            if done is not None:
                state, piece = done
            else:  # By itself, and what follows is looked at anew.
                stretch = order[:1]
                before, state = state, self._round(call, xs, state, stretch[0], asks)
                check_state(call, before, state, f"round {round_}, element {stretch[0]}")
                form, tensors = self.flat(state)
                tensors = [self.builder.unsqueeze(t, 0) for t in tensors]
                piece = _Piece(stretch, form, tensors)
            if keeps:
                pieces.append(piece)
            order = order[len(stretch) :]
        return state, pieces

    def _round(self, call: NestCall, xs: Nest, state: Any, number: int, asks: bool) -> Any:
        """The state after one element, here; `asks`: for the numbers in it."""
        try:
            if not asks:
                return UserFunction(call, self, xs, states=1)(state, xs[number])
        except NoDataError:
            if not self._has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
                raise
        shown = Traced(self.builder, shows_numbers=True)
        with using(shown):
            return UserFunction(call, shown, xs, states=1)(state, xs[number])

    def _stretch(
        self,
        call: NestCall,
        xs: Nest,
        state: Any,
        order: Sequence[int],
        first_round: int,
        from_right: bool,
        keeps: bool,
    ) -> tuple[Any, _Piece] | None:
        """A loop over elements of one form; None where a state has other lengths after a round."""
        numbers = sorted(order)
        form, element = ValueForm.of(state), element_form(xs, numbers[0])
        _, first = self.flat(state)

        def round_(states: Sequence[SymbolicTensor], elements: Sequence[SymbolicTensor]) -> Any:
            inside = Traced((*states, *elements)[0].builder)
            with using(inside):
                function = UserFunction(call, inside, xs, states=1)
                before = form.value(iter(states))
                after = function(before, element.value(iter(elements)))
                check_state(call, before, after, f"round {first_round}, element {order[0]}")
                form_after, tensors = inside.flat(after)
            if form_after != form:
                raise _OtherLengths
            return tensors, tensors if keeps else []

        sequences = self._sequences(xs, numbers)
        directions = [from_right] * len(sequences)
        try:
            last, states = scan(
                self.builder, round_, first, sequences, taken_backward=directions,
                given_backward=[from_right] * len(first) if keeps else (),
            )  # fmt: skip
        except _OtherLengths:
            return None
        return form.value(iter(last)), _Piece(numbers, form, list(states))

    def _reduced(self, call: NestCall, xs: Nest, initializer: Any) -> Any:
        """Neighbours are joined, all pairs at a time, until one is left."""
        form = element_form(xs, 0)
        tensors = self._sequences(xs, range(len(xs)))

        def pair(_: Any, both: Sequence[SymbolicTensor]) -> Any:
            inside = Traced(both[0].builder)
            half = len(both) // 2
            with using(inside):
                left, right = (form.value(iter(side)) for side in (both[:half], both[half:]))
                after = UserFunction(call, inside, xs, states=1)(left, right)
                check_state(call, left, after, "elements 0 and 1")
                form_after, results = inside.flat(after)
            if form_after != form:
                raise _OtherLengths
            return [], results

        while tensors[0].shape[0] > 1:
            count = tensors[0].shape[0]
            even = count - count % 2
            sides = [t[0:even:2] for t in tensors] + [t[1:even:2] for t in tensors]
            _, joined = scan(self.builder, pair, [], sides)
            if even < count:
                rest = zip(joined, tensors, strict=True)
                joined = tuple([self.builder.concat([a, b[even:]], 0) for a, b in rest])
            tensors = list(joined)
        last = form.value(iter([t.reshape(*t.shape[1:]) for t in tensors]))
        if initializer is None:
            return last
        function = UserFunction(call, self, xs, states=1)
        first = function.result(initializer)
        after = function(first, last)
        check_state(call, first, after, "the initializer")
        return after


class _Piece:
    """What some elements, by number, give: tensors with all of them along the first axis."""

    __slots__ = ("form", "numbers", "tensors")

    def __init__(
        self, numbers: Sequence[int], form: ValueForm, tensors: Sequence[SymbolicTensor]
    ) -> None:
        self.numbers, self.form, self.tensors = numbers, form, tensors


def _alike(xs: Nest) -> list[Sequence[int]]:
    """The numbers of the elements of each form."""
    if is_uniform(xs):
        return [range(len(xs))]
    groups: dict[ValueForm, list[int]] = {}
    for number in range(len(xs)):
        groups.setdefault(element_form(xs, number), []).append(number)
    return list(groups.values())


def _stretch(xs: Nest, order: Sequence[int]) -> Sequence[int]:
    """The first elements of an order, as long as they have one form."""
    if is_uniform(xs):
        return order
    _, first = next(groupby(order, lambda number: element_form(xs, number)))
    return list(first)


def _joined(call: NestCall, pieces: Sequence[_Piece]) -> Any:
    """The results of all elements in their order: a nest, or several."""
    nests = [p.form.nest(iter(p.tensors), len(p.numbers)) for p in pieces]
    for piece, nest in zip(pieces, nests, strict=True):
        if form_of(nest) != form_of(nests[0]):
            raise UsageError(
                f"the results of the function of {call.name} are not alike",
                where=f"element {piece.numbers[0]}",
                expected=f"{text_of(_one_of(nests[0]))}, as for element {pieces[0].numbers[0]}",
                got=text_of(_one_of(nest)),
            )
    order = np.argsort(np.concatenate([np.asarray(p.numbers, np.int64) for p in pieces]))
    return _in_order(nests, None if np.array_equal(order, np.arange(len(order))) else order)


def _one_of(nest: Any) -> Any:
    """An element of a nest, or of several."""
    return tuple(map(_one_of, nest)) if isinstance(nest, tuple) else nest[0]


def _in_order(nests: Sequence[Any], order: Any) -> Any:
    first = nests[0]
    if isinstance(first, tuple):
        return tuple([
            _in_order([nest[i] for nest in nests], order) for i in range(len(first))
        ])  # fmt: skip
    if len(nests) == 1 and order is None:
        return first
    listed = FractalTensor(list(nests))
    whole = FractalTensor.of(listed.data, listed.index.flattened())
    return whole if order is None else FractalTensor.of(whole.data, whole.index.taken(order))
