"""Values, operations and slots: the one vocabulary that graphs and programs share."""

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

AttributeValue = int | float | str | tuple[int, ...] | tuple[float, ...] | tuple[str, ...]
#: The index that stands for an optional operand that is not there.
ABSENT = -1
NO_ATTRIBUTES: Mapping[str, AttributeValue] = MappingProxyType({})
#: The domain of operations that are names only: those of another compiler's binaries. They are
#: planned around, and nothing here computes them.
OPAQUE_DOMAIN = "ttnn"


@dataclass(frozen=True, slots=True)
class ValueType:
    """What an operator sees of a value: its shape and its logical data type."""

    shape: tuple[int, ...]
    data_type: DataType

    @property
    def nbytes(self) -> int:
        """What a dense array of it takes; raises `LayoutError` for block formats.

        >>> ValueType((2, 3), DataType.FLOAT32).nbytes
        24
        """
        return math.prod(self.shape) * self.data_type.itemsize

    def text(self) -> str:
        """The spelling of IREE.

        >>> ValueType((2, 3), DataType.FLOAT32).text()
        '2x3xf32'
        """
        return "x".join([*map(str, self.shape), self.data_type.short])


@dataclass(frozen=True, slots=True)
class Value:
    """One value: a name, its logical type, and, once placed, its layout.

    `type.data_type` is what operators compute with; `layout.data_type` is how it is stored. They
    differ only between floating types (a float32 value may be stored as bfp8).
    """

    name: str
    type: ValueType
    layout: Layout | None = None

    @property
    def desc(self) -> TensorDesc:
        """Shape and layout of a placed value; raises `CompileError` before placement."""
        if self.layout is None:
            raise CompileError(f"value {self.name!r} has no layout yet: it is not placed")
        return TensorDesc(self.type.shape, self.layout)


class MathFidelity(enum.Enum):
    """Of how many of their bits a matrix unit multiplies operands, in how many passes; the names
    are tt-metal's. `BY_TYPE`: as the machine's library of kernels does for the operands' type.

    It decides how long a device takes. What is computed here does not depend on it.
    """

    BY_TYPE = "by_type"
    LOFI = "lofi"
    HIFI2 = "hifi2"
    HIFI3 = "hifi3"
    HIFI4 = "hifi4"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Operation:
    """One application of an operator; operands are indices into the values, `ABSENT` for none.

    `body`: the index, among the bodies of its program, of the operations that it stands for;
    `ABSENT` for an operator that has a kernel of its own everywhere. `math_fidelity` is of sums of
    products; others have none to choose. `opset`: of a foreign operator, the version of its domain
    that defines it; 0 for operators that Stitch defines.
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
        """Whether it is a name only: its types are what its program says, and it has no kernel."""
        return self.domain == OPAQUE_DOMAIN

    @property
    def is_foreign(self) -> bool:
        """Whether its operator is one that Stitch does not define: its types are what its program
        says, and only ONNX Runtime computes it."""
        return self.opset > 0

    @property
    def title(self) -> str:
        """The operator as messages spell it.

        >>> Operation("CDist", (0, 1), (2,), domain="com.microsoft", opset=1).title
        'com.microsoft.CDist'
        """
        return f"{self.domain}.{self.op}" if self.domain else self.op


class InputKind(enum.Enum):
    """What an input is for; decides its default home and whether results can be remembered."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    STATE = "state"
    SAVED = "saved"
    KEY = "key"


class Ownership(enum.Enum):
    """Whether the caller keeps an input (`borrow`) or gives it away (`donate`)."""

    BORROW = "borrow"
    DONATE = "donate"


#: What the program is called, after another, that gives the states which that one begins with.
INITIAL_STATE = ".initial_state"


@dataclass(frozen=True, slots=True)
class InputSlot:
    """A named input of a graph or program, and the value that it gives."""

    name: str
    value: int
    kind: InputKind = InputKind.ACTIVATION
    ownership: Ownership = Ownership.BORROW


@dataclass(frozen=True, slots=True)
class OutputSlot:
    """A named output; `aliases_input` is the index of the donated input whose buffer it takes."""

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
