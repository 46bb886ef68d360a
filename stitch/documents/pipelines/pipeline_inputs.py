"""Inputs of a pipeline file: read, checked, arranged; a list of arrays is an input for each array.

Comes in: a `PipelineFile`, its files of arrays, arguments of a call. Goes out: `PipelineInput`s and
what is known of each name; a value for each input. Must not know: programs, devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from stitch.argument_kinds import arranged
from stitch.documents.pipelines.checked_values import CheckedValue
from stitch.documents.pipelines.pipeline_form import InputEntry, PipelineFile
from stitch.errors import FormatError, Problem, StitchError, UsageError
from stitch.forms import read_array
from stitch.program import Array, DataType, ValueType
from stitch.report import counted
from stitch.runtime import capture


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
