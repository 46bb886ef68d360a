"""Does a pipeline file fit its binaries? Names, slots, shapes, types and slices, before it runs;
and how values flow through it: what each step defines and reads, what nobody reads.

Comes in: a `PipelineFile` and the programs of its modules. Goes out: nothing, or one `FormatError`
with every defect and its line; for each value, its type. Must not know: devices.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from stitch.documents.pipelines.pipeline_form import (
    PipelineFile,
    PipelineStep,
    Reference,
    RepeatStep,
    RunStep,
)
from stitch.errors import LinkError, Problem, closest
from stitch.forms import ProblemLog
from stitch.linker import check_link
from stitch.program import Program, TensorDesc, ValueType
from stitch.report import counted

#: Names that a message lists.
MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """What is known of a value: its type; where it lies, if a program made it, and which one."""

    type: ValueType
    desc: TensorDesc | None = None
    made_by: str = ""


#: What is defined so far: the innermost repeat's names first.
Values: TypeAlias = ChainMap[str, CheckedValue]


def check_pipeline(
    pipeline: PipelineFile,
    programs: Mapping[str, Program],
    inputs: Mapping[str, ValueType],
    *,
    strict_types: bool = False,
) -> tuple[tuple[CheckedValue, ...], tuple[Problem, ...]]:
    """The types of the outputs, in order, and where arrays change their floating type.

    Raises `FormatError` with every defect; with `strict_types`, such a change is one.
    """
    check = _Check(pipeline, programs, strict_types)
    values: Values = ChainMap({name: CheckedValue(kind) for name, kind in inputs.items()})
    check.steps(pipeline.steps, values, {})
    outputs = []
    for name, word, line in pipeline.outputs:
        value = check.named(word, values, line)
        if value is not None and value.desc is None:
            check.note("bad_output", line, f"output {name!r} is an input: no step makes it")
        elif value is not None:
            outputs.append(value)
    check.log.raise_any("pipeline")
    return tuple(outputs), tuple(check.converted)


class _Check:
    def __init__(
        self, pipeline: PipelineFile, programs: Mapping[str, Program], strict_types: bool
    ) -> None:
        self.log = ProblemLog(pipeline.file)
        self._programs = programs
        self._strict_types = strict_types
        self._noted: set[tuple[int, str]] = set()
        self.converted: list[Problem] = []

    def note(self, kind: str, line: int, detail: str) -> None:
        """Notes a defect once: the steps of a repeat are walked twice."""
        if (line, detail) not in self._noted:
            self._noted.add((line, detail))
            self.log.note(kind, line, detail)

    def named(
        self, name: str, values: Mapping[str, CheckedValue], line: int
    ) -> CheckedValue | None:
        """A value by name; notes an unknown one."""
        value = values.get(name)
        if value is None and not self.log.is_full:
            self.note("undefined", line, f"there is no value {name!r} here (there are "
                      f"{_listed(values)}){closest(name, values, '; ')}")  # fmt: skip
        return value

    def steps(
        self, steps: Sequence[PipelineStep], values: Values, indices: Mapping[str, int]
    ) -> None:
        """Walks steps in order and adds what they define."""
        for step in steps:
            if isinstance(step, RunStep):
                self._run(step, values, indices)
            else:
                self._repeat(step, values, indices)

    def _repeat(self, step: RepeatStep, values: Values, indices: Mapping[str, int]) -> None:
        if step.index in indices or step.index in values:
            self.note("defined_twice", step.line, f"the index {step.index!r} is taken")
        for name, _ in step.carry:
            self.named(name, values, step.line)
        inner_indices = {**indices, step.index: step.times}
        # The second walk sees what the first one carries over, where that lies otherwise.
        for _ in range(2 if step.times > 1 else 1):
            # An overlay: a copy for each repeat would be as long as the file.
            inner = ChainMap({}, *values.maps)
            self.steps(step.steps, inner, inner_indices)
            carried, moved = {}, False
            for name, after in step.carry:
                value = self.named(after, inner, step.line)
                before = values.get(name)
                if value is None or before is None:
                    continue
                if value.type != before.type:
                    detail = (
                        f"{name} is {before.type.text()}, and cannot become {after}, which is "
                        f"{value.type.text()}"
                    )
                    self.note("carry_type", step.line, detail)
                carried[name] = value
                moved = moved or value.desc != before.desc
            values.update(carried)
            if not moved:
                break

    def _run(self, step: RunStep, values: Values, indices: Mapping[str, int]) -> None:
        program = self._programs.get(step.module)
        if program is None:
            near = closest(step.module, self._programs, "; ")
            self.note("unknown_module", step.line, f"there is no module {step.module!r}{near}")
            return
        names = [slot.name for slot in program.inputs]
        given = self.slots(step, [slot for slot, _ in step.inputs], names, "input")
        fed = set(given)
        missing = [name for i, name in enumerate(names) if i not in fed]
        if missing:
            self.note("missing_input", step.line,
                      f"module {step.module!r} also needs {', '.join(missing)}")  # fmt: skip
        for at, (_, reference) in zip(given, step.inputs, strict=False):
            if at is not None:
                self._input(step, program, at, reference, values, indices)
        slots = self.slots(
            step, [slot for slot, _ in step.outputs], [s.name for s in program.outputs], "output"
        )
        for at, (_, name) in zip(slots, step.outputs, strict=False):
            if name in values or name in indices:
                self.note("defined_twice", step.line, f"{name!r} is defined already")
            if at is not None:
                desc = program.output_desc(at)
                kind = program.values[program.outputs[at].value].type
                title = f"{step.module}.{program.outputs[at].name}"
                values[name] = CheckedValue(kind, desc, title)

    def slots(
        self, step: RunStep, words: Sequence[str | None], names: Sequence[str], side: str
    ) -> list[int | None]:
        """The index of each slot that is named, or stands by position; notes what is wrong."""
        indices: list[int | None] = []
        taken: set[int] = set()
        places = {name: at for at, name in enumerate(names)}
        for position, word in enumerate(words):
            index = position if word is None else _slot(places, word)
            if (index is None or index >= len(names)) and self.log.is_full:
                index = None
            elif index is None or index >= len(names):
                near = "" if word is None else closest(word, names, "; ")
                title = repr(word) if word is not None else f"number {position}"
                detail = f"module {step.module!r} has no {side} {title} (it has {_listed(names)})"
                self.note("unknown_slot", step.line, detail + near)
                index = None
            elif index in taken:
                self.note("slot_twice", step.line, f"{side} {names[index]!r} is named twice")
                index = None
            else:
                taken.add(index)
            indices.append(index)
        return indices

    def _input(
        self,
        step: RunStep,
        program: Program,
        at: int,
        reference: Reference,
        values: Mapping[str, CheckedValue],
        indices: Mapping[str, int],
    ) -> None:
        value = self.named(reference.name, values, step.line)
        if value is None:
            return
        if reference.is_element:
            value = self._element(step, reference, value, indices)
            if value is None:
                return
        slot = f"{step.module}.{program.inputs[at].name}"
        target = program.input_desc(at)
        if value.desc is not None:
            try:
                check_link(value.desc, target, output=value.made_by, input=slot,
                           strict_types=self._strict_types)  # fmt: skip
            except LinkError as error:
                self.note("link", step.line, f"{error.what} (expected {error.expected}, got "
                          f"{error.got})")  # fmt: skip
            return
        wanted = program.values[program.inputs[at].value].type
        same_kind = value.type.data_type.is_floating and wanted.data_type.is_floating
        other = value.type.data_type is not wanted.data_type
        detail = f"{reference.text()} is {value.type.text()}, {slot} is {wanted.text()}"
        if value.type.shape != wanted.shape or (other and (self._strict_types or not same_kind)):
            self.note("wrong_type", step.line, detail)
        elif other and (step.line, detail) not in self._noted:
            self._noted.add((step.line, detail))
            where = f"{self.log.file}:{step.line}"
            self.converted.append(Problem("converted", where, f"{detail}: it is converted"))

    def _element(
        self, step: RunStep, reference: Reference, value: CheckedValue, indices: Mapping[str, int]
    ) -> CheckedValue | None:
        text = reference.text()
        if not value.type.shape:
            self.note("bad_slice", step.line, f"{text}: {reference.name} has no dimensions")
            return None
        length = value.type.shape[0]
        least = most = reference.offset
        if reference.index is not None:
            times = indices.get(reference.index)
            if times is None:
                near = closest(reference.index, indices, "; ")
                self.note("undefined", step.line, f"{text}: there is no index {reference.index!r} "
                          f"here (there are: {', '.join(indices) or 'none'}){near}")  # fmt: skip
                return None
            most += times - 1
        elif least < 0:
            least = most = least + length
        if least < 0 or most >= length:
            self.note("bad_slice", step.line, f"{text} goes from {least} to {most}, and "
                      f"{reference.name} has {counted(length, 'element')}")  # fmt: skip
            return None
        kind = ValueType(value.type.shape[1:], value.type.data_type)
        if value.desc is None:
            return CheckedValue(kind)
        layout = value.desc.layout
        if layout.is_sharded:
            self.note("bad_slice", step.line,
                      f"{text}: {reference.name} lies in shards, which have no views")  # fmt: skip
            return None
        desc = TensorDesc(kind.shape, layout.without_address())
        return CheckedValue(kind, desc, f"{value.made_by} ({text})")


def _slot(places: Mapping[str, int], word: str) -> int | None:
    if word in places:
        return places[word]
    return int(word) if word.isdecimal() and len(word) < 6 and int(word) < len(places) else None


def _listed(names: Iterable[str]) -> str:
    """Some of the names that there are."""
    some = list(islice(names, MAX_LISTED + 1))
    return ", ".join(some[:MAX_LISTED] + ["..."] * (len(some) > MAX_LISTED)) or "none"


def defines(step: PipelineStep) -> frozenset[str]:
    """The names that a step adds for those after it."""
    if isinstance(step, RunStep):
        return frozenset(name for _, name in step.outputs)
    return frozenset()


def uses_of(step: PipelineStep) -> frozenset[str]:
    """The names from outside that a step reads."""
    if isinstance(step, RunStep):
        return frozenset(reference.name for _, reference in step.inputs)
    inner = {name for s in step.steps for name in uses_of(s)}
    defined = {name for s in step.steps for name in defines(s)}
    carried = {name for name, _ in step.carry}
    after = {name for _, name in step.carry}
    return frozenset((inner | carried | after) - (defined - carried))


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
            # What a round defines is gone after it, but for what is carried over.
            yield from _unread_results(step.steps, frozenset(name for _, name in step.carry))
        live -= defines(step)
        live |= uses_of(step)
