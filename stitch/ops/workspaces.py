"""How many bytes a NumPy kernel takes beside its operands and results: rules, and some to choose.

A rule may say more than a kernel takes, never less: `tests/ops/test_workspaces.py` measures every
operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stitch.ops.attributes import WithAttributes
from stitch.program import Array, AttributeValue, ValueType

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
