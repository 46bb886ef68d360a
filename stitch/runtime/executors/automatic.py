"""The automatic executor: for each operation the executor that is faster there.

Comes in: a program. Goes out: its prepared form: by NumPy's kernels, by one call of ONNX Runtime
where that is installed and can run all of it, or by both, where some operations are much faster
here and some there (`division`). The choice rests on the program's operators and shapes, on the
table of prices and on what is installed, never on a clock: by the same table the same program is
always computed in the same way.

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
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stitch.errors import CompileError, UsageError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.ops import multiply_adds
from stitch.program import Body, Operation, Program, ScanForm, Value, is_scan
from stitch.runtime.executors.division import divide
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
from stitch.runtime.executors.linking_terms import LinkTerms
from stitch.runtime.executors.prices import Points, Prices, PriceTable, load_prices

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
    has_lanes = True

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
