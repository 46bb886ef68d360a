"""`YamlPipeline`: a pipeline file on a device, called with its inputs.

A value is freed after its last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
)
from stitch.documents.schedule import (
    CheckedValue,
    Joins,
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
from stitch.report import Device
from stitch.runtime import LoadedProgram, Tensor, capture
from stitch.ttb import Binary, load


@dataclass(frozen=True, slots=True)
class PipelineInput:
    """An input: its type, and the array of its file, if it has one."""

    name: str
    type: ValueType
    given: Array | None = None


def _read_input(entry: InputEntry, file: str, converted: list[Problem]) -> PipelineInput:
    """Read an input with the array of its file; append changes of its type to `converted`."""
    if entry.file is None:
        assert entry.shape is not None and entry.data_type is not None
        return PipelineInput(entry.name, ValueType(entry.shape, entry.data_type))
    array = read_array(entry.file, entry.array, entry.data_type, entry.shape)
    stored = DataType.from_dtype(array.dtype)
    kind = stored if entry.data_type is None else entry.data_type
    shape = array.shape if entry.shape is None else entry.shape
    what = f"input {entry.name!r}"
    try:
        fitted = capture(array, shape, kind, True, what)
    except StitchError as error:
        raise FormatError(
            error.what, where=f"{file}:{entry.line}", expected=error.expected, got=error.got
        ) from error
    if stored is not kind and kind.is_floating:
        detail = f"{what} is converted from {stored.value} to {kind.value}"
        converted.append(Problem("converted", f"{file}:{entry.line}", detail))
    fitted.flags.writeable = False
    return PipelineInput(entry.name, ValueType(shape, kind), fitted)


#: Longer repeats run several rounds as one prepared graph.
MIN_ROUNDS = 128


@dataclass(frozen=True, slots=True, eq=False)
class CheckedPipeline:
    """A checked pipeline file with its binaries and input arrays.

    `warnings` lists conversions of input arrays.
    """

    file: PipelineFile
    binaries: Mapping[str, Binary]
    programs: Mapping[str, Program]
    inputs: tuple[PipelineInput, ...]
    outputs: tuple[CheckedValue, ...]
    warnings: tuple[Problem, ...] = ()

    @property
    def machine(self) -> str | Machine:
        """Return the machine of the file, or the one that its first module was compiled for.

        Raises `UsageError` if Stitch does not know that machine.
        """
        if self.file.device is not None:
            return self.file.device
        first = next(iter(self.binaries.values()))
        if first.origin is not None:
            return first.origin.machine
        name = first.machine.name
        if name not in machine_names():
            raise UsageError(
                f"{self.file.file} has no `device`, and its modules were compiled for {name!r}, "
                "a machine that Stitch does not ship",
                expected="`device: machine.yaml` in the file, or a device to run on",
            )
        return name


def read_pipeline(path: str | Path, *, strict_types: bool = False) -> CheckedPipeline:
    """Read and check a pipeline file, its binaries and its arrays.

    Args:
        path: The YAML file.
        strict_types: Refuse conversions between floating types.

    Raises:
        FormatError: Lists every defect.
        IncompatibleError: A binary has another version.
    """
    file = load_pipeline(path)
    binaries = {m.name: load(m.file) for m in file.modules}
    programs: dict[str, Program] = {}
    for module in file.modules:
        try:
            programs[module.name] = binaries[module.name].program(module.program or 0)
        except StitchError as error:
            where = f"{file.file}:{module.line}"
            raise FormatError(error.what, where=where, expected=error.expected) from error
    converted: list[Problem] = []
    inputs = tuple([_read_input(entry, file.file, converted) for entry in file.inputs])
    if strict_types and converted:
        raise FormatError(
            f"{file.file}: strict types refuse conversions", problems=tuple(converted)
        )
    values = {one.name: CheckedValue(one.type) for one in inputs}
    outputs, changed = check_pipeline(file, programs, values, strict_types=strict_types)
    return CheckedPipeline(file, binaries, programs, inputs, outputs, (*converted, *changed))


@final
class YamlPipeline:
    """A pipeline file on a device; `pipeline(x=...)` returns a tensor or a tuple of tensors."""

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
        #: The rounds of a long repeat that run in one call, by the step's identity, or None.
        self._rounds: dict[int, Rounds | None] = {}
        self._steps = tuple(schedule_of(checked.file.steps, names, wanted, checked.programs))
        donates = any(one.transformation.donated for one in self.programs.values())
        self._joins = Joins(device, is_copying=donates)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Queue one run, with arguments by position or name; return a tensor or a tuple of them.

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
        types = [(one.name, one.type.text()) for one in self.inputs]
        defaults = {one.name: one.given for one in self.inputs if one.given is not None}
        return arranged(what, types, arguments, named, defaults)

    def run(self, values: Sequence[Any], *, borrow: bool = False) -> tuple[Tensor, ...]:
        """Queue one run on a value for each input, in order; `borrow` as for a loaded program."""
        scope = {
            one.name: self._captured(one, value, borrow)
            for one, value in zip(self.inputs, values, strict=True)
        }
        self._run(self._steps, scope, {})
        outputs = [scope[word] for _, word, _ in self.checked.file.outputs]
        return tuple(value for value in outputs if isinstance(value, Tensor))

    def _captured(self, one: PipelineInput, value: Any, borrow: bool) -> Value:
        if isinstance(value, Tensor):
            if value.shape != one.type.shape:
                raise UsageError(f"input {one.name!r} has another shape",
                                 expected=str(one.type.shape), got=str(value.shape))  # fmt: skip
            return value
        what = f"input {one.name!r}"
        allowed = self.device.allowed_nbytes
        array = capture(value, one.type.shape, one.type.data_type, borrow, what, allowed)
        if array is not value:
            # Our own copy: steps may borrow it.
            array.flags.writeable = False
        # An input of several runs is one tensor, which is copied to a space once.
        return self.device.tensor(array, borrow=True) if one.name in self._shared else array

    def _run(
        self, steps: Sequence[Scheduled], scope: dict[str, Value], indices: dict[str, int]
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
        self, step: RepeatStep, scheduled: Scheduled, scope: dict[str, Value],
        indices: dict[str, int],
    ) -> None:  # fmt: skip
        # One scope is enough: a name is defined once, so a round overwrites no outer value.
        number = 0
        collected = [self._joins.tensors() for _ in step.collect]
        while number < step.times:
            # The first round reads values that may be used elsewhere; later rounds may overwrite.
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
            for (_, source), rounds_collected in zip(step.collect, collected, strict=True):
                result = scope[source]
                assert isinstance(result, Tensor), "it is the result of a step"
                rounds_collected.add(result)
            for name in scheduled.ends:
                del scope[name]
            scope.update(carried)
            number += 1
        for (name, _), rounds_collected in zip(step.collect, collected, strict=True):
            scope[name] = rounds_collected.whole()

    def _rounds_of(self, scheduled: Scheduled) -> Rounds | None:
        key = id(scheduled)
        if key not in self._rounds:
            self._rounds[key] = rounds_of(scheduled, self.programs, self.device.window, self._joins)
        return self._rounds[key]

    def _run_one(
        self, step: RunStep, scheduled: Scheduled, scope: dict[str, Value],
        indices: Mapping[str, int],
    ) -> None:  # fmt: skip
        program = self.programs[step.module]
        arguments: list[Any] = [None] * len(program.ports)
        for at, (_, reference) in zip(scheduled.inputs, step.inputs, strict=True):
            arguments[at] = value_of(reference, scope, indices)
        # Arrays of a run are our own or read-only, or borrowed as the caller asked.
        submitted = self.device.submit(program, arguments, True)
        results = submitted if isinstance(submitted, tuple) else (submitted,)
        for at, (_, name) in zip(scheduled.outputs, step.outputs, strict=True):
            scope[name] = results[at]

    def forget(self) -> None:
        """Release the loaded programs; the pipeline cannot be called afterwards."""
        self.programs = {}
        self._rounds.clear()
        self._joins.forget()


def _taken_by_several(steps: Sequence[PipelineStep]) -> frozenset[str]:
    """Return the names that several runs read, and none reads an element of."""
    runs: Counter[str] = Counter()
    sliced = set()
    for times, reference in _references(steps, 1):
        runs[reference.name] += times
        if reference.is_element:
            sliced.add(reference.name)
    return frozenset(name for name, count in runs.items() if count > 1) - sliced


def _references(steps: Sequence[PipelineStep], times: int) -> Iterator[tuple[int, Reference]]:
    """Yield the references of all runs, and how often each is read."""
    for step in steps:
        if isinstance(step, RepeatStep):
            yield from _references(step.steps, times * step.times)
        else:
            yield from ((times, reference) for _, reference in step.inputs)
