"""Segments: runs of a program's operations that are one call of ONNX Runtime each.

A segment is a program of its own (see `program_parts`), on the host; those that are alike (the
layers of a network) share one session.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import numpy as np

from stitch.errors import CompileError
from stitch.program import Array, Operation, Program, holds_foreign
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.host import PartOfProgram, WholeProgram
from stitch.runtime.executors.onnx.onnx_model import onnx_form, operation_form
from stitch.runtime.executors.onnx.session import (
    EXPECT,
    REFUSALS,
    Session,
    computed_apart,
    first_line,
    session_call,
)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One run of operations: `part` is the same as a program of its own, on the host.

    `inputs` and `outputs` are the program's values in the order of the part's slots.
    """

    operations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    part: Program
    session: Session

    def bind(self, arrays: Mapping[int, Array]) -> Sequence[Thunk]:
        """The call on dense arrays of the compute types, by the program's values."""
        own = {s.value: arrays[v] for s, v in zip(self.part.inputs, self.inputs, strict=True)}
        after: list[Thunk] = []
        apart = computed_apart(self.part)
        for slot, value in zip(self.part.outputs, self.outputs, strict=True):
            own[slot.value] = place = arrays[value]
            if slot.value in apart:
                own[slot.value] = np.empty_like(place)
                after.append(partial(np.copyto, place, own[slot.value]))
        return (session_call(self.session, own, self.part), *after)


def _holds_foreign(program: Program, run: Iterable[int]) -> bool:
    return any(holds_foreign(program.operations[i], program.bodies) for i in run)


class Sessions:
    """Sessions by what they compute, made once; `threads` are those of each."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        # Kept by the segments that use them. Weights count by identity: a session holds its own.
        self._found: WeakValueDictionary[tuple[bytes, tuple[int, ...]], Session] = (
            WeakValueDictionary()
        )

    def able(self, program: Program) -> list[bool]:
        """Which of a program's operations can be written for it at all."""

        def can(operation: Operation) -> bool:
            with suppress(CompileError):
                operation_form(program, operation)
                return True
            return False

        return [can(operation) for operation in program.operations]

    def calls(
        self, program: Program, runs: Sequence[Sequence[int]], able: Sequence[bool]
    ) -> tuple[list[Segment] | None, list[bool]]:
        """The segments of a division; None where it turns out that some operations cannot be run.

        What else is given is which can: `Expect` is a check that belongs to whole programs.
        """
        left = [
            can and (o.domain, o.op) != EXPECT
            for can, o in zip(able, program.operations, strict=True)
        ]
        if any(able[i] and not left[i] for run in runs for i in run):
            return None, left
        segments, whole = [], WholeProgram(program)
        for run in runs:
            try:
                segments.append(self._segment(whole, run))
            except REFUSALS:
                for index in run:
                    left[index] = self._runs(whole, index)
                if all(left[i] for i in run) and _holds_foreign(program, run):
                    # Foreign operators of versions that one model cannot import: a call for each.
                    segments += [self._segment(whole, (index,)) for index in run]
                    continue
                # Together they may still not do what each of them can.
                if all(left[index] for index in run):
                    left = [can and i not in run for i, can in enumerate(left)]
                return None, left
        return segments, left

    def refusal(self, program: Program, able: Sequence[bool]) -> CompileError | None:
        """The error for operations that nothing computes: those that hold foreign operators and of
        which `able` says that they cannot be run; None if there are none."""
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

    def calls_apart(self, program: Program, operations: Iterable[int]) -> list[Segment]:
        """A segment for each of these operations that can be run by itself, whose results are all
        given, whoever reads them."""
        whole, segments = WholeProgram(program), []
        for index in operations:
            operation = program.operations[index]
            if (operation.domain, operation.op) != EXPECT:
                with suppress(*REFUSALS):
                    segments.append(self._segment(whole, (index,), operation.outputs))
        return segments

    def _runs(self, whole: WholeProgram, index: int) -> bool:
        with suppress(*REFUSALS):
            self._segment(whole, (index,))
            return True
        return False

    def _segment(
        self, whole: WholeProgram, operations: Sequence[int], held: Collection[int] = ()
    ) -> Segment:
        """A run as a segment; raises one of `REFUSALS` for operations that it cannot run."""
        writing = PartOfProgram(whole, operations, held)
        part = writing.program_of_part()
        form = onnx_form(part)
        key = form.model, tuple(id(weights) for _, weights in form.weights)
        session = self._found.get(key)
        if session is None:
            session = self._found[key] = Session(form, self.threads)
        inputs, outputs = tuple(writing.inputs), tuple(writing.outputs)
        return Segment(tuple(operations), inputs, outputs, part, session)
