"""Constant folding: what can be computed now is computed now.

An operation is folded where all of its operands are constants, or where it asks only for the shape
of a value (shapes are static here). Results are those of the NumPy kernels, bit for bit. A budget
keeps folding from blowing up the file: a result counts, less the constants that only this operation
reads. Shapes, axes and indices are free: operators need them to be constants. Other budgets bound
the work and what kernels take for themselves, in proportion to the constants that were given. All
are asked before anything is computed or allocated: types say it all. Operators that draw random
numbers are never folded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stitch import ops
from stitch.budget import SMALL_NBYTES, claim, claim_for
from stitch.errors import StitchError
from stitch.graph import MAX_KNOWN_ELEMENTS, ComputationGraph
from stitch.program import ABSENT, Array, Constant, Operation, ValueType

#: Elementary steps that all folding of a graph may take: so many, and so many for each element of
#: the constants that the graph was given (which a front end read from a file).
FREE_STEPS, STEPS_PER_ELEMENT = 1 << 26, 16
#: What the kernel of one operation may take for itself: so much, and so many times the constants.
FREE_WORKSPACE_NBYTES, WORKSPACE_TIMES = 1 << 26, 4

#: Operators with hidden state: two applications to the same operands may differ.
UNREPEATABLE = frozenset(
    {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip


def is_repeatable(operation: Operation) -> bool:
    """Whether the operation gives the same result for the same operands, always."""
    if operation.body != ABSENT:
        return False  # nobody looks into it
    if operation.domain:
        return True
    if operation.op == "Dropout":
        return len(operation.inputs) < 3
    return operation.op not in UNREPEATABLE


def fold_constants(graph: ComputationGraph, growth_nbytes: int) -> ComputationGraph:
    """The graph with constant operations replaced by their results, constants grown by at most
    `growth_nbytes` in total."""
    known: dict[int, Array] = dict(graph.constant_data())
    steps_left = FREE_STEPS + STEPS_PER_ELEMENT * sum(data.size for data in known.values())
    workspace = sum(data.nbytes for data in known.values()) * WORKSPACE_TIMES
    workspace += FREE_WORKSPACE_NBYTES
    readers = Counter(v for operation in graph.operations for v in operation.inputs)
    outputs = {slot.value for slot in graph.outputs}
    kept: list[Operation] = []
    for operation in graph.operations:
        dying = {
            v
            for v in operation.inputs
            if v in known and v not in outputs and readers[v] == operation.inputs.count(v)
        }
        operands = [None if v == ABSENT else graph.values[v].type for v in operation.inputs]
        types = [graph.values[v].type for v in operation.outputs if v != ABSENT]
        growth = sum(kind.nbytes for kind in types if not _is_index(kind))
        growth -= sum(known[v].nbytes for v in dying)
        shape = ops.known_by_type(operation, operands[0]) if operands else None
        results = None if shape is None else dict.fromkeys(operation.outputs, shape)
        steps = 0 if shape is not None else ops.estimated_steps(operation, operands, types)
        if results is None and growth <= max(growth_nbytes, 0) and steps <= steps_left:
            results = _fold(operation, operands, types, known, workspace)
        if results is None:
            kept.append(operation)
            continue
        growth_nbytes -= growth
        steps_left -= steps
        known.update(results)
    computed = {v for operation in kept for v in operation.outputs}
    constants = tuple(Constant(v, data) for v, data in known.items() if v not in computed)
    return replace(graph, operations=tuple(kept), constants=constants)


def _is_index(kind: ValueType) -> bool:
    """Whether the data may be a shape, axes or indices: small, and integers."""
    return kind.data_type.dtype.kind in "iub" and math.prod(kind.shape) <= MAX_KNOWN_ELEMENTS


def _fold(
    operation: Operation,
    operands: Sequence[ValueType | None],
    types: Sequence[ValueType],
    known: dict[int, Array],
    workspace_nbytes: int,
) -> dict[int, Array] | None:
    """The results of an operation by value, or None where it has to stay."""
    if not is_repeatable(operation) or not all(v == ABSENT or v in known for v in operation.inputs):
        return None
    arrays = [None if v == ABSENT else known[v] for v in operation.inputs]
    try:
        taken = ops.kernel_workspace(
            operation.op,
            operands,
            types,
            domain=operation.domain,
            constants=arrays,
            attributes=operation.attributes,
        )
        if taken > workspace_nbytes:
            return None
        claimed = claim(taken + 2 * sum(kind.nbytes for kind in types), f"folding {operation.op}")
        with np.errstate(all="ignore"):
            results = ops.evaluate_operation(operation, arrays)
    except (StitchError, MemoryError):
        return None  # what fails must fail where it runs, with its own words
    folded = {
        v: np.array(data, order="C")
        for v, data in zip(operation.outputs, results, strict=True)
        if v != ABSENT
    }
    claimed.dispose()
    for data in folded.values():
        if data.nbytes >= SMALL_NBYTES:
            claim_for(data, data.nbytes, f"for the result of {operation.op}, computed beforehand")
    return folded
