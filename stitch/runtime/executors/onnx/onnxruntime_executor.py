"""The ONNX Runtime executor: a program is one model, one session, and one call per run.

Dense values are bound where they lie in the spaces: nothing is copied to enter or leave, and
constants are read from the file's mapping. Others are staged. Programs compute in float32 where
their types are narrower, and round at casts, at their outputs, and what a scan's rounds hand on; so
results agree with the NumPy executor's within a relative 1e-4 in float32 (sums are taken in another
order), and within one rounding of the narrow type for every operation between an output and its
inputs.

What ONNX leaves open, ONNX Runtime decides otherwise than NumPy, on NaN, infinities and other
values at the edges of their types: `docs/executor_differences.md` lists all of it.

A linked program (one with seams) is run as the optimised forms of its parts, joined: the bits of
its programs apart, in one call (`joined_form`). Programs of which only some take small numbers as
zero, as follows, all do so once they are linked.

Numbers below the smallest normal one (1.2e-38) count as zero in programs with a Softmax, where the
platform can be told so for one call: see `flushing`.

An output that takes the buffer of an input is computed apart and copied, but where every operation
of the program is one that ONNX Runtime itself declares safe in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cache, partial

import numpy as np

from stitch.errors import CompileError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.ops import bind
from stitch.program import Array, Operation, Program
from stitch.runtime.executors.executor import (
    BoundProgram,
    Executor,
    PreparedProgram,
    ProgramBytes,
    Thunk,
    Workspace,
    checked_threads,
    found_once,
)
from stitch.runtime.executors.host import (
    PreparedKernels,
    StagedRegions,
    StagingArrays,
    program_bytes,
    repacked_nbytes,
    session_bytes,
)
from stitch.runtime.executors.linking_terms import LinkTerms
from stitch.runtime.executors.onnx.foreign_calls import Sessions
from stitch.runtime.executors.onnx.joined_form import joined_form
from stitch.runtime.executors.onnx.joining_terms import joining_terms
from stitch.runtime.executors.onnx.model_form import onnx_form, operation_form
from stitch.runtime.executors.onnx.session import (
    EXPECT,
    REFUSALS,
    Session,
    check_kernels,
    computed_apart,
    first_line,
    session_call,
)


class OnnxRuntimeExecutor(Executor):
    """Runs whole programs by ONNX Runtime's CPU kernels; `intra_op_threads` is the user's to set.

    The parts of a linked program are optimised each by itself, and so give the bits that they give
    apart; with `fuse_across_seams` the whole is optimised, which is a little faster and equal only
    within the tolerance. Raises `UsageError` for fewer than one thread.
    """

    name = "onnxruntime"
    has_lanes = True

    def __init__(self, intra_op_threads: int = 1, fuse_across_seams: bool = False) -> None:
        self.intra_op_threads = checked_threads(intra_op_threads)
        self.fuse_across_seams = fuse_across_seams

    def prepare(
        self, program: Program, machine: MachineShape, workspace: Workspace | None = None
    ) -> PreparedProgram:
        """Make a session; raises `CompileError` listing every operation that it cannot run."""
        program = expanded(program)
        if not program.outputs:
            return _Prepared(program, machine, None, self.intra_op_threads)
        try:
            is_whole = self.fuse_across_seams or not program.seams
            form = onnx_form(program) if is_whole else joined_form(program)
            session = Session(form, self.intra_op_threads)
        except REFUSALS as error:
            raise self._refusal(program, error) from error
        return _Prepared(program, machine, session, self.intra_op_threads)

    def check(self, program: Program, machine: MachineShape) -> None:
        """A session that is not optimised tells which operator has no kernel, in a quarter of the
        time; what that refuses, the optimised one decides."""
        super().check(program, machine)
        if not program.outputs:
            return
        try:
            check_kernels(onnx_form(expanded(program)))
        except REFUSALS:
            self.prepare(program, machine)

    def host_bytes(self, program: Program) -> ProgramBytes:
        """A bound for each operator of ONNX Runtime, and for its arena."""
        return program_bytes(expanded(program), session_bytes, in_sessions=True)

    def link_terms(self, programs: Sequence[Program]) -> LinkTerms:
        """The same bits: a linked program is computed by the forms of its parts."""
        return joining_terms([expanded(program) for program in programs])

    def takes_foreign(self) -> bool:
        """Always."""
        return True

    def _refusal(self, program: Program, error: Exception) -> CompileError:
        """Which operations are to blame: each is tried by itself."""
        reasons: dict[str, str] = {}
        for index, operation in enumerate(program.operations):
            name = operation.title
            where = operation.location or f"operation {index}"
            try:
                Session(operation_form(program, operation), self.intra_op_threads)
            except REFUSALS as refusal:
                kinds = ", ".join(program.values[v].type.text() for v in operation.inputs if v >= 0)
                reasons.setdefault(f"{name}({kinds}) at {where}", first_line(refusal))
        other = "auto" if program.foreign_operations() else "numpy"
        listed = "; ".join(f"{what}: {why}" for what, why in reasons.items())
        return CompileError(
            "the onnxruntime executor cannot run " + (listed or first_line(error)),
            where=f"program {program.name!r}",
            remedy=f"use the {other} executor for this program (executor={other!r})",
        )


class _Prepared(PreparedProgram):
    def __init__(
        self, program: Program, machine: MachineShape, session: Session | None, threads: int
    ) -> None:
        self.threads = threads
        self.program = program
        self.machine = machine
        self.session = session
        self.staging = StagingArrays(program, machine)
        self.apart = computed_apart(program)
        self.constants = program.constant_data()
        self.expectations = [o for o in program.operations if (o.domain, o.op) == EXPECT]
        self.repacked_nbytes = repacked_nbytes(program)

    def bind(
        self, inputs: tuple[Array, ...], outputs: tuple[Array, ...], scratch: Array | None
    ) -> BoundProgram:
        """One call between the steps of staging; or a call for each operation, where it must be
        seen by itself."""
        if self.session is None:
            return BoundProgram((), (), {}, 0)
        before: list[Thunk] = []
        after: list[Thunk] = []
        regions = StagedRegions(self.staging, inputs, outputs, scratch)
        checked = {o.inputs[1] for o in self.expectations}
        arrays = {
            v: regions.read(v, before) for v in dict.fromkeys((*self.session.form.inputs, *checked))
        }
        for operation in self.expectations:
            before += _check(operation, arrays, self.constants)
        for value in self.session.form.outputs:
            place = regions.place(value)
            arrays[value] = self.staging.array(value) if value in self.apart else place
            after += regions.write(value, arrays[value], read_back=False)
            if place is not arrays[value]:
                after.append(partial(np.copyto, place, arrays[value]))
        call = session_call(self.session, arrays, self.program)

        @cache
        def one_by_one() -> BoundProgram:
            return self._by_operation.bind_apart(inputs, outputs, scratch)

        steps = (*before, call, *after)
        staged = self.staging.nbytes + self.repacked_nbytes
        return BoundProgram(steps, (), arrays, staged, one_by_one)

    def in_lane(self, workspace: Workspace) -> PreparedProgram:
        """With staging of its own; a session may be run by several threads."""
        own = copy(self)
        own.staging = StagingArrays(self.program, self.machine)
        return own

    @found_once
    def _by_operation(self) -> PreparedKernels:
        """What it cannot run by itself, such as a check of an input, NumPy's kernels compute."""
        every = range(len(self.program.operations))
        apart = partial(Sessions(self.threads).calls_apart, self.program, every)
        return PreparedKernels(self.program, self.machine, Workspace(), calls_apart=apart)


def _check(
    operation: Operation, arrays: dict[int, Array], constants: dict[int, Array]
) -> Sequence[Thunk]:
    """Steps that compare an input with the value that the program was compiled for."""
    nothing = np.empty(0, np.float32)
    wanted = constants[operation.inputs[2]]
    given = arrays[operation.inputs[1]]
    return bind(
        operation.op,
        [nothing, given, wanted.astype(given.dtype, copy=False)],
        [nothing],
        attributes=operation.attributes,
        domain=operation.domain,
    )
