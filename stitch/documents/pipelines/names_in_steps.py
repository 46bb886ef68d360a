"""How values flow through the steps of a pipeline file: what each defines and reads, what nobody
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stitch.documents.pipelines.pipeline_form import (
    PipelineFile,
    PipelineStep,
    RepeatStep,
    RunStep,
)
from stitch.errors import Problem


def defines(step: PipelineStep) -> frozenset[str]:
    """The names that a step adds for those after it."""
    if isinstance(step, RunStep):
        return frozenset(name for _, name in step.outputs)
    return frozenset(name for name, _ in step.collect)


def uses_of(step: PipelineStep) -> frozenset[str]:
    """The names from outside that a step reads."""
    if isinstance(step, RunStep):
        return frozenset(reference.name for _, reference in step.inputs)
    inner = {name for s in step.steps for name in uses_of(s)}
    defined = {name for s in step.steps for name in defines(s)}
    carried = {name for name, _ in step.carry}
    after = at_end(step)
    return frozenset((inner | carried | after) - (defined - carried))


def at_end(step: RepeatStep) -> frozenset[str]:
    """The names that are read at the end of a round."""
    return frozenset(name for _, name in (*step.carry, *step.collect))


def unread(pipeline: PipelineFile) -> tuple[Problem, ...]:
    """Every input and result that nobody reads and that is no output: likely a slip of the pen.

    A name that begins with `_` says that this is meant.

    >>> from pathlib import Path
    >>> from stitch.documents.pipelines.pipeline_form import PipelineFile, RunStep
    >>> step = RunStep("m", (), ((None, "y"), (None, "yy")), 4)
    >>> pipeline = PipelineFile("p.yaml", Path(), "p", None, (), (), (step,), (("y", "y", 5),))
    >>> [str(problem) for problem in unread(pipeline)]
    ["p.yaml:4: 'yy' is read by no step and is no output [unread]"]
    """
    wanted = frozenset(word for _, word, _ in pipeline.outputs)
    names = list(_unread_results(pipeline.steps, wanted))
    read = wanted.union(*(uses_of(step) for step in pipeline.steps))
    names += [(one.name, one.line) for one in pipeline.inputs if one.name not in read]
    return tuple(
        Problem(
            "unread", f"{pipeline.file}:{line}", f"{name!r} is read by no step and is no output"
        )
        for name, line in sorted(names, key=lambda pair: pair[1])
        if not name.startswith("_")
    )


def _unread_results(
    steps: Sequence[PipelineStep], wanted: frozenset[str]
) -> Iterator[tuple[str, int]]:
    """Names that steps define and that neither later steps nor `wanted` ask for, with lines."""
    live = set(wanted)
    for step in reversed(steps):
        if isinstance(step, RunStep):
            yield from ((name, step.line) for name in sorted(defines(step) - live))
        else:
            # What a round defines is gone after it, but for what is carried over or collected.
            yield from _unread_results(step.steps, at_end(step))
            yield from ((name, step.line) for name in sorted(defines(step) - live))
        live -= defines(step)
        live |= uses_of(step)
