"""Functions over nests in a graph under construction: each becomes loops, its function is run once
for each form of its elements.

A `map` is a scan without states, whose cells may run at the same time; a `scan` or `fold` is a scan
over each stretch of elements and states of one form; a `reduce` joins neighbours, all pairs at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.fractal.current import NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.sequential import check_state
from stitch.fractal.user_function import UserFunction, form_of, text_of
from stitch.fractal.value_forms import ValueForm, element_form, is_uniform, rows_of
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import NoDataError, SymbolicTensor, scan_of, trace_body, user_location
from stitch.program import Body, ValueType
from stitch.runtime import Tensor

# --------------------------------------------------------------------------------------------------
# User functions become bodies of loops: traced in a body of the builder's graph.

Tensors: TypeAlias = Sequence[SymbolicTensor]
#: From the builder of a body and its inputs: the form of the function's value, and its tensors.
Function: TypeAlias = Callable[[Any, Tensors], tuple[ValueForm, Tensors]]


@dataclass(frozen=True, slots=True)
class FunctionBody:
    """A body in a graph that is being written, and the tensors around that it reads."""

    body: Body
    captured: tuple[SymbolicTensor, ...]
    form: ValueForm


def function_body(
    owner: Any, kinds: Sequence[tuple[str, ValueType]], function: Function, *, copies: int = 1
) -> FunctionBody:
    """Trace a function into a body, for inputs of these names and types.

    `copies`: so many times each tensor of the value is given, all of them one after the other.
    """
    forms: list[ValueForm] = []

    def whole(builder: Any, inputs: Tensors) -> Tensors:
        form, tensors = function(builder, inputs)
        forms.append(form)
        return [*tensors] * copies

    body, captured = trace_body(owner, kinds, whole)
    return FunctionBody(body, captured, forms[0])


# --------------------------------------------------------------------------------------------------
# Pieces: which elements of a nest one loop takes, as what, and their results in their order.


class LoopPiece:
    """What some elements, by number, give: tensors with all of them along the first axis."""

    __slots__ = ("form", "numbers", "tensors")

    def __init__(
        self, numbers: Sequence[int], form: ValueForm, tensors: Sequence[SymbolicTensor]
    ) -> None:
        self.numbers, self.form, self.tensors = numbers, form, tensors


def alike(xs: Nest) -> list[Sequence[int]]:
    """The numbers of the elements of each form."""
    if is_uniform(xs):
        return [range(len(xs))]
    groups: dict[ValueForm, list[int]] = {}
    for number in range(len(xs)):
        groups.setdefault(element_form(xs, number), []).append(number)
    return list(groups.values())


def first_stretch(xs: Nest, order: Sequence[int]) -> Sequence[int]:
    """The first elements of an order, as long as they have one form."""
    if is_uniform(xs):
        return order
    _, first = next(groupby(order, lambda number: element_form(xs, number)))
    return list(first)


def joined(call: NestCall, pieces: Sequence[LoopPiece]) -> Any:
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


def sequences_of(
    xs: Nest, numbers: Sequence[int], tensor: Callable[[Any], SymbolicTensor]
) -> list[SymbolicTensor]:
    """Elements of one form, a tensor for each leaf or nest of an element; `tensor` makes one of
    data."""
    if isinstance(xs, Zipped):
        return [t for part in xs.parts for t in sequences_of(part, numbers, tensor)]
    first, end = numbers[0], numbers[-1] + 1
    part = xs[first:end] if len(numbers) == end - first else xs[list(numbers)]
    rows = rows_of(part, tensor(part.data))
    form = element_form(xs, numbers[0])
    if form.tree is None:
        return [rows]
    return [rows.reshape(len(numbers), form.tree.numel, *rows.shape[1:])]


def has_numbers(xs: Nest) -> bool:
    """Whether some elements are numbers that are known."""
    parts = xs.parts if isinstance(xs, Zipped) else (xs,)
    return any(
        has_numbers(part) if isinstance(part, Zipped)
        else isinstance(part.data, np.ndarray) and part.dtype.kind in "iub"
        for part in parts
    )  # fmt: skip


def named_inputs(
    states: Sequence[ValueType], elements: Sequence[ValueType]
) -> list[tuple[str, ValueType]]:
    """The inputs of a loop's body by their names."""
    return [
        *[(f"state_{i}", kind) for i, kind in enumerate(states)],
        *[(f"element_{i}", kind) for i, kind in enumerate(elements)],
    ]


#: So many elements are traced one by one, where a function asks for the numbers in them.
MAX_WRITTEN_OUT = 1024


class LengthsOfDataError(CompileError):
    """Lengths depend on data, which there is none of while a graph is built."""


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
        for numbers in alike(xs):
            try:
                piece = self._cells(call, xs, numbers)
            except NoDataError:
                if len(numbers) > MAX_WRITTEN_OUT or not has_numbers(xs):
                    raise
                shown = Traced(self.builder, shows_numbers=True)
                with using(shown):
                    pieces += [shown._cell(call, xs, number) for number in numbers]
            else:
                pieces.append(piece)
        return joined(call, pieces)

    def scanned(self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool) -> Any:
        """One loop for each stretch of one form, whose rounds give their states."""
        return joined(call, self._rounds(call, xs, initializer, from_right, keeps=True)[1])

    def folded(
        self, call: NestCall, xs: Nest, initializer: Any, *, from_right: bool, is_associative: bool
    ) -> Any:
        """The last state; of an associative function neighbours are joined, all at a time."""
        if is_associative and len(xs) > 2 and len(alike(xs)) == 1:
            last = self._reduced(call, xs, initializer)
            if last is not None:
                return last
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

    def _cells(self, call: NestCall, xs: Nest, numbers: Sequence[int]) -> LoopPiece:
        """A loop without states."""
        sequences = sequences_of(xs, numbers, self.tensor)
        owner = self.builder.innermost(sequences)
        body = self._body(call, xs, owner, [element_form(xs, numbers[0])], [], sequences)
        _, results = scan_of(owner, body.body, body.captured, [], sequences)
        return LoopPiece(numbers, body.form, list(results))

    def _body(
        self, call: NestCall, xs: Nest, owner: Any, forms: Sequence[ValueForm],
        states: Sequence[SymbolicTensor], sequences: Sequence[SymbolicTensor], where: str = "",
        copies: int = 1,
    ) -> FunctionBody:  # fmt: skip
        """A loop's body: the function of values of these forms, the state first if there is
        one."""
        elements = [ValueType(t.shape[1:], t.data_type) for t in sequences]
        kinds = named_inputs([t.type for t in states], elements)
        return function_body(owner, kinds, _function_of(call, xs, forms, where), copies=copies)

    def _cell(self, call: NestCall, xs: Nest, number: int) -> LoopPiece:
        """One element, here."""
        value = UserFunction(call, self, xs, states=0)(xs[number])
        form, tensors = self.flat(value)
        return LoopPiece([number], form, [self.builder.unsqueeze(t, 0) for t in tensors])

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
    ) -> tuple[Any, list[LoopPiece]]:
        """The last state, and all of them if they are kept."""
        order = list(range(len(xs)))[:: -1 if from_right else 1]
        pieces: list[LoopPiece] = []
        function = UserFunction(call, self, xs, states=1)
        if initializer is None:
            first, order = order[0], order[1:]
            state = function.given(xs[first])
            form, tensors = self.flat(state)
            pieces.append(LoopPiece([first], form, [self.builder.unsqueeze(t, 0) for t in tensors]))
        else:
            state = function.result(initializer)
        asks = False
        while order:
            stretch, round_ = first_stretch(xs, order), len(xs) - len(order)
            done = None
            if len(stretch) > 1 and not asks:
                try:
                    done = self._stretch(call, xs, state, stretch, round_, from_right, keeps)
                except NoDataError:  # It asks for numbers, and will in other rounds.
                    if not has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
                        raise
                    asks = True
            if done is not None:
                state, piece = done
            else:  # By itself, and what follows is looked at anew.
                stretch, before = order[:1], state
                where = f"round {round_}, element {stretch[0]}"
                state = self._round(call, xs, before, stretch[0], asks)
                check_state(call, before, state, where)
                form, tensors = self.flat(state)
                tensors = [self.builder.unsqueeze(t, 0) for t in tensors]
                piece = LoopPiece(stretch, form, tensors)
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
            if not has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
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
    ) -> tuple[Any, LoopPiece] | None:
        """A loop over elements of one form; None where a state has other lengths after a round."""
        numbers = sorted(order)
        form, element = ValueForm.of(state), element_form(xs, numbers[0])
        _, first = self.flat(state)
        sequences = sequences_of(xs, numbers, self.tensor)
        owner = self.builder.innermost([*first, *sequences])
        where = f"round {first_round}, element {order[0]}"
        body = self._body(
            call, xs, owner, [form, element], first, sequences, where, copies=2 if keeps else 1
        )
        if body.form != form:
            return None
        last, states = scan_of(
            owner, body.body, body.captured, first, sequences,
            taken_backward=[from_right] * len(sequences),
            given_backward=[from_right] * len(first) if keeps else (),
        )  # fmt: skip
        return form.value(iter(last)), LoopPiece(numbers, form, list(states))

    def _reduced(self, call: NestCall, xs: Nest, initializer: Any) -> Any:
        """Neighbours are joined, all pairs at a time, until one is left; None where a pair has
        other lengths than its parts."""
        form = element_form(xs, 0)
        tensors = sequences_of(xs, range(len(xs)), self.tensor)

        while tensors[0].shape[0] > 1:
            count = tensors[0].shape[0]
            even = count - count % 2
            sides = [t[0:even:2] for t in tensors] + [t[1:even:2] for t in tensors]
            owner = self.builder.innermost(sides)
            body = self._body(call, xs, owner, [form, form], [], sides, "elements 0 and 1")
            if body.form != form:
                return None
            _, pairs = scan_of(owner, body.body, body.captured, [], sides)
            if even < count:
                rest = zip(pairs, tensors, strict=True)
                pairs = tuple([self.builder.concat([a, b[even:]], 0) for a, b in rest])
            tensors = list(pairs)
        last = form.value(iter([t.reshape(*t.shape[1:]) for t in tensors]))
        if initializer is None:
            return last
        function = UserFunction(call, self, xs, states=1)
        first = function.result(initializer)
        after = function(first, last)
        check_state(call, first, after, "the initializer")
        return after


def _function_of(call: NestCall, xs: Nest, forms: Sequence[ValueForm], where: str) -> Function:
    """A call's function on the tensors of a body."""

    def function(builder: Any, inputs: Sequence[SymbolicTensor]) -> Any:
        inside, tensors = Traced(builder), iter(inputs)
        with using(inside):
            given = [form.value(tensors) for form in forms]
            after = UserFunction(call, inside, xs, states=len(forms) - 1)(*given)
            if len(forms) > 1:
                check_state(call, given[0], after, where)
            return inside.flat(after)

    return function
