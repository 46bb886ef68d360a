"""Inline the bodies of operations, and eliminate dead code.

Executors without a kernel for an operation compute its inlined body, and a program's scratch has
space for it. Only the operations that its results need are inlined. Scans keep their bodies, in
which bodies of other operations are inlined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from stitch.linker.scratch import ScratchPlan, pack_scratch, place_intermediates
from stitch.program import (
    ABSENT,
    Body,
    BodyPool,
    Constant,
    Operation,
    OperationList,
    Program,
    Value,
    host_layout,
    is_scan,
)

# Dead code elimination

_Body = TypeVar("_Body", bound=OperationList)


def remove_dead_code(body: _Body) -> _Body:
    """Remove what the outputs do not depend on, except input slots."""
    live = _live(body.operations, {slot.value for slot in body.outputs})
    operations = tuple([body.operations[i] for i in live])
    needed = {slot.value for slot in body.outputs}
    needed.update(v for operation in operations for v in operation.inputs)
    constants = tuple([c for c in body.constants if c.value in needed])
    if len(operations) < len(body.operations) or len(constants) < len(body.constants):
        body = replace(body, operations=operations, constants=constants)
    return drop_unused_values(body)


def drop_unused_values(body: _Body) -> _Body:
    """Remove values and bodies that no slot, constant or operation refers to."""
    used = body.placed_values()
    for operation in body.operations:
        used.update(operation.inputs, operation.outputs)
    used.discard(ABSENT)
    body = with_used_bodies(body)
    return body if len(used) == len(body.values) else _with_values(body, sorted(used))


def order_by_use(body: _Body) -> _Body:
    """List constants in the order in which operations read them, and values as inputs, constants,
    results; operations that were removed leave no trace in the order."""
    reads = dict.fromkeys(v for operation in body.operations for v in operation.inputs)
    position = {value: i for i, value in enumerate(reads)}
    last = len(position)
    constants = sorted(body.constants, key=lambda one: position.get(one.value, last))
    made = [v for operation in body.operations for v in operation.outputs if v != ABSENT]
    numbers = [*(s.value for s in body.inputs), *(c.value for c in constants), *made]
    if numbers == [*range(len(body.values))]:
        return body
    return _with_values(replace(body, constants=tuple(constants)), numbers)


def _with_values(body: _Body, numbers: Sequence[int]) -> _Body:
    """Return the list with the values of these numbers, in this order."""
    at = {old: new for new, old in enumerate(numbers)} | {ABSENT: ABSENT}
    return replace(
        body,
        values=tuple(body.values[v] for v in numbers),
        inputs=tuple(replace(s, value=at[s.value]) for s in body.inputs),
        outputs=tuple(replace(s, value=at[s.value]) for s in body.outputs),
        constants=tuple(replace(c, value=at[c.value]) for c in body.constants),
        operations=tuple(
            replace(
                o, inputs=tuple(at[v] for v in o.inputs), outputs=tuple(at[v] for v in o.outputs)
            )
            for o in body.operations
        ),
    )


def _live(operations: Sequence[Operation], needed: set[int]) -> list[int]:
    """Return the indices of the operations that the needed values depend on, ascending."""
    live: list[int] = []
    for index in reversed(range(len(operations))):
        operation = operations[index]
        if not needed.isdisjoint(operation.outputs):
            live.append(index)
            needed.update(v for v in operation.inputs if v != ABSENT)
    return live[::-1]


def with_used_bodies(body: _Body) -> _Body:
    """Return the list with the bodies that its operations carry, each once."""
    if not body.bodies:
        return body
    pool = BodyPool()
    now = pool.add_all(body.bodies, (o.body for o in body.operations))
    if len(pool.bodies) == len(body.bodies) and all(old == new for old, new in now.items()):
        return body
    operations = tuple(
        o if now[o.body] == o.body else replace(o, body=now[o.body]) for o in body.operations
    )
    return replace(body, operations=operations, bodies=tuple(pool.bodies))


def expanded(program: Program) -> Program:
    """Inline the bodies of a program, and repack its scratch.

    Constants of bodies are stored on the host, mapped from the file.
    """
    if not program.bodies:
        return program
    listed = inlined(program)
    plan = pack_scratch(listed.values, listed.operations, listed.placed_values())
    values = list(place_intermediates(listed.values, plan, program.scratch))
    for constant in listed.constants[len(program.constants) :]:
        value = values[constant.value]
        values[constant.value] = replace(value, layout=host_layout(value.type.data_type))
    return replace(
        program, values=tuple(values), operations=listed.operations, constants=listed.constants,
        bodies=listed.bodies, seams=(),
    )  # fmt: skip


def expansion_nbytes(listed: OperationList, plan: ScratchPlan) -> int:
    """Return the scratch bytes over all banks of a list as it is (`plan`) and inlined."""
    if not listed.bodies:
        return plan.nbytes
    whole = inlined(listed)
    written = pack_scratch(whole.values, whole.operations, whole.placed_values())
    return max(plan.nbytes, written.nbytes)


def inlined(listed: OperationList) -> OperationList:
    """Inline the bodies of a list."""
    return _Inliner(listed).inlined()


class _Inliner:
    """Inlines one list; nested bodies are on an explicit stack."""

    def __init__(self, listed: OperationList) -> None:
        self.listed = listed
        self.values = list(listed.values)
        self.constants = list(listed.constants)
        self.operations: list[Operation] = []
        #: By (body, value): the constants of bodies, shared by all operations that carry them.
        self._constants: dict[tuple[int, int], int] = {}

    def inlined(self) -> OperationList:
        """Return the inlined list."""
        self._inline()
        listed, bodies = self.listed, self.listed.bodies
        if any(is_scan(operation) for operation in self.operations):
            bodies = self._bodies_of_scans()
        return with_used_bodies(
            OperationList(
                listed.name, listed.inputs, listed.outputs, tuple(self.values),
                tuple(self.operations), tuple(self.constants), bodies=bodies,
            )
        )  # fmt: skip

    def _bodies_of_scans(self) -> tuple[Body, ...]:
        """Return the bodies, inlining in those that scans carry."""
        found = list(self.listed.bodies)
        wanted = {o.body for o in self.operations if is_scan(o)}
        for index in reversed(range(len(found))):
            if index in wanted:
                found[index] = _inlined_body(found[index], self.listed.bodies)
                wanted.update(o.body for o in found[index].operations if is_scan(o))
        return tuple(found)

    def _inline(self) -> None:
        whole = {value: value for value in range(len(self.values))}
        pending: list[tuple[Iterator[Operation], dict[int, int], Sequence[Value], str]] = [
            (iter(self.listed.operations), whole | {ABSENT: ABSENT}, (), "")
        ]
        while pending:
            operations, at, values, location = pending[-1]
            entered = None
            for operation in operations:
                here = self._moved(operation, at, values, location)
                if here.body != ABSENT and not is_scan(here):
                    entered = here
                    break
                self.operations.append(here)
            if entered is None:
                pending.pop()
                continue
            body = self.listed.bodies[entered.body]
            results = zip(body.outputs, entered.outputs, strict=True)
            live = _live(body.operations, {there for there, here in results if here != ABSENT})
            inner = iter([body.operations[index] for index in live])
            pending.append((inner, self._entered(entered, body), body.values, entered.location))

    def _moved(
        self, operation: Operation, at: dict[int, int], values: Sequence[Value], location: str
    ) -> Operation:
        """Return an operation on the list's values; results inside a body get new ones."""
        for value in operation.outputs:
            if value not in at:
                at[value] = self._fresh(values[value])
        return replace(
            operation,
            inputs=tuple(at[v] for v in operation.inputs),
            outputs=tuple(at[v] for v in operation.outputs),
            location=operation.location or location,
        )

    def _entered(self, operation: Operation, body: Body) -> dict[int, int]:
        """Return the list's values by those of a body, for an operation that carries it."""
        at = dict(zip(body.inputs, operation.inputs, strict=True))
        results = zip(body.outputs, operation.outputs, strict=True)
        at.update((there, here) for there, here in results if here != ABSENT)
        at[ABSENT] = ABSENT
        for constant in body.constants:
            key = (operation.body, constant.value)
            if key not in self._constants:
                self._constants[key] = self._fresh(body.values[constant.value])
                self.constants.append(Constant(self._constants[key], constant.data))
            at[constant.value] = self._constants[key]
        return at

    def _fresh(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _inlined_body(body: Body, bodies: tuple[Body, ...]) -> Body:
    """Inline the bodies of a body's operations, but those of scans."""
    if not any(o.body != ABSENT and not is_scan(o) for o in body.operations):
        return body
    listed = OperationList("", (), (), body.values, body.operations, body.constants, bodies=bodies)
    inliner = _Inliner(listed)
    inliner._inline()
    return replace(
        body, values=tuple(inliner.values), operations=tuple(inliner.operations),
        constants=tuple(inliner.constants),
    )  # fmt: skip
