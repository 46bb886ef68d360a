"""The NumPy executor: each operator's own kernel, writing into preallocated arrays.

Dense values of the compute type are views of the space's bytes, others are staged; float16,
bfloat16 and the block formats compute in float32 and round once per operator output.

Long elementwise operations that follow each other are computed by chunks (`chunks`), and
values are views of others where nothing but their form differs (`arrangement`). Where an
operation must be seen by itself, the program is bound one operation after the other, each computed
by who computes it otherwise: the same bits, but where foreign calls compute several at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.program import Array, Program
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Workspace,
    cached_attribute,
)
from stitch.runtime.executors.host.bindings import ApartBinding, OperationBinding, UnitBinding
from stitch.runtime.executors.host.host_bytes import program_bytes
from stitch.runtime.executors.host.kernels import Kernels
from stitch.runtime.executors.host.staging import StagedRegions
from stitch.runtime.executors.linking_terms import LinkTerms


class NumpyExecutor(Executor):
    """Runs every operator that Stitch defines, one NumPy kernel after the other; of an operation
    that carries a body, the body: what it computes is what the program means."""

    name = "numpy"
    has_lanes = True

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Look every operation's kernel up; raises `CompileError` for an unknown operator."""
        self.check_foreign(program)
        return PreparedKernels(expanded(program), machine, workspace or Workspace())

    def host_bytes(self, program: Program) -> ProgramBytes:
        """What our own kernels take, as their definitions say."""
        return program_bytes(expanded(program))

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """The same bits: each operation has a kernel of its own. Nothing is gained: as many calls
        are made."""
        return LinkTerms()


class PreparedKernels(Kernels, PreparedProgram):
    """A program's kernels, to be bound to any addresses."""

    @cached_attribute
    def is_plain(self) -> bool:
        """Whether nothing is gained over one operation after the other."""
        if self.chosen or any(len(unit.operations) > 1 or unit.foreign for unit in self.units):
            return False
        moved = self.arrangement.moved.items()
        return all(len(left) == len(self.program.operations[i].outputs) for i, left in moved)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps by units and without copies; plain ones if nothing is gained so."""
        if self.is_plain or not _lie_apart(self.program, inputs, outputs):
            return self.bind_plainly(inputs, outputs, scratch)

        def binding() -> UnitBinding:
            return UnitBinding(self, StagedRegions(self.staging, inputs, outputs, scratch))

        @cache
        def one_by_one() -> BoundProgram:
            if self.calls:
                return self.bind_apart(inputs, outputs, scratch)
            # The same kernels on operands of the same forms: NumPy multiplies dense matrices in
            # another order than those that lie apart, so the last bits would not be the same.
            with self.workspace.kernels:
                return binding().bound()

        with self.workspace.kernels:
            return replace(binding().bound_by_units(), one_by_one=one_by_one)

    def in_lane(self, workspace: Workspace) -> PreparedProgram:
        """With staging of its own; constants and what was derived from them are shared."""
        return self.in_workspace(workspace)

    def bind_apart(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps operation by operation, every value in a place of its own: each by its foreign
        call, the library's kernel, or NumPy's."""
        if not _lie_apart(self.program, inputs, outputs):
            return self.bind_plainly(inputs, outputs, scratch)
        with self.workspace.kernels:
            return ApartBinding(self, StagedRegions(self.staging, inputs, outputs, scratch)).bound()

    def bind_plainly(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """Steps operation by operation, by NumPy's kernels, every value in a place of its own."""
        with self.workspace.kernels:
            return OperationBinding(
                self, StagedRegions(self.staging, inputs, outputs, scratch)
            ).bound()


def _lie_apart(program: Program, inputs: tuple[Array, ...], outputs: tuple[Array, ...]) -> bool:
    """Whether nothing lies in an output's bytes but the input whose place it takes."""
    spans, taken = [], set()
    for slot, array in zip(program.outputs, outputs, strict=True):
        start, source = array.ctypes.data, slot.aliases_input
        spans.append((start, start + array.nbytes, True))
        if source is not None and inputs[source].ctypes.data == start:
            taken.add(source)
    for index, array in enumerate(inputs):
        if index not in taken:
            spans.append((array.ctypes.data, array.ctypes.data + array.nbytes, False))
    reach = written_reach = 0
    for start, end, written in sorted(s for s in spans if s[1] > s[0]):
        if start < (reach if written else written_reach):
            return False
        reach = max(reach, end)
        written_reach = max(written_reach, end if written else 0)
    return True
