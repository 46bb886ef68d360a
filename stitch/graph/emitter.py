"""`Emitter`: records values, constants and operations; infers types as operations are added.

The method families (`*_methods.py`) build on this class alone; the graph builder adds slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from stitch import ops
from stitch.argument_kinds import TEXT, ArgumentKind
from stitch.errors import CompileError
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.constant_pool import ConstantPool, array_of
from stitch.graph.known_values import KnownValues
from stitch.graph.source_location import mistake, user_location
from stitch.graph.symbolic import Axes, Operand, SymbolicTensor
from stitch.program import (
    ABSENT,
    Array,
    AttributeValue,
    Body,
    BodyPool,
    DataType,
    Operation,
    Value,
    ValueType,
    is_symbolic,
)

#: An attribute value as callers write it: also lists, booleans, data types, None for absent.
AttributeLike = (
    AttributeValue | bool | DataType | Sequence[int] | Sequence[float] | Sequence[str] | None
)
#: An operand as callers write it: also a list of ints (an int64 vector), None for absent.
OperandLike = Operand | Sequence[int] | Sequence[float] | None
#: A data type as callers write it.
DataTypeLike = DataType | str | np.dtype[Any] | type

TYPE_NAME = ArgumentKind(
    "the name of a data type, a DataType or a NumPy type",
    lambda value: isinstance(value, str | DataType | np.dtype | type),
)


class Emitter:
    """A graph under construction. Every operand may also be an array or a number."""

    __slots__ = (
        "_bodies", "_constants", "_graph", "_known", "_location", "_made", "_names", "_operations",
        "_unnamed", "_values", "name",
    )  # fmt: skip

    def __init__(self, name: str, bodies: BodyPool | None = None) -> None:
        """`bodies`: the pool of the graph that this builder is part of; a new one by default."""
        self.name = name
        self._bodies = BodyPool() if bodies is None else bodies
        self._values: list[Value] = []
        self._operations: list[Operation] = []
        self._constants = ConstantPool()
        self._known = KnownValues()
        self._names: dict[str, int] = {}
        #: Constants without a name.
        self._unnamed: set[int] = set()
        #: Results of operations that are no outputs yet.
        self._made: set[int] = set()
        self._location = ""
        self._graph: ComputationGraph | None = None

    def parameter(self, name: str, array: object) -> SymbolicTensor:
        """Add a named constant; a writable array is copied, a read-only one is shared."""
        return self._constant(name, array_of(array, self._where()))

    def constant(self, array: object) -> SymbolicTensor:
        """Add an unnamed constant; equal small arrays but integers share one value."""
        data = array_of(array, self._where())
        known = self._constants.find(data)
        if known is not None:
            return self._tensor(known)
        tensor = self._constant("constant", data, is_numbered=True)
        self._unnamed.add(tensor.index)
        return tensor

    def _constant(self, name: str, data: Array, *, is_numbered: bool = False) -> SymbolicTensor:
        self._check_open()
        kind = ValueType(data.shape, data_type_of(data.dtype))
        tensor = self._value(name, kind, is_numbered=is_numbered)
        kept = self._constants.add(tensor.index, data)
        self._known.add_constant(tensor.index, kept)
        return tensor

    def apply(
        self,
        op: str,
        operands: Sequence[OperandLike],
        outputs: int | Sequence[str],
        attributes: Mapping[str, AttributeLike],
        domain: str = "",
    ) -> tuple[SymbolicTensor, ...]:
        """Add one operation and return its results.

        An operation on a tensor of a body under construction is added to that body.

        Raises:
            CompileError: The operator does not exist, or operands or attributes do not fit it.
        """
        inside = self.innermost(operands)
        if inside is not self:
            return inside.apply(op, operands, outputs, attributes, domain)
        self._check_open()
        TEXT.check("ComputationGraphBuilder.op", "op", op)
        domain = "" if domain == "ai.onnx" else domain
        given = (o for o in operands if isinstance(o, SymbolicTensor))
        # A condition does not decide the type of a number: `Where(condition, -inf, x)`.
        like = next((o for o in given if o.data_type is not DataType.BOOL), None)
        tensors = [None if o is None else self.tensor(o, like) for o in operands]
        while tensors and tensors[-1] is None:
            tensors.pop()
        is_numbered = isinstance(outputs, int)
        names = [op.lower()] * outputs if isinstance(outputs, int) else list(outputs)
        written = self._attributes(op, domain, attributes)
        indices = tuple(ABSENT if t is None else t.index for t in tensors)
        types = [None if t is None else t.type for t in tensors]
        draft = Operation(op, indices, (), written, domain, self._where())
        inferred = ops.infer_types(
            op, types, domain=domain, constants=self._known.operands(draft), attributes=written,
            outputs=len(names), location=draft.location,
        )  # fmt: skip
        results = tuple([
            self._value(name, kind, is_numbered=is_numbered)
            for name, kind in zip(names, inferred, strict=True)
        ])  # fmt: skip
        numbers = tuple(t.index for t in results)
        operation = Operation(op, indices, numbers, written, domain, draft.location)
        self._operations.append(operation)
        self._known.add_operation(operation, types)
        self._made.update(numbers)
        return results

    def apply_foreign(
        self, operation: Operation, operands: Sequence[SymbolicTensor | None],
        names: Sequence[str], types: Sequence[ValueType | None],
    ) -> tuple[SymbolicTensor | None, ...]:  # fmt: skip
        """Add one operation of a foreign operator.

        Args:
            operation: Gives operator, domain, version and attributes.
            operands: Its operands, None for an absent one.
            names: The names of its results.
            types: The types of its results; None for an unused one.

        Returns: The results, None for an unused one.
        """
        inside = self.innermost(operands)
        if inside is not self:
            return inside.apply_foreign(operation, operands, names, types)
        self._check_open()
        tensors = [None if o is None else self.tensor(o) for o in operands]
        results = tuple([
            None if kind is None else self._value(name, kind)
            for name, kind in zip(names, types, strict=True)
        ])  # fmt: skip
        numbers = tuple([ABSENT if t is None else t.index for t in results])
        given = tuple([ABSENT if t is None else t.index for t in tensors])
        self._operations.append(
            replace(operation, inputs=given, outputs=numbers, location=self._where())
        )
        self._made.update(number for number in numbers if number != ABSENT)
        return results

    def repeat(
        self, operation: Operation, operands: Sequence[Any], names: Sequence[str],
        types: Sequence[ValueType | None],
    ) -> Sequence[Any]:  # fmt: skip
        """Add an operation of another graph, without a body, with other operands.

        `types` are its result types there; a foreign operator keeps them.
        """
        if operation.is_foreign:
            return self.apply_foreign(operation, operands, names, types)
        return self.apply(operation.op, operands, names, operation.attributes, operation.domain)

    def carry(
        self, op: str, domain: str, body: Body, operands: Sequence[SymbolicTensor],
        attributes: Mapping[str, AttributeValue],
    ) -> tuple[SymbolicTensor, ...]:  # fmt: skip
        """Add an operation that carries a body; bodies inside it belong to this graph's pool.

        Raises:
            CompileError: The attributes of a scan do not fit the body.
        """
        self._check_open()
        tensors = [self.tensor(operand) for operand in operands]
        indices = tuple([t.index for t in tensors])
        number = self._bodies.add(body)
        draft = Operation(op, indices, (), attributes, domain, self._where(), number)
        kinds = ops.infer_operation(
            replace(draft, outputs=(ABSENT,) * len(body.outputs)), [t.type for t in tensors], (),
            bodies=self._bodies.bodies,
        )  # fmt: skip
        results = tuple([self._value(op.lower(), kind, is_numbered=True) for kind in kinds])
        numbers = tuple([t.index for t in results])
        self._operations.append(replace(draft, outputs=numbers))
        self._made.update(numbers)
        return results

    def innermost(self, operands: Sequence[object]) -> Emitter:
        """Return the innermost builder among those of the operands, or this one."""
        inside: Emitter = self
        for operand in operands:
            if type(operand) is SymbolicTensor:
                builder: Any = operand.builder
                if builder is not inside and builder.is_inside(inside):
                    inside = builder
        return inside

    def is_inside(self, other: Emitter) -> bool:
        """Whether this builder builds a body inside `other`; false once the body is finished."""
        return False

    @property
    def bodies(self) -> BodyPool:
        """The bodies of the graph."""
        return self._bodies

    def tensor(self, given: OperandLike, like: SymbolicTensor | None = None) -> SymbolicTensor:
        """Convert an operand to a tensor: arrays and numbers become constants.

        Numbers take the data type of `like`.

        Raises:
            CompileError: `given` is a tensor of another graph, or was overwritten in place.
        """
        if isinstance(given, SymbolicTensor):
            builder: Any = given.builder
            if given.written is not None:
                return self.constant(given.written)
            if given.overwritten:
                raise mistake(
                    f"{given!r} is read after its memory was overwritten under another name "
                    f"({given.overwritten}): NumPy would return the new contents",
                    remedy="make a new tensor there, as in y = y + 1 instead of y += 1, or copy "
                    "first, as in y = x.copy()",
                )
            if builder is not self and not builder.is_inside(self):
                builder._check_unfinished()
                raise CompileError(
                    f"{given!r} belongs to another graph ({given.builder.name!r})",
                    where=f"graph {self.name!r} at {self._where()}",
                    remedy="pass it as an input, or build both parts with one builder",
                )
            return given
        kind = None if like is None else like.data_type
        return self.constant(array_of(given, self._where(), kind))

    @contextmanager
    def at(self, location: str) -> Iterator[None]:
        """Record `location` as the source location of operations added in this context."""
        before, self._location = self._location, location
        try:
            yield
        finally:
            self._location = before

    @property
    def location(self) -> str:
        """The source location of operations that are added now."""
        return self._where()

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations so far, in run order (do not modify)."""
        return self._operations

    def type_of(self, index: int) -> ValueType:
        """The type of a value."""
        return self._values[index].type

    def name_of(self, index: int) -> str:
        """The name of a value."""
        return self._values[index].name

    def is_unnamed_constant(self, tensor: SymbolicTensor) -> bool:
        """Whether a tensor is an unnamed constant (not a parameter) of this builder."""
        builder: Any = tensor.builder
        return builder is self and tensor.index in self._unnamed

    def known_data(self, tensor: SymbolicTensor) -> Array | None:
        """Return the data of a small tensor if it is known already (read-only), else None."""
        found = self.tensor(tensor)
        builder: Any = found.builder
        known: Array | None = (
            builder.known_data(found) if builder.is_inside(self) else self._known.get(found.index)
        )
        return known

    def _one(self, op: str, *operands: OperandLike, **attributes: AttributeLike) -> SymbolicTensor:
        return self.apply(op, operands, 1, attributes)[0]

    def _pair(self, name: str, a: Operand, b: Operand) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Return two operands as tensors of one data type."""
        like = next((t for t in (a, b) if isinstance(t, SymbolicTensor)), None)
        if like is None:
            like = next((self.tensor(t) for t in (a, b) if isinstance(t, np.ndarray)), None)
        x, y = self.tensor(a, like), self.tensor(b, like)
        self._same_type(name, (x, y))
        return x, y

    def _same_type(self, name: str, tensors: Sequence[SymbolicTensor]) -> None:
        kinds = [t.data_type for t in tensors]
        if len(set(kinds)) > 1:
            raise mistake(
                f"the operands of {name} have different data types; ONNX does not promote types",
                expected="one data type",
                got=", ".join(t.type.text() for t in tensors),
                remedy=f"cast the others, for instance with .cast({kinds[0].value!r})",
            )

    def _value(self, name: str, kind: ValueType, *, is_numbered: bool = False) -> SymbolicTensor:
        self._check_open()
        times = self._names.get(name, 0)
        unique = name
        while times and unique in self._names:
            unique = f"{name}_{times}"
            times += 1
        self._names[name] = max(times, 1)
        self._names.setdefault(unique, 1)
        self._values.append(Value(unique, kind, is_numbered=is_numbered))
        return self._tensor(len(self._values) - 1)

    def _tensor(self: Any, index: int) -> SymbolicTensor:
        # `Any`: the subclasses add the methods that `SymbolicTensor` calls.
        return SymbolicTensor(self, index)

    def _attributes(
        self, op: str, domain: str, attributes: Mapping[str, AttributeLike]
    ) -> dict[str, AttributeValue]:
        declared = ops.lookup(op, domain).attributes
        written: dict[str, AttributeValue] = {}
        for name, value in attributes.items():
            if value is None:
                continue
            kind = declared[name].kind if name in declared else ""
            written[name] = attribute_of(value, kind)
        return written

    def _where(self) -> str:
        return self._location or user_location()

    def _check_unfinished(self) -> None:
        """Raise `CompileError` if this builds a body that is finished."""

    def _check_open(self) -> None:
        if self._graph is not None:
            raise CompileError(
                f"the graph {self.name!r} is already built; no operation can be added",
                where=self._where(),
                remedy="use its tensors only inside the traced function, before build()",
            )


def axis_of(axis: int, rank: int, what: str) -> int:
    """Return an axis counted from the front; raise `CompileError` if it does not exist."""
    if not -rank <= axis < rank:
        raise mistake(
            f"{what} has no axis {axis}",
            expected=f"{-rank} to {rank - 1}" if rank else "a tensor with axes",
        )
    return int(axis) % rank


def axes_of(axes: Axes, rank: int, what: str) -> tuple[int, ...]:
    """Return distinct axes counted from the front; None means all axes."""
    if axes is None:
        return tuple(range(rank))
    given = [axes] if isinstance(axes, int | np.integer) else list(axes)
    counted = tuple(axis_of(int(a), rank, what) for a in given)
    if len(set(counted)) != len(counted):
        raise mistake(f"{what}: an axis is repeated", got=str(axes))
    return counted


def data_type_of(given: DataTypeLike) -> DataType:
    """Convert a name, a NumPy type or a `DataType`."""
    if isinstance(given, DataType):
        return given
    if isinstance(given, str):
        return DataType.parse(given)
    return DataType.from_dtype(given)


def attribute_of(value: AttributeLike, kind: str = "") -> AttributeValue:
    """Convert an attribute to the representation in graphs: tuples, ints for data types.

    Symbolic sizes are specialised.
    """
    if is_symbolic(value):
        value = int(cast(Any, value))
    if isinstance(value, DataType):
        return ops.onnx_code(value)
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | np.number):
        number = value.item() if isinstance(value, np.number) else value
        return (
            float(number)
            if kind == "float"
            else (number if isinstance(number, float) else int(number))
        )
    items: list[Any] = [value]
    if value is None or isinstance(value, Iterable):
        items = [int(v) if is_symbolic(v) else v for v in (() if value is None else value)]
    if items and all(isinstance(item, str) for item in items):
        return tuple(items)
    if not all(isinstance(item, bool | int | float | np.number) for item in items):
        raise mistake(
            "an attribute must be a number, a string, or a list of either", got=repr(value)[:80]
        )
    if kind == "floats" or any(isinstance(item, float | np.floating) for item in items):
        return tuple(float(item) for item in items)
    return tuple(int(item) for item in items)
