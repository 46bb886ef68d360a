"""Gradient rules: what an operator's vector-Jacobian product may read and emit.

A rule writes the backward pass with ordinary operators, through a builder that it knows only by a
protocol. Reading a forward value makes the forward program save it, so rules read as few as they
can. Helpers that several families need are methods of the contexts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from stitch.errors import CompileError
from stitch.ops.element_types import onnx_code
from stitch.ops.inference import Shape, WithAttributes, operation_text
from stitch.program import Array, AttributeValue, DataType, ValueType

#: A value, an array or number that becomes a constant, or None for an absent operand.
Operand: TypeAlias = Any
Side: TypeAlias = Literal["input", "output"]


class GradientBuilder(Protocol):
    """The graph that rules write: it applies operators and adds constants."""

    def apply(
        self, op: str, operands: Sequence[Operand], outputs: int | Sequence[str],
        attributes: Mapping[str, Any], domain: str = "",
    ) -> tuple[Any, ...]: ...  # fmt: skip

    def constant(self, array: Any) -> Any: ...


class EmittingContext(WithAttributes):
    """One operation and the builder that receives what its rule emits.

    `input_types[i]` is None for an absent operand; `constants[i]` is the data of input i if it is
    known at compile time, else None.
    """

    __slots__ = ()
    op: str
    builder: GradientBuilder
    input_types: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]

    def has(self, index: int) -> bool:
        """Return whether operand `index` is present."""
        return index < len(self.input_types) and self.input_types[index] is not None

    def type_of(self, index: int) -> ValueType:
        """Return the type of operand `index`, which must be present; saves nothing."""
        kind = self.input_types[index]
        assert kind is not None, f"operand {index} of {self.op} is absent"
        return kind

    def ints_at(self, index: int) -> Shape | None:
        """Return the integers of an operand that inference required, None if it is absent."""
        if not self.has(index):
            return None
        data = self.constants[index]
        assert data is not None, f"operand {index} of {self.op} is not known"
        return tuple(int(value) for value in data.ravel())

    def apply(self, op: str, *operands: Operand, domain: str = "", **attributes: Any) -> Any:
        """Emit one operation with one result."""
        return self.builder.apply(op, operands, 1, attributes, domain)[0]

    def apply_many(
        self, op: str, outputs: int, *operands: Operand, domain: str = "", **attributes: Any
    ) -> tuple[Any, ...]:
        """Emit one operation with several results."""
        return self.builder.apply(op, operands, outputs, attributes, domain)

    def constant(self, array: Any) -> Any:
        """Emit a constant."""
        return self.builder.constant(array)

    def fill(self, number: Any, shape: Shape, data_type: DataType) -> Any:
        """Emit a value of one repeated number, expanded at run time to keep files small."""
        value = self.constant(np.array(number, data_type.dtype))
        return self.apply("Expand", value, list(shape)) if shape else value

    def reshape(self, value: Any, shape: Sequence[int]) -> Any:
        """Reshape a value unless it has this shape."""
        if tuple(value.shape) == tuple(shape):
            return value
        # allowzero: a 0 of an empty tensor must not mean "copy this dimension".
        return self.apply("Reshape", value, list(shape), allowzero=int(0 in shape))

    def cast(self, value: Any, data_type: DataType) -> Any:
        """Cast a value unless it has this type."""
        if DataType.from_dtype(value.dtype) == data_type:
            return value
        return self.apply("Cast", value, to=onnx_code(data_type))


@dataclass(frozen=True, slots=True)
class GradientContext(EmittingContext):
    """One forward operation seen from its backward pass.

    `gradients[i]` is the gradient of output i, None if nothing flows back through it; `wanted[i]`
    says whether the gradient of input i is needed.
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
        """Return the value of input `index`; the forward program saves it."""
        return self.read("input", index)

    def output(self, index: int = 0) -> Any:
        """Return the value of output `index`; the forward program saves it.

        An optional output that the operation lacks is added to it.
        """
        return self.read("output", index)

    def wants(self, index: int) -> bool:
        """Return whether input `index` is present and its gradient is needed."""
        return index < len(self.wanted) and self.wanted[index]

    def fail(self, what: str, remedy: str | None = None) -> CompileError:
        """Return the error to raise for operands or attributes that have no gradient."""
        where = operation_text(self.op, self.input_types, self.location)
        return CompileError(f"{self.op} has no gradient here: {what}", where=where, remedy=remedy)

    def sum_to(self, gradient: Any, index: int) -> Any:
        """Sum a gradient over the axes along which input `index` was broadcast."""
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
        return self.reshape(gradient, shape)

    def by_operand(self, *rules: Callable[[], Any] | None) -> tuple[Any, ...]:
        """Return each rule's gradient, summed as by `sum_to`; None where it is not needed."""
        return tuple(
            self.sum_to(rule(), index) if rule is not None and self.wants(index) else None
            for index, rule in enumerate(rules)
        )

    def where(self, condition: Any, gradient: Any) -> Any:
        """Return the gradient where a condition holds, else zero, even if it is infinite."""
        return self.apply("Where", condition, gradient, self.zero_like(gradient))

    def zero_like(self, value: Any) -> Any:
        """Return a scalar zero in a value's type."""
        return self.constant(np.zeros((), value.dtype))

    def pad(self, value: Any, begins: Sequence[int], ends: Sequence[int]) -> Any:
        """Pad a value with zeros."""
        if not any(begins) and not any(ends):
            return value
        return self.apply("Pad", value, [*begins, *ends], 0.0)

    def multiply_axis(self, value: Any, axis: int, table: Any) -> Any:
        """Multiply one axis of a value by a matrix [axis, new axis]."""
        shape = value.shape
        if axis == len(shape) - 1:
            return self.apply(
                "MatMul", value, self.constant(np.ascontiguousarray(table, value.dtype))
            )
        # From the left: the value as matrices [..., axis, rest].
        rest = math.prod(shape[axis + 1 :])
        transposed = self.constant(np.ascontiguousarray(table.T, value.dtype))
        flat = self.reshape(value, (*shape[:axis], shape[axis], rest))
        product = self.apply("MatMul", transposed, flat)
        return self.reshape(product, (*shape[:axis], table.shape[1], *shape[axis + 1 :]))


#: Returns the gradient of every input, None where it is not wanted or nothing flows back.
Gradient = Callable[[GradientContext], Sequence[Any]]
#: Returns the gradient of an operator's only differentiable operand, its first.
Slope = Callable[[GradientContext], Any]


def of_first(slope: Slope) -> Gradient:
    """Return the rule of an operator that is differentiable in its first operand only."""

    def gradient(context: GradientContext) -> Sequence[Any]:
        return slope(context), *no_gradient(context)[1:]

    return gradient


def no_gradient(context: GradientContext) -> Sequence[Any]:
    """Rule of piecewise constant operators: the gradient is zero wherever it exists."""
    return (None,) * len(context.input_types)
