"""The null executor: plans and simulated time are real, data is not computed at all."""

from __future__ import annotations

from collections.abc import Sequence

from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
)
from stitch.runtime.executors.linking_terms import LinkTerms


class NullExecutor(Executor, PreparedProgram):
    """Checks programs and lets plans run without touching a byte."""

    name = "null"
    computes = False

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Nothing to make ready."""
        return self

    def host_bytes(self, program: Program) -> ProgramBytes:
        """Nothing: nothing is computed."""
        return ProgramBytes(0, 0, 0, 0, "")

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """Nothing is computed: nothing differs, and nothing is gained."""
        return LinkTerms()

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """No steps."""
        return BoundProgram((), (), {}, 0)
