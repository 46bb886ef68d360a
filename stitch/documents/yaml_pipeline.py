"""`YamlPipeline`: a pipeline file loaded on a device, called with its inputs.

A value is freed after its last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

from stitch.argument_kinds import arranged
from stitch.documents.fitting import check_pipeline
from stitch.documents.pipeline_form import (
    InputEntry,
    PipelineFile,
    PipelineStep,
    Reference,
    RepeatStep,
    RunStep,
    load_pipeline,
    unread,
)
from stitch.documents.schedule import (
    CheckedValue,
    Joins,
    Named,
    Rounds,
    Scheduled,
    Value,
    rounds_of,
    schedule_of,
    value_of,
)
from stitch.errors import FormatError, Problem, StitchError, UsageError
from stitch.forms import read_array
from stitch.machine import Machine, machine_names
from stitch.program import Array, DataType, Program, ValueType
from stitch.report import Device, counted
from stitch.runtime import LoadedProgram, Tensor, capture
from stitch.ttb import Binary, load

# Inputs; a list of arrays is one input for each array.


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """An input: its type, and the array of its file, if it has one; `xs[2]` is one of a list."""

    name: str
    type: ValueType
    given: Array | None = None


def read_inputs(file: PipelineFile, converted: list[Problem]) -> tuple[PipelineInput, ...]:
    """All inputs, in order; notes where an array's type is changed. Raises `FormatError`."""
    return tuple([one for entry in file.inputs for one in _read(entry, file.file, converted)])


def checked_inputs(file: PipelineFile, inputs: Sequence[PipelineInput]) -> dict[str, CheckedValue]:
    """What is known of each name. Raises `FormatError` for a list whose arrays differ in more than
    their lengths."""
    known = {}
    for entry, (first, *others) in _by_entry(file, inputs):
        kinds = [one.type for one in (first, *others)]
        if entry.count is None:
            known[entry.name] = CheckedValue(first.type)
            continue
        for one in others:
            if _beyond_length(one.type) != _beyond_length(first.type):
                raise FormatError(
                    f"the arrays of a list are alike but for their lengths, and {one.name} is not "
                    f"like {first.name}",
                    where=f"{file.file}:{entry.line}", expected=first.type.text(),
                    got=one.type.text(),
                )  # fmt: skip
        known[entry.name] = CheckedValue(first.type, elements=tuple(kinds))
    return known


def arranged_inputs(
    what: str, file: PipelineFile, inputs: Sequence[PipelineInput], arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    """A value for each input, of arguments by position and by name; a list is one argument.

    Raises `UsageError` for what is missing, surplus or given twice, and for a list of another
    count.
    """
    types, defaults = [], {}
    for entry, own in _by_entry(file, inputs):
        text = own[0].type.text()
        is_one = entry.count is None
        types.append((entry.name, text if is_one else f"{len(own)} such as {text}"))
        if all(one.given is not None for one in own):
            defaults[entry.name] = own[0].given if is_one else [one.given for one in own]
    found = []
    given = arranged(what, types, arguments, named, defaults)
    for entry, value in zip(file.inputs, given, strict=True):
        if entry.count is None:
            found.append(value)
            continue
        is_list = isinstance(value, list | tuple)
        if not is_list or len(value) != entry.count:
            raise UsageError(
                f"input {entry.name!r} of {what} is a list of {counted(entry.count, 'array')}",
                got=counted(len(value), "array") if is_list else type(value).__name__,
            )
        found += value
    return tuple(found)


def _by_entry(
    file: PipelineFile, inputs: Sequence[PipelineInput]
) -> Iterator[tuple[InputEntry, list[PipelineInput]]]:
    """Each entry with its inputs: one, or those of a list."""
    left = iter(inputs)
    for entry in file.inputs:
        yield entry, [*islice(left, entry.count or 1)]


def _beyond_length(kind: ValueType) -> tuple[int, tuple[int, ...], DataType]:
    return len(kind.shape), kind.shape[1:], kind.data_type


def _read(entry: InputEntry, file: str, converted: list[Problem]) -> Iterator[PipelineInput]:
    """An input with the array of its file, if it has one; of a list each."""
    if entry.count is None:
        yield _one(entry, 0, entry.name, file, converted)
        return
    for number in range(entry.count):
        yield _one(entry, number, f"{entry.name}[{number}]", file, converted)


def _one(
    entry: InputEntry, number: int, name: str, file: str, converted: list[Problem]
) -> PipelineInput:
    written, source = entry.element_shape(number), entry.source(number)
    if source is None:
        assert written is not None and entry.data_type is not None
        return PipelineInput(name, ValueType(written, entry.data_type))
    array = read_array(*source, entry.data_type, written)
    stored = DataType.from_dtype(array.dtype)
    kind = stored if entry.data_type is None else entry.data_type
    shape = array.shape if written is None else written
    try:
        fitted = capture(array, shape, kind, True, f"input {name!r}")
    except StitchError as error:
        raise FormatError(
            error.what, where=f"{file}:{entry.line}", expected=error.expected, got=error.got
        ) from error
    if stored is not kind and kind.is_floating:
        detail = f"input {name!r} is converted from {stored.value} to {kind.value}"
        converted.append(Problem("converted", f"{file}:{entry.line}", detail))
    fitted.flags.writeable = False
    return PipelineInput(name, ValueType(shape, kind), fitted)


#: A repeat of so many rounds is queued run by run.
MIN_ROUNDS = 128


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPipeline:
    """A pipeline file with its binaries and input files, checked; opens on any fitting device.

    `warnings`: what is no error and worth a look, such as a result that nobody reads.
    """

    file: PipelineFile
    binaries: Mapping[str, Binary]
    programs: Mapping[str, Program]
    inputs: tuple[PipelineInput, ...]
    outputs: tuple[CheckedValue, ...]
    warnings: tuple[Problem, ...] = ()

    @property
    def machine(self) -> str | Machine:
        """The machine that the file names, else the one its first module was compiled for: as its
        own file describes it, if that does.

        Raises `UsageError` where that is none that Stitch ships.
        """
        if self.file.device is not None:
            return self.file.device
        first = next(iter(self.binaries.values()))
        if first.origin is not None:
            return first.origin.machine
        name = first.machine.name
        if name not in machine_names():
            raise UsageError(
                f"{self.file.file} names no device, and its modules were compiled for {name!r}",
                expected="`device: machine.yaml` in the file, or a device to run on",
            )
        return name


def read_pipeline(
    path: str | Path, *, strict_types: bool = False, given: Mapping[Path, Binary] | None = None
) -> CheckedPipeline:
    """Read a pipeline file, its binaries and its arrays; check all before anything runs.

    `given`: binaries in the place of what their files hold, by resolved path. Raises `FormatError`
    with every defect, `IncompatibleError` for a binary of another version.
    """
    file = load_pipeline(path)
    known = given or {}
    binaries = {m.name: known.get(m.file.resolve()) or load(m.file) for m in file.modules}
    programs: dict[str, Program] = {}
    for module in file.modules:
        try:
            programs[module.name] = binaries[module.name].program(module.program or 0)
        except StitchError as error:
            where = f"{file.file}:{module.line}"
            raise FormatError(error.what, where=where, expected=error.expected) from error
    converted: list[Problem] = []
    inputs = read_inputs(file, converted)
    if strict_types and converted:
        raise FormatError(
            f"{file.file}: strict types convert no input file", problems=tuple(converted)
        )
    known_inputs = checked_inputs(file, inputs)
    outputs, changed = check_pipeline(file, programs, known_inputs, strict_types=strict_types)
    warnings = (*converted, *changed, *unread(file))
    return CheckedPipeline(file, binaries, programs, inputs, outputs, warnings)


@final
class YamlPipeline:
    """A pipeline file, loaded on a device; `pipeline(x=...)` gives a tensor or a tuple of them.

    `inputs` and `output_names` say what it takes and gives.
    """

    def __init__(self, checked: CheckedPipeline, device: Device) -> None:
        self.device = device
        self.checked = checked
        self.inputs = checked.inputs
        self.output_names = tuple(name for name, _, _ in checked.file.outputs)
        self.programs: dict[str, LoadedProgram] = {
            module.name: device.load(checked.binaries[module.name], module.program or 0)
            for module in checked.file.modules
        }
        wanted = frozenset(word for _, word, _ in checked.file.outputs)
        names = frozenset(entry.name for entry in checked.file.inputs)
        self._shared = names & _taken_by_several(checked.file.steps)
        #: What runs rounds of a long repeat in one call, by the step's identity; None: nothing.
        self._rounds: dict[int, Rounds | None] = {}
        self._steps = tuple(schedule_of(checked.file.steps, names, wanted, checked.programs))
        gives_away = any(one.transformation.donated for one in self.programs.values())
        self._joins = Joins(device, is_copying=gives_away)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Queue one run; gives a tensor, or a tuple of them.

        Raises `UsageError` for missing or surplus inputs, `LinkError`.
        """
        results = self.run(self._arranged(arguments, named))
        return results[0] if len(results) == 1 else results

    def __repr__(self) -> str:
        inputs = ", ".join(f"{one.name}: {one.type.text()}" for one in self.inputs)
        outputs = ", ".join(self.output_names)
        return f"<YamlPipeline {self.checked.file.name}({inputs}) -> {outputs} on {self.device!r}>"

    def _arranged(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        what = f"pipeline {self.checked.file.name!r}"
        return arranged_inputs(what, self.checked.file, self.inputs, arguments, named)

    def run(self, values: Sequence[Any], *, borrow: bool = False) -> tuple[Tensor, ...]:
        """Queue one run on a value for each input, in order; `borrow` as for a loaded program."""
        entered = iter([
            self._entered(one, value, borrow)
            for one, value in zip(self.inputs, values, strict=True)
        ])  # fmt: skip
        scope: dict[str, Named] = {
            entry.name: next(entered) if entry.count is None
            else tuple(islice(entered, entry.count))
            for entry in self.checked.file.inputs
        }  # fmt: skip
        self._run(self._steps, scope, {})
        outputs = [scope[word] for _, word, _ in self.checked.file.outputs]
        return tuple(value for value in outputs if isinstance(value, Tensor))

    def _entered(self, one: PipelineInput, value: Any, borrow: bool) -> Value:
        if isinstance(value, Tensor):
            if value.shape != one.type.shape:
                raise UsageError(f"input {one.name!r} has another shape",
                                 expected=str(one.type.shape), got=str(value.shape))  # fmt: skip
            return value
        what = f"input {one.name!r}"
        allowed = self.device.allowed_nbytes
        array = capture(value, one.type.shape, one.type.data_type, borrow, what, allowed)
        if array is not value:
            # Ours alone: steps need no copies of their own.
            array.flags.writeable = False
        # What several runs take is one tensor, which enters a space once.
        return self.device.tensor(array, borrow=True) if one.name in self._shared else array

    def _run(
        self, steps: Sequence[Scheduled], scope: dict[str, Named], indices: dict[str, int]
    ) -> None:
        for scheduled in steps:
            step = scheduled.step
            if isinstance(step, RepeatStep):
                self._repeat(step, scheduled, scope, indices)
            else:
                self._run_one(step, scheduled, scope, indices)
            for name in scheduled.drops:
                scope.pop(name, None)

    def _repeat(
        self,
        step: RepeatStep,
        scheduled: Scheduled,
        scope: dict[str, Named],
        indices: dict[str, int],
    ) -> None:
        # In the one scope: a name is defined once, so a round overwrites nothing of the outside,
        # and leaves behind only what it carries over.
        number = 0
        collected = [self._joins.tensors() for _ in step.collect]
        while number < step.times:
            # The first round takes what others may hold; what it carries over is the loop's alone.
            rounds = self._rounds_of(scheduled) if number and step.times > MIN_ROUNDS else None
            if (
                rounds is not None
                and step.times - number >= rounds.count
                and rounds.run(scope, indices, number, collected)
            ):
                number += rounds.count
                continue
            self._run(scheduled.body, scope, {**indices, step.index: number})
            carried = {name: scope[after] for name, after in step.carry}
            for (_, source), rounds_made in zip(step.collect, collected, strict=True):
                made = scope[source]
                assert isinstance(made, Tensor), "a step made it"
                rounds_made.add(made)
            for name in scheduled.ends:
                del scope[name]
            scope.update(carried)
            number += 1
        for (name, _), rounds_made in zip(step.collect, collected, strict=True):
            scope[name] = rounds_made.whole()

    def _rounds_of(self, scheduled: Scheduled) -> Rounds | None:
        """Rounds of a repeat in one call, where there are such."""
        key = id(scheduled)
        if key not in self._rounds:
            self._rounds[key] = rounds_of(scheduled, self.programs, self.device.window, self._joins)
        return self._rounds[key]

    def _run_one(
        self,
        step: RunStep,
        scheduled: Scheduled,
        scope: dict[str, Named],
        indices: Mapping[str, int],
    ) -> None:
        program = self.programs[step.module]
        arguments: list[Any] = [None] * len(program.ports)
        for at, (_, reference) in zip(scheduled.inputs, step.inputs, strict=True):
            arguments[at] = value_of(reference, scope, indices)
        # Arrays of a run are our own or read-only; writable borrowed ones are the caller's say.
        submitted = self.device.submit(program, arguments, True)
        results = submitted if isinstance(submitted, tuple) else (submitted,)
        for at, (_, name) in zip(scheduled.outputs, step.outputs, strict=True):
            scope[name] = results[at]

    def forget(self) -> None:
        """Drop the loaded programs; the pipeline cannot be called any more."""
        self.programs = {}
        self._rounds.clear()
        self._joins.forget()


def _taken_by_several(steps: Sequence[PipelineStep]) -> frozenset[str]:
    """The names that several runs take, all of them as a whole."""
    runs: Counter[str] = Counter()
    parted = set()
    for times, reference in _taken(steps, 1):
        runs[reference.name] += times
        if reference.is_element:
            parted.add(reference.name)
    return frozenset(name for name, count in runs.items() if count > 1) - parted


def _taken(steps: Sequence[PipelineStep], times: int) -> Iterator[tuple[int, Reference]]:
    """What runs take, and how often."""
    for step in steps:
        if isinstance(step, RepeatStep):
            yield from _taken(step.steps, times * step.times)
        else:
            yield from ((times, reference) for _, reference in step.inputs)
