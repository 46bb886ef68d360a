"""Programs as user functions over nests.

Called with data they run; called with symbolic tensors their operations are written into that
graph, with the casts that storing in narrower types implies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from stitch.argument_kinds import arranged
from stitch.errors import LinkError, UsageError
from stitch.frontend import is_torch
from stitch.graph import (
    ComputationGraph,
    NoDataError,
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
from stitch.runtime import LoadedProgram

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
    holder: Any, bodies: Sequence[Body], operands: Sequence[Any], builder: Any
) -> tuple[SymbolicTensor, ...]:
    """Write the operations of a body, a graph or an `_InlineProgram` into a graph; `bodies` are
    those that they refer to."""

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
# Programs as functions over nests.


def as_function(function: Callable[..., Any], builder: Any) -> Callable[..., Any]:
    """Return programs as functions of a builder's tensors; others unchanged.

    Raises `UsageError` for a torch module.
    """
    if isinstance(function, LoadedProgram):
        return partial(_call_loaded, function, builder)
    if is_torch(function):
        raise UsageError(
            "functions over nests do not take torch modules", got=type(function).__name__,
            remedy="pass device.load(stitch.compile(module, example_inputs, target=...))",
        )  # fmt: skip
    return function


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


def _is_traced(value: Any) -> bool:
    return isinstance(value, SymbolicTensor) and value.written is None
