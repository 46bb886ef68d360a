"""The automatic executor: computes each operation by the kernel with the lowest price.

The choice depends on the program, the price table and the installed packages, never on measured
time, so a program is always computed in the same way.

Small programs run by NumPy alone, as a call of ONNX Runtime costs about 1 us more. A program may
use ONNX Runtime from one point on: the table says how many multiply-adds, elements of operators of
a few passes, and calls in a scan's rounds make a point; an operator of many passes makes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stitch.errors import UsageError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.program import Program
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
from stitch.runtime.executors.prices import Prices, PriceTable, divide, load_prices, points


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
