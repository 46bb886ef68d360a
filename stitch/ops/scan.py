"""`Scan`: an operator whose body runs once per element of its sequences, carrying states.

The body is bound twice, to fixed arrays: states alternate between two buffers, one of which is the
result; sequence elements are copied in, elements of results are copied out. A round allocates only
views. With a condition, the buffer that the last round wrote is known only afterwards; if it is not
the result, it is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat

import numpy as np

from stitch.ops.definition import (
    Attribute,
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    declared,
)
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import copy_steps, workspace
from stitch.program import SCAN, Array, ScanForm, ValueType

#: The steps of a round, and where what it gives lies then.
_Round = tuple[tuple[Thunk, ...], list[Array]]


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    raise context.fail("a Scan is typed by the body that it carries, and there is none")


def _kernel(arguments: KernelArguments) -> Sequence[Thunk]:
    form = ScanForm.read(arguments.attributes, len(arguments.inputs), len(arguments.outputs))
    operands = [arguments.given(i) for i in range(len(arguments.inputs))]
    if form.has_condition and form.count:
        return _while(arguments, form, operands)
    body = arguments.body
    assert body is not None, "a Scan carries a body"
    first, rest = operands[: form.states], operands[form.states :]
    last, given = arguments.outputs[: form.states], arguments.outputs[form.states :]
    if not form.count:
        return [step for a, b in zip(first, last, strict=True) for step in copy_steps(a, b)]
    sequences = _rows(rest[: form.sequences], form.taken_backward)
    results = _rows(given, form.given_backward)
    shared = rest[form.sequences :]
    taken = [workspace(a.shape[1:], a.dtype) for a in rest[: form.sequences]]
    # What is a state again is collected from there.
    own = [i for i in range(len(given)) if form.states + i not in body.repeated]
    made = {i: workspace(given[i].shape[1:], given[i].dtype) for i in own}
    # The last round writes the results.
    others = [workspace(a.shape, a.dtype) for a in last] if form.count > 1 else []
    sides = [others, last] if form.count % 2 == 0 else [last, others]
    rounds: list[_Round] = []
    # Without states, all rounds read and write the same places.
    for there, here in (sides, sides[::-1])[: form.sides]:
        before = here if form.count > 1 else first
        steps = body.bind([*before, *taken, *shared], [*there, *made.values()])
        outputs = dict(enumerate(there)) | {form.states + i: a for i, a in made.items()}
        sources = [
            outputs[body.repeated.get(form.states + i, form.states + i)] for i in range(len(given))
        ]
        rounds.append((tuple(steps), list(map(_row, sources))))
    starts: list[Thunk] = []
    if form.count > 1:
        for source, buffer in zip(first, sides[1], strict=True):
            starts += copy_steps(source, buffer)
    slots = list(map(_row, taken))
    return (*starts, partial(_run, form.count, rounds, slots, sequences, results))


def _rows(arrays: Sequence[Array], backward: Sequence[bool]) -> list[Array]:
    """Sequences in the order of rounds."""
    in_order = [a[::-1] if back else a for a, back in zip(arrays, backward, strict=True)]
    return [a[:, np.newaxis] if a.ndim == 1 else a for a in in_order]


def _row(slot: Array) -> Array:
    """A place for one element, as it is in a sequence: what has no axes is no view there."""
    return slot.reshape(1) if slot.ndim == 0 else slot


def _run(
    count: int,
    rounds: Sequence[_Round],
    taken: Sequence[Array],
    sequences: Sequence[Array],
    results: Sequence[Array],
) -> None:
    """All rounds, one after the other."""
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


def _nbytes(context: WorkspaceContext) -> int:
    """What states and elements take a second time; what a body takes is counted with it."""
    return 2 * context.nbytes


def _while(
    arguments: KernelArguments, form: ScanForm, operands: Sequence[Array]
) -> Sequence[Thunk]:
    """The steps of a scan with a condition."""
    body = arguments.body
    assert body is not None, "a Scan carries a body"
    first, shared = operands[: form.states], operands[form.states :]
    last = arguments.outputs
    others = [workspace(a.shape, a.dtype) for a in last]
    ways = [(others, last), (last, others)][: form.sides]
    rounds = [tuple(body.bind([*before, *shared], after)) for before, after in ways]
    starts = [step for a, b in zip(first, others, strict=True) for step in copy_steps(a, b)]
    ends = [step for a, b in zip(others, last, strict=True) for step in copy_steps(a, b)]
    return (*starts, partial(_run_while, form.count, rounds, (others[0], last[0]), ends))


def _run_while(
    count: int,
    rounds: Sequence[Sequence[Thunk]],
    conditions: Sequence[Array],
    ends: Sequence[Thunk],
) -> None:
    """Rounds while the condition, which lies in two places in turn, is true."""
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
        SCAN[1],
        (0, -1),
        _infer,
        _kernel,
        outputs=(1, -1),
        attributes=declared(
            count=Attribute("int", required=True),
            num_states=0,
            num_scan_inputs=0,
            scan_input_directions=Attribute("ints"),
            scan_output_directions=Attribute("ints"),
            has_condition=0,
        ),
        domain=SCAN[0],
        workspace=WorkspaceRule(_nbytes, is_kept=False),
        checks=True,
    ),
)
