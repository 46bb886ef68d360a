"""Expansion: what operations stand for is written out, and no body is left but those of scans.

It is what a program with bodies means: executors without a kernel for an operation compute this,
and a program's scratch holds it. Of a body only what the operation's results need is written. A
scan runs its body in rounds: it stays, and what its body carries is written out there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    Seam,
    Value,
    host_layout,
    is_scan,
)

# --------------------------------------------------------------------------------------------------
# Dead code elimination: operations, constants, values and bodies that no output needs.

_Body = TypeVar("_Body", bound=OperationList)


def remove_dead_code(body: _Body) -> _Body:
    """The list without what its outputs do not depend on; input slots stay, also unused ones."""
    return drop_unused_values(only_operations(body, live_operations(body)))


def drop_unused_values(body: _Body) -> _Body:
    """The list without values and bodies that no slot, constant or operation mentions."""
    return renumbered(body, used_values(body))


def live_operations(body: OperationList) -> list[int]:
    """The indices of the operations that outputs depend on, rising."""
    needed = {slot.value for slot in body.outputs}
    live: list[int] = []
    for index in range(len(body.operations) - 1, -1, -1):
        operation = body.operations[index]
        if not needed.isdisjoint(operation.outputs):
            live.append(index)
            needed.update(v for v in operation.inputs if v != ABSENT)
    return live[::-1]


def only_operations(body: _Body, indices: Sequence[int]) -> _Body:
    """The list with these operations, and the constants that they or outputs mention."""
    operations = tuple([body.operations[i] for i in indices])
    needed = {slot.value for slot in body.outputs}
    needed.update(v for operation in operations for v in operation.inputs)
    constants = tuple([c for c in body.constants if c.value in needed])
    if len(operations) == len(body.operations) and len(constants) == len(body.constants):
        return body
    return replace(body, operations=operations, constants=constants)


def used_values(body: OperationList) -> dict[int, int]:
    """The new number of each value that a slot, constant or operation mentions, by its old one."""
    used = body.placed_values()
    for operation in body.operations:
        used.update(operation.inputs, operation.outputs)
    used.discard(ABSENT)
    return {old: new for new, old in enumerate(sorted(used))}


def renumbered(body: _Body, numbers: Mapping[int, int]) -> _Body:
    """The list with only these values, under their new numbers, which rise as the old ones do, and
    the bodies that its operations carry."""
    body = with_used_bodies(body)
    if len(numbers) == len(body.values):
        return body
    at = {**numbers, ABSENT: ABSENT}
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


def with_used_bodies(body: _Body) -> _Body:
    """The list with the bodies that its operations carry, each once, and no others."""
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


#: Whether an operation that carries a body keeps it.
Keep = Callable[[Operation], bool]


def no_operation(_: Operation) -> bool:
    """Everything is written out."""
    return False


def expanded(program: Program, keep: Keep = no_operation) -> Program:
    """A program with its bodies written out, all its intermediate values placed anew.

    Operations that `keep` names stay as they are. Constants of bodies lie on the host: they are
    read where the file has them.
    """
    if not program.bodies:
        return program
    writing = _Writing(program, keep)
    listed = writing.written()
    plan = pack_scratch(listed.values, listed.operations, listed.placed_values())
    values = list(place_intermediates(listed.values, plan, program.scratch))
    for constant in listed.constants[len(program.constants) :]:
        value = values[constant.value]
        values[constant.value] = replace(value, layout=host_layout(value.type.data_type))
    return replace(
        program, values=tuple(values), operations=listed.operations, constants=listed.constants,
        bodies=listed.bodies, seams=_moved_seams(program, writing.firsts),
    )  # fmt: skip


def _moved_seams(program: Program, firsts: Sequence[int]) -> tuple[Seam, ...]:
    """The seams before the operations that begin the parts now; a part that is gone has none."""
    moved = [replace(seam, first=firsts[seam.first]) for seam in program.seams]
    ends = [*(seam.first for seam in moved[1:]), firsts[-1]]
    return tuple(seam for seam, end in zip(moved, ends, strict=False) if seam.first < end)


def expansion_nbytes(listed: OperationList, plan: ScratchPlan) -> int:
    """Bytes of scratch over all banks that a list takes, as it is (`plan`) and written out."""
    if not listed.bodies:
        return plan.nbytes
    whole = inlined(listed)
    written = pack_scratch(whole.values, whole.operations, whole.placed_values())
    return max(plan.nbytes, written.nbytes)


def inlined(listed: OperationList, keep: Keep = no_operation) -> OperationList:
    """A list of operations with the bodies written out, but for those of operations to `keep`."""
    return _Writing(listed, keep).written()


class _Writing:
    """One list under way; bodies within bodies are on a stack of our own."""

    def __init__(self, listed: OperationList, keep: Keep) -> None:
        self.listed = listed
        self.keep = keep
        self.values = list(listed.values)
        self.constants = list(listed.constants)
        self.operations: list[Operation] = []
        #: Where each of the list's operations begins now, and where the last one ends.
        self.firsts: list[int] = []
        #: The values of bodies' constants, by body and value there: one for all that carry it.
        self._known: dict[tuple[int, int], int] = {}

    def written(self) -> OperationList:
        """The list with all operations written."""
        self._write()
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
        """The bodies, those that scans carry written out."""
        found = list(self.listed.bodies)
        wanted = {o.body for o in self.operations if is_scan(o)}
        for index in reversed(range(len(found))):
            if index in wanted:
                found[index] = _written_body(found[index], self.listed.bodies, self.keep)
                wanted.update(o.body for o in found[index].operations if is_scan(o))
        return tuple(found)

    def _write(self) -> None:
        whole = dict(zip(range(len(self.values)), range(len(self.values)), strict=True))
        pending: list[tuple[Iterator[Operation], dict[int, int], Sequence[Value], str]] = [
            (iter(self.listed.operations), whole | {ABSENT: ABSENT}, (), "")
        ]
        while pending:
            operations, at, values, location = pending[-1]
            entered = None
            for operation in operations:
                if len(pending) == 1:
                    self.firsts.append(len(self.operations))
                here = self._moved(operation, at, values, location)
                if here.body != ABSENT and not is_scan(here) and not self.keep(here):
                    entered = here
                    break
                self.operations.append(here)
            if entered is None:
                pending.pop()
                continue
            body = self.listed.bodies[entered.body]
            inner = iter(_needed(body, entered))
            pending.append((inner, self._entered(entered, body), body.values, entered.location))
        self.firsts.append(len(self.operations))

    def _moved(
        self, operation: Operation, at: dict[int, int], values: Sequence[Value], location: str
    ) -> Operation:
        """An operation on the values of the whole; those that it makes inside a body are new."""
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
        """Where the values of a body are in the whole, for one operation that carries it."""
        at = dict(zip(body.inputs, operation.inputs, strict=True))
        results = zip(body.outputs, operation.outputs, strict=True)
        at.update((there, here) for there, here in results if here != ABSENT)
        at[ABSENT] = ABSENT
        for constant in body.constants:
            key = (operation.body, constant.value)
            if key not in self._known:
                self._known[key] = self._fresh(body.values[constant.value])
                self.constants.append(Constant(self._known[key], constant.data))
            at[constant.value] = self._known[key]
        return at

    def _fresh(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _written_body(body: Body, bodies: tuple[Body, ...], keep: Keep) -> Body:
    """A body in which no operation carries one, but scans."""
    if not any(o.body != ABSENT and not is_scan(o) and not keep(o) for o in body.operations):
        return body
    listed = OperationList("", (), (), body.values, body.operations, body.constants, bodies=bodies)
    writing = _Writing(listed, keep)
    writing._write()
    return replace(
        body, values=tuple(writing.values), operations=tuple(writing.operations),
        constants=tuple(writing.constants),
    )  # fmt: skip


def _needed(body: Body, operation: Operation) -> Iterable[Operation]:
    """The operations of a body that the results need which an operation gives."""
    wanted = {
        there for there, here in zip(body.outputs, operation.outputs, strict=True) if here != ABSENT
    }
    live = []
    for inner in reversed(body.operations):
        if not wanted.isdisjoint(inner.outputs):
            live.append(inner)
            wanted.update(v for v in inner.inputs if v != ABSENT)
    return reversed(live)
