"""Bodies: operations inside an operation, stored once, and their checks.

A body defines its operation: an executor without a kernel for the operation computes the body (of a
scan once a round, see `scans`). It reads its own inputs only. Its values have no layouts, because
several operations may carry it. Its operations may carry earlier bodies of the list, so bodies do
not recurse.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from stitch.errors import Problem
from stitch.program.operation import (
    ABSENT,
    Constant,
    MathFidelity,
    Operation,
    Value,
    ValueType,
)
from stitch.program.scans import ScanForm, is_scan

# Limits of nesting --------------------------------------------------------------------------------

#: Limit of operations, values and constants of a program with all bodies expanded, a scan's as
#: often as executors bind it.
MAX_EXPANSION = 1 << 18
#: Limit of nested scans, so that recursive walks are safe.
MAX_SCAN_DEPTH = 16


def expansion_size(operations: Sequence[Operation], bodies: Sequence[Body]) -> int:
    """Count operations, values and constants of expanded bodies, up to about `MAX_EXPANSION`."""
    sizes: list[int] = []
    for body in bodies:
        own = len(body.operations) + len(body.values) + len(body.constants)
        inner = sum(_times(o) * sizes[o.body] for o in _carriers(body.operations, len(sizes)))
        sizes.append(min(own + inner, MAX_EXPANSION + 1))
    return sum(_times(o) * sizes[o.body] for o in _carriers(operations, len(sizes)))


def scan_depth(operations: Sequence[Operation], bodies: Sequence[Body]) -> int:
    """Return the depth of nested scans; 0 without any."""
    depths: list[int] = []
    for body in bodies:
        deepest = _deepest(body.operations, depths)
        depths.append(deepest)
    return _deepest(operations, depths)


def _deepest(operations: Sequence[Operation], depths: Sequence[int]) -> int:
    carriers = _carriers(operations, len(depths))
    return max((is_scan(o) + depths[o.body] for o in carriers), default=0)


def _carriers(operations: Sequence[Operation], usable: int) -> Iterator[Operation]:
    """Yield the operations with a valid body."""
    return (o for o in operations if 0 <= o.body < usable)


def _times(operation: Operation) -> int:
    """Return how often executors bind the body of an operation."""
    if not is_scan(operation):
        return 1
    try:
        return max(1, ScanForm.of(operation).sides)
    except ValueError:
        return 1  # Reported elsewhere.


@dataclass(frozen=True, slots=True)
class Body:
    """Operations inside an operation, with their own values.

    `inputs` are the values of the operation's operands, or `ABSENT`; `outputs` those of its
    results, which are distinct results of the body's operations.

    >>> from stitch.program import DataType
    >>> kind = ValueType((2,), DataType.FLOAT32)
    >>> values = Value("x", kind), Value("y", kind)
    >>> body = Body((0,), (1,), values, (Operation("Relu", (0,), (1,)),))
    >>> [line.strip() for line in body.lines(0)]
    ['body 0 (%x 2xf32) -> (%y 2xf32)', '%y = Relu(%x) : 2xf32']
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    constants: tuple[Constant, ...] = ()

    @property
    def input_types(self) -> tuple[ValueType | None, ...]:
        """Return the types of the operands, None for an absent one."""
        return tuple(None if v == ABSENT else self.values[v].type for v in self.inputs)

    @property
    def output_types(self) -> tuple[ValueType, ...]:
        """Return the types of the results."""
        return tuple(self.values[v].type for v in self.outputs)

    @property
    def meaning(self) -> Hashable:
        """Return a key that ignores names of values and source locations."""
        return (
            self.inputs,
            self.outputs,
            tuple([value.type for value in self.values]),
            tuple([
                (o.op, o.domain, o.inputs, o.outputs, o.body, o.math_fidelity, o.opset,
                 tuple([(k, repr(v)) for k, v in sorted(o.attributes.items())]))
                for o in self.operations
            ]),
            tuple([(c.value, c.data.dtype.str, c.data.tobytes()) for c in self.constants]),
        )  # fmt: skip

    def lines(self, index: int) -> Iterator[str]:
        """Yield the body as text, under its index."""

        def slot(value: int) -> str:
            return "_" if value == ABSENT else f"{name_of(self.values, value)} {kind(value)}"

        def kind(value: int) -> str:
            return self.values[value].type.text()

        inputs, outputs = (", ".join(map(slot, side)) for side in (self.inputs, self.outputs))
        yield f"  body {index} ({inputs}) -> ({outputs})"
        for constant in self.constants:
            yield f"    constant {slot(constant.value)}"
        for operation in self.operations:
            yield f"    {operation_line(operation, self.values, kind)}"


def name_of(values: Sequence[Value], index: int) -> str:
    """Return the name of a value in text, `_` for an absent operand."""
    return "_" if index == ABSENT else f"%{values[index].name}"


def operation_line(
    operation: Operation, values: Sequence[Value], kind: Callable[[int], str]
) -> str:
    """Return an operation as text; `kind` describes a value."""
    op = f"{operation.domain}.{operation.op}" if operation.domain else operation.op
    outputs, inputs = (
        ", ".join(name_of(values, v) for v in side)
        for side in (operation.outputs, operation.inputs)
    )
    shown = ", ".join(f"{k}={v!r}" for k, v in sorted(operation.attributes.items()))
    body = "" if operation.body == ABSENT else f" body={operation.body}"
    if operation.math_fidelity is not MathFidelity.BY_TYPE:
        body += f" fidelity={operation.math_fidelity.value}"
    body += f" opset={operation.opset}" if operation.is_foreign else ""
    types = ", ".join("_" if v == ABSENT else kind(v) for v in operation.outputs)
    return f"{outputs} = {op}({inputs}){f' {{{shown}}}' if shown else ''}{body} : {types}"


def holds_foreign(operation: Operation, bodies: Sequence[Body]) -> bool:
    """Return whether an operator, or one in its body, is foreign."""
    if operation.body == ABSENT:
        return operation.is_foreign
    return any(holds_foreign(inner, bodies) for inner in bodies[operation.body].operations)


class BodyPool:
    """A list of distinct bodies.

    >>> from stitch.program import DataType
    >>> pool, kind = BodyPool(), ValueType((2,), DataType.FLOAT32)
    >>> values = Value("x", kind), Value("y", kind)
    >>> body = Body((0,), (1,), values, (Operation("Relu", (0,), (1,)),))
    >>> pool.add(body), pool.add(body), len(pool.bodies)
    (0, 0, 1)
    """

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self._known: dict[Hashable, int] = {}

    def add(self, body: Body) -> int:
        """Add a body unless there is an equal one; return its index."""
        index = self._known.setdefault(body.meaning, len(self.bodies))
        if index == len(self.bodies):
            self.bodies.append(body)
        return index

    def add_all(self, bodies: Sequence[Body], used: Iterable[int] | None = None) -> dict[int, int]:
        """Add the `used` bodies of another list, and those inside them; map old to new indices."""
        wanted = set(range(len(bodies)) if used is None else used)
        for index in reversed(range(len(bodies))):
            if index in wanted:
                wanted.update(o.body for o in bodies[index].operations)
        now = {ABSENT: ABSENT}
        for index in sorted(wanted - {ABSENT}):
            body = bodies[index]
            inner = tuple(replace(o, body=now[o.body]) for o in body.operations)
            now[index] = self.add(replace(body, operations=inner))
        return now


# What must hold ------------------------------------------------------------------------------


def body_problems(bodies: Sequence[Body], operations: Sequence[Operation]) -> Iterator[Problem]:
    """Yield the defects of a list of bodies, and a too large expansion of `operations`."""
    for index, body in enumerate(bodies):
        where = f"body {index}"
        given = [(v, f"{where}, input {i}") for i, v in enumerate(body.inputs) if v != ABSENT]
        yield from definition_problems(
            body.values, given, body.constants, body.operations, bodies, index, f"{where}, "
        )
        yield from _own_problems(body, where)
    if bodies and expansion_size(operations, bodies) > MAX_EXPANSION:
        detail = f"written out, they come to more than {MAX_EXPANSION} operations and values"
        yield Problem("too_large", "bodies", detail)
    depth = scan_depth(operations, bodies)
    if depth > MAX_SCAN_DEPTH:
        detail = f"scans stand within scans, {depth} deep: more than {MAX_SCAN_DEPTH}"
        yield Problem("too_deep", "bodies", detail)


def _own_problems(body: Body, where: str) -> Iterator[Problem]:
    made = {v for operation in body.operations for v in operation.outputs if v != ABSENT}
    seen: set[int] = set()
    if not body.outputs:
        yield Problem("no_output", where, "a body makes something")
    for i, value in enumerate(body.outputs):
        if value not in made or value in seen:
            detail = "an output is a value of its own, made in the body"
            yield Problem("output_value", f"{where}, output {i}", detail)
        seen.add(value)
    for i, described in enumerate(body.values):
        at = f"{where}, value {i} ({described.name})"
        if described.layout is not None:
            yield Problem("placed", at, "values of bodies have no layout")
        if described.type.data_type.is_block:
            yield Problem("storage_type", at, "block formats only store, they are not computed in")


def definition_problems(
    values: Sequence[Value],
    given: Iterable[tuple[int, str]],
    constants: Sequence[Constant],
    operations: Sequence[Operation],
    bodies: Sequence[Body],
    usable: int,
    prefix: str = "",
) -> Iterator[Problem]:
    """Yield bad indices, values defined twice, too late or never, and bodies that do not fit.

    `given` are outer values and their descriptions; operations may carry the first `usable` bodies.
    """
    count = len(values)
    #: By value, what defines it: text, or the index of an operation.
    defined: dict[int, str | int] = {}

    def described(origin: str | int) -> str:
        if isinstance(origin, str):
            return origin
        return f"{prefix}operation {origin} ({operations[origin].op})"

    def misplaced(index: int, origin: str | int) -> Problem:
        if not 0 <= index < count:
            return Problem("bad_index", described(origin), f"value {index} of {count}")
        text = f"value {index} comes from {described(defined[index])}"
        return Problem("defined_twice", described(origin), text)

    sources = [*given, *((c.value, f"{prefix}constant {i}") for i, c in enumerate(constants))]
    for value, where in sources:
        if value in defined or not 0 <= value < count:
            yield misplaced(value, where)
        else:
            defined[value] = where
    for i, constant in enumerate(constants):
        if 0 <= constant.value < count:
            data, kind = constant.data, values[constant.value].type
            stored = kind.data_type
            if data.shape != kind.shape or stored.is_block or data.dtype != stored.dtype:
                detail = f"data is {data.dtype}{list(data.shape)}, value is {kind.text()}"
                yield Problem("constant_type", f"{prefix}constant {i}", detail)
    for i, operation in enumerate(operations):
        for index in operation.inputs:
            if index not in defined and index != ABSENT:
                detail = f"input value {index} is not defined before it"
                yield Problem("undefined", described(i), detail)
        for index in operation.outputs:
            if index != ABSENT:
                if index in defined or not 0 <= index < count:
                    yield misplaced(index, i)
                else:
                    defined[index] = i
        if operation.body != ABSENT:
            yield from _carried_problems(operation, values, bodies, usable, described(i))
        elif is_scan(operation):
            yield Problem(
                "bad_scan", described(i), "a scan runs a body in rounds, and carries none"
            )


def _carried_problems(
    operation: Operation,
    values: Sequence[Value],
    bodies: Sequence[Body],
    usable: int,
    where: str,
) -> Iterator[Problem]:
    """Yield mismatches between the operands and results of an operation and of its body."""
    if not 0 <= operation.body < usable:
        yield Problem("bad_body", where, f"body {operation.body} of {usable} that it may carry")
        return
    if not operation.domain:
        yield Problem("bad_body", where, "an operator of ONNX's means what ONNX says, and has none")
    body = bodies[operation.body]
    takes, makes = _types(body, body.inputs), _types(body, body.outputs)
    theirs_is = f"in body {operation.body}"
    if is_scan(operation):
        try:
            form = ScanForm.of(operation)
        except ValueError as error:
            yield Problem("bad_scan", where, str(error))
            return
        for problem in form.problems(takes, makes, operation.inputs):
            yield Problem("bad_scan", where, problem)
        takes, makes = form.operand_types(takes), form.result_types(makes)
        theirs_is = f"for {form.count} rounds of body {operation.body}"
    for side, ours, theirs in (
        ("operand", operation.inputs, takes), ("result", operation.outputs, makes),
    ):  # fmt: skip
        if len(ours) != len(theirs):
            detail = f"{len(ours)} {side}s, body {operation.body} has {len(theirs)}"
            yield Problem("bad_body", where, detail)
        for i, (here, its) in enumerate(zip(ours, theirs, strict=False)):
            # A result may be left out; what stands for an operand is there if the operand is.
            if side == "operand" and (here == ABSENT) != (its is None):
                yield Problem("bad_body", where, f"operand {i} is only on one side of the body")
            elif its is not None and 0 <= here < len(values):
                mine = values[here].type
                if mine != its:
                    detail = f"{side} {i} is {mine.text()}, {theirs_is} {its.text()}"
                    yield Problem("bad_body", where, detail)


def _types(body: Body, slots: Sequence[int]) -> list[ValueType | None]:
    """Return the types of values, None for bad indices."""
    return [body.values[v].type if 0 <= v < len(body.values) else None for v in slots]


def result_types(operation: Operation, bodies: Sequence[Body]) -> tuple[ValueType, ...]:
    """Return the result types of an operation with a body; raise `ValueError` for a bad scan."""
    made = bodies[operation.body].output_types
    if not is_scan(operation):
        return made
    kinds = ScanForm.of(operation).result_types(made)
    return tuple([kind for kind in kinds if kind is not None])
