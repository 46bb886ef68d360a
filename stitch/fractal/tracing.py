"""What a call is given, divided: data, which a program takes as its inputs, and the form of all
else, for which it was made.

Data are nests, arrays and tensors, also in tuples and lists. Of data the form has shapes and types,
of numbers and texts their values, of other objects their identity. Nothing is computed or copied.

A call of a function over nests, before it is said how it runs: its value in a way, and the key
under which its trace is kept.

Functions over nests in a graph under construction: each becomes loops, its function is run once
for each form of its elements.

A `map` is a scan without states, whose cells may run at the same time; a `scan` or `fold` is a scan
over each segment of elements and states of one form; a `reduce` joins neighbours, all pairs at a
time.

Calls of functions over nests become graphs, their data the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MethodType
from typing import Any, TypeAlias

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.fractal.current import ExecutionMode, NestCall, using
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.programs import SameObject
from stitch.fractal.rows import Affine, Indexed, Rows
from stitch.fractal.user_function import UserFunction, check_state, form_of, text_of
from stitch.fractal.value_forms import ValueForm, element_form, is_uniform, rows_of
from stitch.fractal.zipped import Nest, Zipped
from stitch.frontend import is_torch
from stitch.graph import (
    ComputationGraph,
    ComputationGraphBuilder,
    NoDataError,
    SymbolicTensor,
    scan_of,
    trace_body,
    user_location,
)
from stitch.program import Body, DataType, ValueType
from stitch.runtime import Tensor

# --------------------------------------------------------------------------------------------------
# Arguments of a call: data become program inputs; the structure is part of the key.

#: Lists of so few whole numbers are part of a program.
MAX_NUMBERS = 1024
#: Of so many bytes a part of the rows is copied, that parts elsewhere are the same program.
MAX_PART_NBYTES = 1 << 24
_PLAIN = (bool, int, str, bytes, type(None))


class NoFormError(Exception):
    """A value that may change unnoticed, or that is of a graph which is being written."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class RowsPart:
    """Of many rows those from one on, whose number is an input as well."""

    rows: int
    begin: int
    count: int
    first: int


class CallInputs:
    """The data of what was given so far, the same data once.

    `keeps_numbers`: few whole numbers are part of the form, for functions that ask for them.
    """

    def __init__(self, *, keeps_numbers: bool) -> None:
        self.keeps_numbers = keeps_numbers
        #: Whether there were such numbers.
        self.has_numbers = False
        #: What is given for the inputs, in their order.
        self.arguments: list[Any] = []
        self._places: dict[int, int] = {}
        self._parts: dict[tuple[int, int, int], RowsPart] = {}
        #: About what the forms take.
        self.nbytes = 0

    def form(self, value: Any) -> Hashable:
        """All that is not data of a value; raises `NoFormError` for what cannot be told."""
        self.nbytes += 256
        if isinstance(value, FractalTensor):
            if self.is_kept(value):
                return "numbers", self._bytes(value.data), self._index(value.index)
            part = self.part(value)
            if part is None:
                return "nest", self._input_form(value.data), self._index(value.index)
            where = value.index.map
            assert isinstance(where, Affine)
            rows = where.base - part.first, where.strides
            return (
                "part", self._input_form(value.data), part.begin, part.count,
                value.index.tree.lengths, rows,
            )  # fmt: skip
        if isinstance(value, Zipped):
            return "zip", *map(self.form, value.parts)
        if isinstance(value, tuple | list):
            return SameObject(type(value)), *map(self.form, value)
        data = self.data_of(value)
        return self._other(value) if data is None else ("input", self._input_form(data))

    def _other(self, value: Any) -> Hashable:
        """The form of what is no data."""
        if type(value) in _PLAIN:
            return type(value).__name__, value
        if isinstance(value, float | complex):
            return type(value).__name__, repr(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return "number", self._bytes(value)
        if isinstance(value, SymbolicTensor):
            raise NoFormError("it is given a tensor of a graph that is being written")
        if isinstance(value, MethodType):  # It is made anew whenever it is asked for.
            return "method", SameObject(value.__func__), SameObject(value.__self__)
        if is_torch(value):
            raise NoFormError("weights of torch modules may have changed")
        if hasattr(type(value), "__dlpack__") or hasattr(type(value), "__array__"):
            raise NoFormError(f"elements of {type(value).__name__} may have changed")
        if type(value).__hash__ is None:
            raise NoFormError(f"{type(value).__name__} cannot be hashed and may have changed")
        return SameObject(value)

    def _index(self, index: Indexed) -> Hashable:
        """Lengths, and the row of each leaf."""
        lengths = [n if isinstance(n, int) else self._bytes(n) for n in index.tree.lengths]
        rows = index.map
        if isinstance(rows, Affine):
            return tuple(lengths), rows.base, rows.strides
        numbers = rows.starts if isinstance(rows, Rows) else rows.numbers
        return tuple(lengths), type(rows).__name__, self._bytes(numbers)

    def _bytes(self, array: Any) -> Hashable:
        self.nbytes += array.nbytes
        return array.dtype.str, array.shape, array.tobytes()

    def is_kept(self, nest: FractalTensor) -> bool:
        """Whether a nest is part of the form, being few whole numbers that are known."""
        is_known = isinstance(nest.data, np.ndarray) and nest.dtype.kind in "iub"
        are_numbers = is_known and not nest.leaf_shape and nest.numel <= MAX_NUMBERS
        self.has_numbers = self.has_numbers or are_numbers
        return are_numbers and self.keeps_numbers

    def data_of(self, value: Any) -> Any:
        """What is given for an input in place of a value, None for what is no data."""
        if isinstance(value, SymbolicTensor):
            return value.written
        is_data = isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.ndim)
        return value if is_data else None

    def place(self, data: Any) -> int:
        """The number of the input that data is given for."""
        found = self._places.get(id(data))
        if found is None:
            found = self._places[id(data)] = len(self.arguments)
            self.arguments.append(data)
        return found

    def part(self, nest: FractalTensor) -> RowsPart | None:
        """The part of the rows that a nest is made of, where that is some rows of many: parts
        that are alike, `xs[a:b]` for many a, are one graph."""
        data, where, lengths = nest.data, nest.index.map, nest.index.tree.uniform
        if not isinstance(where, Affine) or lengths is None or not nest.numel:
            return None
        first, last = where.reached(lengths)
        count = last - first + 1
        row_nbytes = math.prod(nest.leaf_shape) * nest.dtype.itemsize
        if count == data.shape[0] or count * row_nbytes > MAX_PART_NBYTES:
            return None
        rows = self.place(data)
        key = rows, first, count
        if key not in self._parts:
            begin = self.place(np.array(first, np.int64))
            self._parts[key] = RowsPart(rows, begin, count, first)
        return self._parts[key]

    def _input_form(self, data: Any) -> Hashable:
        return self.place(data), data.shape, type_of_input(data)


def type_of_input(data: Any) -> Any:
    """The type of the input that data is given for."""
    return data.data_type.in_arrays if isinstance(data, Tensor) else data.dtype


# --------------------------------------------------------------------------------------------------
# A pending call, and the key of its trace.


@dataclass(frozen=True, slots=True)
class CallReading:
    """What a call gives a program as `inputs`; equal keys run the same program. Without a key the
    call is traced each time, and `why` says for what reason."""

    inputs: CallInputs
    key: Hashable = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class NestWork:
    """`method` of a way, with these words."""

    call: NestCall
    xs: Nest
    initializer: Any
    method: str
    words: Mapping[str, bool] = field(default_factory=dict)

    def written(self, way: ExecutionMode) -> Any:
        """The value in a way."""
        given = (self.xs,) if self.method == "mapped" else (self.xs, self.initializer)
        return getattr(way, self.method)(self.call, *given, **self.words)

    def on(self, call: NestCall, xs: Nest, initializer: Any) -> NestWork:
        """The same of other values."""
        return replace(self, call=call, xs=xs, initializer=initializer)

    def read(self, *, keeps_numbers: bool) -> CallReading:
        """The key of the call: its function as an object, the form of what it is given."""
        inputs = CallInputs(keeps_numbers=keeps_numbers)
        call = self.call
        try:
            key = (
                self.method, *self.words.values(),
                inputs.form(call.function),
                inputs.form(call.arguments),
                tuple([(name, inputs.form(each)) for name, each in call.named.items()]),
                inputs.form(self.xs),
                None if self.initializer is None else inputs.form(self.initializer),
            )  # fmt: skip
        except NoFormError as error:
            return CallReading(inputs, why=error.why)
        return CallReading(inputs, key)


# --------------------------------------------------------------------------------------------------
# Functions over nests become loops; each function is traced once per element type.

# --------------------------------------------------------------------------------------------------
# Tracing user functions into bodies of loops.

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
# Pieces: the elements of a nest that one loop takes, and the order of their results.


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


def first_segment(xs: Nest, order: Sequence[int]) -> Sequence[int]:
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
        """One loop for each segment of one form, whose rounds give their states."""
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
            segment, round_ = first_segment(xs, order), len(xs) - len(order)
            done = None
            if len(segment) > 1 and not asks:
                try:
                    done = self._segment(call, xs, state, segment, round_, from_right, keeps)
                except NoDataError:  # It asks for numbers, and will in other rounds.
                    if not has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
                        raise
                    asks = True
            if done is not None:
                state, piece = done
            else:  # By itself, and what follows is looked at anew.
                segment, before = order[:1], state
                where = f"round {round_}, element {segment[0]}"
                state = self._round(call, xs, before, segment[0], asks)
                check_state(call, before, state, where)
                form, tensors = self.flat(state)
                tensors = [self.builder.unsqueeze(t, 0) for t in tensors]
                piece = LoopPiece(segment, form, tensors)
            if keeps:
                pieces.append(piece)
            order = order[len(segment) :]
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

    def _segment(
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


# --------------------------------------------------------------------------------------------------
# Calls of functions over nests become graphs, their data the inputs.


class GraphTracing:
    """A call becomes a graph; all data of its nests and arguments become inputs.

    `inputs`: those of a call, that the graph begins with.
    """

    def __init__(self, name: str, inputs: CallInputs | None = None) -> None:
        self.builder = ComputationGraphBuilder(name)
        self.given = inputs or CallInputs(keeps_numbers=True)
        self.count = 0
        self._inputs: list[SymbolicTensor] = []
        self._parts: dict[RowsPart, SymbolicTensor] = {}

    def traced(self, work: NestWork) -> ValueForm:
        """Write a call down; gives the form of its value, whose tensors are the graph's outputs."""
        call = work.call
        arguments = tuple([self.brought(each) for each in call.arguments])
        named = {name: self.brought(each) for name, each in call.named.items()}
        xs = self.brought(work.xs)
        first = None if work.initializer is None else self.brought(work.initializer)
        inside = work.on(NestCall(call.name, call.function, arguments, named), xs, first)
        return self.written(inside.written)

    def written(self, write: Callable[[Traced], Any]) -> ValueForm:
        """Write down what is called in the way given; gives the form of its value, whose tensors
        are the graph's outputs."""
        way = Traced(self.builder)
        with using(way):
            value = as_values(write(way))
            form, tensors = way.flat(value)
        for number, tensor in enumerate(tensors):
            self.builder.output(f"output_{number}", tensor)
        return form

    def graph(self) -> ComputationGraph:
        """The graph of what was traced."""
        return self.builder.build()

    def brought(self, value: Any) -> Any:
        """A value with its data as inputs of the graph; numbers and functions stay."""
        if isinstance(value, FractalTensor):
            return value if self.given.is_kept(value) else self._rows(value)
        if isinstance(value, Zipped):
            return Zipped([self.brought(part) for part in value.parts])
        if isinstance(value, tuple | list):
            parts = [self.brought(each) for each in value]
            # Functions may ask for the parts of a named tuple by their names.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        data = self.given.data_of(value)
        return value if data is None else self._input(self.given.place(data))

    def rearranged(self, value: Any) -> Any:
        """As `brought`, but that leaves become inputs in their order, and all of them."""
        if isinstance(value, FractalTensor):
            kind = ValueType((value.numel, *value.leaf_shape), DataType.from_dtype(value.dtype))
            rows = self._next_input(kind.shape, kind.data_type)
            return FractalTensor.of(rows, Indexed.whole(value.index.tree))
        if isinstance(value, Zipped):
            return Zipped([self.rearranged(part) for part in value.parts])
        if isinstance(value, tuple | list):
            return tuple([self.rearranged(each) for each in value])
        data = value if isinstance(value, Tensor) else np.asarray(value)
        return self._next_input(data.shape, type_of_input(data))

    def _input(self, place: int) -> SymbolicTensor:
        """An input by its number, after all those before it."""
        for data in self.given.arguments[len(self._inputs) : place + 1]:
            self._inputs.append(self._next_input(data.shape, type_of_input(data)))
        return self._inputs[place]

    def _rows(self, nest: FractalTensor) -> FractalTensor:
        """A nest over an input, or a part of one."""
        part, where = self.given.part(nest), nest.index.map
        rows = self._input(self.given.place(nest.data))
        if part is None or not isinstance(where, Affine):
            return FractalTensor.of(rows, nest.index)
        if part not in self._parts:
            begin = self._input(part.begin)
            self._parts[part] = self.builder.window_rows(rows, begin, [1], [part.count])
        inside = Affine(where.base - part.first, where.strides)
        return FractalTensor.of(self._parts[part], Indexed(nest.index.tree, inside))

    def _next_input(self, shape: tuple[int, ...], kind: Any) -> SymbolicTensor:
        self.count += 1
        return self.builder.input(f"input_{self.count - 1}", shape, kind)


class GraphMeaning:
    """Equal for graphs that compute the same, slot by slot."""

    __slots__ = ("__weakref__", "_hash", "_meaning")

    def __init__(self, graph: ComputationGraph) -> None:
        inputs = tuple([slot.value for slot in graph.inputs])
        outputs = tuple([slot.value for slot in graph.outputs])
        whole = Body(inputs, outputs, graph.values, graph.operations, graph.constants)
        self._meaning = (whole.meaning, *[body.meaning for body in graph.bodies])
        self._hash = hash(self._meaning)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphMeaning) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return self._hash


def as_values(value: Any) -> Any:
    """What a function gives, or is given: lists and zipped nests as tuples."""
    if isinstance(value, Zipped):
        return tuple([as_values(part) for part in value.parts])
    if isinstance(value, tuple | list):
        return tuple([as_values(each) for each in value])
    return value
