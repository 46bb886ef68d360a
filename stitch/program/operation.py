"""Values, operations and slots, shared by graphs and programs."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from stitch.errors import CompileError
from stitch.program.contents import Array, as_read_only
from stitch.program.data_type import DataType
from stitch.program.layout import Layout, TensorDesc
from stitch.program.symbolic_sizes import size_text

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
#: The index that stands for an optional operand that is not there.
ABSENT = -1
NO_ATTRIBUTES: Mapping[str, AttributeValue] = MappingProxyType({})
#: The domain of operations that are names only: those of another compiler's binaries. They are
#: planned around, and nothing here computes them.
OPAQUE_DOMAIN = "ttnn"


@dataclass(frozen=True, slots=True)
class ValueType:
    """Shape and logical data type of a value."""

    shape: tuple[int, ...]
    data_type: DataType

    @property
    def nbytes(self) -> int:
        """Return the bytes of a dense array; raise `LayoutError` for block formats.

        >>> ValueType((2, 3), DataType.FLOAT32).nbytes
        24
        """
        return math.prod(self.shape) * self.data_type.itemsize

    def text(self) -> str:
        """Return the text of the type as in IREE, with expressions for symbolic sizes.

        >>> ValueType((2, 3), DataType.FLOAT32).text()
        '2x3xf32'
        """
        return "x".join([*(size_text(size, True) for size in self.shape), self.data_type.short])


@dataclass(frozen=True, slots=True)
class Value:
    """One value: a name, its logical type, and, once placed, its layout.

    Operators compute in `type.data_type`; `layout.data_type` is the storage type. They differ only
    between floating types (a float32 value may be stored as bfp8).

    Attributes:
        name: The name; unique in a program.
        type: The logical type.
        layout: Where it lies and how; None before placement.
        is_numbered: Whether the graph named it after its operation with a number (`add_3`): the
            program numbers such values again, in the order of its operations.
    """

    name: str
    type: ValueType
    layout: Layout | None = None
    is_numbered: bool = False

    @property
    def desc(self) -> TensorDesc:
        """Return shape and layout of a placed value; raise `CompileError` before placement."""
        if self.layout is None:
            raise CompileError(f"value {self.name!r} has no layout yet: it is not placed")
        return TensorDesc(self.type.shape, self.layout)


class MathFidelity(enum.Enum):
    """The passes of a matrix unit, by the operand bits of each (tt-metal's names).

    `BY_TYPE` follows the operands' type. It affects the simulated time, not the results.
    """

    BY_TYPE = "by_type"
    LOFI = "lofi"
    HIFI2 = "hifi2"
    HIFI3 = "hifi3"
    HIFI4 = "hifi4"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Operation:
    """One application of an operator.

    Args:
        op: The operator.
        inputs: Indices of the operands, or `ABSENT`.
        outputs: Indices of the results, or `ABSENT`.
        attributes: Its attributes.
        domain: Its domain; empty is ONNX's.
        location: Its location in the source.
        body: The index of its body in the program; `ABSENT` if every executor has a kernel.
        math_fidelity: Of matrix products.
        opset: The version of the domain of a foreign operator; 0 for those that Stitch defines.
    """

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: Mapping[str, AttributeValue] = field(default_factory=lambda: NO_ATTRIBUTES)
    domain: str = ""
    location: str = ""
    body: int = ABSENT
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE
    opset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

    @property
    def is_opaque(self) -> bool:
        """Return whether it is opaque: the program states its types, and it has no kernel."""
        return self.domain == OPAQUE_DOMAIN

    @property
    def is_foreign(self) -> bool:
        """Return whether the operator is foreign: the program states its types, and only ONNX
        Runtime computes it."""
        return self.opset > 0

    @property
    def title(self) -> str:
        """Return the operator's name for errors.

        >>> Operation("CDist", (0, 1), (2,), domain="com.microsoft", opset=1).title
        'com.microsoft.CDist'
        """
        return f"{self.domain}.{self.op}" if self.domain else self.op


class InputKind(enum.Enum):
    """The use of an input; decides its default space and whether results can be cached."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    STATE = "state"
    SAVED = "saved"
    KEY = "key"


class Ownership(enum.Enum):
    """Whether a program may overwrite an input (`donate`) or not (`borrow`)."""

    BORROW = "borrow"
    DONATE = "donate"


#: What the program is called, after another, that gives the states which that one begins with.
INITIAL_STATE = ".initial_state"


@dataclass(frozen=True, slots=True)
class InputSlot:
    """A named input of a graph or program, and its value."""

    name: str
    value: int
    kind: InputKind = InputKind.ACTIVATION
    ownership: Ownership = Ownership.BORROW


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """A named output; `aliases_input` is the index of the donated input whose buffer it reuses."""

    name: str
    value: int
    aliases_input: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value known at compile time: dense row-major data of the value's logical data type.

    The array is read-only and may be a memory mapping of the file that it came from.
    """

    value: int
    data: Array

    def __post_init__(self) -> None:
        if self.data.flags.writeable:
            object.__setattr__(self, "data", as_read_only(self.data))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        same = self.value == other.value and self.data.dtype == other.data.dtype
        return same and self.data.shape == other.data.shape and self._bytes() == other._bytes()

    def __hash__(self) -> int:
        return hash((self.value, self.data.shape, self.data.dtype.str))

    def _bytes(self) -> bytes:
        # NaN equals itself.
        return np.ascontiguousarray(self.data).tobytes()
