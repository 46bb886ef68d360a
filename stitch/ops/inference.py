"""`InferenceContext`: what shape and type inference looks at, and the rules that many share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from stitch.errors import CompileError
from stitch.program import Array, AttributeValue, DataType, ValueType

Attributes = Mapping[str, AttributeValue]


def int_of(attributes: Attributes, name: str) -> int:
    """An integer attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, int)
    return value


def float_of(attributes: Attributes, name: str) -> float:
    """A float attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, float)
    return value


def string_of(attributes: Attributes, name: str) -> str:
    """A string attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, str)
    return value


def ints_of(attributes: Attributes, name: str) -> tuple[int, ...] | None:
    """A list of integers, or None where the attribute is absent."""
    value = attributes.get(name)
    if value is None:
        return None
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))


class WithAttributes:
    """What an operation's context has: its resolved attributes, by name with their Python type."""

    __slots__ = ()
    attributes: Attributes

    def int_of(self, name: str) -> int:
        """An integer attribute."""
        return int_of(self.attributes, name)

    def float_of(self, name: str) -> float:
        """A float attribute."""
        return float_of(self.attributes, name)

    def string_of(self, name: str) -> str:
        """A string attribute."""
        return string_of(self.attributes, name)

    def ints_of(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where the attribute is absent."""
        return ints_of(self.attributes, name)


Shape = tuple[int, ...]
#: No window is longer, and none moves on by more: what is computed from that fits 64 bits.
MAX_STEP = 1 << 48


def operation_text(name: str, operands: Iterable[ValueType | None], location: str) -> str:
    """An operation by its name, its operands, and where it stands in its source."""
    kinds = ", ".join("_" if kind is None else kind.text() for kind in operands)
    return f"{name}({kinds})" + (f" at {location}" if location else "")


def _said(fact: object) -> str | None:
    """A fact for an error; shapes as lists."""
    return None if fact is None else str(list(fact) if isinstance(fact, tuple) else fact)


@dataclass(frozen=True, slots=True)
class InferenceContext(WithAttributes):
    """What shape and type inference may look at.

    `inputs[i]` is None for an absent optional operand; `constants[i]` holds the data of operand i
    where it is known at compile time (a Reshape's target shape), else None.
    """

    op: str
    inputs: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    attributes: Mapping[str, AttributeValue]
    outputs: int
    location: str = ""

    def fail(self, what: str, *, expected: object = None, got: object = None) -> CompileError:
        """The error to raise: names the operator, where it stands, and the operand types."""
        where = operation_text(self.op, self.inputs, self.location)
        return CompileError(what, where=where, expected=_said(expected), got=_said(got))

    def operand(self, index: int) -> ValueType:
        """The type of an operand that has to be there."""
        kind = self.inputs[index] if index < len(self.inputs) else None
        if kind is None:
            raise self.fail(f"{self.op} needs its operand {index}")
        return kind

    def present(self, index: int) -> ValueType | None:
        """The type of an optional operand."""
        return self.inputs[index] if index < len(self.inputs) else None

    def constant(self, index: int) -> Array | None:
        """The data of an operand where it is known at compile time."""
        return self.constants[index] if index < len(self.constants) else None

    def require_type(self, index: int, allowed: frozenset[DataType]) -> ValueType:
        """The type of operand `index`, which must be one of `allowed`."""
        kind = self.operand(index)
        if kind.data_type not in allowed:
            raise self.fail(
                f"{self.op} does not take this type as operand {index}",
                expected=" or ".join(sorted(t.value for t in allowed)),
                got=kind.data_type.value,
            )
        return kind

    def require_same_type(self, indices: Iterable[int]) -> None:
        """Those operands that are there must agree in data type."""
        types = {t.data_type for i in indices if (t := self.present(i)) is not None}
        if len(types) > 1:
            raise self.fail(
                f"the operands of {self.op} differ in type",
                expected="one type for all",
                got=", ".join(sorted(t.value for t in types)),
            )

    def require_rank(self, index: int, least: int, most: int | None = None) -> int:
        """The rank of operand `index`, which must be in `least..most`."""
        rank = len(self.operand(index).shape)
        if rank < least or (most is not None and rank > most):
            wanted = (
                f"{least}" if most == least else f"{least} to {'any' if most is None else most}"
            )
            raise self.fail(
                f"operand {index} of {self.op} has the wrong rank", expected=wanted, got=rank
            )
        return rank

    def require_shape(self, index: int, shape: Shape) -> None:
        """Operand `index` must have exactly this shape."""
        given = self.operand(index).shape
        if given != shape:
            raise self.fail(
                f"operand {index} of {self.op} has the wrong shape", expected=shape, got=given
            )

    def broadcast(self, *shapes: Shape) -> Shape:
        """The common shape of ONNX's multidirectional broadcasting."""
        rank = max(map(len, shapes), default=0)
        result = []
        for column in zip(*[(1,) * (rank - len(s)) + s for s in shapes], strict=True):
            sizes = set(column) - {1}
            if len(sizes) > 1:
                listed = " and ".join(str(list(s)) for s in shapes)
                raise self.fail(f"the shapes {listed} do not broadcast to one shape")
            result.append(sizes.pop() if sizes else 1)
        return tuple(result)

    def require_broadcast_to(self, index: int, shape: Shape) -> None:
        """Operand `index` must broadcast to `shape` without changing it."""
        given = self.operand(index).shape
        if self.broadcast(given, shape) != shape:
            raise self.fail(
                f"operand {index} of {self.op} does not broadcast to the first",
                expected=shape,
                got=given,
            )

    def axis_of(self, axis: int, rank: int) -> int:
        """A possibly negative axis as an index into a shape of `rank` dimensions."""
        if not -rank <= axis < rank:
            raise self.fail(
                f"{self.op} has no axis {axis}", expected=f"{-rank} to {rank - 1}", got=axis
            )
        return axis % rank

    def axes_of(self, axes: Iterable[int], rank: int) -> tuple[int, ...]:
        """Possibly negative axes as distinct indices into a shape of `rank` dimensions."""
        indices = tuple(self.axis_of(axis, rank) for axis in axes)
        if len(set(indices)) != len(indices):
            raise self.fail(f"{self.op} names an axis twice", got=indices)
        return indices

    def known_ints(self, index: int, name: str) -> tuple[int, ...]:
        """The integers of an operand that decides a shape, so it must be known at compile time."""
        kind = self.require_type(index, frozenset({DataType.INT64, DataType.INT32}))
        data = self.constant(index)
        if data is None:
            raise self.fail(
                f"operand {index} ({name}) of {self.op} must be known at compile time: "
                "it decides a shape",
                expected=f"a constant for {name}",
                got=f"a computed {kind.text()}",
            )
        return tuple(int(value) for value in np.ravel(data))

    def known_scalar(self, index: int, name: str) -> int:
        """The one integer of an operand that must be known at compile time."""
        values = self.known_ints(index, name)
        if len(values) != 1:
            raise self.fail(f"operand {index} ({name}) holds one number", got=len(values))
        return values[0]

    def require_word(self, name: str, allowed: Iterable[str], what: str) -> str:
        """A string attribute, which must be one of some words; `what` says what there is not."""
        words, given = tuple(allowed), self.string_of(name)
        if given not in words:
            raise self.fail(what, expected=", ".join(words), got=given)
        return given

    def spatial_ints(self, name: str, default: Shape, least: int = 1) -> Shape:
        """A list attribute with one integer per element of `default`, each at least `least`."""
        listed = self.ints_of(name)
        if listed is None:
            return default
        if len(listed) != len(default) or not all(least <= v <= MAX_STEP for v in listed):
            raise self.fail(
                f"attribute {name!r} of {self.op} does not fit",
                expected=f"{len(default)} integers from {least} to {MAX_STEP}",
                got=listed,
            )
        return listed


#: Gives the types of an operation's outputs; raises `CompileError` for operands that do not fit.
Inference = Callable[[InferenceContext], tuple[ValueType, ...]]


def same_as_first(allowed: frozenset[DataType]) -> Inference:
    """Inference for operators whose one output looks like their first operand."""

    def infer(context: InferenceContext) -> tuple[ValueType, ...]:
        return (context.require_type(0, allowed),)

    return infer
