"""The automatic executor: for each operation the executor that is faster there.

The choice rests on the program's operators and shapes, on the table of prices and on what is
installed, never on a clock: by the same table the same program is always computed in the same way.

A small program is computed by one of them, and mostly by NumPy: a call of ONNX Runtime costs about
1 us more than its few calls, and gains that back in products, and in operators that NumPy needs
many passes for. Measured on one thread of an Intel processor (us, NumPy and ONNX Runtime): Gemm and
Relu 1x64x64 3.0 and 3.4, 16x64x64 4.2 and 4.5, 16x128x128 8.7 and 7.5, 64x784x512 526 and 328; Gelu
of 64 elements 6.2 and 3.0; Sigmoid of 64 2.5 and 2.9, of 16,384 17 and 9; eight additions and
products of 64 5.4 and 5.1, of 262,144 450 and 791. So one point is wanted, and given for so many
multiply-adds as the table says (131,072 there), for every operator of many passes, for so many
elements (4,096) of one of a few passes; nothing is given for plain arithmetic. Rounds of a scan are
different: within its `Scan`, ONNX Runtime spends 0.2 us on a node and 0.1 on a result, where
NumPy's kernels and copies take 0.5 each; so a few of them (8) are a point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stitch.errors import CompileError, UsageError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.ops import multiply_adds
from stitch.program import Body, Operation, Program, ScanForm, Value, is_scan
from stitch.runtime.executors.executor import (
    Executor,
    LinkTerms,
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

# --------------------------------------------------------------------------------------------------
# Which operations of a program go to ONNX Runtime, and which to NumPy's or a library's kernels.


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


#: Operators that NumPy needs many passes or Python loops for.
MANY_PASSES = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "CumProd", "CumSum", "Erf",
    "Gelu", "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization",
    "LayerNormalization", "LogSoftmax", "MaxPool", "Mish", "RMSNormalization", "Softmax", "TopK",
})  # fmt: skip
#: Operators whose functions NumPy computes more slowly.
FEW_PASSES = frozenset({
    "Celu", "Elu", "Exp", "HardSigmoid", "HardSwish", "Log", "Selu", "Sigmoid", "Softplus", "Swish",
})  # fmt: skip


class AutomaticExecutor(Executor):
    """Chooses executors for each program; without ONNX Runtime it is the NumPy executor.

    `prices` is the table that it chooses by. `intra_op_threads` and `fuse_across_seams` are for
    ONNX Runtime; raises `UsageError` for fewer threads than one, and as `load_prices` does.
    """

    name = "auto"
    supports_threads = True

    def __init__(
        self,
        intra_op_threads: int = 1,
        fuse_across_seams: bool = False,
        prices: Prices | None = None,
    ) -> None:
        self.prices: PriceTable = load_prices(prices)
        self.numpy = NumpyExecutor()
        self.library: KernelLibrary | None = None
        self._threads, self._fuses = checked_threads(intra_op_threads), fuse_across_seams

    @cached_property
    def onnxruntime(self) -> Executor | None:
        """ONNX Runtime, where it is installed: loaded for the first program that it may compute.

        Raises `UsageError` where what is installed cannot be loaded.
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
                remedy="install it anew, or take executor='numpy'",
            ) from error
        found: Executor = onnx.OnnxRuntimeExecutor(self._threads, self._fuses)
        return found

    def takes_foreign(self) -> bool:
        """Where ONNX Runtime is installed."""
        return self.onnxruntime is not None

    @cached_property
    def sessions(self) -> Any:
        """Its sessions of parts of programs."""
        return import_module("stitch.runtime.executors.onnx").Sessions(self._threads)

    def host_bytes(self, program: Program) -> ProgramBytes:
        """What whichever kernel takes most takes."""
        return program_bytes(expanded(program), either_bytes, in_sessions=True)

    def _points(self, program: Program) -> float:
        return points(program, self.prices.points)

    @property
    def _is_alone(self) -> bool:
        """Whether there is nothing but NumPy's kernels to choose."""
        return self.library is None and self.onnxruntime is None

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """The same bits where NumPy's kernels compute the whole as well as each program."""
        if sum(map(self._points, map(expanded, programs))) < 1 or self._is_alone:
            return self.numpy.link_terms(programs)
        return LinkTerms(f"the executor {self.name!r} chooses anew who computes what of the whole")

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a program ready by the executors chosen; raises `CompileError`."""
        self.check_foreign(program)
        workspace, program = workspace or Workspace(), expanded(program)
        if self._points(program) < 1 or self._is_alone:
            return self.numpy.prepare(program, machine, workspace)
        if self.onnxruntime is None:
            unable = [False] * len(program.operations)
            division = divide(program, unable, self.prices, 1, self.library)
            return PreparedKernels(program, machine, workspace, (), self.library, division.library)
        able, calls, is_first = self.sessions.able(program), None, True
        while calls is None:
            refusal = self.sessions.refusal(program, able)
            if refusal is not None:
                raise refusal
            division = divide(program, able, self.prices, self.sessions.threads, self.library)
            if is_first and division.runs == (tuple(range(len(able))),):
                # If the program is at fault, and not ONNX Runtime, NumPy's executor says so.
                with suppress(CompileError):
                    return self.onnxruntime.prepare(program, machine, workspace)
            calls, able = self.sessions.calls(program, division.runs, able)
            is_first = False
        return PreparedKernels(
            program, machine, workspace, calls, self.library, division.library,
            partial(self.sessions.calls_apart, program, [i for run in division.runs for i in run]),
        )  # fmt: skip


def points(program: Program, for_one: Points) -> float:
    """How much speaks for ONNX Runtime: from 1 on, it is chosen (see above)."""
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
