"""Gradients: the terms in which an operator says its vector-Jacobian product.

A rule writes the backward pass with the operator vocabulary itself, through a builder that it knows
only by the protocol below, so that backward graphs are ordinary graphs. Asking for a forward value
is what saves it: rules ask for as little as they need. What rules of all families write often the
context writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from stitch.errors import CompileError
from stitch.ops.element_types import onnx_code
from stitch.ops.inference import WithAttributes, operation_text
from stitch.program import Array, AttributeValue, DataType, ValueType

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
class GradientContext(WithAttributes):
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

    def of_operands(self, *rules: Callable[[], Any] | None) -> tuple[Any, ...]:
        """What the rule of each operand gives, summed as by `reduced`; None where not wanted."""
        return tuple(
            self.reduced(rule(), index) if rule is not None and self.wants(index) else None
            for index, rule in enumerate(rules)
        )

    def fail(self, what: str, remedy: str | None = None) -> CompileError:
        """The error to raise where this form of the operator has no gradient."""
        where = operation_text(self.op, self.input_types, self.location)
        return CompileError(f"{self.op} has no gradient here: {what}", where=where, remedy=remedy)

    def kept(self, condition: Any, gradient: Any) -> Any:
        """The gradient where a condition holds, else zero (also where the gradient is infinite)."""
        return self.apply("Where", condition, gradient, self.zero_like(gradient))

    def zero_like(self, value: Any) -> Any:
        """Zero, in a value's type, to be broadcast."""
        return self.constant(np.zeros((), value.data_type.dtype))

    def zeros(self, shape: Sequence[int], data_type: DataType) -> Any:
        """A value of zeros that takes no room in a file."""
        zero = self.constant(np.zeros((), data_type.dtype))
        return self.apply("Expand", zero, list(shape)) if shape else zero

    def in_type(self, value: Any, data_type: DataType) -> Any:
        """A value in another floating type, where it has another."""
        if value.data_type == data_type:
            return value
        return self.apply("Cast", value, to=onnx_code(data_type))

    def shaped(self, value: Any, shape: Sequence[int]) -> Any:
        """The same elements in another shape, where it is another."""
        if value.shape == tuple(shape):
            return value
        # No 0 of an empty tensor may be read as "as before".
        return self.apply("Reshape", value, list(shape), allowzero=int(0 in shape))

    def constant_ints(self, index: int) -> tuple[int, ...] | None:
        """The integers of an operand that inference has asked for, None where it is absent."""
        if not self.has(index):
            return None
        data = self.constants[index]
        assert data is not None
        return tuple(int(value) for value in data.ravel())

    def padded(self, value: Any, begins: Sequence[int], ends: Sequence[int]) -> Any:
        """Zeros around a value."""
        if not any(begins) and not any(ends):
            return value
        return self.apply("Pad", value, [*begins, *ends], 0.0)

    def weighted(self, value: Any, axis: int, table: Any) -> Any:
        """One axis of a value times a matrix [axis, new axis]."""
        rank = len(value.shape)
        matrix = self.constant(np.ascontiguousarray(table, value.data_type.dtype))
        if axis == rank - 1:
            return self.apply("MatMul", value, matrix)
        # From the left instead: [..., axis, rest] as matrices.
        shape = value.shape
        rest = math.prod(shape[axis + 1 :])
        turned = self.constant(np.ascontiguousarray(table.T, value.data_type.dtype))
        flat = self.shaped(value, (*shape[:axis], shape[axis], rest))
        product = self.apply("MatMul", turned, flat)
        return self.shaped(product, (*shape[:axis], table.shape[1], *shape[axis + 1 :]))


#: Gives the gradient of every input, None where it is not wanted or nothing flows back.
Gradient = Callable[[GradientContext], Sequence[Any]]
#: Gives the gradient of an operator's only differentiable operand, its first.
Slope = Callable[[GradientContext], Any]


def of_first(slope: Slope) -> Gradient:
    """The rule of an operator that has a gradient by its first operand alone."""

    def gradient(context: GradientContext) -> Sequence[Any]:
        return slope(context), *no_gradient(context)[1:]

    return gradient


def no_gradient(context: GradientContext) -> Sequence[Any]:
    """The gradient is zero wherever there is one: steps, signs."""
    return (None,) * len(context.input_types)
