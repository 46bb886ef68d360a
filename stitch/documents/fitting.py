"""Check a pipeline file against its binaries: names, slots, shapes, types and slices."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from stitch.documents.pipeline_form import (
    PipelineFile,
    PipelineStep,
    Reference,
    RepeatStep,
    RunStep,
    defines,
)
from stitch.errors import LinkError, Problem, closest
from stitch.forms import ProblemLog
from stitch.linker import check_link
from stitch.program import MAX_RANK, Program, TensorDesc, ValueType, host_layout
from stitch.report import counted

#: Names that an error lists.
MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class CheckedValue:
    """The type of a value; of a result also its descriptor and its producer (`module.slot`)."""

    type: ValueType
    desc: TensorDesc | None = None
    made_by: str = ""


#: The defined values by name, those of the innermost repeat first.
Values: TypeAlias = ChainMap[str, CheckedValue]


def check_pipeline(
    pipeline: PipelineFile, programs: Mapping[str, Program], inputs: Mapping[str, CheckedValue], *,
    strict_types: bool = False,
) -> tuple[tuple[CheckedValue, ...], tuple[Problem, ...]]:  # fmt: skip
    """Check the steps and outputs of a pipeline.

    Returns the types of the outputs, and the conversions between floating types. Raises
    `FormatError` that lists every defect; with `strict_types` a conversion is one.
    """
    check = _Check(pipeline, programs, strict_types)
    values: Values = ChainMap(dict(inputs))
    check.steps(pipeline.steps, values, {})
    outputs = []
    for name, word, line in pipeline.outputs:
        value = check.named(word, values, line)
        if value is not None and value.desc is None:
            check.note("bad_output", line, f"output {name!r} is an input, not a result of a step")
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
        """Note a defect once: the steps of a repeat are walked twice."""
        if (line, detail) not in self._noted:
            self._noted.add((line, detail))
            self.log.note(kind, line, detail)

    def named(
        self, name: str, values: Mapping[str, CheckedValue], line: int
    ) -> CheckedValue | None:
        """Return a value by name; note an unknown one."""
        value = values.get(name)
        if value is None and not self.log.is_full:
            self.note("undefined", line, f"there is no value {name!r} here (there are "
                      f"{_listed(values)}){closest(name, values, '; ')}")  # fmt: skip
        return value

    def steps(
        self, steps: Sequence[PipelineStep], values: Values, indices: Mapping[str, int]
    ) -> None:
        """Walk steps in order and add the values that they define."""
        for step in steps:
            if isinstance(step, RunStep):
                self._run(step, values, indices)
            else:
                self._repeat(step, values, indices)

    def _repeat(self, step: RepeatStep, values: Values, indices: Mapping[str, int]) -> None:
        if step.index in indices or step.index in values:
            self.note("defined_twice", step.line, f"the index {step.index!r} is defined already")
        for name, _ in step.carry:
            self.named(name, values, step.line)
        inner_indices = {**indices, step.index: step.times}
        collected: dict[str, CheckedValue] = {}
        # The second walk checks the layouts of carried values, if they differ from the first ones.
        for _ in range(2 if step.times > 1 else 1):
            # Not a copy: nested repeats would take quadratic time.
            inner = ChainMap({}, *values.maps)
            self.steps(step.steps, inner, inner_indices)
            collected = self._collected(step, inner)
            carried, has_changed = {}, False
            for name, after in step.carry:
                value = self.named(after, inner, step.line)
                before = values.get(name)
                if value is None or before is None:
                    continue
                if value.type != before.type:
                    self.note("carry_type", step.line, f"{name} is {before.type.text()}, and "
                              f"cannot become {after}, which is {value.type.text()}")  # fmt: skip
                carried[name] = value
                has_changed = has_changed or value.desc != before.desc
            values.update(carried)
            if not has_changed:
                break
        for name, value in collected.items():
            if name in values or name in indices:
                self.note("defined_twice", step.line, f"{name!r} is defined already")
            values[name] = value

    def _collected(self, step: RepeatStep, inner: Values) -> dict[str, CheckedValue]:
        """Return the collected values; `inner` has the values at the end of a round."""
        collected = {}
        for name, word in step.collect:
            value = self.named(word, inner, step.line)
            if value is None:
                continue
            if word not in inner.maps[0]:
                results = [result for each in step.steps for result in defines(each)]
                self.note("bad_collect", step.line, f"{name} collects {word!r}, which no step of "
                          f"the repeat defines{closest(word, results, '; ')}")  # fmt: skip
            elif len(value.type.shape) == MAX_RANK:
                self.note("bad_collect", step.line, f"{name} would have {MAX_RANK + 1} dimensions, "
                          f"at most {MAX_RANK} are allowed")  # fmt: skip
            elif value.desc is not None:
                # Stacked in the storage type of a round; the space is open.
                shape = (step.times, *value.type.shape)
                desc = TensorDesc(shape, host_layout(value.desc.layout.data_type.in_arrays))
                kind = ValueType(shape, value.type.data_type)
                collected[name] = CheckedValue(kind, desc, f"{word} of all rounds")
        return collected

    def _run(self, step: RunStep, values: Values, indices: Mapping[str, int]) -> None:
        program = self._programs.get(step.module)
        if program is None:
            near = closest(step.module, self._programs, "; ")
            self.note("unknown_module", step.line, f"there is no module {step.module!r}{near}")
            return
        names = [slot.name for slot in program.inputs]
        bound = self.slots(step, [slot for slot, _ in step.inputs], names, "input")
        missing = [name for i, name in enumerate(names) if i not in set(bound)]
        if missing:
            self.note("missing_input", step.line,
                      f"module {step.module!r} also needs {', '.join(missing)}")  # fmt: skip
        for at, (_, reference) in zip(bound, step.inputs, strict=False):
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
        """Return the index of each slot, by name or position; note unknown ones as None."""
        indices: list[int | None] = []
        by_name = {name: at for at, name in enumerate(names)}
        for position, word in enumerate(words):
            index = position if word is None else _slot(by_name, word)
            if index is None or index >= len(names):
                index = None
                if not self.log.is_full:
                    near = "" if word is None else closest(word, names, "; ")
                    title = f"number {position}" if word is None else repr(word)
                    self.note("unknown_slot", step.line, f"module {step.module!r} has no {side} "
                              f"{title} (it has {_listed(names)}){near}")  # fmt: skip
            elif index in indices:
                self.note("slot_twice", step.line, f"{side} {names[index]!r} is named twice")
                index = None
            indices.append(index)
        return indices

    def _input(
        self, step: RunStep, program: Program, at: int, reference: Reference,
        values: Mapping[str, CheckedValue], indices: Mapping[str, int],
    ) -> None:  # fmt: skip
        value = self.named(reference.name, values, step.line)
        if value is None:
            return
        slot = f"{step.module}.{program.inputs[at].name}"
        if reference.is_element:
            value = self._element(step, reference, value, indices)
            if value is None:
                return
        target = program.input_desc(at)
        if value.desc is not None:
            try:
                check_link(value.desc, target, output=value.made_by, input=slot,
                           strict_types=self._strict_types)  # fmt: skip
            except LinkError as error:
                self.note("link", step.line, f"{error.what} (expected {error.expected}, got "
                          f"{error.got})")  # fmt: skip
            return
        # An array of the caller or of a file.
        kind, wanted = value.type, program.values[program.inputs[at].value].type
        are_floating = kind.data_type.is_floating and wanted.data_type.is_floating
        is_other = kind.data_type is not wanted.data_type
        detail = f"{reference.text()} is {kind.text()}, {slot} is {wanted.text()}"
        if kind.shape != wanted.shape or (is_other and (self._strict_types or not are_floating)):
            self.note("wrong_type", step.line, detail)
        elif is_other and (step.line, detail) not in self._noted:
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
        if not self._is_within(step, reference, value.type.shape[0], indices):
            return None
        kind = ValueType(value.type.shape[1:], value.type.data_type)
        if value.desc is None:
            return CheckedValue(kind)
        layout = value.desc.layout
        if layout.is_sharded:
            self.note("bad_slice", step.line,
                      f"{text}: {reference.name} is sharded, and shards have no views")  # fmt: skip
            return None
        desc = TensorDesc(kind.shape, layout.without_address())
        return CheckedValue(kind, desc, f"{value.made_by} ({text})")

    def _is_within(
        self, step: RunStep, reference: Reference, length: int, indices: Mapping[str, int]
    ) -> bool:
        """Return whether the elements that a reference reads in all rounds exist; note defects."""
        text, times = reference.text(), 1
        if reference.index is not None:
            if reference.index not in indices:
                near = closest(reference.index, indices, "; ")
                self.note("undefined", step.line, f"{text}: there is no index {reference.index!r} "
                          f"here (there are: {', '.join(indices) or 'none'}){near}")  # fmt: skip
                return False
            times = indices[reference.index]
        first = reference.offset + (length if reference.is_from_end else 0)
        last = first + (1 - times if reference.is_backward else times - 1)
        if min(first, last) < 0 or max(first, last) >= length:
            self.note("bad_slice", step.line, f"{text} goes from {first} to {last}, and "
                      f"{reference.name} has {counted(length, 'element')}")  # fmt: skip
            return False
        return True


def _slot(by_name: Mapping[str, int], word: str) -> int | None:
    if word in by_name:
        return by_name[word]
    return int(word) if word.isdecimal() and len(word) < 6 and int(word) < len(by_name) else None


def _listed(names: Iterable[str]) -> str:
    some = list(islice(names, MAX_LISTED + 1))
    return ", ".join(some[:MAX_LISTED] + ["..."] * (len(some) > MAX_LISTED)) or "none"
