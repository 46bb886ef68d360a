"""What a torch module computes with, to see whether it is still what it was.

An object of another kind is itself, and changes inside it are not seen, nor is what `forward` reads
from outside the module. Nothing large is kept alive.

Programs whose compiler knew nothing of the graph that is being written become part of it.

Only values count: where a tensor lies is the new graph's own affair. But what is stored in another
floating type than it is computed in is rounded there, as a run rounds it.

Programs and torch modules as functions over nests: on tensors with data they are run, on values
of a graph under construction their operations are written in.

A module is captured once for the types of what it is given, and anew once its weights, parts, hooks
or attributes have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from stitch.argument_kinds import arranged
from stitch.errors import LinkError, UsageError
from stitch.fractal.eager import EagerBuilder
from stitch.frontend import is_torch, read_graph
from stitch.graph import (
    ComputationGraph,
    NoDataError,
    Operations,
    SymbolicTensor,
    WriteUnbatched,
    vmap,
)
from stitch.ops import BatchingContext, onnx_code
from stitch.program import (
    ABSENT,
    Body,
    Constant,
    DataType,
    Operation,
    Program,
    Value,
    ValueType,
    is_scan,
)
from stitch.runtime import LoadedProgram, Tensor

# --------------------------------------------------------------------------------------------------
# The state of a torch module, to detect changes.

#: What Python has in each class, or fills at its first use.
_OF_PYTHON = frozenset({
    "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__dict__",
    "__doc__", "__module__", "__weakref__",
})  # fmt: skip


def state_of(module: Any) -> tuple[Hashable, list[Any]]:
    """What a module computes with, and its tensors. An exported program does not change."""
    if not hasattr(module, "modules"):
        return None, []
    seen = _Seeing()
    return seen.state(module), seen.tensors


class SameObject:
    """Equal to what stands for the same living object, which is not kept alive.

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
        except TypeError:  # Small ones, such as torch's types; no other may come to lie there.
            self._ref = _Held(held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject) or self._at != other._at:
            return False
        held = self._ref()
        return held is not None and held is other._ref()

    def __hash__(self) -> int:
        return hash(self._at)


class _Held:
    """Gives what it holds, as a weak reference does."""

    __slots__ = ("_what",)

    def __init__(self, what: Any) -> None:
        self._what = what

    def __call__(self) -> Any:
        return self._what


class _Seeing:
    """One walk through a module; what is met again is called by its number."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._met: dict[int, int] = {}

    def state(self, value: Any) -> Hashable:
        """What a value is."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, MethodType):  # It is made anew whenever it is asked for.
            return "method", SameObject(value.__func__), self.state(value.__self__)
        if id(value) in self._met:
            return "again", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", value.dtype.str, value.shape, value.tobytes()
        if _is_tensor(value):
            self.tensors.append(value)
            return ("tensor",)
        if isinstance(value, dict):
            return "dict", *[(self.state(k), self.state(v)) for k, v in value.items()]
        if isinstance(value, tuple | list | set | frozenset):
            return SameObject(type(value)), *map(self.state, value)
        if hasattr(value, "modules") and hasattr(value, "parameters"):
            kind = type(value)
            classes = tuple([self._class(each) for each in kind.__mro__])
            return SameObject(kind), SameObject(kind.forward), classes, self.state(vars(value))
        return (SameObject(value),)

    def _class(self, kind: type) -> Hashable:
        """What a class of modules has; those of libraries stay."""
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            return SameObject(kind)
        if id(kind) in self._met:
            return "again", self._met[id(kind)]
        self._met[id(kind)] = len(self._met)
        own = [(name, each) for name, each in vars(kind).items() if name not in _OF_PYTHON]
        return SameObject(kind), *[(name, self.state(each)) for name, each in own]


def same_bits(before: Any, now: Any) -> bool:
    """Whether two tensors of torch are alike to the sign of a zero; never, where there is what is
    no number."""
    if before.shape != now.shape or before.dtype != now.dtype or not now.equal(before):
        return False
    return not now.is_floating_point() or bool(now.signbit().equal(before.signbit()))


def _is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor, without loading torch to ask."""
    return any((k.__module__, k.__name__) == ("torch", "Tensor") for k in type(value).__mro__)


# --------------------------------------------------------------------------------------------------
# Inlining programs into a graph under construction.

Source = Program | ComputationGraph


@dataclass(slots=True)
class _Plain:
    """A program without places: the casts written out that its storage makes.

    Its constants come after its inputs, so that the large ones lie where the graph wants them.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: tuple[Constant, ...] = ()

    def cast(self, value: int, data_type: DataType) -> int:
        """The value in a floating type; itself if it is in that."""
        before = self.values[value]
        if before.type.data_type is data_type:
            return value
        kind = ValueType(before.type.shape, data_type)
        self.values.append(Value(f"{before.name}.{data_type.short}", kind))
        made = len(self.values) - 1
        self.operations.append(Operation("Cast", (value,), (made,), {"to": onnx_code(data_type)}))
        return made


def written_in(source: Source, given: Sequence[Any], builder: Any) -> tuple[SymbolicTensor, ...]:
    """What a program gives for values of a graph, its operations written there.

    `given`: a value, array or number for each input; floats are converted. Raises `LinkError` for
    other shapes and types, `NoDataError` for a program that stores in blocks, which only a run
    rounds.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> inner, outer = ComputationGraphBuilder("double"), ComputationGraphBuilder("outer")
    >>> x = inner.input("x", (2,), "float32")
    >>> inner.output("y", x + x)
    >>> (y,) = written_in(inner.build(), [outer.input("z", (2,), "float32")], outer)
    >>> y.builder is outer, y.shape
    (True, (2,))
    """
    builder = builder.innermost(given)
    plain = _plain(source)
    operands = [
        _fitting(source, slot.name, source.values[slot.value].type, value, builder)
        for slot, value in zip(source.inputs, given, strict=True)
    ]
    operands += [builder.tensor(constant.data) for constant in source.constants]

    return write_operations(plain, source.bodies, operands, builder)


def write_operations(
    holder: Operations, bodies: Sequence[Body], operands: Sequence[Any], builder: Any
) -> tuple[SymbolicTensor, ...]:
    """What the operations of a graph or body give for values of a graph, written there; `bodies`
    are those that they carry."""

    def writer(numbers: Mapping[int, int]) -> WriteUnbatched:
        """Writes operations that carry a body; `numbers`: of their bodies, in this graph."""

        def write(operation: Operation, context: BatchingContext) -> Sequence[Any]:
            here: Any = context.builder
            body, operands = here.bodies.bodies[numbers[operation.body]], context.operands
            if is_scan(operation):
                return list(here.carry(operation.op, operation.domain, body, list(operands),
                                       operation.attributes))  # fmt: skip
            inside = vmap(body, operands, [False] * len(operands), 1, here, writer(same))
            return [result.tensor for result in inside.results]

        return write

    numbers = builder.bodies.add_all(bodies)
    same = {number: number for number in range(len(builder.bodies.bodies))}
    made = vmap(holder, operands, [False] * len(operands), 1, builder, writer(numbers))
    return tuple([result.tensor for result in made.results])


def _fitting(source: Source, slot: str, kind: ValueType, given: Any, builder: Any) -> Any:
    """A value as an input takes it, converted as an array is where a program is called."""
    tensor = builder.tensor(given)
    have, want = tensor.type.data_type, kind.data_type
    if tensor.shape != kind.shape:
        raise LinkError(
            f"input {slot!r} of {source.name!r} has another shape", expected=str(list(kind.shape)),
            got=str(list(tensor.shape)),
            remedy="reshape the tensor, or compile the program for this shape",
        )  # fmt: skip
    if have is want:
        return tensor
    if not (have.is_floating and want.is_floating):
        raise LinkError(
            f"input {slot!r} of {source.name!r} has another kind of number", expected=want.value,
            got=have.value, remedy=f"convert it with .cast({want.value!r})",
        )  # fmt: skip
    return tensor.cast(want)


def _plain(source: Source) -> _Plain:
    plain = _Plain(values=[replace(value, layout=None) for value in source.values])
    #: What readers of a value read, once its storage has rounded it.
    read: dict[int, int] = {ABSENT: ABSENT}
    slots = {slot.value for slot in source.outputs}
    stored = {number: _stored(source, number) for number in range(len(source.values))}

    def as_stored(number: int) -> None:
        kind = stored[number]
        if kind is not None:
            narrow = plain.cast(number, kind)
            read[number] = plain.cast(narrow, source.values[number].type.data_type)
            if number in slots:
                given[number] = narrow

    given: dict[int, int] = {}
    for number in (*(slot.value for slot in source.inputs), *(c.value for c in source.constants)):
        plain.inputs.append(number)
        as_stored(number)
    for operation in source.operations:
        inputs = tuple([read.get(value, value) for value in operation.inputs])
        plain.operations.append(replace(operation, inputs=inputs))
        for number in operation.outputs:
            if number != ABSENT:
                as_stored(number)
    plain.outputs = [given.get(slot.value, slot.value) for slot in source.outputs]
    return plain


def _stored(source: Source, number: int) -> DataType | None:
    """The type that a value is stored in, if it is another one than it is computed in."""
    value = source.values[number]
    if value.layout is None or value.layout.data_type is value.type.data_type:
        return None
    kind = value.layout.data_type
    if kind.is_block:
        slots = {slot.value: slot.name for slot in source.inputs}
        slots |= {slot.value: slot.name for slot in source.outputs}
        name = slots.get(number, value.name)
        raise NoDataError(
            f"program {source.name!r} stores {name!r} in {kind.value}, which only a run "
            "rounds as it does: it cannot become part of another program",
            remedy="call it outside of the function that is traced, or compile it with that slot "
            "in another type",
        )
    return kind


# --------------------------------------------------------------------------------------------------
# Programs and torch modules as functions over nests.

#: Captures that are kept of one module.
MAX_CAPTURED = 64


def as_function(function: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """A user function as one that can be called with the tensors of a builder: programs and torch
    modules on values of a graph too; others as they are."""
    if isinstance(function, LoadedProgram):
        return ProgramFunction(function, builder)
    return ModuleFunction(function, builder) if is_torch(function) else function


def called(program: LoadedProgram, given: Sequence[Any], builder: Any) -> Any:
    """What a program gives: by a run, or written into the graph that one of the values is of."""
    if not any(map(_is_traced, given)):
        return program(*given)
    found = written_in(program.program, given, builder)
    return found[0] if len(found) == 1 else found


class ProgramFunction:
    """A loaded program as a function."""

    def __init__(self, program: LoadedProgram, builder: Any) -> None:
        self._program, self._builder = program, builder

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Its results; raises what calling the program raises, `LinkError`."""
        program = self._program
        types = [(port.name, port.type.text()) for port in program.ports]
        given = arranged(f"program {program.name!r}", types, arguments, named)
        return called(program, given, self._builder)


class ModuleFunction:
    """A torch module as a function: what `forward` takes and gives are tensors, nested in tuples.

    Raises `CompileError` for what cannot be captured, `UsageError` for other arguments.
    """

    def __init__(self, module: Any, builder: Any) -> None:
        self._module, self._builder = module, builder
        forward = getattr(module, "forward", None)
        self.__signature__ = None if forward is None else inspect.signature(forward)
        #: What was captured in this call, by the types of what was given: no training runs during
        #: the call.
        self._known: dict[Hashable, _Captured] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The module's results for tensors."""
        if named:
            arguments = self._by_position(arguments, named)
        given = tuple([self._tensors(argument) for argument in arguments])
        flat = [*_flat(given)]
        kinds = _nested(given, lambda tensor: tensor.type)
        if kinds not in self._known:
            self._known[kinds] = _captured(self._module, kinds)
        captured = self._known[kinds]
        if isinstance(self._builder, EagerBuilder) and not any(map(_is_traced, flat)):
            found = self._builder.run(captured.graph, flat)
        else:
            found = written_in(captured.graph, flat, self._builder)
        return captured.shaped(found)

    def _by_position(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        name = type(self._module).__name__
        if self.__signature__ is None:
            raise UsageError(f"{name} takes what it is given by position", got=", ".join(named))
        try:
            bound = self.__signature__.bind(*arguments, **named)
        except TypeError as error:
            raise UsageError(f"{name}.forward: {error}", got=", ".join(named)) from error
        if bound.kwargs:
            raise UsageError(
                f"{name}.forward takes tensors by position", got=", ".join(bound.kwargs)
            )
        return bound.args

    def _tensors(self, value: Any) -> Any:
        """What stands for a module's argument: tensors of the builder."""
        if isinstance(value, tuple | list):
            return tuple([self._tensors(each) for each in value])
        if isinstance(value, float):
            value = np.float32(value)
        if isinstance(value, SymbolicTensor | Tensor | np.ndarray | np.generic | bool | int):
            array = value.numpy() if isinstance(value, Tensor) else value
            return self._builder.tensor(array)
        raise UsageError(
            f"{type(self._module).__name__} takes tensors, or tuples of such, as torch modules do",
            got=type(value).__name__, remedy="flatten the nest first: ops.flatten(nest)",
        )  # fmt: skip


class _Captured:
    """A module's graph for some types."""

    def __init__(self, graph: ComputationGraph, state: Hashable, tensors: Sequence[Any]) -> None:
        self.graph, self._state, self._tensors = graph, state, tensors
        self._paths = [_path(graph, slot.name) for slot in graph.outputs]

    def is_of(self, state: Hashable, tensors: Sequence[Any]) -> bool:
        """Whether the module is still what was captured."""
        pairs = zip(tensors, self._tensors, strict=False)
        return (
            state == self._state
            and len(tensors) == len(self._tensors)
            and all(same_bits(then, now) for now, then in pairs)
        )

    def shaped(self, found: Sequence[Any]) -> Any:
        """Results as the module gives them: one, or a tuple, nested."""
        if self._paths == [()]:
            return found[0]
        return _tuples(dict(zip(self._paths, found, strict=True)))


#: What was captured of modules that are alive, by the types of what they were given.
_modules: WeakKeyDictionary[Any, dict[Hashable, _Captured]] = WeakKeyDictionary()


def _captured(module: Any, kinds: Any) -> _Captured:
    """The module's graph for these types, as the module is now."""
    known = _modules.setdefault(module, {})
    state, tensors = state_of(module)
    if len(known) >= MAX_CAPTURED:
        known.clear()
    found = known.get(kinds)
    if found is None or not found.is_of(state, tensors):
        graph = read_graph(module, kinds)
        found = _Captured(graph, state, [tensor.detach().clone() for tensor in tensors])
        known[kinds] = found
    return found


def _is_traced(value: Any) -> bool:
    """Whether it is a value of a graph under construction."""
    return isinstance(value, SymbolicTensor) and value.written is None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _nested(value: Any, of: Callable[[Any], Any]) -> Any:
    return tuple([_nested(each, of) for each in value]) if isinstance(value, tuple) else of(value)


def _path(graph: ComputationGraph, name: str) -> tuple[int, ...]:
    """Where a result stands in what the module returns, by the name that the front end gave it."""
    first, *numbers = name.split("_")
    if first != "output" or not all(number.isdecimal() for number in numbers):
        raise UsageError(
            f"{graph.name} returns a dictionary, and functions over nests give tensors or tuples",
            got=name,
        )
    return tuple(map(int, numbers))


def _tuples(found: dict[tuple[int, ...], Any]) -> tuple[Any, ...]:
    """Results by their paths as nested tuples, in order."""
    groups: dict[int, dict[tuple[int, ...], Any]] = {}
    for path, value in found.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    return tuple([
        inside[()] if () in inside else _tuples(inside) for _, inside in sorted(groups.items())
    ])  # fmt: skip
