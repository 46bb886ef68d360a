"""Where to cut a graph: at its narrowest points, into parts of about the same cost.

Comes in: a graph, and the bytes that pass over each point between its operations. Goes out: the
points. The cost of an operation counts the bytes it touches and its multiplications; it decides
where cuts may lie, never what is computed. Must not know: parts, machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from stitch.graph import ComputationGraph
from stitch.ops import multiply_adds
from stitch.program import ABSENT, Operation, Value

#: How far a part's cost may lie from the mean; wider only where no cuts lie within.
_SLACKS = (0.4, 0.7, 1.0, math.inf)
#: Multiplications that take as long as touching one byte, about, on one core.
_PRODUCTS_PER_BYTE = 2


def narrowest_cuts(
    graph: ComputationGraph, crossing_nbytes: Sequence[int], parts: int
) -> tuple[int, ...]:
    """The points, `parts - 1` of them, over which the fewest bytes pass in total.

    Point p lies before operation p. Each part has an operation, and a cost near the mean; among
    equal cuts the most even ones win.
    """
    if parts == 1:
        return ()
    costs = [operation_cost(operation, graph.values) for operation in graph.operations]
    totals = np.array([0, *accumulate(costs)], np.float64)
    mean = max(totals[-1] / parts, 1.0)
    for slack in _SLACKS:
        cuts = _cuts(totals, np.array(crossing_nbytes, np.float64), parts, mean, slack)
        if cuts is not None:
            return cuts
    raise AssertionError("without limits on cost, any cuts will do")


def _cuts(
    totals: np.ndarray[tuple[int], np.dtype[np.float64]],
    crossing: np.ndarray[tuple[int], np.dtype[np.float64]],
    parts: int,
    mean: float,
    slack: float,
) -> tuple[int, ...] | None:
    """Best cuts by dynamic programming over (parts so far, end of the last one)."""
    count = len(totals) - 1
    # Bytes are whole numbers: what is added for unevenness decides between equal sums only.
    unevenness = 0.5 / (parts * (parts * mean) ** 2)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    steps = []
    for part in range(parts):
        nearer = np.full(count + 1, np.inf)
        source = np.zeros(count + 1, np.int64)
        for end in range(part + 1, count + 1):
            cost = totals[end] - totals[part:end]
            sums = best[part:end] + unevenness * (cost - mean) ** 2
            sums = np.where(np.abs(cost - mean) <= slack * mean, sums, np.inf)
            at = int(np.argmin(sums))
            nearer[end], source[end] = sums[at], part + at
        nearer[:count] += crossing[:count]
        best = nearer
        steps.append(source)
    if not np.isfinite(best[count]):
        return None
    ends = [count]
    for source in reversed(steps):
        ends.append(int(source[ends[-1]]))
    return tuple(reversed(ends[1:-1]))


def operation_cost(operation: Operation, values: Sequence[Value]) -> float:
    """Bytes read and written, and multiplications as the bytes that take as long."""
    touched = [v for v in (*operation.inputs, *operation.outputs) if v != ABSENT]
    nbytes = sum(values[v].type.nbytes for v in touched)
    products = 0 if operation.domain else multiply_adds(operation, values)
    return 1 + nbytes + products / _PRODUCTS_PER_BYTE
