"""Schedules: the steps of a pipeline file with slots by index, and what each lets go of.

Comes in: checked steps. Goes out: the same steps, ready to run. Must not know devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stitch.documents.pipelines.fitting import defines, uses_of
from stitch.documents.pipelines.pipeline_form import PipelineStep, Reference, RunStep
from stitch.program import Array, InputSlot, OutputSlot, Program
from stitch.runtime import Tensor

Value = Tensor | Array


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step with its slots by index, and the names that nobody needs after it.

    `ends`: what a round of a repeat defines and still has at its end, to be carried over.
    """

    step: PipelineStep
    drops: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    body: tuple[Scheduled, ...] = ()
    ends: tuple[str, ...] = ()


def schedule_of(
    steps: Sequence[PipelineStep],
    known: frozenset[str],
    wanted: frozenset[str],
    programs: Mapping[str, Program],
) -> list[Scheduled]:
    """The steps, each with the names of `known` and of earlier steps that are not used later.

    `wanted` names what is needed after the last step.
    """
    live = set(wanted)
    #: Where a name is defined first; a step can drop only what is defined by then.
    defined_at = dict.fromkeys(known, -1)
    for at, step in enumerate(steps):
        for name in defines(step):
            defined_at.setdefault(name, at)
    planned: list[Scheduled] = []
    for at in reversed(range(len(steps))):
        step = steps[at]
        uses, defined = uses_of(step), defines(step)
        drops = tuple(sorted(
            name for name in uses | defined
            if name not in live and defined_at.get(name, len(steps)) <= at
        ))  # fmt: skip
        if isinstance(step, RunStep):
            program = programs[step.module]
            inputs = _indices(step.inputs, program.inputs)
            outputs = _indices(step.outputs, program.outputs)
            planned.append(Scheduled(step, drops, inputs, outputs))
        else:
            # A round may drop what it defines, and the carried names; the rest is not its own.
            own = frozenset(name for name, _ in step.carry)
            after = frozenset(name for _, name in step.carry)
            body = schedule_of(step.steps, own, after, programs)
            inner = {name for s in step.steps for name in defines(s)}
            ends = tuple(sorted(after & inner))
            planned.append(Scheduled(step, drops, body=tuple(body), ends=ends))
        live -= defined
        live |= uses
    return planned[::-1]


def _indices(
    bindings: Sequence[tuple[str | None, object]], slots: Sequence[InputSlot | OutputSlot]
) -> tuple[int, ...]:
    places = {slot.name: at for at, slot in enumerate(slots)}
    return tuple(
        at if slot is None else places[slot] if slot in places else int(slot)
        for at, (slot, _) in enumerate(bindings)
    )


def found(reference: Reference, scope: Mapping[str, Value], indices: Mapping[str, int]) -> Value:
    """What a reference stands for."""
    value = scope[reference.name]
    if not reference.is_element:
        return value
    start = 0 if reference.index is None else indices[reference.index]
    element: Value = value[start + reference.offset]
    return element if isinstance(element, Tensor) else np.asarray(element)
