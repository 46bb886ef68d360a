"""`OpDef`: all that Stitch knows of one operator, and the terms in which it is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Protocol

from stitch.errors import CompileError, closest
from stitch.ops.batching import Batching
from stitch.ops.gradient import Gradient
from stitch.ops.inference import (
    Attributes,
    Inference,
    WithAttributes,
)
from stitch.program import Array, AttributeValue, DataType, ValueType

#: What any kernel may take besides: a few chunks of a chain, and the steps themselves.
ANY_KERNEL_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkspaceContext(WithAttributes):
    """What the bytes that a kernel takes may depend on: as `InferenceContext`, results known."""

    inputs: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    attributes: Mapping[str, AttributeValue]
    outputs: tuple[ValueType, ...]

    def operand(self, index: int) -> ValueType:
        """The type of an operand that inference made sure is there."""
        kind = self.inputs[index]
        assert kind is not None
        return kind

    @property
    def nbytes(self) -> int:
        """What operands and results take in the types in which kernels compute."""
        return sum(computed_nbytes(t) for t in (*self.inputs, *self.outputs) if t is not None)


@dataclass(frozen=True, slots=True)
class WorkspaceRule:
    """The most bytes that a kernel has at once beside operands and results, at binding or while its
    steps run. It may say too much, never too little; a few chunks of a chain are added to it.

    `is_kept`: from binding on; else what outlives a step lies in the common memory of kernels
    (`steps.workspace`).
    """

    nbytes: Callable[[WorkspaceContext], int]
    is_kept: bool = True


def computed_nbytes(kind: ValueType) -> int:
    """What a value takes where kernels read it: float32 stands in for narrower floats."""
    return math.prod(kind.shape) * kind.data_type.compute_dtype.itemsize


def operands(times: float, *, is_kept: bool = True) -> WorkspaceRule:
    """A rule: so many times what operands and results take in the compute type."""

    def nbytes(context: WorkspaceContext) -> int:
        return int(times * context.nbytes)

    return WorkspaceRule(nbytes, is_kept)


#: The rule of operators that declare none.
twice = operands(2)
#: A rule for kernels that go through their operands once, with steps for each chunk of them.
few = operands(1 / 8, is_kept=False)


def integers(times: float, otherwise: WorkspaceRule) -> WorkspaceRule:
    """A rule for kernels that compute with integers as with wider numbers."""
    wide = operands(times)

    def nbytes(context: WorkspaceContext) -> int:
        first = context.operand(0)
        return (otherwise if first.data_type.is_floating else wide).nbytes(context)

    return WorkspaceRule(nbytes)


#: A prepared step: called with nothing, it reads and writes the arrays it was bound to.
Thunk = Callable[[], object]


class BodyBinder(Protocol):
    """Binds the body of an operation to arrays."""

    @property
    def repeated(self) -> Mapping[int, int]:
        """The outputs that are other outputs again, by number."""

    def bind(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Sequence[Thunk]:
        """The steps of one round on arrays that lie apart, one for each input, and for each output
        that is no other again. What it needs besides is of the memory of kernels."""


@dataclass(frozen=True, slots=True)
class KernelArguments(WithAttributes):
    """What a kernel is bound to.

    Arrays are dense views of the compute type (float32 stands in for narrower floats); outputs
    are preallocated and never overlap an input, but for elementwise operators, where output 0 may
    *be* an input's array. `constant[i]` says that input i never changes: it may be rearranged or
    broadcast once, at binding. What is derived from constants goes into `memo`, which the executor
    keeps for the operation, so that binding it to other addresses derives nothing again.
    `types` are the data types that the outputs are rounded to; empty where that is not said.
    `body` binds the body that the operation carries.
    """

    inputs: tuple[Array | None, ...]
    outputs: tuple[Array, ...]
    attributes: Mapping[str, AttributeValue]
    constant: tuple[bool, ...]
    memo: dict[str, Array] = field(default_factory=dict)
    types: tuple[DataType, ...] = ()
    body: BodyBinder | None = None

    def given(self, index: int) -> Array:
        """The array of an operand that inference made sure is there."""
        array = self.inputs[index]
        assert array is not None
        return array

    def optional(self, index: int) -> Array | None:
        """The array of an optional operand."""
        return self.inputs[index] if index < len(self.inputs) else None

    def is_constant(self, index: int) -> bool:
        """Whether an operand may be rearranged once, at binding."""
        return index < len(self.constant) and self.constant[index]

    def ints_at(self, index: int) -> tuple[int, ...]:
        """The integers of an operand that was known at compile time."""
        return tuple(int(value) for value in self.given(index).ravel())

    def remembered(self, name: str, make: Callable[[], Array]) -> Array:
        """What is derived from constants: made at an operation's first binding, then shared."""
        array = self.memo.get(name)
        if array is None:
            array = self.memo[name] = make()
        return array


#: Binds an operator to arrays and returns the steps that compute it; allocation happens here, once.
#: Steps may rely on their caller's `np.errstate(all="ignore")`: entering it costs more than many.
Kernel = Callable[[KernelArguments], Sequence[Thunk]]


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute: its Python type as written in files, and its default (`required` if none)."""

    kind: str  # "int", "float", "string", "ints", "floats", "strings"
    default: AttributeValue | None = None
    required: bool = False


def declared(**attributes: Attribute | AttributeValue) -> dict[str, Attribute]:
    """Attributes by name, each by its declaration, or by a default, whose type is the kind.

    >>> declared(axis=-1, modes=("linear",))["modes"].kind
    'strings'
    """
    return {
        name: given if isinstance(given, Attribute) else Attribute(_kind_of(given), given)
        for name, given in attributes.items()
    }


def _kind_of(default: AttributeValue) -> str:
    if isinstance(default, tuple):
        return _kind_of(default[0]) + "s"
    return {int: "int", float: "float", str: "string"}[type(default)]


@dataclass(frozen=True, slots=True)
class OpDef:
    """One operator: names as in ONNX (opset 26), arity, attributes, inference and NumPy kernel.

    `elementwise`: each output element depends on the input elements at its own place only, so an
    output may overwrite an input that is not read later. `gradient` is its vector-Jacobian rule
    (`stitch.ops.gradient`) and `batching` how it is applied to a batch
    (`stitch.ops.batching`), None where it has none. `workspace` says how many bytes the kernel
    takes for itself (`stitch.ops.steps` has rules to choose from). An operator that `checks`
    looks at the data of operands, also where its results have no elements.
    """

    name: str
    inputs: tuple[int, int]  # least and most operands; most = -1 for any number
    infer: Inference
    kernel: Kernel
    outputs: tuple[int, int] = (1, 1)
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    domain: str = ""
    elementwise: bool = False
    gradient: Gradient | None = None
    batching: Batching | None = None
    workspace: WorkspaceRule = twice
    checks: bool = False

    def steps(self, arguments: KernelArguments) -> Sequence[Thunk]:
        """The kernel's steps; none where there is nothing to compute: no kernel asks for that."""
        has_elements = any(out.size for out in arguments.outputs)
        return self.kernel(arguments) if has_elements or self.checks else ()


def resolve_attributes(
    definition: OpDef, attributes: Mapping[str, Any], location: str = ""
) -> Attributes:
    """The attributes of one operation with defaults filled in; optional ones may stay absent.

    Raises `CompileError` for an unknown, missing or mistyped attribute. An int is taken where a
    float is wanted; resolving a resolved mapping changes nothing.
    """
    where = definition.name + (f" at {location}" if location else "")
    for name in attributes:
        if name not in definition.attributes:
            raise CompileError(
                f"{definition.name} has no attribute {name!r}",
                where=where,
                expected=", ".join(definition.attributes) or "no attributes",
                remedy=closest(name, definition.attributes) or None,
            )
    resolved: dict[str, AttributeValue] = {}
    for name, declared in definition.attributes.items():
        if name in attributes:
            resolved[name] = _typed(name, declared, attributes[name], where)
        elif declared.required:
            raise CompileError(
                f"{definition.name} needs the attribute {name!r}",
                where=where,
                expected=declared.kind,
            )
        elif declared.default is not None:
            resolved[name] = declared.default
    return MappingProxyType(resolved)


def _typed(name: str, declared: Attribute, value: Any, where: str) -> AttributeValue:
    kind = declared.kind
    try:
        if kind.endswith("s"):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError
            # One element kind per attribute kind, which a union of tuples cannot say.
            return tuple(_scalar(kind[:-1], item) for item in value)  # type: ignore[return-value]
        return _scalar(kind, value)
    except TypeError:
        raise CompileError(
            f"attribute {name!r} has the wrong type", where=where, expected=kind, got=repr(value)
        ) from None


def _scalar(kind: str, value: Any) -> int | float | str:
    if kind == "int" and isinstance(value, Integral):
        return int(value)
    if kind == "float" and isinstance(value, Real):
        return float(value)
    if kind == "string" and isinstance(value, str):
        return value
    raise TypeError
