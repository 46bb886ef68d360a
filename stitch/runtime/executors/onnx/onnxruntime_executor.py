"""The ONNX Runtime executor: a program is one model, one session, and one call per run.

Other executors run segments of programs (consecutive operations) so. Equal segments, such as the
layers of a network, share one session.

Dense inputs, outputs and constants are bound in place; others are staged. Types narrower than
float32 compute in float32 and round at casts, program outputs and a scan's carried states; results
in float32 agree with the NumPy executor's within a relative 1e-4. `docs/executor_differences.md`
lists where the two differ on NaN, infinities and extreme values.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from stitch.errors import CompileError
from stitch.linker import expanded
from stitch.machine import MachineShape
from stitch.ops import bind
from stitch.program import Array, Operation, Program, holds_foreign
from stitch.runtime.executors.executor import (
    Executor,
    NullExecutor,
    PreparedProgram,
    ProgramBytes,
    Thunk,
    Workspace,
    checked_threads,
)
from stitch.runtime.executors.host import (
    ForeignCall,
    PartOfProgram,
    PreparedKernels,
    WholeProgram,
    program_bytes,
    session_bytes,
)
from stitch.runtime.executors.onnx.onnx_model import (
    check_writable,
    write_model,
    write_operation_model,
)
from stitch.runtime.executors.onnx.session import (
    EXPECT,
    REFUSALS,
    SAFE_IN_PLACE,
    Session,
    check_kernels,
    first_line,
    session_call,
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Part:
    """Operations of a program as a program, and its session."""

    program: Program
    session: Session


def _bound(
    of: _Part, name: str, inputs: Sequence[int], outputs: Sequence[int],
    arrays: Mapping[int, Array],
) -> Sequence[Thunk]:  # fmt: skip
    """Bind the session of a part to arrays by value of the whole program.

    Args:
        of: The part; `inputs` and `outputs` are the values of the whole program in the order of its
            slots.
        name: The name of the whole program.
    """
    part = of.program
    own = {s.value: arrays[v] for s, v in zip(part.inputs, inputs, strict=True)}
    before = _checks(part, own)
    after: list[Thunk] = []
    for slot, value in zip(part.outputs, outputs, strict=True):
        own[slot.value] = output = arrays[value]
        if _is_read_while_written(part, slot.value, own):
            own[slot.value] = np.empty_like(output)
            after.append(partial(np.copyto, output, own[slot.value]))
    return (*before, session_call(of.session, own, part, name), *after)


def _is_read_while_written(part: Program, result: int, arrays: Mapping[int, Array]) -> bool:
    """Whether a result overlaps an input that the session may read after it wrote the result.

    In place is safe if the part has only `SAFE_IN_PLACE` operations and the operation that computes
    the result is the only reader of the input.
    """
    output = arrays[result]
    sources = {s.value for s in part.inputs if np.may_share_memory(output, arrays[s.value])}
    readers = [o for o in part.operations if not sources.isdisjoint(o.inputs)]
    is_plain = all(o.op in SAFE_IN_PLACE and not o.domain for o in part.operations)
    is_safe = is_plain and len(readers) == 1 and result in readers[0].outputs
    return bool(sources) and not is_safe


def _checks(part: Program, arrays: Mapping[int, Array]) -> list[Thunk]:
    """Return the steps that compare inputs with the constants that `Expect` gives."""
    steps, constants, nothing = list[Thunk](), part.constant_data(), np.empty(0, np.float32)
    for operation in part.operations:
        if (operation.domain, operation.op) == EXPECT:
            actual = arrays[operation.inputs[1]]
            expected = constants[operation.inputs[2]].astype(actual.dtype, copy=False)
            steps += bind(
                operation.op, [nothing, actual, expected], [nothing],
                attributes=operation.attributes, domain=operation.domain,
            )  # fmt: skip
    return steps


class _Wiring(NamedTuple):
    """The values of a program that a part of it reads and writes, in the order of its slots, and
    what the part is but for the forms of its operations."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    key: Hashable


def _wiring(whole: WholeProgram, operations: Sequence[int], held: Collection[int]) -> _Wiring:
    part = PartOfProgram(whole, operations, held)
    numbered = tuple([(o.inputs, o.outputs) for o in part.operations])
    inputs, outputs = tuple(part.inputs), tuple(part.outputs)
    return _Wiring(inputs, outputs, (numbered, tuple([part.numbers[v] for v in outputs])))


class Sessions:
    """A cache of sessions by the model that they run, each with `threads` threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # By model and identity of the weights, which the session keeps alive.
        self._found: WeakValueDictionary[tuple[bytes, tuple[int, ...]], Session] = (
            WeakValueDictionary()
        )
        #: By the forms of the operations and how they read each other: without writing the model.
        self._parts: WeakValueDictionary[Hashable, _Part] = WeakValueDictionary()

    def able(self, program: Program) -> list[bool]:
        """Return for each operation whether it can be written as an ONNX model."""

        constants = program.constant_data()

        def can(operation: Operation) -> bool:
            with suppress(CompileError):
                check_writable(program, operation, constants)
                return True
            return False

        return [
            form.get("is writable as ONNX", can, operation)
            for form, operation in zip(program.forms, program.operations, strict=True)
        ]

    def call(self, program: Program, operations: Sequence[int]) -> ForeignCall:
        """Create the segment of a run; raises one of `REFUSALS` if ONNX Runtime refuses it."""
        return self._segment(WholeProgram(program), operations)

    def calls(
        self, program: Program, runs: Sequence[Sequence[int]], able: Sequence[bool]
    ) -> tuple[list[ForeignCall] | None, list[bool]]:
        """Create the segments of a division.

        Returns:
            The segments, or None if ONNX Runtime refuses one; and for each operation whether ONNX
            Runtime can run it, for the next attempt.
        """
        can_run, segments, whole = list(able), list[ForeignCall](), WholeProgram(program)
        for run in runs:
            try:
                segments.append(self._segment(whole, run))
            except REFUSALS:
                for index in run:
                    can_run[index] = self._runs_alone(whole, index)
                if not all(can_run[i] for i in run):
                    return None, can_run
                if any(holds_foreign(program.operations[i], program.bodies) for i in run):
                    # Foreign operators of opsets that one model cannot import: a call for each.
                    segments += [self._segment(whole, (index,)) for index in run]
                    continue
                # Each runs alone, but not together: leave the whole run out.
                return None, [can and i not in run for i, can in enumerate(can_run)]
        return segments, can_run

    def refusal(self, program: Program, able: Sequence[bool]) -> CompileError | None:
        """Return the error for the first foreign operation that is not `able`; None without one."""
        for index, operation in enumerate(program.operations):
            if able[index] or not holds_foreign(operation, program.bodies):
                continue
            reason = ""
            try:
                self._segment(WholeProgram(program), (index,))
            except REFUSALS as error:
                reason = first_line(error)
            return CompileError(
                f"ONNX Runtime cannot run {operation.title}, and nothing else computes it"
                + (f": {reason}" if reason else ""),
                where=f"program {program.name!r} at {operation.location or f'operation {index}'}",
            )
        return None

    def calls_apart(self, program: Program, operations: Iterable[int]) -> list[ForeignCall]:
        """Return a segment for each operation that runs alone; all of its results are outputs."""
        whole, segments = WholeProgram(program), []
        for index in operations:
            with suppress(*REFUSALS):
                held = program.operations[index].outputs
                segments.append(self._segment(whole, (index,), held))
        return segments

    def _runs_alone(self, whole: WholeProgram, index: int) -> bool:
        with suppress(*REFUSALS):
            self._segment(whole, (index,))
            return True
        return False

    def _segment(
        self, whole: WholeProgram, operations: Sequence[int], held: Collection[int] = ()
    ) -> ForeignCall:
        """Create the segment of a run; raises one of `REFUSALS` if ONNX Runtime refuses it."""
        program, run, kept = whole.program, tuple(operations), tuple(held)
        wiring = program.order.get(
            ("wiring", run, kept, whole.slot_values), _wiring, whole, run, kept
        )
        key = wiring.key, tuple([program.forms[i] for i in run])
        part = self._parts.get(key)
        if part is None:
            part = self._part(PartOfProgram(whole, run, kept).program_of_part())
            self._parts[key] = part
        bind = partial(_bound, part, program.name, wiring.inputs, wiring.outputs)
        return ForeignCall(run, wiring.inputs, wiring.outputs, bind)

    def _part(self, program: Program) -> _Part:
        model = write_model(program)
        key = model.serialized, tuple(id(weights) for _, weights in model.weights)
        session = self._found.get(key)
        if session is None:
            session = self._found[key] = Session(model, self.threads)
        return _Part(program, session)


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
        constants = program.constant_data()
        for index, operation in enumerate(program.operations):
            name = operation.title
            where = operation.location or f"operation {index}"
            try:
                model = write_operation_model(program, operation, constants)
                Session(model, self.sessions.threads)
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
