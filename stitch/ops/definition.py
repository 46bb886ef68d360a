"""`OpDef`: all that Stitch knows of one operator, and the terms in which it is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stitch.errors import CompileError
from stitch.ops.gradient import Gradient
from stitch.ops.workspaces import WorkspaceRule, twice
from stitch.program import Array, AttributeValue, DataType, ValueType

#: A prepared step: called with nothing, it reads and writes the arrays it was bound to.
Thunk = Callable[[], object]


@dataclass(frozen=True, slots=True)
class InferenceContext:
    """What shape and type inference may look at.

    `inputs[i]` is None for an absent optional operand; `constants[i]` holds the data of operand i
    where it is known at compile time (a Reshape's target shape), else None.
    """

    op: str
    inputs: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    attributes: Mapping[str, AttributeValue]
    outputs: int
    location: str = ""

    def fail(
        self, what: str, *, expected: str | None = None, got: str | None = None
    ) -> CompileError:
        """The error to raise: names the operator, where it stands, and the operand types."""
        operands = ", ".join("_" if t is None else t.text() for t in self.inputs)
        where = f"{self.op}({operands})" + (f" at {self.location}" if self.location else "")
        return CompileError(what, where=where, expected=expected, got=got)


@dataclass(frozen=True, slots=True)
class KernelArguments:
    """What a kernel is bound to.

    Arrays are dense views of the compute type (float32 stands in for narrower floats); outputs
    are preallocated and never overlap an input, but for elementwise operators, where output 0 may
    *be* an input's array. `constant[i]` says that input i never changes: it may be rearranged or
    broadcast once, at binding. What is derived from constants goes into `memo`, which the executor
    keeps for the operation, so that binding it to other addresses derives nothing again.
    `types` are the data types that the outputs are rounded to; empty where that is not said.
    """

    inputs: tuple[Array | None, ...]
    outputs: tuple[Array, ...]
    attributes: Mapping[str, AttributeValue]
    constant: tuple[bool, ...]
    memo: dict[str, Array] = field(default_factory=dict)
    types: tuple[DataType, ...] = ()


#: Binds an operator to arrays and returns the steps that compute it; allocation happens here, once.
#: Steps may rely on their caller's `np.errstate(all="ignore")`: entering it costs more than many.
Kernel = Callable[[KernelArguments], Sequence[Thunk]]
Inference = Callable[[InferenceContext], tuple[ValueType, ...]]


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute: its Python type as written in files, and its default (`required` if none)."""

    kind: str  # "int", "float", "string", "ints", "floats", "strings"
    default: AttributeValue | None = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class OpDef:
    """One operator: names as in ONNX (opset 26), arity, attributes, inference and NumPy kernel.

    `elementwise`: each output element depends on the input elements at its own place only, so an
    output may overwrite an input that is not read later. `gradient` is its vector-Jacobian rule
    (`stitch.ops.gradient`), None where it has none. `workspace` says how many bytes the kernel
    takes for itself (`stitch.ops.workspaces` has rules to choose from).
    """

    name: str
    inputs: tuple[int, int]  # least and most operands; most = -1 for any number
    infer: Inference
    kernel: Kernel
    outputs: tuple[int, int] = (1, 1)
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    domain: str = ""
    elementwise: bool = False
    doc: str = ""
    gradient: Gradient | None = None
    workspace: WorkspaceRule = twice
