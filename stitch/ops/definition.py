"""`OpDef`, the definition of one operator, and the arguments and attributes of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Protocol

from stitch.errors import CompileError, unknown
from stitch.ops.batching import Batching, broadcasting
from stitch.ops.gradient import Gradient
from stitch.ops.inference import Attributes, Inference, WithAttributes
from stitch.program import Array, AttributeValue, DataType, Operation

#: A prepared step: called with nothing, it reads and writes the arrays it was bound to.
Thunk = Callable[[], object]


class BodyBinder(Protocol):
    """Binds the body of an operation to arrays."""

    @property
    def repeated(self) -> Mapping[int, int]:
        """Outputs that duplicate another output: its index by theirs."""

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Sequence[Thunk]:
        """Return the steps of one iteration.

        Args:
            inputs: One array for each input; no two of all arrays overlap.
            outputs: One array for each output that duplicates no other.
        """


@dataclass(frozen=True, slots=True)
class KernelArguments(WithAttributes):
    """The arrays and attributes that a kernel is bound to.

    Args:
        inputs: Dense arrays in the compute type (float32 for narrower floats); None: absent.
        outputs: Preallocated arrays. They never overlap an input, except that output 0 of an
            elementwise operator may *be* an input's array.
        attributes: Resolved attributes.
        constant: Whether each input never changes, so that a kernel may rearrange it at binding.
        memo: Arrays derived from constants; it outlives the binding, see `memoize`.
        types: The data types that outputs are rounded to; empty if unknown.
        body: Binds the operation's body, for operators that have one.
    """

    inputs: tuple[Array | None, ...]
    outputs: tuple[Array, ...]
    attributes: Mapping[str, AttributeValue]
    constant: tuple[bool, ...]
    memo: dict[str, Array] = field(default_factory=dict)
    types: tuple[DataType, ...] = ()
    body: BodyBinder | None = None

    def operand(self, index: int) -> Array:
        """Return the array of an operand that must be present."""
        array = self.inputs[index]
        assert array is not None
        return array

    def optional(self, index: int) -> Array | None:
        """Return the array of an optional operand, None if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def is_constant(self, index: int) -> bool:
        """Return whether an operand never changes."""
        return index < len(self.constant) and self.constant[index]

    def ints_at(self, index: int) -> tuple[int, ...]:
        """Return the integers of an operand that is known at compile time."""
        return tuple(int(value) for value in self.operand(index).ravel())

    def memoize(self, name: str, make: Callable[[], Array]) -> Array:
        """Return an array derived from constants; later bindings of the operation share it."""
        array = self.memo.get(name)
        if array is None:
            array = self.memo[name] = make()
        return array


#: Binds an operator to arrays and returns the steps that compute it. All allocation happens at
#: binding. Steps run under their caller's `np.errstate(all="ignore")`, which costs about 1 us.
Kernel = Callable[[KernelArguments], Sequence[Thunk]]


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute: its type as written in files, its default, and whether it is required."""

    kind: str  # "int", "float", "string", "ints", "floats", "strings"
    default: AttributeValue | None = None
    required: bool = False


def declared(**attributes: Attribute | AttributeValue) -> dict[str, Attribute]:
    """Return attributes by name, from `Attribute`s or from defaults, whose type gives the kind.

    >>> declared(axis=-1, modes=("linear",))["modes"].kind
    'strings'
    """
    return {
        name: value if isinstance(value, Attribute) else Attribute(_kind_of(value), value)
        for name, value in attributes.items()
    }


def _kind_of(default: AttributeValue) -> str:
    if isinstance(default, tuple):
        return _kind_of(default[0]) + "s"
    return {int: "int", float: "float", str: "string"}[type(default)]


@dataclass(frozen=True, slots=True)
class OpDef:
    """One operator, named as in ONNX (opset 26).

    Args:
        inputs: Least and most operands; most = -1 for any number.
        infer: Shape and type inference.
        kernel: The NumPy kernel.
        outputs: Least and most results.
        attributes: Attributes by name.
        domain: "" for ai.onnx.
        elementwise: Each output element depends only on the input elements at the same index, so
            an output may overwrite an input that is not read later.
        gradient: Vector-Jacobian product (`stitch.ops.gradient`), None if there is none.
        batching: Rule for a batch of examples (`stitch.ops.batching`), None if there is none.
        checks: The kernel validates operand data, even if its results have no elements.
        onnx: The form for ONNX Runtime, for operators of plugins: called with the model's writer,
            the operation and its attributes, it adds nodes that compute the results. Without it
            ONNX Runtime refuses the operator, and `auto` uses the NumPy kernel.
    """

    name: str
    inputs: tuple[int, int]
    infer: Inference
    kernel: Kernel
    outputs: tuple[int, int] = (1, 1)
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    domain: str = ""
    elementwise: bool = False
    gradient: Gradient | None = None
    batching: Batching | None = None
    checks: bool = False
    onnx: Callable[[Any, Operation, Attributes], object] | None = None

    def steps(self, arguments: KernelArguments) -> Sequence[Thunk]:
        """Return the kernel's steps; kernels without checks are not called for empty results."""
        has_elements = any(out.size for out in arguments.outputs)
        return self.kernel(arguments) if has_elements or self.checks else ()


def elementwise(
    name: str, inputs: tuple[int, int], infer: Inference, kernel: Kernel,
    gradient: Gradient | None = None, **attributes: Attribute | AttributeValue,
) -> OpDef:  # fmt: skip
    """Return the definition of an elementwise operator whose operands broadcast."""
    return OpDef(
        name, inputs, infer, kernel, attributes=declared(**attributes), elementwise=True,
        gradient=gradient, batching=broadcasting,
    )  # fmt: skip


def resolve_attributes(
    definition: OpDef, attributes: Mapping[str, Any], location: str = ""
) -> Attributes:
    """Return the attributes of one operation with defaults filled in.

    Optional attributes without a default may stay absent; an int is accepted as a float.

    Raises:
        CompileError: An attribute is unknown, missing or of the wrong type.
    """
    where = definition.name + (f" at {location}" if location else "")
    for name in attributes:
        if name not in definition.attributes:
            what, names = f"{definition.name} has no attribute {name!r}", definition.attributes
            raise unknown(what, name, names, CompileError, where=where, none="no attributes")
    resolved: dict[str, AttributeValue] = {}
    for name, declared in definition.attributes.items():
        if name in attributes:
            resolved[name] = _typed(name, declared, attributes[name], where)
        elif declared.required:
            raise CompileError(
                f"attribute {name!r} of {definition.name} is required", where=where,
                expected=declared.kind,
            )  # fmt: skip
        elif declared.default is not None:
            resolved[name] = declared.default
    return MappingProxyType(resolved)


#: By kind: the accepted Python type, and the conversion to the type of files.
_SCALARS: Mapping[str, tuple[type, Callable[[Any], Any]]] = {
    "int": (Integral, int), "float": (Real, float), "string": (str, str),
}  # fmt: skip


def _typed(name: str, declared: Attribute, value: Any, where: str) -> AttributeValue:
    accepted, convert = _SCALARS[declared.kind.removesuffix("s")]
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    items = value if is_list else (value,)
    if is_list == declared.kind.endswith("s") and all(isinstance(x, accepted) for x in items):
        converted = tuple(map(convert, items))
        return converted if is_list else converted[0]
    what = f"attribute {name!r} has the wrong type"
    raise CompileError(what, where=where, expected=declared.kind, got=repr(value))
