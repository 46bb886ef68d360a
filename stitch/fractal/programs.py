"""Programs and torch modules as user functions over nests.

Called with data they run; called with symbolic tensors their operations are written into that
graph, with the casts that storing in narrower types implies. A module is captured once per argument
types, and again after its weights, submodules, hooks or attributes have changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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
# The state of a torch module, to detect changes


def state_of(module: Any) -> tuple[Hashable, list[Any]]:
    """Return a key of what a module computes with, and its tensors. Exported programs never
    change."""
    if not hasattr(module, "modules"):
        return None, []
    seen = _StateReader()
    return seen.state(module), seen.tensors


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
            self._ref = _StrongReference(held)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject) or self._at != other._at:
            return False
        held = self._ref()
        return held is not None and held is other._ref()

    def __hash__(self) -> int:
        return hash(self._at)


class _StrongReference:
    """A strong reference with the call interface of a weak one."""

    __slots__ = ("_what",)

    def __init__(self, what: Any) -> None:
        self._what = what

    def __call__(self) -> Any:
        return self._what


class _StateReader:
    """Reads a module's state; objects that occur again are replaced by their number."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self._met: dict[int, int] = {}

    def state(self, value: Any) -> Hashable:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return type(value).__name__, repr(value)
        if isinstance(value, MethodType):  # A new object at each attribute access.
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
            return SameObject(kind), SameObject(kind.forward), self.state(vars(value))
        return (SameObject(value),)


def same_bits(before: Any, now: Any) -> bool:
    """Return whether two torch tensors are equal, including signs of zeros; False with NaN."""
    if before.shape != now.shape or before.dtype != now.dtype or not now.equal(before):
        return False
    return not now.is_floating_point() or bool(now.signbit().equal(before.signbit()))


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    return any((k.__module__, k.__name__) == ("torch", "Tensor") for k in type(value).__mro__)


# --------------------------------------------------------------------------------------------------
# Inlining programs into a graph under construction.

Source = Program | ComputationGraph


@dataclass(slots=True)
class _InlineProgram:
    """A program without layouts, with the casts of its storage as operations.

    Constants follow the inputs, so that the target graph decides where large ones are stored.
    """

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    constants: tuple[Constant, ...] = ()

    def cast(self, value: int, data_type: DataType) -> int:
        """Return the value in a floating type, by a Cast if needed."""
        before = self.values[value]
        if before.type.data_type is data_type:
            return value
        kind = ValueType(before.type.shape, data_type)
        self.values.append(Value(f"{before.name}.{data_type.short}", kind))
        result = len(self.values) - 1
        self.operations.append(Operation("Cast", (value,), (result,), {"to": onnx_code(data_type)}))
        return result


def inline_program(
    source: Source, arguments: Sequence[Any], builder: Any
) -> tuple[SymbolicTensor, ...]:
    """Write a program's operations into the graph of `builder`; return its outputs.

    Args:
        arguments: A tensor, array or number for each input; floats are converted.

    Raises:
        LinkError: A shape or type differs.
        NoDataError: The program stores values in block formats, which only a run rounds correctly.

    >>> from stitch.graph import ComputationGraphBuilder
    >>> inner, outer = ComputationGraphBuilder("double"), ComputationGraphBuilder("outer")
    >>> x = inner.input("x", (2,), "float32")
    >>> inner.output("y", x + x)
    >>> (y,) = inline_program(inner.build(), [outer.input("z", (2,), "float32")], outer)
    >>> y.builder is outer, y.shape
    (True, (2,))
    """
    builder = builder.innermost(arguments)
    plain = _without_storage(source)
    operands = [
        _fitting(source, slot.name, source.values[slot.value].type, value, builder)
        for slot, value in zip(source.inputs, arguments, strict=True)
    ]
    operands += [builder.tensor(constant.data) for constant in source.constants]

    return write_operations(plain, source.bodies, operands, builder)


def write_operations(
    holder: Operations, bodies: Sequence[Body], operands: Sequence[Any], builder: Any
) -> tuple[SymbolicTensor, ...]:
    """Write operations into a graph; `bodies` are those that they refer to."""

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
    results = vmap(holder, operands, [False] * len(operands), 1, builder, writer(numbers))
    return tuple([result.tensor for result in results.results])


def _fitting(source: Source, slot: str, kind: ValueType, argument: Any, builder: Any) -> Any:
    """Return an operand in an input's type, with the conversions of a program call."""
    tensor = builder.tensor(argument)
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


def _without_storage(source: Source) -> _InlineProgram:
    plain = _InlineProgram(values=[replace(value, layout=None) for value in source.values])
    #: For each value, the one that its readers read: rounded by its storage.
    read: dict[int, int] = {ABSENT: ABSENT}
    slots = {slot.value for slot in source.outputs}
    stored = {number: _stored(source, number) for number in range(len(source.values))}

    def as_stored(number: int) -> None:
        kind = stored[number]
        if kind is not None:
            narrow = plain.cast(number, kind)
            read[number] = plain.cast(narrow, source.values[number].type.data_type)
            if number in slots:
                narrow_of[number] = narrow

    narrow_of: dict[int, int] = {}
    for number in (*(slot.value for slot in source.inputs), *(c.value for c in source.constants)):
        plain.inputs.append(number)
        as_stored(number)
    for operation in source.operations:
        inputs = tuple([read.get(value, value) for value in operation.inputs])
        plain.operations.append(replace(operation, inputs=inputs))
        for number in operation.outputs:
            if number != ABSENT:
                as_stored(number)
    plain.outputs = [narrow_of.get(slot.value, slot.value) for slot in source.outputs]
    return plain


def _stored(source: Source, number: int) -> DataType | None:
    """Return the type in which a value is stored, None if it is the type it is computed in."""
    value = source.values[number]
    if value.layout is None or value.layout.data_type is value.type.data_type:
        return None
    kind = value.layout.data_type
    if kind.is_block:
        slots = {slot.value: slot.name for slot in source.inputs}
        slots |= {slot.value: slot.name for slot in source.outputs}
        name = slots.get(number, value.name)
        raise NoDataError(
            f"program {source.name!r} cannot be inlined: it stores {name!r} in the block format "
            f"{kind.value}, whose rounding no operator has",
            remedy="call it outside of the traced function, or compile it with this slot in "
            "another type",
        )
    return kind


# --------------------------------------------------------------------------------------------------
# Programs and torch modules as functions over nests.

#: Cached captures per module.
MAX_CAPTURED = 64


def as_function(function: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """Return programs and torch modules as functions of a builder's tensors; others unchanged."""
    if isinstance(function, LoadedProgram):
        return partial(_call_loaded, function, builder)
    return ModuleFunction(function, builder) if is_torch(function) else function


def call_program(program: LoadedProgram, arguments: Sequence[Any], builder: Any) -> Any:
    """Run a program, or write it into the graph of a symbolic argument."""
    if not any(map(_is_traced, arguments)):
        return program(*arguments)
    results = inline_program(program.program, arguments, builder)
    return results[0] if len(results) == 1 else results


def _call_loaded(program: LoadedProgram, builder: Any, /, *arguments: Any, **named: Any) -> Any:
    types = [(port.name, port.type.text()) for port in program.ports]
    inputs = arranged(f"program {program.name!r}", types, arguments, named)
    return call_program(program, inputs, builder)


class ModuleFunction:
    """A torch module as a function of tensors and nested tuples of them.

    Raises `CompileError` if it cannot be captured, `UsageError` for other arguments.
    """

    def __init__(self, module: Any, builder: Any) -> None:
        self._module, self._builder = module, builder
        forward = getattr(module, "forward", None)
        self.__signature__ = None if forward is None else inspect.signature(forward)
        #: Captures of this call by argument types: the module does not change during the call.
        self._known: dict[Hashable, _Captured] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if named:
            arguments = self._by_position(arguments, named)
        tensors = tuple([self._tensors(argument) for argument in arguments])
        flat = [*_flat(tensors)]
        kinds = _nested(tensors, lambda tensor: tensor.type)
        if kinds not in self._known:
            self._known[kinds] = _captured(self._module, kinds)
        captured = self._known[kinds]
        if isinstance(self._builder, EagerBuilder) and not any(map(_is_traced, flat)):
            results = self._builder.run(captured.graph, flat)
        else:
            results = inline_program(captured.graph, flat, self._builder)
        return captured.shaped(results)

    def _by_position(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        name = type(self._module).__name__
        if self.__signature__ is None:
            raise UsageError(f"{name} accepts positional arguments only", got=", ".join(named))
        try:
            bound = self.__signature__.bind(*arguments, **named)
        except TypeError as error:
            raise UsageError(f"{name}.forward: {error}", got=", ".join(named)) from error
        if bound.kwargs:
            raise UsageError(
                f"{name}.forward accepts positional tensors only", got=", ".join(bound.kwargs)
            )
        return bound.args

    def _tensors(self, value: Any) -> Any:
        """Return an argument as tensors of the builder."""
        if isinstance(value, tuple | list):
            return tuple([self._tensors(each) for each in value])
        if isinstance(value, float):
            value = np.float32(value)
        if isinstance(value, SymbolicTensor | Tensor | np.ndarray | np.generic | bool | int):
            array = value.numpy() if isinstance(value, Tensor) else value
            return self._builder.tensor(array)
        raise UsageError(
            f"{type(self._module).__name__} accepts tensors and tuples of tensors only",
            got=type(value).__name__, remedy="flatten the nest first: ops.flatten(nest)",
        )  # fmt: skip


class _Captured:
    """A module's graph for some argument types, and the module's state at the capture."""

    def __init__(self, graph: ComputationGraph, state: Hashable, tensors: Sequence[Any]) -> None:
        self.graph, self._state, self._tensors = graph, state, tensors
        self._paths = [_path(graph, slot.name) for slot in graph.outputs]

    def is_of(self, state: Hashable, tensors: Sequence[Any]) -> bool:
        """Return whether the module's state is unchanged."""
        pairs = zip(tensors, self._tensors, strict=False)
        return (
            state == self._state
            and len(tensors) == len(self._tensors)
            and all(same_bits(then, now) for now, then in pairs)
        )

    def shaped(self, results: Sequence[Any]) -> Any:
        """Return results nested as the module returns them."""
        if self._paths == [()]:
            return results[0]
        return _tuples(dict(zip(self._paths, results, strict=True)))


#: Captures of living modules by argument types.
_modules: WeakKeyDictionary[Any, dict[Hashable, _Captured]] = WeakKeyDictionary()


def _captured(module: Any, kinds: Any) -> _Captured:
    """Return the module's graph for these types; capture it again if its state has changed."""
    captures = _modules.setdefault(module, {})
    state, tensors = state_of(module)
    if len(captures) >= MAX_CAPTURED:
        captures.clear()
    capture = captures.get(kinds)
    if capture is None or not capture.is_of(state, tensors):
        graph = read_graph(module, kinds)
        capture = _Captured(graph, state, [tensor.detach().clone() for tensor in tensors])
        captures[kinds] = capture
    return capture


def _is_traced(value: Any) -> bool:
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
    """Return the position of a result in the module's return value, from the front end's name."""
    first, *numbers = name.split("_")
    if first != "output" or not all(number.isdecimal() for number in numbers):
        raise UsageError(
            f"{graph.name} returns a dictionary; functions over nests return tensors or tuples",
            got=name,
        )
    return tuple(map(int, numbers))


def _tuples(results: dict[tuple[int, ...], Any]) -> tuple[Any, ...]:
    """Return results by their paths as nested tuples."""
    groups: dict[int, dict[tuple[int, ...], Any]] = {}
    for path, value in results.items():
        groups.setdefault(path[0], {})[path[1:]] = value
    return tuple([
        inside[()] if () in inside else _tuples(inside) for _, inside in sorted(groups.items())
    ])  # fmt: skip
