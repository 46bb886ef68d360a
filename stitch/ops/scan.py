"""`Scan`: an operator whose body runs once per element of its sequences, carrying states.

The body is bound twice, to fixed arrays: states alternate between two buffers, one of which is the
result; sequence elements are copied in, result elements are copied out. An iteration allocates only
views. With a condition, the last iteration may write the other buffer, which is then copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat

import numpy as np

from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import copy_steps
from stitch.ops.workspaces import workspace
from stitch.program import SCAN, Array, ScanForm, ValueType

#: The steps of an iteration, and the arrays that hold its result elements.
_Round = tuple[tuple[Thunk, ...], list[Array]]


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    raise context.fail("Scan has no body to infer its types from")


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    form = ScanForm.read(arguments.attributes, len(arguments.inputs), len(arguments.outputs))
    values = [arguments.operand(i) for i in range(len(arguments.inputs))]
    if form.has_condition and form.count:
        return _while(arguments, form, values)
    body = arguments.body
    assert body is not None, "a Scan has a body"
    first, rest = values[: form.states], values[form.states :]
    last, sequences_out = arguments.outputs[: form.states], arguments.outputs[form.states :]
    if not form.count:
        return [step for a, b in zip(first, last, strict=True) for step in copy_steps(a, b)]
    sequences = _rows(rest[: form.sequences], form.taken_backward)
    results = _rows(sequences_out, form.given_backward)
    shared = rest[form.sequences :]
    taken = [workspace(a.shape[1:], a.dtype) for a in rest[: form.sequences]]
    # Result elements that duplicate a state are copied from the state.
    elements = {
        i: workspace(a.shape[1:], a.dtype)
        for i, a in enumerate(sequences_out)
        if form.states + i not in body.repeated
    }
    # The last iteration writes the results.
    others = [workspace(a.shape, a.dtype) for a in last] if form.count > 1 else []
    sides = [others, last] if form.count % 2 == 0 else [last, others]
    rounds: list[_Round] = []
    # Without states, all iterations use the same arrays.
    for there, here in (sides, sides[::-1])[: form.sides]:
        before = here if form.count > 1 else first
        steps = body.bind([*before, *taken, *shared], [*there, *elements.values()])
        outputs = dict(enumerate(there)) | {form.states + i: a for i, a in elements.items()}
        numbers = range(form.states, len(arguments.outputs))
        sources = [outputs[body.repeated.get(number, number)] for number in numbers]
        rounds.append((tuple(steps), list(map(_row, sources))))
    starts: list[Thunk] = []
    if form.count > 1:
        for source, buffer in zip(first, sides[1], strict=True):
            starts += copy_steps(source, buffer)
    slots = list(map(_row, taken))
    return (*starts, partial(_run, form.count, rounds, slots, sequences, results))


def _rows(arrays: Sequence[Array], backward: Sequence[bool]) -> list[Array]:
    """Return sequences in the order of iterations, their elements with at least one axis."""
    in_order = [a[::-1] if back else a for a, back in zip(arrays, backward, strict=True)]
    return [a[:, np.newaxis] if a.ndim == 1 else a for a in in_order]


def _row(slot: Array) -> Array:
    """Return the array of one element with at least one axis."""
    return slot.reshape(1) if slot.ndim == 0 else slot


def _run(
    count: int,
    rounds: Sequence[_Round],
    taken: Sequence[Array],
    sequences: Sequence[Array],
    results: Sequence[Array],
) -> None:
    """Run all iterations."""
    copy, many = np.copyto, len(taken)
    even, odd = rounds[0], rounds[-1]
    rows = zip(*sequences, *results, strict=True) if many or results else repeat((), count)
    for number, row in enumerate(rows):
        steps, made = odd if number & 1 else even
        for slot, element in zip(taken, row, strict=False):
            copy(slot, element)
        for step in steps:
            step()
        for slot, element in zip(made, row[many:], strict=True):
            copy(element, slot)


def _while(arguments: KernelArguments, form: ScanForm, values: Sequence[Array]) -> Sequence[Thunk]:
    """Return the steps of a Scan with a condition."""
    body = arguments.body
    assert body is not None, "a Scan has a body"
    first, shared = values[: form.states], values[form.states :]
    last = arguments.outputs
    others = [workspace(a.shape, a.dtype) for a in last]
    sides = [(others, last), (last, others)][: form.sides]
    rounds = [tuple(body.bind([*before, *shared], after)) for before, after in sides]
    starts = [step for a, b in zip(first, others, strict=True) for step in copy_steps(a, b)]
    ends = [step for a, b in zip(others, last, strict=True) for step in copy_steps(a, b)]
    return (*starts, partial(_run_while, form.count, rounds, (others[0], last[0]), ends))


def _run_while(
    count: int,
    rounds: Sequence[Sequence[Thunk]],
    conditions: Sequence[Array],
    ends: Sequence[Thunk],
) -> None:
    """Iterate while the condition, in alternating buffers, is true."""
    number = 0
    while number < count and conditions[number & 1]:
        for step in rounds[number & 1]:
            step()
        number += 1
    if not number & 1:
        for step in ends:
            step()


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        SCAN[1], (0, -1), _infer, _kernel, outputs=(1, -1),
        attributes=declared(
            count=Attribute("int", required=True), num_states=0, num_scan_inputs=0,
            scan_input_directions=Attribute("ints"), scan_output_directions=Attribute("ints"),
            has_condition=0,
        ),
        # States and elements a second time; the body's own bytes are counted separately.
        domain=SCAN[0], checks=True,
    ),
)  # fmt: skip
