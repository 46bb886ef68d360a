"""Constant folding: what can be computed now is computed now.

An operation is folded where all of its operands are constants, or where it asks only for the shape
of a value (shapes are static here). Results are those of the NumPy kernels, bit for bit. A budget
keeps folding from blowing up the file: a result counts, less the constants that only this operation
reads. Shapes, axes and indices are free: operators need them to be constants. Operators that draw
random numbers are never folded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from stitch import ops
from stitch.errors import StitchError
from stitch.graph.computation_graph import ComputationGraph
from stitch.graph.known_values import MAX_ELEMENTS
from stitch.program import ABSENT, Array, Constant, Operation, Value

#: Operators with hidden state: two applications to the same operands may differ.
UNREPEATABLE = frozenset(
    {
        "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
        "RandomUniformLike",
    }
)  # fmt: skip
_SHAPE_ONLY = frozenset({"Shape", "Size"})


def is_repeatable(operation: Operation) -> bool:
    """Whether the operation gives the same result for the same operands, always."""
    if operation.domain:
        return True
    if operation.op == "Dropout":
        return len(operation.inputs) < 3
    return operation.op not in UNREPEATABLE


def fold_constants(graph: ComputationGraph, growth_nbytes: int) -> ComputationGraph:
    """The graph with constant operations replaced by their results, constants grown by at most
    `growth_nbytes` in total."""
    known: dict[int, Array] = dict(graph.constant_data())
    readers = Counter(v for operation in graph.operations for v in operation.inputs)
    outputs = {slot.value for slot in graph.outputs}
    kept: list[Operation] = []
    for operation in graph.operations:
        results = _fold(operation, graph.values, known)
        if results is None:
            kept.append(operation)
            continue
        dying = {
            v
            for v in operation.inputs
            if v in known and v not in outputs and readers[v] == operation.inputs.count(v)
        }
        growth = sum(data.nbytes for data in results.values() if not _is_index(data))
        growth -= sum(known[v].nbytes for v in dying)
        if growth > 0 and growth > growth_nbytes:
            kept.append(operation)
            continue
        growth_nbytes -= growth
        known.update(results)
    made = {v for operation in kept for v in operation.outputs}
    constants = tuple(Constant(v, data) for v, data in known.items() if v not in made)
    return replace(graph, operations=tuple(kept), constants=constants)


def _is_index(data: Array) -> bool:
    """Whether the data may be a shape, axes or indices: small, and integers."""
    return data.dtype.kind in "iub" and data.size <= MAX_ELEMENTS


def _fold(
    operation: Operation, values: tuple[Value, ...], known: dict[int, Array]
) -> dict[int, Array] | None:
    """The results of an operation by value, or None where it has to stay."""
    if not is_repeatable(operation):
        return None
    arrays: list[Array | None] = []
    for v in operation.inputs:
        if v == ABSENT:
            arrays.append(None)
        elif v in known:
            arrays.append(known[v])
        elif operation.op in _SHAPE_ONLY and not operation.domain:
            kind = values[v].type
            # Stands for any array of this shape; it takes the bytes of one element.
            arrays.append(np.broadcast_to(np.zeros((), kind.data_type.dtype), kind.shape))
        else:
            return None
    try:
        with np.errstate(all="ignore"):
            results = ops.evaluate(
                operation.op,
                arrays,
                domain=operation.domain,
                attributes=operation.attributes,
                outputs=len(operation.outputs),
            )
    except StitchError:
        return None  # what fails must fail where it runs, with its own words
    return {
        v: np.array(data, order="C")
        for v, data in zip(operation.outputs, results, strict=True)
        if v != ABSENT
    }
