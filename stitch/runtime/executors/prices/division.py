"""Divide a program among NumPy's kernels, ONNX Runtime and a library by a price table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.ops import multiply_adds
from stitch.program import Body, Operation, Program, ScanForm, Value, is_scan
from stitch.runtime.executors.host import KernelLibrary
from stitch.runtime.executors.prices.operation_prices import OperationPrices
from stitch.runtime.executors.prices.tables import Points, PriceTable


@dataclass(frozen=True, slots=True)
class Division:
    """The runs of operations that ONNX Runtime computes, and the operations of the library."""

    runs: tuple[tuple[int, ...], ...]
    library: frozenset[int] = frozenset()


def divide(
    program: Program,
    able: Sequence[bool],
    table: PriceTable,
    threads: int = 1,
    library: KernelLibrary | None = None,
) -> Division:
    """Return the cheapest division by a price table.

    Prefers one run of all operations, then NumPy alone, unless a division gains what the table asks
    for. The library's kernels must gain over the whole division; else each must gain over NumPy's.

    Args:
        able: Which operations ONNX Runtime can run.
        threads: Threads of ONNX Runtime.
    """
    if table.onnxruntime is None:
        able = [False] * len(able)
    prices = OperationPrices(program, table, threads)
    division, price = _without_library(prices, able)
    if library is None:
        return division
    prices.offer(library)
    runs = _cheapest(prices, able)
    least = prices.cheaper
    if prices.of_division(runs) > table.gains.library.max_cost(price):
        runs = division.runs
        least = {i: cost for i, cost in prices.cheaper.items()
                 if cost <= table.gains.library.max_cost(prices.of_numpy(i))}  # fmt: skip
    foreign = {i for run in runs for i in run}
    return Division(runs, frozenset(i for i in least if i not in foreign))


def _without_library(prices: OperationPrices, able: Sequence[bool]) -> tuple[Division, float]:
    """Return the division between NumPy and ONNX Runtime, and its price."""
    runs, gains = _cheapest(prices, able), prices.table.gains
    least = prices.of_division(runs)
    if not all(able) or not able:
        return Division(runs), least
    whole, alone = (tuple(range(len(able))),), prices.of_division(())
    price = prices.of_division(whole)
    if least <= gains.division.max_cost(price):
        return Division(runs), least
    if alone <= gains.numpy.max_cost(price):
        return Division(()), alone
    return Division(whole), price


def _cheapest(prices: OperationPrices, able: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """Return the runs of the cheapest division by dynamic programming, not pricing copied views."""
    # The lowest price if the last operation is NumPy's, and if it is ONNX Runtime's.
    ends = (0.0, math.inf)
    before: list[tuple[int, int]] = []
    for index, foreign in enumerate(able):
        plain = prices.cheaper.get(index) or prices.of_numpy(index)
        other = prices.of_onnx(index) if foreign else math.inf
        from_plain = int(ends[1] < ends[0])
        from_other = int(ends[1] <= ends[0] + prices.call)
        before.append((from_plain, from_other))
        ends = min(ends) + plain, (ends[1] if from_other else ends[0] + prices.call) + other
    state = int(ends[1] <= ends[0])
    states = [0] * len(able)
    for index in reversed(range(len(able))):
        states[index] = state
        state = before[index][state]
    runs: list[list[int]] = []
    for index, state in enumerate(states):
        if state and index and states[index - 1]:
            runs[-1].append(index)
        elif state:
            runs.append([index])
    return tuple(map(tuple, runs))


#: Operators that take NumPy many passes or Python loops.
MANY_PASSES = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumProd", "CumSum", "Erf",
    "Gelu", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "LogSoftmax", "MaxPool", "Mish", "RMSNormalization", "Softmax", "TopK",
})  # fmt: skip
#: Operators that NumPy computes more slowly, in a few passes.
FEW_PASSES = frozenset({
    "Celu", "Elu", "Exp", "HardSigmoid", "HardSwish", "Log", "Selu", "Sigmoid", "Softplus", "Swish",
})  # fmt: skip


def points(program: Program, for_one: Points) -> float:
    """Return a program's points: from 1 on it may use ONNX Runtime (see the module)."""
    return _score(program.operations, program.values, program.bodies, for_one)


def _score(
    operations: Sequence[Operation],
    values: Sequence[Value],
    bodies: Sequence[Body],
    for_one: Points,
) -> float:
    score = 0.0
    for operation in operations:
        if is_scan(operation):
            body = bodies[operation.body]
            calls = len(body.operations) + len(body.outputs)
            inside = _score(body.operations, body.values, bodies, for_one)
            score += ScanForm.of(operation).likely_rounds * (inside + calls / for_one.round_calls)
        if operation.is_foreign:
            return math.inf  # Nothing else computes it.
        if operation.domain:
            continue
        score += multiply_adds(operation, values) / for_one.multiply_adds
        if operation.op in MANY_PASSES:
            score += 1
        elif operation.op in FEW_PASSES:
            score += math.prod(values[operation.outputs[0]].type.shape) / for_one.elements
    return score
