"""Dependence between values of a graph, through the rounds of scans."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from stitch.program import ABSENT, Body, Operation, OperationList, ScanForm, is_scan


def reachable_from(
    operations: Iterable[Operation],
    sources: Iterable[int],
    always: Callable[[Operation], bool] | None = None,
) -> set[int]:
    """Return the sources and all values computed from them.

    Results of operations for which `always` is true are included whatever they read.

    >>> relu, total = Operation("Relu", (0,), (2,)), Operation("Add", (2, 1), (3,))
    >>> sorted(reachable_from([relu, total], [1])), sorted(reachable_from([relu, total], [0]))
    ([1, 3], [0, 2, 3])
    """
    found = set(sources) - {ABSENT}
    for operation in operations:
        if not found.isdisjoint(operation.inputs) or (always is not None and always(operation)):
            found.update(operation.outputs)
            found.discard(ABSENT)
    return found


def propagate_over_rounds(
    places: Iterable[int], begin: Sequence[int], end: Sequence[int], states: int,
    way: Callable[[Iterable[int]], set[int]],
) -> tuple[set[int], set[int]]:  # fmt: skip
    """Propagate through rounds until no further state is reached.

    Args:
        places: Indices into `begin` to start from.
        begin: Values at which a round begins (inputs, or outputs when going backward).
        end: Values at which it ends.
        states: The first `states` entries of `begin` and `end` are carried between rounds.
        way: Returns the values reachable within a round from some of `begin`.

    Returns:
        The reached indices into `begin`, and all reached values.
    """
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
    """Return the sources, and the values that depend on them through floating values only."""
    found = set(sources) - {ABSENT}
    for operation in part.operations:
        if found.isdisjoint(operation.inputs):
            continue
        made: Iterable[int] = operation.outputs
        if is_scan(operation):
            indices = _places(operation.inputs, found)
            made = [operation.outputs[i] for i in _results(operation, bodies, indices)]
        found.update(
            v for v in made if v != ABSENT and part.values[v].type.data_type.is_floating
        )  # fmt: skip
    return found


def dependencies(
    part: OperationList | Body, bodies: Sequence[Body], targets: Iterable[int]
) -> set[int]:
    """Return the targets, and the values that they depend on."""
    found = set(targets) - {ABSENT}
    for operation in reversed(part.operations):
        if found.isdisjoint(operation.outputs):
            continue
        read: Iterable[int] = operation.inputs
        if is_scan(operation):
            indices = _places(operation.outputs, found)
            read = [operation.inputs[i] for i in _operands(operation, bodies, indices)]
        found.update(read)
        found.discard(ABSENT)
    return found


def gradient_slots(
    operation: Operation, bodies: Sequence[Body], operands: Collection[int], results: set[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which slots of the body of a scan take part in its gradient.

    Args:
        operation: The scan.
        bodies: The bodies of its graph.
        operands: Indices of operands whose gradients are wanted.
        results: Indices of results whose gradients are given.

    Returns:
        Inputs of the body that have a gradient, and outputs of the body that receive one.
    """
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
    """Return the results of a scan that depend on these operands."""
    _, made = _forth(operation, bodies, operands)
    return _places(bodies[operation.body].outputs, made) | _kept(operation, operands)


def _operands(operation: Operation, bodies: Sequence[Body], results: set[int]) -> Iterable[int]:
    """Return the operands of a scan that these results depend on."""
    _, read = _back(operation, bodies, results)
    condition = {0} if ScanForm.of(operation).has_condition else set()
    return _places(bodies[operation.body].inputs, read) | _kept(operation, results) | condition


def _kept(operation: Operation, places: set[int]) -> set[int]:
    """Return the states among these that may stay unchanged because no round may run."""
    form = ScanForm.of(operation)
    if form.count and not form.has_condition:
        return set()
    return {i for i in places if i < form.states}


def _forth(
    operation: Operation, bodies: Sequence[Body], operands: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the inputs of the body that depend on operands in some round, and all such values."""
    body, states = bodies[operation.body], ScanForm.of(operation).states
    return propagate_over_rounds(
        operands, body.inputs, body.outputs, states, lambda of: dependents(body, bodies, of)
    )


def _back(
    operation: Operation, bodies: Sequence[Body], results: Collection[int]
) -> tuple[set[int], set[int]]:
    """Return the outputs of the body that results depend on in some round, and all such values."""
    body, states = bodies[operation.body], ScanForm.of(operation).states
    return propagate_over_rounds(
        results, body.outputs, body.inputs, states, lambda of: dependencies(body, bodies, of)
    )
