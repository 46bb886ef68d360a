"""Pipelines in YAML: separately compiled binaries, and how data flows through them; checked.

Comes in: the path of a YAML file. Goes out: a `PipelineFile`, or one `FormatError` that lists every
defect with file and line, what is allowed, and the closest match. Nothing runs here;
`yaml_pipeline` checks shapes and types against the binaries, and runs it. The form::

    name: rollout                         # the file's name without suffix, if absent
    device: wormhole_n150                 # or machine.yaml; else the first module's machine
    modules:                              # paths are relative to this file
      encoder: encoder.ttb
      cell: {file: cell.ttb, program: main}
    inputs:
      x: {shape: [32, 64], type: float32}         # to be given
      h0: {file: state.npz, name: h0}             # given, unless replaced
      xs: {shape: [10, 32, 64], type: float32}
    steps:                                # in the order in which they run
      - {run: encoder, inputs: {x: x}, outputs: {y: h}}
      - repeat: 10
        index: i                          # 0 to 9 in the steps below; `i` if absent
        carry: {h: h_next}                # after each round h becomes h_next
        steps:
          - {run: cell, inputs: {x: "xs[i]", h: h}, outputs: {y: h_next}}
      - run: cell
        inputs: {x: "xs[-1]", h: h}
        outputs: {y: last}
    outputs: {result: last}               # or a list of names
    max_runs: 2000000000                  # programs that a pass may run; 10^9 if absent

`inputs` of a step names every input slot of the program, `outputs` those results that are wanted;
both may be lists, by position. A result that nobody reads is warned of, unless its name begins
with `_`. A name is defined once; names that a repeat defines are gone after
it, but for the carried ones. `xs[i]`, `xs[i+1]`, `xs[i-1]`, `xs[3]`, `xs[-1]` take one element of
the first dimension; that they stay within it is checked before anything runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stitch.forms import (
    ByKey,
    ElementType,
    Entries,
    Form,
    Kind,
    ListOf,
    Name,
    NameOrPath,
    Node,
    Number,
    Pairs,
    Place,
    Reading,
    RelativePath,
    Row,
    Shape,
    Whole,
    Word,
    form_text,
    is_word,
    read_yaml,
)
from stitch.program import DataType

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_REFERENCE = re.compile(rf"({_WORD})(?:\[\s*(?:(-?\d+)|({_WORD})\s*(?:([+-])\s*(\d+))?)\s*\])?")
MAX_REPEAT = 1_000_000
#: Programs that one pass may run unless the file allows more.
MAX_RUNS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ModuleEntry:
    """A binary and the program of it that is meant (None: its first)."""

    name: str
    file: Path
    program: str | None
    line: int


@dataclass(frozen=True, slots=True)
class InputEntry:
    """An input of the pipeline: described, or taken from a file, or both."""

    name: str
    shape: tuple[int, ...] | None
    data_type: DataType | None
    file: Path | None
    array: str | None
    line: int


@dataclass(frozen=True, slots=True)
class Reference:
    """A value by name, or one element of its first dimension.

    `offset` counts from the variable `index` (None: from 0, or from the end where negative);
    `is_element` tells `xs[0]` from `xs`.
    """

    name: str
    is_element: bool = False
    index: str | None = None
    offset: int = 0

    def text(self) -> str:
        """As it is written."""
        if not self.is_element:
            return self.name
        sign = f"{self.offset:+d}" if self.offset else ""
        return f"{self.name}[{self.index}{sign}]" if self.index else f"{self.name}[{self.offset}]"


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a module: where its inputs come from, what its outputs are called."""

    module: str
    inputs: tuple[tuple[str | None, Reference], ...]
    outputs: tuple[tuple[str | None, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """Run steps several times; `carry` pairs a name with what it becomes after each round."""

    times: int
    index: str
    carry: tuple[tuple[str, str], ...]
    steps: tuple[PipelineStep, ...]
    line: int


PipelineStep: TypeAlias = RunStep | RepeatStep


def runs_of(steps: Sequence[PipelineStep]) -> int:
    """How many programs run in one pass over the steps.

    >>> run = RunStep("m", (), (), 3)
    >>> runs_of([run, RepeatStep(10, "i", (), (run, run), 4)])
    21
    """
    return sum(
        1 if isinstance(step, RunStep) else step.times * runs_of(step.steps) for step in steps
    )


@dataclass(frozen=True, slots=True)
class PipelineFile:
    """A pipeline as it is written; `outputs` pairs a result's name with the value's."""

    file: str
    folder: Path
    name: str
    device: str | None
    modules: tuple[ModuleEntry, ...]
    inputs: tuple[InputEntry, ...]
    steps: tuple[PipelineStep, ...]
    outputs: tuple[tuple[str, str, int], ...]
    max_runs: float = MAX_RUNS

    @property
    def runs(self) -> int:
        """How many programs run in one pass."""
        return runs_of(self.steps)


def load_pipeline(path: str | Path) -> PipelineFile:
    """The pipeline of a YAML file; raises `FormatError` listing every defect of its form."""
    place = Path(path)
    return pipeline_from_text(form_text(place, "pipeline", str(place)), place.parent, place.name)


def pipeline_from_text(text: str, folder: Path, file: str = "pipeline.yaml") -> PipelineFile:
    """The pipeline of a YAML text whose files lie in `folder`; raises `FormatError`."""
    root, log = read_yaml(text, file)
    pipeline = _PIPELINE.read(root, Reading(log, folder).root)
    log.raise_any("pipeline")
    assert pipeline is not None, "what is wrong has been noted"
    return pipeline


def parse_reference(text: str) -> Reference | None:
    """`h`, `xs[i]`, `xs[i-1]`, `xs[3]`; None for anything else.

    >>> parse_reference("xs[i+1]").text()
    'xs[i+1]'
    """
    match = _REFERENCE.fullmatch(text.strip())
    if match is None:
        return None
    name, number, index, sign, offset = match.groups()
    if number is not None:
        return Reference(name, True, None, int(number)) if len(number) < 12 else None
    if index is None:
        return Reference(name)
    if offset is not None and len(offset) > 12:
        return None
    return Reference(name, True, index, int(f"{sign}{offset}") if sign else 0)


class _Value(Kind[Reference]):
    """What a step reads."""

    wanted = "a value: x, xs[i], xs[i-1]"

    def value(self, node: Node, place: Place) -> Reference | None:
        reference = parse_reference(node.raw) if is_word(node) else None
        if reference is None:
            detail = f"{node.raw[:60]!r} is no value: x, xs[i], xs[i-1]"
            place.reading.log.note("bad_value", node.line, detail)
        return reference


_BINDINGS = "a mapping from slots to values, or a list by position"
_MODULE = Form(
    "module",
    ModuleEntry,
    Row("file", RelativePath("the path of a .ttb file"), needed=True),
    Row("program", Word()),
    word="file",
    wanted="a path, or a mapping",
)
_INPUT = Form(
    "input",
    InputEntry,
    Row("shape", Shape(), needed_without="file"),
    Row("type", ElementType(), into="data_type", needed_without="file"),
    Row("file", RelativePath()),
    Row("name", Word(), into="array", only_with="file"),
)
_RUN: Form[PipelineStep] = Form(
    "a step",
    RunStep,
    Row("run", Word("the name of a module (or `repeat` with steps)"), into="module", needed=True),
    Row("inputs", Pairs(_Value(), _BINDINGS), default=()),
    Row("outputs", Pairs(Name(), _BINDINGS), default=()),
)
_STEPS: Kind[tuple[PipelineStep, ...]] = ListOf(
    ByKey(
        "a mapping such as {run: encoder, inputs: {x: x}, outputs: {y: h}}",
        lambda: {"run": _RUN, "repeat": _REPEAT},
    ),
    "a list of steps",
    least=1,
)
_REPEAT: Form[PipelineStep] = Form(
    "a step",
    RepeatStep,
    Row("repeat", Whole(1, MAX_REPEAT), into="times", needed=True),
    Row("index", Name(), default="i"),
    Row("carry", Pairs(Name(), "a mapping from values to names", by_position=False), default=()),
    Row("steps", _STEPS, needed=True, default=()),
)


def _check(pipeline: PipelineFile, place: Place) -> None:
    """Notes outputs of one name, and a product of repeats that nobody can have meant."""
    log = place.reading.log
    times = Counter(name for name, _, _ in pipeline.outputs)
    for name, _, line in pipeline.outputs:
        if times[name] > 1:
            log.note("duplicate_name", line, f"two outputs are called {name!r}")
    if pipeline.runs > pipeline.max_runs:
        detail = (
            f"one pass runs {pipeline.runs:,} programs, and at most {int(pipeline.max_runs):,} are "
            "allowed: repeats multiply; say `max_runs:` if so many are meant"
        )
        longest = max(pipeline.steps, key=lambda step: runs_of([step]))
        log.note("too_many_runs", longest.line, detail)


_PIPELINE = Form(
    "a pipeline",
    PipelineFile,
    Row("name", Word(), default=Reading.stem),
    Row("device", NameOrPath("the name of a machine, or the path of its .yaml")),
    Row("modules", Entries(_MODULE), needed=True, default=()),
    Row("inputs", Entries(_INPUT), default=()),
    Row("steps", _STEPS, needed=True, default=()),
    Row(
        "outputs",
        Pairs(
            Name(), "a mapping or a list of names, at least one", 1, is_named=True, has_lines=True
        ),
        needed=True,
        default=(),
    ),
    Row(
        "max_runs",
        Number(least=1, wanted="a number from 1: the programs that one pass may run"),
        default=MAX_RUNS,
    ),
    check=_check,
)
PIPELINE_KEYS = _PIPELINE.keys
