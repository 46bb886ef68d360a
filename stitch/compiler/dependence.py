"""Dependence: which values of a graph depend on which, through the rounds of scans too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from stitch.program import ABSENT, Body, Operation, OperationList, ScanForm, is_scan


def reached(
    operations: Iterable[Operation],
    sources: Iterable[int],
    always: Callable[[Operation], bool] | None = None,
) -> set[int]:
    """The sources, and all values that they have a part in; also what operations make that are
    `always` taken to be reached, whatever they read.

    >>> relu, total = Operation("Relu", (0,), (2,)), Operation("Add", (2, 1), (3,))
    >>> sorted(reached([relu, total], [1])), sorted(reached([relu, total], [0]))
    ([1, 3], [0, 2, 3])
    """
    found = set(sources) - {ABSENT}
    for operation in operations:
        if not found.isdisjoint(operation.inputs) or (always is not None and always(operation)):
            found.update(operation.outputs)
            found.discard(ABSENT)
    return found


def in_some_round(
    places: Iterable[int], begin: Sequence[int], end: Sequence[int], states: int,
    way: Callable[[Iterable[int]], set[int]],
) -> tuple[set[int], set[int]]:  # fmt: skip
    """Where a way through a round leads from some of the values that it may begin at, by their
    places, when a state that it ends at is one that the next round begins at; and its values."""
    found = set(places)
    while True:
        values = way([begin[i] for i in found])
        more = {i for i in range(states) if end[i] in values} - found
        if not more:
            return found, values
        found |= more


def dependents(
    part: OperationList | Body, bodies: Sequence[Body], sources: Iterable[int]
) -> set[int]:
    """The sources, and the values that depend on them through floating values alone."""
    found = set(sources) - {ABSENT}
    for operation in part.operations:
        if found.isdisjoint(operation.inputs):
            continue
        made: Iterable[int] = operation.outputs
        if is_scan(operation):
            reached = _places(operation.inputs, found)
            made = [operation.outputs[i] for i in _results(operation, bodies, reached)]
        found.update(
            v for v in made if v != ABSENT and part.values[v].type.data_type.is_floating
        )  # fmt: skip
    return found


def needed(part: OperationList | Body, bodies: Sequence[Body], targets: Iterable[int]) -> set[int]:
    """The targets, and the values that they depend on."""
    found = set(targets) - {ABSENT}
    for operation in reversed(part.operations):
        if found.isdisjoint(operation.outputs):
            continue
        read: Iterable[int] = operation.inputs
        if is_scan(operation):
            reached = _places(operation.outputs, found)
            read = [operation.inputs[i] for i in _operands(operation, bodies, reached)]
        found.update(read)
        found.discard(ABSENT)
    return found


def through_rounds(
    operation: Operation, bodies: Sequence[Body], operands: Collection[int], results: set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a scan whose gradients come in for some results and are wanted of some operands, which
    inputs of the body have a gradient in some round, and for which of its outputs one comes in."""
    body = bodies[operation.body]
    inputs, made = _forth(operation, bodies, operands)
    outputs, read = _back(operation, bodies, results)
    return (
        tuple(i for i in sorted(inputs) if body.inputs[i] in read),
        tuple(i for i in sorted(outputs) if body.outputs[i] in made),
    )


def _places(slots: Sequence[int], found: set[int]) -> set[int]:
    return {i for i, value in enumerate(slots) if value in found}


def _results(operation: Operation, bodies: Sequence[Body], operands: set[int]) -> Iterable[int]:
    """The results of a scan that depend on some of its operands."""
    _, made = _forth(operation, bodies, operands)
    return _places(bodies[operation.body].outputs, made) | _kept(operation, operands)


def _operands(operation: Operation, bodies: Sequence[Body], results: set[int]) -> Iterable[int]:
    """The operands of a scan that some of its results depend on."""
    _, read = _back(operation, bodies, results)
    condition = {0} if ScanForm.of(operation).has_condition else set()
    return _places(bodies[operation.body].inputs, read) | _kept(operation, results) | condition


def _kept(operation: Operation, places: set[int]) -> set[int]:
    """The states among these that no round may change, as there may be none."""
    form = ScanForm.of(operation)
    if form.count and not form.has_condition:
        return set()
    return {i for i in places if i < form.states}


def _forth(
    operation: Operation, bodies: Sequence[Body], operands: Collection[int]
) -> tuple[set[int], set[int]]:
    """The inputs of the body that depend on operands in some round, and the values that do."""
    body, states = bodies[operation.body], ScanForm.of(operation).states
    return in_some_round(
        operands, body.inputs, body.outputs, states, lambda of: dependents(body, bodies, of)
    )


def _back(
    operation: Operation, bodies: Sequence[Body], results: Collection[int]
) -> tuple[set[int], set[int]]:
    """The outputs of the body that results depend on in some round, and the values that do."""
    body, states = bodies[operation.body], ScanForm.of(operation).states
    return in_some_round(
        results, body.outputs, body.inputs, states, lambda of: needed(body, bodies, of)
    )
