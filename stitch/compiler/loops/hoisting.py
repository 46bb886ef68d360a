"""Hoisting: compute the operations of a body that read no state before the loop, for all rounds.

A product of a concatenation of states and other values is split into two products first, one of
which can be hoisted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stitch.compiler.dependence import reachable_from
from stitch.program import ABSENT, Body, Constant, DataType, Operation, ScanForm, Value, ValueType

#: Operations worth hoisting.
PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "Einsum"})


@dataclass(frozen=True, slots=True)
class Hoisted:
    """The two parts of a body.

    Attributes:
        before: Takes elements and shared operands.
        rest: Takes the results of `before` as further elements.
    """

    before: Body
    rest: Body


def hoist(body: Body, form: ScanForm) -> Hoisted | None:
    """Split a body; return None if no product can be hoisted."""
    body = _regrouped(_split_products(body, form), form)
    # Nested loops are not hoisted.
    stay = reachable_from(body.operations, body.inputs[: form.states], lambda o: o.body != ABSENT)
    early = [i for i, o in enumerate(body.operations)
             if stay.isdisjoint(o.inputs) and o.body == ABSENT]  # fmt: skip
    if not any(body.operations[i].op in PRODUCTS and not body.operations[i].domain for i in early):
        return None
    early = _worth(body, early)
    inside = set(early)
    made = {v for i in early for v in body.operations[i].outputs if v != ABSENT}
    late = [o for i, o in enumerate(body.operations) if i not in inside]
    wanted = {v for o in late for v in o.inputs} | set(body.outputs)
    passed = [v for i in early for v in body.operations[i].outputs if v in wanted and v in made]
    if set(body.outputs) & made:
        return None  # A result of the loop depends on no state: not supported.
    if any(body.values[v].type.data_type.is_narrow for v in passed):
        return None  # Narrow types cannot be elements of a round.
    operands = list(body.inputs[form.states :])
    before = Body(
        tuple(operands), tuple(passed), body.values,
        tuple(body.operations[i] for i in early), _used(body.constants, body.operations, early),
    )  # fmt: skip
    first = form.states + form.sequences
    rest = Body(
        (*body.inputs[:first], *passed, *body.inputs[first:]), body.outputs, body.values,
        tuple(late), tuple(c for c in body.constants if c.value in wanted),
    )  # fmt: skip
    return Hoisted(before, rest)


def form_of_rest(parts: Hoisted, form: ScanForm) -> ScanForm:
    """Return the form of the rest of a scan; all elements are taken in the order of rounds."""
    sequences = form.sequences + len(parts.before.outputs)
    taken = (False,) * sequences
    return replace(form, sequences=sequences, taken_backward=taken)


def _worth(body: Body, early: Sequence[int]) -> list[int]:
    """Select from the hoistable operations products, their operands, and operations on them."""
    wanted: set[int] = set()
    kept: set[int] = set()
    for i in reversed(early):
        operation = body.operations[i]
        is_product = operation.op in PRODUCTS and not operation.domain
        if is_product or not wanted.isdisjoint(operation.outputs):
            kept.add(i)
            wanted.update(operation.inputs)
    made = {v for i in kept for v in body.operations[i].outputs}
    fixed = {c.value for c in body.constants} | set(body.inputs)
    for i in early:  # Such as the addition of a bias.
        operation = body.operations[i]
        inputs = {v for v in operation.inputs if v != ABSENT}
        if i not in kept and inputs & made and inputs <= made | fixed:
            kept.add(i)
            made.update(operation.outputs)
    return sorted(kept)


def _used(
    constants: Sequence[Constant], operations: Sequence[Operation], chosen: Sequence[int]
) -> tuple[Constant, ...]:
    read = {v for i in chosen for v in operations[i].inputs}
    return tuple(c for c in constants if c.value in read)


def _split_products(body: Body, form: ScanForm) -> Body:
    """Split products of concatenations along the last axis that join states and other values:
    `[x, h] @ W` becomes `x @ W_x + h @ W_h`."""
    dependent = reachable_from(body.operations, body.inputs[: form.states])
    makers = {v: o for o in body.operations for v in o.outputs}
    values, constants = list(body.values), list(body.constants)
    operations: list[Operation] = []

    def fresh(name: str, kind: ValueType) -> int:
        values.append(Value(name, kind))
        return len(values) - 1

    for operation in body.operations:
        joined = makers.get(operation.inputs[0]) if operation.inputs else None
        if operation.op != "MatMul" or operation.domain or joined is None:
            operations.append(operation)
            continue
        weight = operation.inputs[1]
        rank = len(body.values[operation.inputs[0]].type.shape)
        if (
            joined.op != "Concat" or joined.domain or weight in dependent
            or int(str(joined.attributes["axis"])) % rank != rank - 1
            or len(body.values[weight].type.shape) != 2
            or len({v in dependent for v in joined.inputs}) != 2
        ):  # fmt: skip
            operations.append(operation)
            continue
        kind = body.values[weight].type
        widths = [body.values[v].type.shape[-1] for v in joined.inputs]
        sizes = fresh("sizes", ValueType((len(widths),), DataType.INT64))
        constants.append(Constant(sizes, np.array(widths, np.int64)))
        parts = [fresh("part", ValueType((w, kind.shape[1]), kind.data_type)) for w in widths]
        operations.append(Operation("Split", (weight, sizes), tuple(parts), {"axis": 0}))
        total = ABSENT
        for at, (given, part) in enumerate(zip(joined.inputs, parts, strict=True)):
            result = body.values[operation.outputs[0]].type
            last = at == len(parts) - 1
            product = fresh("product", result)
            operations.append(replace(operation, inputs=(given, part), outputs=(product,)))
            if total == ABSENT:
                total = product
                continue
            summed = operation.outputs[0] if last else fresh("sum", result)
            operations.append(
                Operation("Add", (total, product), (summed,), location=operation.location)
            )
            total = summed
    return replace(
        body, values=tuple(values), operations=tuple(operations), constants=tuple(constants)
    )


def _regrouped(body: Body, form: ScanForm) -> Body:
    """Reorder sums to add state-independent terms first: `(x + h) + b` becomes `(x + b) + h`."""
    dependent = reachable_from(body.operations, body.inputs[: form.states])
    makers = {v: i for i, o in enumerate(body.operations) for v in o.outputs}
    readers = Counter(v for o in body.operations for v in o.inputs)
    values, outputs = list(body.values), set(body.outputs)
    written: list[list[Operation]] = [[o] for o in body.operations]

    def parts(operation: Operation) -> tuple[int, int] | None:
        """Return the state-dependent and the state-independent term of a sum, or None."""
        if operation.op != "Add" or operation.domain:
            return None
        held = [v for v in operation.inputs if v in dependent]
        free = [v for v in operation.inputs if v not in dependent]
        return (held[0], free[0]) if len(held) == len(free) == 1 else None

    for index, operation in enumerate(body.operations):
        # An earlier iteration may have moved this operation.
        operation = written[index][-1] if written[index] else operation
        outer = parts(operation)
        if outer is None or readers[outer[0]] != 1 or outer[0] in outputs:
            continue
        at = makers.get(outer[0], -1)
        inner = parts(written[at][-1]) if at >= 0 and written[at] else None
        if inner is None:
            continue
        kinds = [values[v].type for v in (inner[1], outer[1])]
        shape = np.broadcast_shapes(*(kind.shape for kind in kinds))
        values.append(Value("sum", ValueType(tuple(shape), kinds[0].data_type)))
        total = len(values) - 1
        # Write the sum here, where both terms are available.
        before = written[at].pop()
        written[index] = [
            *written[at], replace(before, inputs=(inner[1], outer[1]), outputs=(total,)),
            replace(operation, inputs=(total, inner[0])),
        ]  # fmt: skip
        written[at] = []
    operations = tuple(o for group in written for o in group)
    return replace(body, values=tuple(values), operations=operations)
