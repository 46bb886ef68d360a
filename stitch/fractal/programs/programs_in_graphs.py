"""Programs whose compiler knew nothing of the graph that is being written become part of it.

Only values count: where a tensor lies is the new graph's own affair. But what is stored in another
floating type than it is computed in is rounded there, as a run rounds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stitch.errors import LinkError
from stitch.graph import (
    ComputationGraph,
    NoDataError,
    Operations,
    SymbolicTensor,
    Unliftable,
    lift,
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

    def writer(numbers: Mapping[int, int]) -> Unliftable:
        """Writes operations that carry a body; `numbers`: of their bodies, in this graph."""

        def write(operation: Operation, context: BatchingContext) -> Sequence[Any]:
            here: Any = context.builder
            body, operands = here.bodies.bodies[numbers[operation.body]], context.operands
            if is_scan(operation):
                return list(here.carry(operation.op, operation.domain, body, list(operands),
                                       operation.attributes))  # fmt: skip
            inside = lift(body, operands, [False] * len(operands), 1, here, writer(same))
            return [result.tensor for result in inside.results]

        return write

    numbers = builder.bodies.add_all(bodies)
    same = {number: number for number in range(len(builder.bodies.bodies))}
    made = lift(holder, operands, [False] * len(operands), 1, builder, writer(numbers))
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
