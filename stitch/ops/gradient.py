"""Gradients: the terms in which an operator says its vector-Jacobian product.

A rule writes the backward pass with the operator vocabulary itself, through a builder that it
knows only by the protocol below, so that backward graphs are ordinary graphs. Asking for a forward
value is what saves it: rules ask for as little as they need. Must not know: graphs, training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from stitch.errors import CompileError
from stitch.program import Array, AttributeValue, DataType, ValueType


class GradientValue(Protocol):
    """A value of the backward graph: arithmetic on it adds operations, numbers take its type."""

    @property
    def type(self) -> ValueType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data_type(self) -> DataType: ...
    def __add__(self, other: Any) -> Any: ...
    def __radd__(self, other: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any: ...
    def __rsub__(self, other: Any) -> Any: ...
    def __mul__(self, other: Any) -> Any: ...
    def __rmul__(self, other: Any) -> Any: ...
    def __truediv__(self, other: Any) -> Any: ...
    def __rtruediv__(self, other: Any) -> Any: ...
    def __neg__(self) -> Any: ...


#: A value, an array or number that becomes a constant, or None for an absent operand.
Given: TypeAlias = Any


class GradientBuilder(Protocol):
    """What rules may do to the backward graph: apply operators, and write constants."""

    def apply(
        self, op: str, operands: Sequence[Given], outputs: int | Sequence[str],
        attributes: Mapping[str, Any], domain: str = "",
    ) -> tuple[Any, ...]: ...  # fmt: skip

    def constant(self, array: Any) -> Any: ...


Side: TypeAlias = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class GradientContext:
    """One forward operation seen from its backward pass.

    `gradients[i]` belongs to output i, None where nothing flows back; `wanted[i]` says whether
    input i's gradient is needed; `constants[i]` is the data of input i where known at compile time.
    """

    op: str
    builder: GradientBuilder
    attributes: Mapping[str, AttributeValue]
    input_types: tuple[ValueType | None, ...]
    output_types: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    gradients: tuple[Any, ...]
    wanted: tuple[bool, ...]
    read: Callable[[Side, int], Any]
    location: str = ""

    @property
    def gradient(self) -> Any:
        """The gradient of output 0."""
        return self.gradients[0]

    def input(self, index: int) -> Any:
        """The value of input `index`, which makes the forward program save it."""
        return self.read("input", index)

    def output(self, index: int = 0) -> Any:
        """The value of output `index`, which makes the forward program save it.

        An optional output that the operation does not give is added to it.
        """
        return self.read("output", index)

    def type_of(self, index: int) -> ValueType:
        """The type of input `index`, which is present; saves nothing."""
        kind = self.input_types[index]
        assert kind is not None, f"input {index} of {self.op} is absent"
        return kind

    def wants(self, index: int) -> bool:
        """Whether input `index` is present and its gradient is needed."""
        return index < len(self.wanted) and self.wanted[index]

    def has(self, index: int) -> bool:
        """Whether input `index` is present."""
        return index < len(self.input_types) and self.input_types[index] is not None

    def apply(self, op: str, *operands: Given, domain: str = "", **attributes: Any) -> Any:
        """One operation with one result in the backward graph."""
        return self.builder.apply(op, operands, 1, attributes, domain)[0]

    def apply_many(
        self, op: str, outputs: int, *operands: Given, domain: str = "", **attributes: Any
    ) -> tuple[Any, ...]:
        """One operation with several results in the backward graph."""
        return self.builder.apply(op, operands, outputs, attributes, domain)

    def constant(self, array: Any) -> Any:
        """A constant of the backward graph."""
        return self.builder.constant(array)

    def reduced(self, gradient: Any, index: int) -> Any:
        """A gradient summed over what broadcasting of input `index` repeated."""
        shape = self.type_of(index).shape
        if gradient.shape == shape:
            return gradient
        extra = len(gradient.shape) - len(shape)
        axes = [
            axis
            for axis, length in enumerate(gradient.shape)
            if axis < extra or (shape[axis - extra] == 1 and length != 1)
        ]
        if axes:
            gradient = self.apply("ReduceSum", gradient, axes, keepdims=1)
        if gradient.shape == shape:
            return gradient
        return self.apply("Reshape", gradient, list(shape))

    def fail(self, what: str, remedy: str | None = None) -> CompileError:
        """The error to raise where this form of the operator has no gradient."""
        operands = ", ".join("_" if t is None else t.text() for t in self.input_types)
        where = f"{self.op}({operands})" + (f" at {self.location}" if self.location else "")
        return CompileError(f"{self.op} has no gradient here: {what}", where=where, remedy=remedy)


#: Gives the gradient of every input, None where it is not wanted or nothing flows back.
Gradient = Callable[[GradientContext], Sequence[Any]]
