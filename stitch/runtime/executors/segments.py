"""Segments: runs of a program's operations that are one call of ONNX Runtime each.

Comes in: a program, and which of its operations go together. Goes out: their sessions, ready to be
bound to arrays. Segments that are alike (the layers of a network) share one session. Must not know
who computes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from stitch.errors import CompileError
from stitch.program import (
    ABSENT,
    Array,
    Constant,
    InputSlot,
    Operation,
    OutputSlot,
    Program,
    Value,
    host_layout,
)
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.onnx_form import onnx_form, operation_form
from stitch.runtime.executors.onnxruntime import (
    EXPECT,
    MASKED,
    REFUSALS,
    Session,
    computed_apart,
    session_call,
)
from stitch.runtime.executors.staging import compute_type


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
        found = {s.value: arrays[v] for s, v in zip(self.part.inputs, self.inputs, strict=True)}
        after: list[Thunk] = []
        apart = computed_apart(self.part)
        for slot, value in zip(self.part.outputs, self.outputs, strict=True):
            found[slot.value] = place = arrays[value]
            if slot.value in apart:
                found[slot.value] = np.empty_like(place)
                after.append(partial(np.copyto, place, found[slot.value]))
        masked = any(not o.domain and o.op in MASKED for o in self.part.operations)
        return (session_call(self.session, found, self.part.name, masked=masked), *after)


class Sessions:
    """Sessions by what they compute, made once; `threads` are those of each."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._found: dict[bytes, list[Session]] = {}

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
        found = []
        for run in runs:
            try:
                found.append(self.segment(program, run))
            except REFUSALS:
                for index in run:
                    left[index] = self._runs(program, index)
                # Together they may still not do what each of them can.
                if all(left[index] for index in run):
                    left = [can and i not in run for i, can in enumerate(left)]
                return None, left
        return found, left

    def _runs(self, program: Program, index: int) -> bool:
        with suppress(*REFUSALS):
            self.segment(program, (index,))
            return True
        return False

    def segment(self, program: Program, operations: Sequence[int]) -> Segment:
        """A run of a program's operations as a segment.

        Raises `CompileError`, or what a session raises, for operations that it cannot run.
        """
        inputs, outputs, part = part_of(program, operations)
        form = onnx_form(part)
        alike = self._found.setdefault(form.model, [])
        for session in alike:
            theirs = session.form.weights
            if all(a is b for (_, a), (_, b) in zip(theirs, form.weights, strict=True)):
                break
        else:
            session = Session(form, self.threads)
            alike.append(session)
        return Segment(tuple(operations), inputs, outputs, part, session)


def part_of(
    program: Program, operations: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], Program]:
    """Some operations as a program of their own, and which values are its inputs and outputs.

    Its values are numbered by first use, so that equal parts have equal forms.
    """
    inside = set(operations)
    constants = program.constant_data()
    slots = {s.value: s for s in program.outputs}
    outside = {
        v for i, o in enumerate(program.operations) if i not in inside for v in o.inputs
    } | slots.keys()
    numbers: dict[int, int] = {}
    rewritten, inputs, outputs = [], [], []
    for index in operations:
        operation = program.operations[index]
        for value in operation.inputs:
            if value != ABSENT and value not in numbers:
                numbers[value] = len(numbers)
                if value not in constants:
                    inputs.append(value)
        for value in operation.outputs:
            if value != ABSENT:
                numbers[value] = len(numbers)
                if value in outside:
                    outputs.append(value)
        rewritten.append(
            Operation(
                operation.op,
                tuple(numbers.get(v, ABSENT) for v in operation.inputs),
                tuple(numbers.get(v, ABSENT) for v in operation.outputs),
                operation.attributes,
                operation.domain,
                operation.location,
            )
        )
    order = sorted(numbers, key=numbers.__getitem__)
    given = [s.value for s in program.inputs]
    part = Program(
        program.name,
        tuple(
            replace(program.inputs[given.index(v)], name=f"v{numbers[v]}", value=numbers[v])
            if v in given
            else InputSlot(f"v{numbers[v]}", numbers[v])
            for v in inputs
        ),
        tuple(
            OutputSlot(f"v{numbers[v]}", numbers[v], _alias(program, v, inputs)) for v in outputs
        ),
        tuple(_on_host(program.values[v], numbers[v]) for v in order),
        tuple(rewritten),
        tuple(Constant(numbers[v], constants[v]) for v in order if v in constants),
        replace(program.scratch, size_per_bank=0),
        program.role,
    )
    return tuple(inputs), tuple(outputs), part


def _on_host(value: Value, number: int) -> Value:
    """A value as the arrays have it: dense, in the type that it is computed in."""
    return Value(f"v{number}", value.type, host_layout(compute_type(value.type)))


def _alias(program: Program, value: int, inputs: Sequence[int]) -> int | None:
    """Which of a part's inputs an output takes the place of."""
    for slot in program.outputs:
        if slot.value == value and slot.aliases_input is not None:
            source = program.inputs[slot.aliases_input].value
            return inputs.index(source) if source in inputs else None
    return None
