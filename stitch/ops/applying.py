"""Using a definition: infer the types of an operation, bind it to arrays, or compute it at once;
and what the NumPy kernels of a whole program take beside its values: kept, and while they run.

Bound steps are run under `np.errstate(all="ignore")`: kernels rely on it, as entering it costs more
than many of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.errors import CompileError
from stitch.ops.definition import (
    ANY_KERNEL_NBYTES,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    computed_nbytes,
    resolve_attributes,
)
from stitch.ops.inference import InferenceContext, operation_text
from stitch.ops.registry import lookup
from stitch.program import (
    ABSENT,
    MAX_RANK,
    NO_ATTRIBUTES,
    Array,
    Body,
    DataType,
    Operation,
    OperationList,
    ValueType,
    result_types,
)

#: No result is larger: sums of sizes, padded to tiles and banks, stay far from 64 bits.
MAX_NBYTES = 1 << 46
#: What the steps of one operation take as Python objects.
STEPS_NBYTES = 4096


def infer_types(
    op: str,
    inputs: Sequence[ValueType | None],
    *,
    domain: str = "",
    constants: Sequence[Array | None] | None = None,
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    outputs: int = 1,
    location: str = "",
) -> tuple[ValueType, ...]:
    """The types of an operation's outputs; raises `CompileError` for operands that do not fit.

    `constants[i]` is the data of operand i where it is known; `outputs` is how many are wanted.

    >>> a = ValueType((2, 1), DataType.FLOAT32)
    >>> infer_types("Add", [a, ValueType((3,), DataType.FLOAT32)])[0].text()
    '2x3xf32'
    """
    definition = lookup(op, domain)
    known = tuple(constants) if constants is not None else (None,) * len(inputs)
    context = InferenceContext(
        op,
        tuple(inputs),
        known,
        resolve_attributes(definition, attributes, location),
        outputs,
        location,
    )
    _check_arity(definition, context)
    # What a shape is computed from may overflow like any other number.
    with np.errstate(all="ignore"):
        kinds = definition.infer(context)
    assert len(kinds) == outputs, f"{op} inferred {len(kinds)} outputs of {outputs}"
    for kind in kinds:
        _check_size(context, kind)
    return kinds


def infer_operation(
    operation: Operation,
    inputs: Sequence[ValueType | None],
    constants: Sequence[Array | None],
    location: str | None = None,
    bodies: Sequence[Body] = (),
) -> tuple[ValueType, ...]:
    """As `infer_types`, for an operation as graphs and programs hold it, and their `bodies`."""
    if operation.body != ABSENT:
        try:
            kinds = result_types(operation, bodies)
        except ValueError as error:
            raise CompileError(f"{operation.op}: {error}", where=operation.location) from None
        for kind in kinds:
            _check_size(
                InferenceContext(operation.op, tuple(inputs), (), {}, 0, location or ""), kind
            )
        return kinds
    return infer_types(
        operation.op, inputs, domain=operation.domain, constants=constants,
        attributes=operation.attributes, outputs=len(operation.outputs),
        location=operation.location if location is None else location,
    )  # fmt: skip


def evaluate_operation(operation: Operation, inputs: Sequence[Array | None]) -> tuple[Array, ...]:
    """As `evaluate`, for an operation as graphs and programs hold it."""
    return evaluate(
        operation.op, inputs, domain=operation.domain, attributes=operation.attributes,
        outputs=len(operation.outputs),
    )  # fmt: skip


def _check_size(context: InferenceContext, kind: ValueType) -> None:
    if len(kind.shape) > MAX_RANK:
        raise context.fail(
            f"the result of {context.op} has too many dimensions",
            expected=f"at most {MAX_RANK}",
            got=len(kind.shape),
        )
    # Dimensions beside an empty one count too: nothing could index them.
    if math.prod(max(d, 1) for d in kind.shape) * kind.data_type.dtype.itemsize > MAX_NBYTES:
        raise context.fail(
            f"the result of {context.op} is larger than the memory of any machine",
            expected=f"at most {MAX_NBYTES} bytes",
            got=kind.text(),
        )


def _check_arity(definition: OpDef, context: InferenceContext) -> None:
    sides = (
        ("operands", len(context.inputs), definition.inputs),
        ("outputs", context.outputs, definition.outputs),
    )
    for side, count, (least, most) in sides:
        if count < least or (most >= 0 and count > most):
            upper = "or more" if most < 0 else f"to {most}"
            raise context.fail(
                f"{definition.name} has the wrong number of {side}",
                expected=least if least == most else f"{least} {upper}",
                got=count,
            )
    required = (
        context.inputs if definition.inputs[1] < 0 else context.inputs[: definition.inputs[0]]
    )
    if None in required:
        raise context.fail(f"operand {required.index(None)} of {definition.name} is not optional")


def kernel_workspace(
    op: str,
    inputs: Sequence[ValueType | None],
    outputs: Sequence[ValueType],
    *,
    domain: str = "",
    constants: Sequence[Array | None] | None = None,
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
) -> int:
    """The most bytes that an operation's NumPy kernel has at once beside operands and results.

    >>> a = ValueType((1000, 1000), DataType.BFLOAT16)
    >>> kernel_workspace("Add", [a, a], [a]) < a.shape[0] * a.shape[1] * 4
    True
    """
    definition = lookup(op, domain)
    context = WorkspaceContext(
        tuple(inputs),
        tuple(constants) if constants is not None else (None,) * len(inputs),
        resolve_attributes(definition, attributes),
        tuple(outputs),
    )
    return definition.workspace.nbytes(context) + ANY_KERNEL_NBYTES


def bind(
    op: str,
    inputs: Sequence[Array | None],
    outputs: Sequence[Array],
    *,
    domain: str = "",
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    constant: Sequence[bool] | None = None,
    types: Sequence[DataType] = (),
) -> tuple[Thunk, ...]:
    """The steps that compute an operation from `inputs` into `outputs`, dense arrays of the
    compute types; run them under `np.errstate(all="ignore")`.

    `constant[i]` promises that input i never changes; `types[i]` is what output i is rounded to
    afterwards, by default the type of its array. Operands that decide shapes are read now.
    """
    definition = lookup(op, domain)
    fixed = tuple(constant) if constant is not None else (False,) * len(inputs)
    resolved = resolve_attributes(definition, attributes)
    rounded = tuple(types) or tuple(DataType.from_dtype(array.dtype) for array in outputs)
    with np.errstate(all="ignore"):
        return tuple(
            definition.steps(
                KernelArguments(tuple(inputs), tuple(outputs), resolved, fixed, types=rounded)
            )
        )


def in_compute_type(array: Array) -> Array:
    """The array as kernels want it: dense, and float32 where its type is narrower."""
    return np.asarray(array, DataType.from_dtype(array.dtype).compute_dtype, order="C")


def evaluate(
    op: str,
    inputs: Sequence[Array | None],
    *,
    domain: str = "",
    attributes: Mapping[str, Any] = NO_ATTRIBUTES,
    outputs: int = 1,
) -> tuple[Array, ...]:
    """Compute an operation at once; float16 and bfloat16 are computed in float32, rounded once.

    Raises `CompileError` for operands that do not fit, `TaskError` for an index out of range.

    >>> evaluate("Div", [np.array([-7, 7]), np.array([2, 2])])[0].tolist()
    [-3, 3]
    """
    arrays = [None if a is None else np.asarray(a) for a in inputs]
    types = [
        None if a is None else ValueType(a.shape, DataType.from_dtype(a.dtype)) for a in arrays
    ]
    kinds = infer_types(
        op, types, domain=domain, constants=arrays, attributes=attributes, outputs=outputs
    )
    results = [np.empty(t.shape, t.data_type.compute_dtype) for t in kinds]
    with np.errstate(all="ignore"):
        operands = [None if a is None else in_compute_type(a) for a in arrays]
        steps = bind(
            op,
            operands,
            results,
            domain=domain,
            attributes=attributes,
            constant=[True] * len(arrays),
            types=[t.data_type for t in kinds],
        )
        for step in steps:
            step()
        return tuple(
            r.astype(t.data_type.dtype, copy=False) for r, t in zip(results, kinds, strict=True)
        )


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
    """What the NumPy kernel of an operation takes that carries no body; a foreign operator has
    none."""
    if operation.is_foreign:
        return 0, 0
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
