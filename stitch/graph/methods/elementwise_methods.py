"""Elementwise operators as methods: arithmetic, comparison, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stitch.graph.emitter import Emitter, TypeName, data_type_of
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import Operand, SymbolicTensor
from stitch.program import DataType


def _unary(op: str, says: str) -> Callable[[Any, Operand], SymbolicTensor]:
    """The method that applies an operator to one operand."""

    def method(self: Emitter, x: Operand) -> SymbolicTensor:
        return self._one(op, x)

    method.__doc__ = says
    return method


def _binary(op: str, says: str) -> Callable[[Any, Operand, Operand], SymbolicTensor]:
    """The method that applies an operator to two operands."""

    def method(self: Emitter, a: Operand, b: Operand) -> SymbolicTensor:
        return self._one(op, *self._pair(op, a, b))

    method.__doc__ = says
    return method


def _logical(op: str, says: str) -> Callable[[Any, Operand, Operand], SymbolicTensor]:
    """The method that applies an operator to truth values, or its bitwise form to integers."""

    def method(self: Emitter, a: Operand, b: Operand) -> SymbolicTensor:
        x, y = self._pair(op, a, b)
        return self._one(op if x.data_type is DataType.BOOL else f"Bitwise{op}", x, y)

    method.__doc__ = f"{says}: logical on booleans, bitwise on integers."
    return method


class ElementwiseMethods(Emitter):
    """One element at a time; two operands broadcast as in NumPy, their types must agree."""

    __slots__ = ()

    # Arithmetic --------------------------------------------------------------------------------

    add = _binary("Add", "a + b.")
    sub = _binary("Sub", "a - b.")
    mul = _binary("Mul", "a * b.")

    def div(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a / b; raises `CompileError` for integers, whose ONNX Div truncates."""
        x, y = self._pair("Div", a, b)
        if not x.data_type.is_floating:
            raise mistake(
                f"a true division of {x.data_type.value} has no exact type in ONNX",
                remedy="use // for whole numbers, or cast both sides to float32",
            )
        return self._one("Div", x, y)

    true_div = div

    def floordiv(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a // b, rounded towards minus infinity as in Python."""
        x, y = self._pair("FloorDiv", a, b)
        quotient = self._one("Div", x, y)
        if x.data_type.is_floating:
            return self._one("Floor", quotient)
        if x.data_type.value.startswith("uint"):
            return quotient
        remainder = self._one("Sub", x, self._one("Mul", quotient, y))
        too_high = self._signs_differ(remainder, y)
        return self._one("Sub", quotient, self.cast(too_high, x.data_type))

    def mod(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a % b with the sign of b, as in Python."""
        x, y = self._pair("Mod", a, b)
        if not x.data_type.is_floating:
            return self._one("Mod", x, y)
        remainder = self._one("Mod", x, y, fmod=1)
        shifted = self._one("Add", remainder, y)
        return self._one("Where", self._signs_differ(remainder, y), shifted, remainder)

    def _signs_differ(self, remainder: SymbolicTensor, divisor: SymbolicTensor) -> SymbolicTensor:
        """Where a remainder is not zero and its sign is not the divisor's."""
        different = self.logical_xor(self.less(remainder, 0), self.less(divisor, 0))
        return self.logical_and(self.not_equal(remainder, 0), different)

    pow = _binary("Pow", "a ** b; the result has the type of a.")
    maximum = _binary("Max", "The greater of two; NaN if either is.")
    minimum = _binary("Min", "The lesser of two; NaN if either is.")

    # FlexFlow's names for a tensor and a number.
    scalar_add, scalar_sub, scalar_multiply = add, sub, mul
    scalar_true_div, scalar_floor_div = div, floordiv

    # Comparison and logic ----------------------------------------------------------------------

    equal = _binary("Equal", "a == b, as booleans.")

    def not_equal(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a != b, as booleans."""
        return self._one("Not", self.equal(a, b))

    less = _binary("Less", "a < b, as booleans.")
    less_or_equal = _binary("LessOrEqual", "a <= b, as booleans.")
    greater = _binary("Greater", "a > b, as booleans.")
    greater_or_equal = _binary("GreaterOrEqual", "a >= b, as booleans.")
    logical_and = _logical("And", "a & b")
    logical_or = _logical("Or", "a | b")
    logical_xor = _logical("Xor", "a ^ b")

    def logical_not(self, x: Operand) -> SymbolicTensor:
        """~x: logical on booleans, bitwise on integers."""
        tensor = self.tensor(x)
        is_bool = tensor.data_type is DataType.BOOL
        return self._one("Not" if is_bool else "BitwiseNot", tensor)

    def where(self, condition: Operand, a: Operand, b: Operand) -> SymbolicTensor:
        """a where the condition holds, else b."""
        return self._one("Where", self.tensor(condition), *self._pair("Where", a, b))

    # Unary -------------------------------------------------------------------------------------

    identity = _unary("Identity", "x as a value of its own.")
    noop = identity
    neg = _unary("Neg", "-x.")
    abs = _unary("Abs", "|x|.")
    sign = _unary("Sign", "-1, 0 or 1.")
    exp = _unary("Exp", "e to the x.")
    log = _unary("Log", "The natural logarithm.")
    sqrt = _unary("Sqrt", "The square root.")
    reciprocal = _unary("Reciprocal", "1 / x.")

    def rsqrt(self, x: Operand) -> SymbolicTensor:
        """1 / sqrt(x)."""
        return self._one("Reciprocal", self._one("Sqrt", x))

    def square(self, x: Operand) -> SymbolicTensor:
        """x * x."""
        tensor = self.tensor(x)
        return self._one("Mul", tensor, tensor)

    sin = _unary("Sin", "The sine.")
    cos = _unary("Cos", "The cosine.")
    floor = _unary("Floor", "The greatest whole number that is not above x.")
    ceil = _unary("Ceil", "The least whole number that is not below x.")
    round = _unary("Round", "The nearest whole number, halves to even.")
    erf = _unary("Erf", "The error function.")

    def clip(
        self, x: Operand, low: Operand | None = None, high: Operand | None = None
    ) -> SymbolicTensor:
        """x within [low, high]; either bound may be absent."""
        tensor = self.tensor(x)
        bounds = [None if b is None else self.tensor(b, tensor) for b in (low, high)]
        if any(b is not None and b.shape != () for b in bounds):
            clipped = tensor if low is None else self.maximum(tensor, low)
            return clipped if high is None else self.minimum(clipped, high)
        return self._one("Clip", tensor, *bounds)

    # Activations -------------------------------------------------------------------------------

    relu = _unary("Relu", "max(x, 0).")

    def leaky_relu(self, x: Operand, alpha: float = 0.01) -> SymbolicTensor:
        """x where positive, else alpha x."""
        return self._one("LeakyRelu", x, alpha=alpha)

    def gelu(self, x: Operand, approximate: str = "none") -> SymbolicTensor:
        """x times the normal distribution function of x; approximate: `none` or `tanh`."""
        return self._one("Gelu", x, approximate=None if approximate == "none" else approximate)

    sigmoid = _unary("Sigmoid", "1 / (1 + exp(-x)).")
    tanh = _unary("Tanh", "The hyperbolic tangent.")

    def elu(self, x: Operand, alpha: float = 1.0) -> SymbolicTensor:
        """x where positive, else alpha (exp(x) - 1)."""
        return self._one("Elu", x, alpha=None if alpha == 1.0 else alpha)

    def silu(self, x: Operand) -> SymbolicTensor:
        """x sigmoid(x)."""
        tensor = self.tensor(x)
        return self._one("Mul", tensor, self._one("Sigmoid", tensor))

    softplus = _unary("Softplus", "log(1 + exp(x)).")

    def dropout(self, x: Operand, rate: float = 0.5) -> SymbolicTensor:
        """Dropout at inference: x itself; the rate stays on record for training."""
        return self._one("Dropout", x, np.float32(rate))

    def cast(self, x: Operand, data_type: TypeName) -> SymbolicTensor:
        """x with another data type: a `DataType`, its name, or a NumPy type."""
        tensor, wanted = self.tensor(x), data_type_of(data_type)
        if tensor.data_type is wanted:
            return tensor
        return self._one("Cast", tensor, to=wanted)

    def type_as(self, x: Operand, other: Operand) -> SymbolicTensor:
        """x with the data type of another tensor."""
        return self.cast(x, self.tensor(other).data_type)

    def activation(self, x: Operand, name: str | None) -> SymbolicTensor:
        """The activation of that name (relu, gelu, sigmoid, tanh, elu, identity), or none."""
        allowed = {
            "relu": self.relu, "gelu": self.gelu, "sigmoid": self.sigmoid, "tanh": self.tanh,
            "elu": self.elu, "silu": self.silu, "identity": self.identity,
        }  # fmt: skip
        if name is None or name == "none":
            return self.tensor(x)
        if name not in allowed:
            raise mistake(f"unknown activation {name!r}", expected=", ".join([*allowed, "none"]))
        return allowed[name](x)
