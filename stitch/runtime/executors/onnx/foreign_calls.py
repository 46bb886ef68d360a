"""Segments: runs of a program's operations that are one call of ONNX Runtime each.

Comes in: a program, and which of its operations go together. Goes out: their sessions, ready to be
bound to arrays. A segment is a program of its own (`_Part`), on the host; those that are alike (the
layers of a network) share one session. Must not know the kernels of the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakValueDictionary

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
from stitch.runtime.executors.host import compute_type
from stitch.runtime.executors.onnx.model_form import onnx_form, operation_form
from stitch.runtime.executors.onnx.session import (
    EXPECT,
    REFUSALS,
    Session,
    computed_apart,
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
        segments, whole = [], _Whole(program)
        for run in runs:
            try:
                segments.append(self._segment(whole, run))
            except REFUSALS:
                for index in run:
                    left[index] = self._runs(whole, index)
                # Together they may still not do what each of them can.
                if all(left[index] for index in run):
                    left = [can and i not in run for i, can in enumerate(left)]
                return None, left
        return segments, left

    def _runs(self, whole: _Whole, index: int) -> bool:
        with suppress(*REFUSALS):
            self._segment(whole, (index,))
            return True
        return False

    def _segment(self, whole: _Whole, operations: Sequence[int]) -> Segment:
        """A run as a segment; raises one of `REFUSALS` for operations that it cannot run."""
        writing = _Part(whole, operations)
        part = writing.program_of_part()
        form = onnx_form(part)
        key = form.model, tuple(id(weights) for _, weights in form.weights)
        session = self._found.get(key)
        if session is None:
            session = self._found[key] = Session(form, self.threads)
        inputs, outputs = tuple(writing.inputs), tuple(writing.outputs)
        return Segment(tuple(operations), inputs, outputs, part, session)


class _Whole:
    """A program, and what its parts ask of it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.data = program.constant_data()
        self.given = {slot.value for slot in program.outputs}
        self.slots = {slot.value: slot for slot in program.inputs}
        self.readers = program.readers()


class _Part:
    """Some operations as a program; `inputs` and `outputs`: which values are its slots.

    Its values are numbered by first use, so that equal parts are equal programs.
    """

    def __init__(self, whole: _Whole, operations: Sequence[int]) -> None:
        self.whole, self.program, self.data = whole, whole.program, whole.data
        self.inside = set(operations)
        self.numbers: dict[int, int] = {}
        self.values: list[Value] = []
        self.constants: list[Constant] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.operations = [self._operation(self.program.operations[i]) for i in operations]

    def _operation(self, operation: Operation) -> Operation:
        inputs = tuple(map(self._operand, operation.inputs))
        for value in operation.outputs:
            if value != ABSENT:
                self._number(value)
                readers = self.whole.readers.get(value, set())
                if value in self.whole.given or readers - self.inside:
                    self.outputs.append(value)
        outputs = tuple(self.numbers.get(v, ABSENT) for v in operation.outputs)
        return replace(operation, inputs=inputs, outputs=outputs)

    def _operand(self, value: int) -> int:
        if value == ABSENT:
            return ABSENT
        if value not in self.numbers:
            self._number(value)
            if value in self.data:
                self.constants.append(Constant(self.numbers[value], self.data[value]))
            else:
                self.inputs.append(value)
        return self.numbers[value]

    def _number(self, value: int) -> None:
        kind = self.program.values[value].type
        # As the arrays have it: dense, in the type that it is computed in.
        name = f"v{len(self.values)}"
        self.numbers[value] = len(self.values)
        self.values.append(Value(name, kind, host_layout(compute_type(kind))))

    def program_of_part(self) -> Program:
        """The part."""
        program, numbers = self.program, self.numbers
        slots = {v: self.whole.slots.get(v, InputSlot("", v)) for v in self.inputs}
        return Program(
            program.name,
            tuple(replace(s, name=f"v{numbers[v]}", value=numbers[v]) for v, s in slots.items()),
            tuple(OutputSlot(f"v{numbers[v]}", numbers[v], self._alias(v)) for v in self.outputs),
            tuple(self.values),
            tuple(self.operations),
            tuple(self.constants),
            replace(program.scratch, size_per_bank=0),
            program.role,
        )

    def _alias(self, value: int) -> int | None:
        """Which of the part's inputs an output takes the place of."""
        for slot in self.program.outputs:
            if slot.value == value and slot.aliases_input is not None:
                source = self.program.inputs[slot.aliases_input].value
                return self.inputs.index(source) if source in self.inputs else None
        return None
