"""The ONNX Runtime executor: a program is one model, one session, and one call per run.

Dense inputs, outputs and constants are bound in place; others are staged. Types narrower than
float32 compute in float32 and round at casts, program outputs and a scan's carried states; results
in float32 agree with the NumPy executor's within a relative 1e-4. `docs/executor_differences.md`
lists where the two differ on NaN, infinities and extreme values.
"""

from __future__ import annotations

from functools import partial

from stitch.errors import CompileError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.program import Program
from stitch.runtime.executors.executor import (
    Executor,
    NullExecutor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    checked_threads,
)
from stitch.runtime.executors.host import PreparedKernels, program_bytes, session_bytes
from stitch.runtime.executors.onnx.foreign_calls import Sessions
from stitch.runtime.executors.onnx.onnx_model import write_model, write_operation_model
from stitch.runtime.executors.onnx.session import REFUSALS, Session, check_kernels, first_line


class OnnxRuntimeExecutor(Executor):
    """Runs whole programs by ONNX Runtime's CPU kernels.

    Args:
        intra_op_threads: Threads per session; `UsageError` below 1.
    """

    name = "onnxruntime"
    supports_threads = True

    def __init__(self, intra_op_threads: int = 1) -> None:
        self.sessions = Sessions(checked_threads(intra_op_threads))

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Create the session; raises `CompileError` naming every operation that it cannot run."""
        program = expanded(program)
        if not program.outputs:
            return NullExecutor()
        every = range(len(program.operations))
        try:
            calls = [self.sessions.call(program, every)]
        except REFUSALS as error:
            raise self._refusal(program, error) from error
        apart = partial(self.sessions.calls_apart, program, every)
        return PreparedKernels(program, machine, workspace or Workspace(), calls, calls_apart=apart)

    def check(self, program: Program, machine: MachineShape) -> None:
        super().check(program, machine)
        if not program.outputs:
            return
        # A session without optimisation finds missing kernels in a quarter of the time; it may
        # refuse what an optimised one can run.
        try:
            check_kernels(write_model(expanded(program)))
        except REFUSALS:
            self.prepare(program, machine)

    def host_bytes(self, program: Program) -> ProgramBytes:
        return program_bytes(expanded(program), session_bytes, in_sessions=True)

    def takes_foreign(self) -> bool:
        return True

    def _refusal(self, program: Program, error: Exception) -> CompileError:
        """Return the error that names each operation that ONNX Runtime refuses when tried alone."""
        reasons: dict[str, str] = {}
        for index, operation in enumerate(program.operations):
            name = operation.title
            where = operation.location or f"operation {index}"
            try:
                Session(write_operation_model(program, operation), self.sessions.threads)
            except REFUSALS as refusal:
                kinds = ", ".join(program.values[v].type.text() for v in operation.inputs if v >= 0)
                reasons.setdefault(f"{name}({kinds}) at {where}", first_line(refusal))
        other = "auto" if program.foreign_operations() else "numpy"
        listed = "; ".join(f"{what}: {why}" for what, why in reasons.items())
        return CompileError(
            "the onnxruntime executor cannot run "
            + (listed or f"this program: {first_line(error)}"),
            where=f"program {program.name!r}",
            remedy=f"use the {other} executor for this program (executor={other!r})",
        )
