"""Dependence: which values of a graph depend on which, through the rounds of scans too.

Comes in: a graph or a body, the bodies that its operations carry. Goes out: values that gradients
flow through; of a scan, the inputs and outputs of its body that they flow through in some round.
Must not know: rules, backward graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from stitch.program import ABSENT, Body, Operation, OperationList, ScanForm, is_scan


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
    return _places(bodies[operation.body].inputs, read) | _kept(operation, results)


def _kept(operation: Operation, places: set[int]) -> set[int]:
    """The states among these that no round changes, as there is none."""
    form = ScanForm.of(operation)
    return set() if form.count else {i for i in places if i < form.states}


def _forth(
    operation: Operation, bodies: Sequence[Body], operands: Collection[int]
) -> tuple[set[int], set[int]]:
    """The inputs of the body that depend on operands in some round, and the values that do."""
    body, states = bodies[operation.body], ScanForm.of(operation).states
    inputs = set(operands)
    while True:
        made = dependents(body, bodies, [body.inputs[i] for i in inputs])
        more = {i for i in range(states) if body.outputs[i] in made} - inputs
        if not more:
            return inputs, made
        inputs |= more


def _back(
    operation: Operation, bodies: Sequence[Body], results: Collection[int]
) -> tuple[set[int], set[int]]:
    """The outputs of the body that results depend on in some round, and the values that do."""
    body, states = bodies[operation.body], ScanForm.of(operation).states
    outputs = set(results)
    while True:
        read = needed(body, bodies, [body.outputs[i] for i in outputs])
        more = {i for i in range(states) if body.inputs[i] in read} - outputs
        if not more:
            return outputs, read
        outputs |= more
