"""The automatic executor: computes each operation by the kernel with the lowest price.

The choice depends on the program, the price table and the installed packages, never on measured
time, so a program is always computed in the same way.

Small programs run by NumPy alone, as a call of ONNX Runtime costs about 1 us more. A program may
use ONNX Runtime from one point on: the table says how many multiply-adds, elements of operators of
a few passes, and calls in a scan's rounds make a point; an operator of many passes makes one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stitch.errors import UsageError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.ops import multiply_adds
from stitch.program import Body, Operation, Program, ScanForm, Value, is_scan
from stitch.runtime.executors.executor import (
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    checked_threads,
)
from stitch.runtime.executors.host import (
    KernelLibrary,
    NumpyExecutor,
    PreparedKernels,
    either_bytes,
    program_bytes,
)
from stitch.runtime.executors.operation_prices import OperationPrices
from stitch.runtime.executors.prices import Points, Prices, PriceTable, load_prices

# Division


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
    division, price = _without_library(OperationPrices(program, table, threads), able)
    if library is None:
        return division
    prices = OperationPrices(program, table, threads, library)
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


class AutomaticExecutor(Executor):
    """Divides programs among NumPy's kernels, ONNX Runtime and a library of kernels by prices.

    Args:
        intra_op_threads: Threads of ONNX Runtime; `UsageError` below 1.
        prices: See `load_prices`.
    """

    name = "auto"
    supports_threads = True

    def __init__(self, intra_op_threads: int = 1, prices: Prices | None = None) -> None:
        self.prices: PriceTable = load_prices(prices)
        self.numpy = NumpyExecutor()
        self.library: KernelLibrary | None = None
        self._threads = checked_threads(intra_op_threads)

    @cached_property
    def sessions(self) -> Any:
        """ONNX Runtime's sessions, imported on first use; None if it is not installed.

        Raises `UsageError` if the installed package cannot be imported.
        """
        if find_spec("onnxruntime") is None or find_spec("onnx") is None:
            return None
        try:
            onnx = import_module("stitch.runtime.executors.onnx")
        except ImportError as error:
            raise UsageError(
                "ONNX Runtime is installed, but cannot be loaded",
                where=f"executor {self.name!r}",
                got=str(error),
                remedy="reinstall onnxruntime, or use executor='numpy'",
            ) from error
        return onnx.Sessions(self._threads)

    def takes_foreign(self) -> bool:
        return self.sessions is not None

    def host_bytes(self, program: Program) -> ProgramBytes:
        return program_bytes(expanded(program), either_bytes, in_sessions=True)

    def _points(self, program: Program) -> float:
        return points(program, self.prices.points)

    @property
    def _has_numpy_only(self) -> bool:
        return self.library is None and self.sessions is None

    def link_obstacle(self, programs: Sequence[Program]) -> str:
        """As `Executor.link_obstacle`; equal if NumPy computes both the whole and each program."""
        if sum(map(self._points, map(expanded, programs))) < 1 or self._has_numpy_only:
            return ""
        return f"the executor {self.name!r} may choose other kernels for the whole"

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        self.check_foreign(program)
        workspace, program = workspace or Workspace(), expanded(program)
        if self._points(program) < 1 or self._has_numpy_only:
            return self.numpy.prepare(program, machine, workspace)
        if self.sessions is None:
            unable = [False] * len(program.operations)
            division = divide(program, unable, self.prices, 1, self.library)
            return PreparedKernels(program, machine, workspace, (), self.library, division.library)
        able, calls = self.sessions.able(program), None
        while calls is None:
            refusal = self.sessions.refusal(program, able)
            if refusal is not None:
                raise refusal
            division = divide(program, able, self.prices, self.sessions.threads, self.library)
            calls, able = self.sessions.calls(program, division.runs, able)
        return PreparedKernels(
            program, machine, workspace, calls, self.library, division.library,
            partial(self.sessions.calls_apart, program, [i for run in division.runs for i in run]),
        )  # fmt: skip


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
