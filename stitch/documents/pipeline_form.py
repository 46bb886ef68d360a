"""Pipeline files: separately compiled binaries and the data flow between them.

Reads and checks the file alone; `fitting` checks it against the binaries, `yaml_pipeline` runs it.
The keys::

    name: rollout                         # default: the file's name without suffix
    device: wormhole_n150                 # or machine.yaml, system.ttsys:0; default: the machine
                                          # of the first module
    modules:                              # paths are relative to this file
      encoder: encoder.ttb                # with `devices`: {file: encoder.ttb, device: left}
      cell: {file: cell.ttb, program: main}
    inputs:
      x: {shape: [32, 64], type: float32}         # an argument of each call
      h0: {file: state.npz, name: h0}             # an optional argument
      xs: {shape: [10, 32, 64], type: float32}
    steps:                                # in run order
      - {run: encoder, inputs: {x: x}, outputs: {y: h}}
      - repeat: 10
        index: i                          # 0 to 9 in the steps below; default: i
        carry: {h: h_next}                # after each round h becomes h_next
        collect: {hs: h_next}             # h_next of all rounds, of shape [10, 32, 64]
        steps:
          - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {y: h_next}}
      - run: cell
        inputs: {x: "xs[-1]", h: h}
        outputs: {y: last}
    outputs: {result: last}               # or a list of names
    max_runs: 2000000000                  # limit of program runs of a pass; default: 10^9

`inputs` of a step binds every input slot of the program, `outputs` the results that are used; both
may be lists, by position. A name is defined once; names of a repeat are local to it, except carried
and collected ones. `xs[i]`, `xs[i+1]`, `xs[i-1]`, `xs[3]`, `xs[-1]` read one element of the first
dimension; `xs[-1-i]` goes from the last to the first. Bounds and shapes are checked before anything
runs. `collect` stacks the values of all rounds along a new first axis.

Instead of `device`, `devices` names several: the path of a machine specification, or a number of
equal devices. Then a module may name its `device`; without one it is placed automatically.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stitch.forms import (
    ByKey,
    ElementType,
    Entries,
    Field,
    FieldType,
    JsonType,
    ListOf,
    Name,
    NameOrPath,
    Node,
    Number,
    Pairs,
    ParseContext,
    RelativePath,
    Schema,
    SchemaWriter,
    Shape,
    SourceLocation,
    Whole,
    Word,
    form_text,
    is_word,
    json_schema,
    read_yaml,
)
from stitch.program import DataType

# References: a value, or one element of its first dimension.

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_FORWARD = rf"({_WORD})\s*(?:([+-])\s*(\d+))?"
_BACKWARD = rf"(-?\d+)\s*-\s*({_WORD})"
_REFERENCE = re.compile(rf"({_WORD})(?:\[\s*(?:(-?\d+)|{_FORWARD}|{_BACKWARD})\s*\])?")
_MAX_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Reference:
    """A value by name, or one element of its first dimension.

    Args:
        name: The value.
        is_element: Whether it is an element (`xs[0]`, not `xs`).
        index: The variable of a repeat, if there is one.
        offset: Added to the variable; negative without one: from the end.
        is_backward: Subtract the variable: `xs[-1-i]`, `xs[9-i]`.
    """

    name: str
    is_element: bool = False
    index: str | None = None
    offset: int = 0
    is_backward: bool = False

    def text(self) -> str:
        """Return it as in the file."""
        if not self.is_element:
            return self.name
        if self.index is None:
            return f"{self.name}[{self.offset}]"
        if self.is_backward:
            return f"{self.name}[{self.offset}-{self.index}]"
        sign = f"{self.offset:+d}" if self.offset else ""
        return f"{self.name}[{self.index}{sign}]"

    @property
    def is_from_end(self) -> bool:
        """Return whether it counts from the end."""
        return self.offset < 0 and (self.index is None or self.is_backward)

    def at(self, indices: Mapping[str, int]) -> int:
        """Return the element's index; negative from the end.

        >>> reference = parse_reference("xs[-1-i]")
        >>> [reference.at({"i": i}) for i in range(3)]
        [-1, -2, -3]
        """
        start = 0 if self.index is None else indices[self.index]
        return self.offset - start if self.is_backward else self.offset + start


def parse_reference(text: str) -> Reference | None:
    """Parse `h`, `xs[i]`, `xs[i-1]`, `xs[-1-i]` or `xs[3]`; return None for other text.

    >>> parse_reference("xs[i+1]").text(), parse_reference("xs[ -1 - i ]").text()
    ('xs[i+1]', 'xs[-1-i]')
    """
    match = _REFERENCE.fullmatch(text.strip())
    if match is None:
        return None
    name, number, index, sign, offset, start, subtracted = match.groups()
    if max(len(digits or "") for digits in (number, offset, start)) > _MAX_DIGITS:
        return None
    if number is not None:
        return Reference(name, True, None, int(number))
    if subtracted is not None:
        return Reference(name, True, subtracted, int(start), is_backward=True)
    if index is None:
        return Reference(name)
    return Reference(name, True, index, int(f"{sign}{offset}") if sign else 0)


class ReferenceKind(FieldType[Reference]):
    """The field type of a `Reference`."""

    wanted = "a value: x, xs[i], xs[i-1], xs[-1-i]"

    def value(self, node: Node, place: SourceLocation) -> Reference | None:
        return parse_reference(node.raw) if is_word(node) else None


# The file.

MAX_REPEAT = 1_000_000
#: Default limit of program runs of a pass.
MAX_RUNS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A binary, the name of its program (None: the first), and of its device if it has one."""

    name: str
    file: Path
    program: str | None
    device: str | None
    line: int


@dataclass(frozen=True, slots=True)
class InputEntry:
    """An input of the pipeline: its type, or the array of a file, or both."""

    name: str
    shape: tuple[int, ...] | None
    data_type: DataType | None
    file: Path | None
    array: str | None
    line: int


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a module: the values of its inputs, the names of its outputs."""

    module: str
    inputs: tuple[tuple[str | None, Reference], ...]
    outputs: tuple[tuple[str | None, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """Run steps several times.

    `carry` pairs a name with its value for the next round, `collect` a name with the value that is
    stacked over all rounds.
    """

    times: int
    index: str
    carry: tuple[tuple[str, str], ...]
    steps: tuple[PipelineStep, ...]
    line: int
    collect: tuple[tuple[str, str], ...] = ()


PipelineStep: TypeAlias = RunStep | RepeatStep


def runs_of(steps: Sequence[PipelineStep]) -> int:
    """Return the number of program runs of one pass over the steps.

    >>> run = RunStep("m", (), (), 3)
    >>> runs_of([run, RepeatStep(10, "i", (), (run, run), 4)])
    21
    """
    return sum(
        1 if isinstance(step, RunStep) else step.times * runs_of(step.steps) for step in steps
    )


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """A pipeline file; `outputs` has the name of a result, its value, and the line."""

    file: str
    folder: Path
    name: str
    device: str | None
    #: The path of a machine specification, or a number of equal devices.
    devices: str | int | None
    modules: tuple[ModuleEntry, ...]
    inputs: tuple[InputEntry, ...]
    steps: tuple[PipelineStep, ...]
    outputs: tuple[tuple[str, str, int], ...]
    max_runs: float = MAX_RUNS

    @property
    def runs(self) -> int:
        """Return the number of program runs of one pass."""
        return runs_of(self.steps)


def load_pipeline(path: str | Path) -> PipelineFile:
    """Read the pipeline of a YAML file; raise `FormatError` that lists every defect."""
    path = Path(path)
    return pipeline_from_text(form_text(path, "pipeline", str(path)), path.parent, path.name)


def pipeline_from_text(text: str, folder: Path, file: str = "pipeline.yaml") -> PipelineFile:
    """Parse a pipeline in YAML with paths relative to `folder`; raise `FormatError`."""
    root, log = read_yaml(text, file)
    pipeline = _PIPELINE.read(root, ParseContext(log, folder).root)
    log.raise_any("pipeline")
    assert pipeline is not None, "the log has a defect otherwise"
    return pipeline


class Devices(FieldType[str | int]):
    """The field type of `devices`."""

    wanted = "a machine specification, such as two.yaml, or a number of equal devices"

    def value(self, node: Node, place: SourceLocation) -> str | int | None:
        if isinstance(node.data, int) and not isinstance(node.data, bool):
            return node.data if node.data > 0 else None
        is_path = is_word(node) and node.raw.endswith((".yaml", ".yml")) and "\0" not in node.raw
        return str(place.reading.folder / node.raw) if is_path else None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        path = {"type": "string", "pattern": r"\.ya?ml$"}
        return {"anyOf": [{"type": "integer", "minimum": 1}, path]}


_BINDINGS = "a mapping from slots to values, or a list by position"
_NAMES = "a mapping from names to values"
_RESULTS = "a mapping or a list of names, at least one"
_MODULE = Schema(
    ModuleEntry,
    Field("file", RelativePath("the path of a .ttb file"), needed=True),
    Field("program", Word()),
    Field("device", Word("the name of a device of the machine specification")),
    word="file",
    wanted="a path, or a mapping",
)


_INPUT = Schema(
    InputEntry,
    Field("shape", Shape(), needed_without="file"),
    Field("type", ElementType(), into="data_type", needed_without="file"),
    Field("file", RelativePath()),
    Field("name", Word(), into="array", only_with="file"),
)
_RUN: Schema[PipelineStep] = Schema(
    RunStep,
    Field("run", Word("the name of a module (or `repeat` with steps)"), into="module", needed=True),
    Field("inputs", Pairs(ReferenceKind(), _BINDINGS), default=()),
    Field("outputs", Pairs(Name(), _BINDINGS), default=()),
)
_STEPS: FieldType[tuple[PipelineStep, ...]] = ListOf(
    ByKey(
        "a mapping such as {run: encoder, inputs: {x: x}, outputs: {y: h}}",
        lambda: {"run": _RUN, "repeat": _REPEAT},
    ),
    "a list of steps",
    least=1,
)
_REPEAT: Schema[PipelineStep] = Schema(
    RepeatStep,
    Field("repeat", Whole(1, MAX_REPEAT), into="times", needed=True),
    Field("index", Name(), default="i"),
    Field("carry", Pairs(Name(), _NAMES, by_position=False), default=()),
    Field("collect", Pairs(Name(), _NAMES, by_position=False), default=()),
    Field("steps", _STEPS, needed=True, default=()),
)


def _check(pipeline: PipelineFile, place: SourceLocation) -> None:
    """Note devices that contradict, outputs of one name, and more runs than `max_runs`."""
    log = place.reading.log
    if pipeline.devices is None:
        for module in pipeline.modules:
            if module.device is not None:
                log.note("bad_device", module.line, f"module {module.name!r} names its device "
                         f"{module.device!r}, and the file has no `devices`")  # fmt: skip
    elif pipeline.device is not None:
        place.at("devices").note("bad_device", "there is `device` as well: leave one of them out")
    times = Counter(name for name, _, _ in pipeline.outputs)
    for name, _, line in pipeline.outputs:
        if times[name] > 1:
            log.note("duplicate_name", line, f"two outputs are called {name!r}")
    if pipeline.runs > pipeline.max_runs:
        longest = max(pipeline.steps, key=lambda step: runs_of([step]))
        log.note("too_many_runs", longest.line, f"one pass runs {pipeline.runs:,} programs (nested "
                 f"repeats multiply), at most {int(pipeline.max_runs):,} are allowed: reduce them, "
                 "or set `max_runs`")  # fmt: skip


_PIPELINE = Schema(
    PipelineFile,
    Field("name", Word(), default=ParseContext.stem),
    Field("device", NameOrPath("the name of a machine, or the path of its .yaml or .ttsys")),
    Field("devices", Devices()),
    Field("modules", Entries(_MODULE), needed=True, default=()),
    Field("inputs", Entries(_INPUT), default=()),
    Field("steps", _STEPS, needed=True, default=()),
    Field("outputs", Pairs(Name(), _RESULTS, 1, is_named=True, has_lines=True), needed=True,
          default=()),
    Field("max_runs", Number(least=1, wanted="a number of program runs, at least 1"),
          default=MAX_RUNS),
    check=_check,
)  # fmt: skip
PIPELINE_KEYS = _PIPELINE.keys


def pipeline_json_schema() -> JsonType:
    """Return the JSON Schema of pipeline files."""
    return json_schema(_PIPELINE, "A pipeline for Stitch")


# Names that steps define and read.


def defines(step: PipelineStep) -> frozenset[str]:
    """Return the names that a step defines for later steps."""
    if isinstance(step, RunStep):
        return frozenset(name for _, name in step.outputs)
    return frozenset(name for name, _ in step.collect)
