"""Elementwise operators as methods: arithmetic, comparison, activations.

Comes in: tensors, arrays and numbers (which take the tensor's type). Goes out: ONNX operations.
"""

from __future__ import annotations

import numpy as np

from stitch.errors import CompileError
from stitch.graph.emitter import Emitter, TypeName, data_type_of
from stitch.graph.source_location import user_location
from stitch.graph.symbolic import Operand, SymbolicTensor
from stitch.program import DataType


class ElementwiseMethods(Emitter):
    """One element at a time; two operands broadcast as in NumPy, their types must agree."""

    __slots__ = ()

    def _binary(self, op: str, a: Operand, b: Operand) -> SymbolicTensor:
        return self._one(op, *self._pair(op, a, b))

    # Arithmetic --------------------------------------------------------------------------------

    def add(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a + b."""
        return self._binary("Add", a, b)

    def sub(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a - b."""
        return self._binary("Sub", a, b)

    def mul(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a * b."""
        return self._binary("Mul", a, b)

    def div(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a / b; raises `CompileError` for integers, whose ONNX Div truncates."""
        x, y = self._pair("Div", a, b)
        if not x.data_type.is_floating:
            raise CompileError(
                f"a true division of {x.data_type.value} has no exact type in ONNX",
                where=user_location(),
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

    def pow(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a ** b; the result has the type of a."""
        return self._binary("Pow", a, b)

    def maximum(self, a: Operand, b: Operand) -> SymbolicTensor:
        """The greater of two; NaN if either is."""
        return self._binary("Max", a, b)

    def minimum(self, a: Operand, b: Operand) -> SymbolicTensor:
        """The lesser of two; NaN if either is."""
        return self._binary("Min", a, b)

    # Scalar versions (FlexFlow's names) --------------------------------------------------------

    def scalar_add(self, x: SymbolicTensor, scalar: float) -> SymbolicTensor:
        """x + scalar."""
        return self.add(x, scalar)

    def scalar_sub(self, x: SymbolicTensor, scalar: float) -> SymbolicTensor:
        """x - scalar."""
        return self.sub(x, scalar)

    def scalar_multiply(self, x: SymbolicTensor, scalar: float) -> SymbolicTensor:
        """x * scalar."""
        return self.mul(x, scalar)

    def scalar_true_div(self, x: SymbolicTensor, scalar: float) -> SymbolicTensor:
        """x / scalar."""
        return self.div(x, scalar)

    def scalar_floor_div(self, x: SymbolicTensor, scalar: float) -> SymbolicTensor:
        """x // scalar."""
        return self.floordiv(x, scalar)

    # Comparison and logic ----------------------------------------------------------------------

    def equal(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a == b, as booleans."""
        return self._binary("Equal", a, b)

    def not_equal(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a != b, as booleans."""
        return self._one("Not", self.equal(a, b))

    def less(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a < b, as booleans."""
        return self._binary("Less", a, b)

    def less_or_equal(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a <= b, as booleans."""
        return self._binary("LessOrEqual", a, b)

    def greater(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a > b, as booleans."""
        return self._binary("Greater", a, b)

    def greater_or_equal(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a >= b, as booleans."""
        return self._binary("GreaterOrEqual", a, b)

    def logical_and(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a & b: logical on booleans, bitwise on integers."""
        return self._logical("And", a, b)

    def logical_or(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a | b: logical on booleans, bitwise on integers."""
        return self._logical("Or", a, b)

    def logical_xor(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a ^ b: logical on booleans, bitwise on integers."""
        return self._logical("Xor", a, b)

    def logical_not(self, x: Operand) -> SymbolicTensor:
        """~x: logical on booleans, bitwise on integers."""
        tensor = self.tensor(x)
        is_bool = tensor.data_type is DataType.BOOL
        return self._one("Not" if is_bool else "BitwiseNot", tensor)

    def _logical(self, op: str, a: Operand, b: Operand) -> SymbolicTensor:
        x, y = self._pair(op, a, b)
        return self._one(op if x.data_type is DataType.BOOL else f"Bitwise{op}", x, y)

    def where(self, condition: Operand, a: Operand, b: Operand) -> SymbolicTensor:
        """a where the condition holds, else b."""
        return self._one("Where", self.tensor(condition), *self._pair("Where", a, b))

    # Unary -------------------------------------------------------------------------------------

    def identity(self, x: Operand) -> SymbolicTensor:
        """x as a value of its own."""
        return self._one("Identity", x)

    noop = identity

    def neg(self, x: Operand) -> SymbolicTensor:
        """-x."""
        return self._one("Neg", x)

    def abs(self, x: Operand) -> SymbolicTensor:
        """|x|."""
        return self._one("Abs", x)

    def sign(self, x: Operand) -> SymbolicTensor:
        """-1, 0 or 1."""
        return self._one("Sign", x)

    def exp(self, x: Operand) -> SymbolicTensor:
        """e to the x."""
        return self._one("Exp", x)

    def log(self, x: Operand) -> SymbolicTensor:
        """The natural logarithm."""
        return self._one("Log", x)

    def sqrt(self, x: Operand) -> SymbolicTensor:
        """The square root."""
        return self._one("Sqrt", x)

    def reciprocal(self, x: Operand) -> SymbolicTensor:
        """1 / x."""
        return self._one("Reciprocal", x)

    def rsqrt(self, x: Operand) -> SymbolicTensor:
        """1 / sqrt(x)."""
        return self._one("Reciprocal", self._one("Sqrt", x))

    def square(self, x: Operand) -> SymbolicTensor:
        """x * x."""
        tensor = self.tensor(x)
        return self._one("Mul", tensor, tensor)

    def sin(self, x: Operand) -> SymbolicTensor:
        """The sine."""
        return self._one("Sin", x)

    def cos(self, x: Operand) -> SymbolicTensor:
        """The cosine."""
        return self._one("Cos", x)

    def floor(self, x: Operand) -> SymbolicTensor:
        """The greatest whole number that is not above x."""
        return self._one("Floor", x)

    def ceil(self, x: Operand) -> SymbolicTensor:
        """The least whole number that is not below x."""
        return self._one("Ceil", x)

    def round(self, x: Operand) -> SymbolicTensor:
        """The nearest whole number, halves to even."""
        return self._one("Round", x)

    def erf(self, x: Operand) -> SymbolicTensor:
        """The error function."""
        return self._one("Erf", x)

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

    def relu(self, x: Operand) -> SymbolicTensor:
        """max(x, 0)."""
        return self._one("Relu", x)

    def leaky_relu(self, x: Operand, alpha: float = 0.01) -> SymbolicTensor:
        """x where positive, else alpha x."""
        return self._one("LeakyRelu", x, alpha=alpha)

    def gelu(self, x: Operand, approximate: str = "none") -> SymbolicTensor:
        """x times the normal distribution function of x; approximate: `none` or `tanh`."""
        return self._one("Gelu", x, approximate=None if approximate == "none" else approximate)

    def sigmoid(self, x: Operand) -> SymbolicTensor:
        """1 / (1 + exp(-x))."""
        return self._one("Sigmoid", x)

    def tanh(self, x: Operand) -> SymbolicTensor:
        """The hyperbolic tangent."""
        return self._one("Tanh", x)

    def elu(self, x: Operand, alpha: float = 1.0) -> SymbolicTensor:
        """x where positive, else alpha (exp(x) - 1)."""
        return self._one("Elu", x, alpha=None if alpha == 1.0 else alpha)

    def silu(self, x: Operand) -> SymbolicTensor:
        """x sigmoid(x)."""
        tensor = self.tensor(x)
        return self._one("Mul", tensor, self._one("Sigmoid", tensor))

    def softplus(self, x: Operand) -> SymbolicTensor:
        """log(1 + exp(x))."""
        return self._one("Softplus", x)

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
            raise CompileError(
                f"unknown activation {name!r}",
                where=user_location(),
                expected=", ".join([*allowed, "none"]),
            )
        return allowed[name](x)
