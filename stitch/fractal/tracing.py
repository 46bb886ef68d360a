"""Trace calls of functions over nests into graphs, and compute the cache keys of calls.

`CallInputs` divides a call's arguments into data, which become program inputs, and structure, which
is part of the key. `Traced` turns each call into loops and traces its function once per element
structure: `map` is a scan without states, `scan` and `fold` scan each segment of one structure,
`reduce` combines pairs of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MethodType
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.fractal.current import NestCall, use_mode
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.rows import Affine, Indexed, leaf_rows
from stitch.fractal.structures import Structure, element_structure, is_uniform
from stitch.fractal.user_function import UserFunction, check_state, structure_text, type_structure
from stitch.fractal.zipped import Nest, Zipped
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
# Arguments of a call: data become program inputs, the structure is part of the key

#: Maximum length of a list of whole numbers that is part of a program.
MAX_NUMBERS = 1024
#: Maximum size of a range of rows that is copied so that other ranges share the program.
MAX_PART_NBYTES = 1 << 24
_PLAIN = (bool, int, str, bytes, type(None))


class SameObject:
    """A key that is equal for the same living object, which is not kept alive.

    >>> def f(): pass
    >>> SameObject(f) == SameObject(f), SameObject(f) == SameObject(print)
    (True, False)
    """

    __slots__ = ("_at", "_ref")

    def __init__(self, held: Any) -> None:
        self._at = id(held)
        self._ref: Any = None
        try:
            self._ref = ref(held)
        except TypeError:  # No weak references: keep it, so that its id is not reused.
            self._ref = lambda: held

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject) or self._at != other._at:
            return False
        held = self._ref()
        return held is not None and held is other._ref()

    def __hash__(self) -> int:
        return hash(self._at)


class NoKeyError(Exception):
    """A value may change unnoticed, or belongs to a graph under construction."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class RowsPart:
    """A range of rows of an input; its begin is an input as well."""

    begin: int
    count: int
    first: int


class CallInputs:
    """The data of a call's arguments, without duplicates.

    `keeps_numbers`: short lists of whole numbers are part of the key, because the function needs
    their values.
    """

    def __init__(self, *, keeps_numbers: bool) -> None:
        self.keeps_numbers = keeps_numbers
        #: Whether some arguments are such lists.
        self.has_numbers = False
        #: The data of the program inputs, in order.
        self.arguments: list[Any] = []
        self._places: dict[int, int] = {}
        self._parts: dict[tuple[int, int, int], RowsPart] = {}
        #: Approximate size of the keys.
        self.nbytes = 0

    def key_of(self, value: Any) -> Hashable:
        """Return the key of a value without its data; raise `NoKeyError` if it has none."""
        self.nbytes += 256
        if isinstance(value, FractalTensor):
            if self.is_kept(value):
                return "numbers", self._bytes(value.data), self._index(value.index)
            part = self.part(value)
            if part is None:
                return "nest", self._input_key(value.data), self._index(value.index)
            where = value.index.map
            assert isinstance(where, Affine)
            rows = where.base - part.first, where.strides
            return (
                "part", self._input_key(value.data), part.begin, part.count,
                value.index.tree.lengths, rows,
            )  # fmt: skip
        if isinstance(value, Zipped):
            return "zip", *map(self.key_of, value.parts)
        if isinstance(value, tuple | list):
            return SameObject(type(value)), *map(self.key_of, value)
        data = self.data_of(value)
        return self._other(value) if data is None else ("input", self._input_key(data))

    def _other(self, value: Any) -> Hashable:
        """Return the key of a value that is not data."""
        if type(value) in _PLAIN:
            return type(value).__name__, value
        if isinstance(value, float | complex):
            return type(value).__name__, repr(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            return "number", self._bytes(value)
        if isinstance(value, SymbolicTensor):
            raise NoKeyError("an argument is a tensor of a graph under construction")
        if isinstance(value, MethodType):  # A new object at each attribute access.
            return "method", SameObject(value.__func__), SameObject(value.__self__)
        if hasattr(type(value), "__dlpack__") or hasattr(type(value), "__array__"):
            raise NoKeyError(f"elements of {type(value).__name__} may have changed")
        if type(value).__hash__ is None:
            raise NoKeyError(f"{type(value).__name__} cannot be hashed and may have changed")
        return SameObject(value)

    def _index(self, index: Indexed) -> Hashable:
        """Return the key of an index: lengths and rows."""
        lengths = [n if isinstance(n, int) else self._bytes(n) for n in index.tree.lengths]
        rows = index.map
        if isinstance(rows, Affine):
            return tuple(lengths), rows.base, rows.strides
        return tuple(lengths), self._bytes(rows.numbers)

    def _bytes(self, array: Any) -> Hashable:
        self.nbytes += array.nbytes
        return array.dtype.str, array.shape, array.tobytes()

    def is_kept(self, nest: FractalTensor) -> bool:
        """Return whether a nest of known whole numbers is part of the key."""
        is_known = isinstance(nest.data, np.ndarray) and nest.dtype.kind in "iub"
        are_numbers = is_known and not nest.leaf_shape and nest.numel <= MAX_NUMBERS
        self.has_numbers = self.has_numbers or are_numbers
        return are_numbers and self.keeps_numbers

    def data_of(self, value: Any) -> Any:
        """Return the data of a value, None if it has none."""
        if isinstance(value, SymbolicTensor):
            return value.written
        is_data = isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.ndim)
        return value if is_data else None

    def place(self, data: Any) -> int:
        """Return the number of the program input for some data."""
        number = self._places.get(id(data))
        if number is None:
            number = self._places[id(data)] = len(self.arguments)
            self.arguments.append(data)
        return number

    def part(self, nest: FractalTensor) -> RowsPart | None:
        """Return the range of rows of a nest if it is a small part of its data.

        Ranges of one length share a graph: `xs[a:b]` for many a.
        """
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
            self._parts[key] = RowsPart(begin, count, first)
        return self._parts[key]

    def _input_key(self, data: Any) -> Hashable:
        return self.place(data), data.shape, type_of_input(data)


def type_of_input(data: Any) -> Any:
    return data.data_type.in_arrays if isinstance(data, Tensor) else data.dtype


# --------------------------------------------------------------------------------------------------
# The cache key of a call


@dataclass(frozen=True, slots=True)
class CallKey:
    """The inputs and the cache key of a call. Without a key it is traced each time, because of
    `why`."""

    inputs: CallInputs
    key: Hashable = None
    why: str = ""


def key_of_call(call: NestCall, *, keeps_numbers: bool) -> CallKey:
    """Return the key of a call: its function by identity, and its arguments."""
    inputs = CallInputs(keeps_numbers=keeps_numbers)
    try:
        key = (
            call.kind, call.from_right, call.is_associative,
            inputs.key_of(call.function),
            inputs.key_of(call.arguments),
            tuple([(name, inputs.key_of(each)) for name, each in call.named.items()]),
            inputs.key_of(call.xs),
            inputs.key_of(call.initializer),
        )  # fmt: skip
    except NoKeyError as error:
        return CallKey(inputs, why=error.why)
    return CallKey(inputs, key)


# --------------------------------------------------------------------------------------------------
# Loop bodies

Tensors: TypeAlias = Sequence[SymbolicTensor]


@dataclass(frozen=True, slots=True)
class FunctionBody:
    """A loop body, and the outer tensors that it reads."""

    body: Body
    captured: tuple[SymbolicTensor, ...]
    structure: Structure


# --------------------------------------------------------------------------------------------------
# Pieces: the elements of one loop, and the order of their results


@dataclass(frozen=True, slots=True)
class LoopPiece:
    """The results of some elements, by number: tensors with all of them along axis 0."""

    numbers: Sequence[int]
    structure: Structure
    tensors: Sequence[SymbolicTensor]


def group_by_structure(xs: Nest) -> list[Sequence[int]]:
    """Return the numbers of the elements of each structure."""
    if is_uniform(xs):
        return [range(len(xs))]
    groups: dict[Structure, list[int]] = {}
    for number in range(len(xs)):
        groups.setdefault(element_structure(xs, number), []).append(number)
    return list(groups.values())


def first_segment(xs: Nest, order: Sequence[int]) -> Sequence[int]:
    """Return the longest prefix of an order whose elements have one structure."""
    if is_uniform(xs):
        return order
    _, first = next(groupby(order, lambda number: element_structure(xs, number)))
    return list(first)


def join_pieces(call: NestCall, pieces: Sequence[LoopPiece]) -> Any:
    """Return the results of all elements in order: a nest, or a tuple of nests."""
    nests = [p.structure.nest(iter(p.tensors), len(p.numbers)) for p in pieces]
    for piece, nest in zip(pieces, nests, strict=True):
        if type_structure(nest) != type_structure(nests[0]):
            raise UsageError(
                f"the results of the function of {call.name} have different structures",
                where=f"element {piece.numbers[0]}",
                expected=f"{structure_text(_one_of(nests[0]))}, as for element "
                f"{pieces[0].numbers[0]}",
                got=structure_text(_one_of(nest)),
            )
    order = np.argsort(np.concatenate([np.asarray(p.numbers, np.int64) for p in pieces]))
    return _in_order(nests, None if np.array_equal(order, np.arange(len(order))) else order)


def _one_of(nest: Any) -> Any:
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
    """Return elements of one structure, a tensor per leaf or nest; `tensor` converts data."""
    if isinstance(xs, Zipped):
        return [t for part in xs.parts for t in sequences_of(part, numbers, tensor)]
    first, end = numbers[0], numbers[-1] + 1
    part = xs[first:end] if len(numbers) == end - first else xs[list(numbers)]
    rows = leaf_rows(tensor(part.data), part.index)
    structure = element_structure(xs, numbers[0])
    if structure.tree is None:
        return [rows]
    return [rows.reshape(len(numbers), structure.tree.numel, *rows.shape[1:])]


def has_numbers(xs: Nest) -> bool:
    """Return whether some elements are numbers known while tracing."""
    parts = xs.parts if isinstance(xs, Zipped) else (xs,)
    return any(
        has_numbers(part) if isinstance(part, Zipped)
        else isinstance(part.data, np.ndarray) and part.dtype.kind in "iub"
        for part in parts
    )  # fmt: skip


#: Maximum number of elements that are traced one by one if a function needs their values.
MAX_WRITTEN_OUT = 1024


class LengthsOfDataError(CompileError):
    """Lengths depend on data, which does not exist while tracing."""


class Traced:
    """Writes functions over nests into a graph, or a body of it.

    `shows_numbers`: functions receive known whole numbers as NumPy numbers.
    """

    def __init__(self, builder: Any, *, shows_numbers: bool = False) -> None:
        self.builder, self.shows_numbers = builder, shows_numbers

    def as_leaf(self, data: Any) -> Any:
        if self.shows_numbers and not isinstance(data, SymbolicTensor | Tensor):
            array = np.asarray(data)
            if not array.shape and array.dtype.kind in "iub":
                return array[()]
        return self.tensor(data)

    def tensor(self, data: Any) -> SymbolicTensor:
        """Return data as a tensor of the graph; known data becomes a constant."""
        if isinstance(data, SymbolicTensor) and data.written is None:
            return data
        tensor: SymbolicTensor = self.builder.tensor(
            data.numpy() if isinstance(data, Tensor) else data
        )
        return tensor

    def run(self, call: NestCall) -> Any:
        """Write a call as loops; raise `LengthsOfDataError` for a selection."""
        if call.kind == "map":
            return self._mapped(call)
        if call.kind == "scan":
            return join_pieces(call, self._rounds(call)[1])
        if call.kind == "fold":
            return self._folded(call)
        raise LengthsOfDataError(
            f"the length of the result of {call.name} depends on data, which does not exist while "
            "tracing",
            where=user_location() or getattr(call.function, "__name__", "its predicate"),
            remedy="call it outside of the traced function, or compute with all elements and a "
            "mask",
        )

    def _mapped(self, call: NestCall) -> Any:
        """Write one loop per structure of elements."""
        pieces = []
        for numbers in group_by_structure(call.xs):
            try:
                piece = self._cells(call, numbers)
            except NoDataError:
                if len(numbers) > MAX_WRITTEN_OUT or not has_numbers(call.xs):
                    raise
                shown = Traced(self.builder, shows_numbers=True)
                with use_mode(shown):
                    pieces += [shown._cell(call, number) for number in numbers]
            else:
                pieces.append(piece)
        return join_pieces(call, pieces)

    def _folded(self, call: NestCall) -> Any:
        """Return the last state; of an associative function combine all pairs of neighbours at
        once."""
        if call.is_associative and len(call.xs) > 2 and len(group_by_structure(call.xs)) == 1:
            last = self._reduced(call)
            if last is not None:
                return last
        return self._rounds(call)[0]

    def _cells(self, call: NestCall, numbers: Sequence[int]) -> LoopPiece:
        """Write a loop without states."""
        sequences = sequences_of(call.xs, numbers, self.tensor)
        owner = self.builder.innermost(sequences)
        body = self._body(call, owner, [element_structure(call.xs, numbers[0])], [], sequences)
        _, results = scan_of(owner, body.body, body.captured, [], sequences)
        return LoopPiece(numbers, body.structure, list(results))

    def _body(
        self, call: NestCall, owner: Any, structures: Sequence[Structure],
        states: Sequence[SymbolicTensor], sequences: Sequence[SymbolicTensor], where: str = "",
        copies: int = 1,
    ) -> FunctionBody:  # fmt: skip
        """Trace a loop body: the function of values of these structures, the state first.

        `copies`: how often the tensors of the result are repeated as outputs.
        """
        kinds = [(f"state_{i}", t.type) for i, t in enumerate(states)]
        kinds += [
            (f"element_{i}", ValueType(t.shape[1:], t.data_type)) for i, t in enumerate(sequences)
        ]
        made: list[Structure] = []

        def function(builder: Any, inputs: Tensors) -> Tensors:
            inside, tensors = Traced(builder), iter(inputs)
            with use_mode(inside):
                values = [structure.value(tensors) for structure in structures]
                after = UserFunction(call, inside, states=len(structures) - 1)(*values)
                if len(structures) > 1:
                    check_state(call, values[0], after, where)
                structure, results = inside.flat(after)
            made.append(structure)
            return results * copies

        body, captured = trace_body(owner, kinds, function)
        return FunctionBody(body, captured, made[0])

    def _cell(self, call: NestCall, number: int) -> LoopPiece:
        """Write the function of one element outside of a loop."""
        return self._piece(number, UserFunction(call, self, states=0)(call.xs[number]))

    def _piece(self, number: int, value: Any) -> LoopPiece:
        """Return the result of one element."""
        structure, tensors = self.flat(value)
        return LoopPiece([number], structure, [self.builder.unsqueeze(t, 0) for t in tensors])

    def flat(self, value: Any) -> tuple[Structure, list[SymbolicTensor]]:
        """Return a value's structure, and the tensors that it consists of."""
        tensors: list[SymbolicTensor] = []

        def walk(part: Any) -> None:
            if isinstance(part, tuple):
                for each in part:
                    walk(each)
            elif isinstance(part, FractalTensor):
                tensors.append(leaf_rows(self.tensor(part.data), part.index))
            else:
                tensors.append(self.tensor(part))

        walk(value)
        return Structure.of(value), tensors

    def _rounds(self, call: NestCall) -> tuple[Any, list[LoopPiece]]:
        """Return the last state, and all states for a scan."""
        xs, keeps = call.xs, call.kind == "scan"
        order = list(range(len(xs)))[:: -1 if call.from_right else 1]
        pieces: list[LoopPiece] = []
        function = UserFunction(call, self, states=1)
        if call.initializer is None:
            first, order = order[0], order[1:]
            state = function.as_leaf(xs[first])
            pieces.append(self._piece(first, state))
        else:
            state = function.result(call.initializer)
        asks = False
        while order:
            segment, round_ = first_segment(xs, order), len(xs) - len(order)
            done = None
            if len(segment) > 1 and not asks:
                try:
                    done = self._segment(call, state, segment, round_)
                except NoDataError:  # It needs numbers, and will in other rounds.
                    if not has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
                        raise
                    asks = True
            if done is not None:
                state, piece = done
            else:  # One round outside of a loop; then try the next segment.
                segment, before = order[:1], state
                where = f"round {round_}, element {segment[0]}"
                state = self._round(call, before, segment[0], asks)
                check_state(call, before, state, where)
                piece = self._piece(segment[0], state)
            if keeps:
                pieces.append(piece)
            order = order[len(segment) :]
        return state, pieces

    def _round(self, call: NestCall, state: Any, number: int, asks: bool) -> Any:
        """Return the state after one element; `asks`: the function needs the numbers in it."""
        xs = call.xs
        try:
            if not asks:
                return UserFunction(call, self, states=1)(state, xs[number])
        except NoDataError:
            if not has_numbers(xs) or len(xs) > MAX_WRITTEN_OUT:
                raise
        shown = Traced(self.builder, shows_numbers=True)
        with use_mode(shown):
            return UserFunction(call, shown, states=1)(state, xs[number])

    def _segment(
        self, call: NestCall, state: Any, order: Sequence[int], first_round: int
    ) -> tuple[Any, LoopPiece] | None:
        """Write a loop over elements of one structure; None if a round changes the state's
        lengths."""
        numbers, keeps = sorted(order), call.kind == "scan"
        structure, element = Structure.of(state), element_structure(call.xs, numbers[0])
        _, first = self.flat(state)
        sequences = sequences_of(call.xs, numbers, self.tensor)
        owner = self.builder.innermost([*first, *sequences])
        where = f"round {first_round}, element {order[0]}"
        body = self._body(
            call, owner, [structure, element], first, sequences, where, copies=2 if keeps else 1
        )
        if body.structure != structure:
            return None
        last, states = scan_of(
            owner, body.body, body.captured, first, sequences,
            taken_backward=[call.from_right] * len(sequences),
            given_backward=[call.from_right] * len(first) if keeps else (),
        )  # fmt: skip
        return structure.value(iter(last)), LoopPiece(numbers, structure, list(states))

    def _reduced(self, call: NestCall) -> Any:
        """Combine neighbours until one is left; None if a pair has other lengths than its parts."""
        structure = element_structure(call.xs, 0)
        tensors = sequences_of(call.xs, range(len(call.xs)), self.tensor)

        while tensors[0].shape[0] > 1:
            count = tensors[0].shape[0]
            even = count - count % 2
            sides = [t[0:even:2] for t in tensors] + [t[1:even:2] for t in tensors]
            owner = self.builder.innermost(sides)
            body = self._body(call, owner, [structure, structure], [], sides, "elements 0 and 1")
            if body.structure != structure:
                return None
            _, pairs = scan_of(owner, body.body, body.captured, [], sides)
            if even < count:
                rest = zip(pairs, tensors, strict=True)
                pairs = tuple([self.builder.concat([a, b[even:]], 0) for a, b in rest])
            tensors = list(pairs)
        last = structure.value(iter([t.reshape(*t.shape[1:]) for t in tensors]))
        if call.initializer is None:
            return last
        function = UserFunction(call, self, states=1)
        first = function.result(call.initializer)
        after = function(first, last)
        check_state(call, first, after, "the initializer")
        return after


# --------------------------------------------------------------------------------------------------
# Graphs of calls


class GraphTracing:
    """Traces a call into a graph whose inputs are the data of its arguments."""

    def __init__(self, name: str, inputs: CallInputs | None = None) -> None:
        self.builder = ComputationGraphBuilder(name)
        self.call_inputs = inputs or CallInputs(keeps_numbers=True)
        self.count = 0
        self._inputs: list[SymbolicTensor] = []
        self._parts: dict[RowsPart, SymbolicTensor] = {}

    def trace_call(self, call: NestCall) -> Structure:
        """Trace a call; return the structure of its value, whose tensors are the graph's
        outputs."""
        arguments = tuple([self.as_inputs(each) for each in call.arguments])
        named = {name: self.as_inputs(each) for name, each in call.named.items()}
        xs, first = self.as_inputs(call.xs), self.as_inputs(call.initializer)
        inside = replace(call, arguments=arguments, named=named, xs=xs, initializer=first)
        return self.trace(lambda execution: execution.run(inside))

    def trace(self, write: Callable[[Traced], Any]) -> Structure:
        """Trace what `write` computes; return the structure of its value."""
        execution = Traced(self.builder)
        with use_mode(execution):
            value = as_tuples(write(execution))
            structure, tensors = execution.flat(value)
        for number, tensor in enumerate(tensors):
            self.builder.output(f"output_{number}", tensor)
        return structure

    def graph(self) -> ComputationGraph:
        return self.builder.build()

    def as_inputs(self, value: Any) -> Any:
        """Return a value with its data as graph inputs; numbers and functions are unchanged."""
        if isinstance(value, FractalTensor):
            return value if self.call_inputs.is_kept(value) else self._rows(value)
        if isinstance(value, Zipped):
            return Zipped([self.as_inputs(part) for part in value.parts])
        if isinstance(value, tuple | list):
            parts = [self.as_inputs(each) for each in value]
            # Rebuild named tuples: functions may access their fields.
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        data = self.call_inputs.data_of(value)
        return value if data is None else self._input(self.call_inputs.place(data))

    def as_leaf_inputs(self, value: Any) -> Any:
        """Return a value with all leaves of its nests as graph inputs, in order."""
        if isinstance(value, FractalTensor):
            kind = ValueType((value.numel, *value.leaf_shape), DataType.from_dtype(value.dtype))
            rows = self._next_input(kind.shape, kind.data_type)
            return FractalTensor.of(rows, Indexed.whole(value.index.tree))
        if isinstance(value, Zipped):
            return Zipped([self.as_leaf_inputs(part) for part in value.parts])
        if isinstance(value, tuple | list):
            return tuple([self.as_leaf_inputs(each) for each in value])
        data = value if isinstance(value, Tensor) else np.asarray(value)
        return self._next_input(data.shape, type_of_input(data))

    def _input(self, place: int) -> SymbolicTensor:
        """Return an input by number; create it and those before it if needed."""
        for data in self.call_inputs.arguments[len(self._inputs) : place + 1]:
            self._inputs.append(self._next_input(data.shape, type_of_input(data)))
        return self._inputs[place]

    def _rows(self, nest: FractalTensor) -> FractalTensor:
        """Return a nest over an input, or over a range of its rows."""
        part, where = self.call_inputs.part(nest), nest.index.map
        rows = self._input(self.call_inputs.place(nest.data))
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


class GraphKey:
    """The meaning of a graph, hashed once."""

    __slots__ = ("__weakref__", "_hash", "_meaning")

    def __init__(self, graph: ComputationGraph) -> None:
        self._meaning = graph.meaning
        self._hash = hash(self._meaning)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphKey) and self._meaning == other._meaning

    def __hash__(self) -> int:
        return self._hash


def as_tuples(value: Any) -> Any:
    """Return a value with lists and zipped nests as tuples."""
    if isinstance(value, Zipped):
        return tuple([as_tuples(part) for part in value.parts])
    if isinstance(value, tuple | list):
        return tuple([as_tuples(each) for each in value])
    return value
