"""Which operations of a program go to ONNX Runtime, and which to NumPy's or a library's kernels.

Comes in: a program, a table of prices. Goes out: runs of operations, each one call of ONNX Runtime;
of all others, which are the library's (`KernelLibrary`). The choice rests on operators, shapes and
the table, never on a clock: by the same table the same program is always computed in the same way,
on every machine. Must not know sessions.

Every operation has two prices (`operation_prices`), and a run of ONNX Runtime's the price of its
call; the cheapest division is found by dynamic programming over the program's order, as if views
were as good as values to whoever reads them; what it then really costs decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.program import Program
from stitch.runtime.executors.host import KernelLibrary
from stitch.runtime.executors.operation_prices import OperationPrices
from stitch.runtime.executors.prices import PriceTable


@dataclass(frozen=True, slots=True)
class Division:
    """The runs of operations that go to ONNX Runtime, and those that go to the library."""

    runs: tuple[tuple[int, ...], ...]
    library: frozenset[int] = frozenset()


def divide(
    program: Program,
    able: Sequence[bool],
    table: PriceTable,
    threads: int = 1,
    library: KernelLibrary | None = None,
) -> Division:
    """The cheapest division by a table; `able` says which operations ONNX Runtime can run.

    One run of all where nothing else is much cheaper; none where kernels are. With a library the
    same, unless its kernels gain what they must: over the whole, for what ONNX Runtime joins is not
    seen in prices; else each over NumPy's, in whose place it comes.
    """
    if table.onnxruntime is None:
        able = [False] * len(able)
    division, price = _without_library(OperationPrices(program, table, threads), able)
    if library is None:
        return division
    prices = OperationPrices(program, table, threads, library)
    runs = _cheapest(prices, able)
    least = prices.cheaper
    if prices.of_division(runs) > table.gains.library.may_cost(price):
        runs = division.runs
        least = {i: cost for i, cost in prices.cheaper.items()
                 if cost <= table.gains.library.may_cost(prices.of_numpy(i))}  # fmt: skip
    foreign = {i for run in runs for i in run}
    return Division(runs, frozenset(i for i in least if i not in foreign))


def _without_library(prices: OperationPrices, able: Sequence[bool]) -> tuple[Division, float]:
    """The division between NumPy and ONNX Runtime, and its price."""
    runs, gains = _cheapest(prices, able), prices.table.gains
    least = prices.of_division(runs)
    if not all(able) or not able:
        return Division(runs), least
    whole, alone = (tuple(range(len(able))),), prices.of_division(())
    price = prices.of_division(whole)
    if least <= gains.division.may_cost(price):
        return Division(runs), least
    if alone <= gains.numpy.may_cost(price):
        return Division(()), alone
    return Division(whole), price


def _cheapest(prices: OperationPrices, able: Sequence[bool]) -> tuple[tuple[int, ...], ...]:
    """The runs of the cheapest division, were views as good as values to whoever reads them."""
    # Price so far when the last operation is NumPy's, and when it is ONNX Runtime's.
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
