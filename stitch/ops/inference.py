"""Shape and type inference: the context that rules read, and the checks that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stitch.errors import CompileError
from stitch.program import Array, AttributeValue, DataType, ValueType, integers_of, is_symbolic

Attributes = Mapping[str, AttributeValue]
Shape = tuple[int, ...]
#: Limit of kernel sizes, strides, dilations and pads, so that sums of their products fit in int64.
MAX_STEP = 1 << 48


def int_of(attributes: Attributes, name: str) -> int:
    """Return an integer attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, int)
    return value


def float_of(attributes: Attributes, name: str) -> float:
    """Return a float attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, float)
    return value


def string_of(attributes: Attributes, name: str) -> str:
    """Return a string attribute of a resolved mapping."""
    value = attributes[name]
    assert isinstance(value, str)
    return value


def ints_of(attributes: Attributes, name: str) -> Shape | None:
    """Return an attribute that is a list of integers, None if it is absent."""
    value = attributes.get(name)
    if value is None:
        return None
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))


class WithAttributes:
    """Accessors of resolved attributes by Python type, for every context of an operation."""

    __slots__ = ()
    attributes: Attributes

    def int_of(self, name: str) -> int:
        return int_of(self.attributes, name)

    def float_of(self, name: str) -> float:
        return float_of(self.attributes, name)

    def string_of(self, name: str) -> str:
        return string_of(self.attributes, name)

    def ints_of(self, name: str) -> Shape | None:
        return ints_of(self.attributes, name)


def operation_text(name: str, operands: Iterable[ValueType | None], location: str) -> str:
    """Format an operation for messages: its name, operand types and source location."""
    kinds = ", ".join("_" if kind is None else kind.text() for kind in operands)
    return f"{name}({kinds})" + (f" at {location}" if location else "")


def _text(fact: object) -> str | None:
    """Format an expected or actual value: shapes as lists, sets as alternatives."""
    if isinstance(fact, frozenset):
        return " or ".join(sorted(data_type.value for data_type in fact))
    return None if fact is None else str(list(fact) if isinstance(fact, tuple) else fact)


@dataclass(frozen=True, slots=True)
class InferenceContext(WithAttributes):
    """One operation whose output types are inferred.

    `inputs[i]` is None for an absent optional operand; `constants[i]` holds the data of operand i
    if it is known at compile time, else None. Checks raise `CompileError`.
    """

    op: str
    inputs: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    attributes: Mapping[str, AttributeValue]
    outputs: int
    location: str = ""

    def fail(
        self, what: str, *, expected: object = None, got: object = None, remedy: str | None = None
    ) -> CompileError:
        """Return the error to raise; it names the operator, its operand types and its location."""
        where = operation_text(self.op, self.inputs, self.location)
        expected, got = _text(expected), _text(got)
        return CompileError(what, where=where, expected=expected, got=got, remedy=remedy)

    def require(
        self, condition: object, what: str, *, expected: object = None, got: object = None
    ) -> None:
        """Raise the error `fail` returns unless a condition holds."""
        if not condition:
            raise self.fail(what, expected=expected, got=got)

    def operand(self, index: int) -> ValueType:
        """Return the type of an operand that must be present."""
        kind = self.present(index)
        if kind is None:
            raise self.fail(f"operand {index} of {self.op} is missing")
        return kind

    def present(self, index: int) -> ValueType | None:
        """Return the type of an optional operand, None if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def constant(self, index: int) -> Array | None:
        """Return the data of an operand, None if it is not known at compile time."""
        return self.constants[index] if index < len(self.constants) else None

    def require_type(self, index: int, allowed: frozenset[DataType]) -> ValueType:
        """Check that operand `index` is present with one of these types, and return its type."""
        kind = self.operand(index)
        if kind.data_type not in allowed:
            raise self.fail(
                f"{self.op} does not support the data type of operand {index}",
                expected=allowed,
                got=kind.data_type.value,
            )
        return kind

    def require_same_type(self, indices: Iterable[int]) -> None:
        """Check that those of the operands that are present agree in data type."""
        types = {t.data_type for i in indices if (t := self.present(i)) is not None}
        if len(types) > 1:
            raise self.fail(
                f"operands of {self.op} have different data types",
                expected="one data type",
                got=", ".join(sorted(t.value for t in types)),
                remedy="ONNX does not promote types: insert a Cast, or give each parameter the "
                "type of the input (`type:` in YAML)",
            )

    def require_rank(self, index: int, least: int, most: int | None = None) -> int:
        """Check that the rank of operand `index` is in `least..most`, and return it."""
        rank = len(self.operand(index).shape)
        if rank < least or (most is not None and rank > most):
            upper = "or more" if most is None else f"to {most}"
            raise self.fail(
                f"operand {index} of {self.op} has rank {rank}",
                expected=f"rank {least}" if most == least else f"rank {least} {upper}",
                got=f"rank {rank}",
            )
        return rank

    def require_shape(self, index: int, shape: Shape) -> None:
        """Check that operand `index` has this shape, if it is present."""
        kind = self.present(index)
        if kind is not None and kind.shape != shape:
            raise self.fail(
                f"operand {index} of {self.op} has the wrong shape", expected=shape, got=kind.shape
            )

    def require_scalar(self, index: int) -> None:
        """Check that operand `index` has shape [] or [1], if it is present."""
        kind = self.present(index)
        if kind is not None and kind.shape != (1,):
            self.require_shape(index, ())

    def broadcast(self, *shapes: Shape) -> Shape:
        """Return the common shape of ONNX's multidirectional broadcasting."""
        rank = max(map(len, shapes), default=0)
        result = []
        for column in zip(*[(1,) * (rank - len(s)) + s for s in shapes], strict=True):
            common = 1
            for size in column:
                if not is_symbolic(size) and size == 1:
                    continue
                if not is_symbolic(common) and common == 1:
                    common = size
                elif size != common and size != 1:
                    if common != 1:
                        listed = " and ".join(str(list(s)) for s in shapes)
                        raise self.fail(f"shapes {listed} do not broadcast to one shape")
                    common = size
            result.append(common)
        return tuple(result)

    def require_broadcast_to(self, index: int, shape: Shape) -> None:
        """Check that operand `index` broadcasts to exactly this shape, if it is present."""
        kind = self.present(index)
        if kind is not None and self.broadcast(kind.shape, shape) != shape:
            raise self.fail(
                f"operand {index} of {self.op} does not broadcast to {list(shape)}", got=kind.shape
            )

    def axis_of(self, axis: int, rank: int) -> int:
        """Return a possibly negative axis as an index into a shape of `rank` dimensions."""
        if not -rank <= axis < rank:
            raise self.fail(
                f"axis {axis} of {self.op} is out of range", expected=f"{-rank} to {rank - 1}",
                got=axis,
            )  # fmt: skip
        return axis % rank

    def axes_of(self, axes: Iterable[int], rank: int) -> Shape:
        """Return possibly negative axes as distinct indices into a shape of `rank` dimensions."""
        indices = tuple(self.axis_of(axis, rank) for axis in axes)
        if len(set(indices)) != len(indices):
            raise self.fail(f"{self.op} lists an axis twice", got=indices)
        return indices

    def known_ints(self, index: int, name: str) -> Shape:
        """Return the integers of an operand that must be known at compile time."""
        self.require_type(index, frozenset({DataType.INT64, DataType.INT32}))
        data = self.known_data(index, name)
        return integers_of(data)

    def known_data(self, index: int, name: str) -> Array:
        """Return the data of an operand that must be known at compile time."""
        data = self.constant(index)
        if data is None:
            raise self.fail(
                f"operand {index} ({name}) of {self.op} must be known at compile time: "
                "it decides a shape",
                expected=f"a constant for {name}",
                got=f"a computed {self.operand(index).text()}",
            )
        return data

    def known_scalar(self, index: int, name: str) -> int:
        """Return the one integer of an operand that must be known at compile time."""
        values = self.known_ints(index, name)
        if len(values) != 1:
            raise self.fail(
                f"operand {index} ({name}) of {self.op} has {len(values)} elements", expected=1,
                got=len(values),
            )  # fmt: skip
        return values[0]

    def require_word(self, name: str, allowed: Iterable[str]) -> str:
        """Check that a string attribute is one of some words, and return it."""
        words, value = tuple(allowed), self.string_of(name)
        if value not in words:
            raise self.fail(
                f"{self.op} does not support {name}={value!r}", expected=", ".join(words), got=value
            )
        return value

    def spatial_ints(self, name: str, default: Shape, least: int = 1) -> Shape:
        """Return a list attribute: an integer >= `least` for each element of `default`."""
        listed = self.ints_of(name)
        if listed is None:
            return default
        if len(listed) != len(default) or not all(least <= v <= MAX_STEP for v in listed):
            raise self.fail(
                f"attribute {name!r} of {self.op} has the wrong length or an element out of range",
                expected=f"{len(default)} integers from {least} to {MAX_STEP}",
                got=listed,
            )
        return listed


#: Returns the types of an operation's outputs; raises `CompileError` for operands that do not fit.
Inference = Callable[[InferenceContext], tuple[ValueType, ...]]


def same_as_first(allowed: frozenset[DataType]) -> Inference:
    """Return the rule of operators whose output has the type and shape of their first operand."""

    def infer(context: InferenceContext) -> tuple[ValueType, ...]:
        return (context.require_type(0, allowed),)

    return infer
