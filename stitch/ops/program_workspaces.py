"""What the NumPy kernels of a whole program take beside its values: kept, and while they run.

Comes in: a program's values, operations and constants. Goes out: bytes, and the operation that
takes most. Must not know: addresses, layouts, executors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stitch.ops.applying import infer_types, kernel_workspace
from stitch.ops.inference import operation_text
from stitch.ops.registry import lookup
from stitch.ops.workspaces import computed_nbytes
from stitch.program import ABSENT, Array, Operation, OperationList

#: What the steps of one operation take as Python objects.
STEPS_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class KernelBytes:
    """Bytes that kernels take: `kept` from binding on, `passing` by one operation at a time.

    `largest` names the operation that takes most, with its operands; empty without operations.
    """

    kept: int
    passing: int
    largest: str


#: The most bytes that an operation takes for itself, and how many it keeps from binding on.
OperationBytes = Callable[[OperationList, Operation, dict[int, Array]], tuple[int, int]]


def kernel_bytes(program: OperationList, bytes_of: OperationBytes) -> KernelBytes:
    """What the operations of a program take, if each takes what `bytes_of` says."""
    constants = {c.value: c.data for c in program.constants}
    kept = passing = most = 0
    largest = ""
    for operation in program.operations:
        nbytes, held = bytes_of(program, operation, constants)
        passing = max(passing, nbytes)
        kept += STEPS_NBYTES + held
        if nbytes > most:
            kinds = (None if v == ABSENT else program.values[v].type for v in operation.inputs)
            name = f"{operation.domain}.{operation.op}".lstrip(".")
            most, largest = nbytes, operation_text(name, kinds, operation.location)
    return KernelBytes(kept, passing, largest)


def numpy_bytes(
    program: OperationList, operation: Operation, constants: dict[int, Array]
) -> tuple[int, int]:
    """What an operation's NumPy kernel takes."""
    values = program.values
    inputs = [None if v == ABSENT else values[v].type for v in operation.inputs]
    known = [constants.get(v) for v in operation.inputs]
    words: dict[str, Any] = {
        "domain": operation.domain,
        "constants": known,
        "attributes": operation.attributes,
    }
    wanted = [v for v in operation.outputs if v != ABSENT]
    outputs, unwanted = tuple(values[v].type for v in wanted), 0
    if len(wanted) < len(operation.outputs):
        # Kernels write unwanted results too.
        outputs = infer_types(operation.op, inputs, outputs=len(operation.outputs), **words)
        unwanted = sum(
            computed_nbytes(t) for t, v in zip(outputs, operation.outputs, strict=True) if v < 0
        )
    nbytes = kernel_workspace(operation.op, inputs, outputs, **words) + unwanted
    is_kept = lookup(operation.op, operation.domain).workspace.is_kept or unwanted > 0
    return nbytes, nbytes if is_kept else 0


def operand_nbytes(program: OperationList, operation: Operation) -> int:
    """What an operation's operands and results take in the types in which kernels compute."""
    touched = (v for v in (*operation.inputs, *operation.outputs) if v != ABSENT)
    return sum(computed_nbytes(program.values[v].type) for v in touched)
