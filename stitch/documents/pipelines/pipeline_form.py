"""Pipelines in YAML: separately compiled binaries, and how data flows through them; checked.

Nothing runs here; `yaml_pipeline` checks shapes and types against the binaries, and runs it. The
form::

    name: rollout                         # the file's name without suffix, if absent
    device: wormhole_n150                 # or machine.yaml, system.ttsys:0; else the first module's
    modules:                              # paths are relative to this file
      encoder: encoder.ttb
      cell: {file: cell.ttb, program: main}
    inputs:
      x: {shape: [32, 64], type: float32}         # to be given
      h0: {file: state.npz, name: h0}             # given, unless replaced
      xs: {shape: [10, 32, 64], type: float32}
      # lists of arrays, of which only the first axis may differ: `name` may stand beside `files`
      ss: {shape: [64], lengths: [7, 9], type: float32}
      ts: {files: [a.npy, b.npy]}
      us: {file: state.npz, names: [u0, u1]}
    steps:                                # in the order in which they run
      - {run: encoder, inputs: {x: x}, outputs: {y: h}}
      - repeat: 10
        index: i                          # 0 to 9 in the steps below; `i` if absent
        carry: {h: h_next}                # after each round h becomes h_next
        collect: {hs: h_next}             # h_next of all rounds, of shape [10, 32, 64]
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
it, but for the carried and the collected ones. `xs[i]`, `xs[i+1]`, `xs[i-1]`, `xs[3]`, `xs[-1]`
take one element of the first dimension, or one array of a list; `xs[-1-i]` goes from the last to
the first. That they stay within it, and that each has the shape that its slot takes, is checked
before anything runs. `collect` gives what all rounds made, along a new first axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stitch.documents.pipelines.references import Reference, ReferenceKind
from stitch.forms import (
    ByKey,
    ElementType,
    Entries,
    Field,
    FieldType,
    ListOf,
    Name,
    NameOrPath,
    Number,
    Pairs,
    ParseContext,
    RelativePath,
    Schema,
    Shape,
    SourceLocation,
    Whole,
    Word,
    form_text,
    read_yaml,
)
from stitch.program import DataType

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
    """An input of the pipeline: described, or taken from a file, or both.

    A list of arrays has several `files`, several `arrays` of one file, or `lengths`; with those,
    `shape` is what follows the first axis.
    """

    name: str
    shape: tuple[int, ...] | None
    data_type: DataType | None
    file: Path | None
    array: str | None
    line: int
    files: tuple[Path, ...] = ()
    arrays: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def count(self) -> int | None:
        """How many arrays it is a list of; None: it is one array."""
        return max(len(self.files), len(self.arrays), len(self.lengths)) or None

    def element_shape(self, number: int) -> tuple[int, ...] | None:
        """The shape of an element as it is written, for 0 of the only array; None: its file's."""
        if not self.lengths or self.shape is None:
            return self.shape
        return (self.lengths[number], *self.shape)

    def source(self, number: int) -> tuple[Path, str | None] | None:
        """The file of an element, and the name of the array in it; None: it is to be given."""
        file = self.files[number] if self.files else self.file
        return None if file is None else (file, self.arrays[number] if self.arrays else self.array)


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a module: where its inputs come from, what its outputs are called."""

    module: str
    inputs: tuple[tuple[str | None, Reference], ...]
    outputs: tuple[tuple[str | None, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class RepeatStep:
    """Run steps several times; `carry` pairs a name with what it becomes after each round,
    `collect` one with the value of which it is all that the rounds made, in their order."""

    times: int
    index: str
    carry: tuple[tuple[str, str], ...]
    steps: tuple[PipelineStep, ...]
    line: int
    collect: tuple[tuple[str, str], ...] = ()


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
    pipeline = _PIPELINE.read(root, ParseContext(log, folder).root)
    log.raise_any("pipeline")
    assert pipeline is not None, "what is wrong has been noted"
    return pipeline


_BINDINGS = "a mapping from slots to values, or a list by position"
_MODULE = Schema(
    "module",
    ModuleEntry,
    Field("file", RelativePath("the path of a .ttb file"), needed=True),
    Field("program", Word()),
    word="file",
    wanted="a path, or a mapping",
)


def _check_input(entry: InputEntry, place: SourceLocation) -> None:
    """Notes keys of a list beside those of one array, and lists that differ in length."""
    for one, several in (("file", "files"), ("name", "names")):
        if {one, several} <= place.nodes.keys():
            place.note("misplaced_key", f"`{one}` is for one array, `{several}` for a list of them")
    counts = {"files": len(entry.files), "names": len(entry.arrays), "lengths": len(entry.lengths)}
    said = {key: count for key, count in counts.items() if count}
    if len(set(said.values())) > 1:
        several = " and ".join(f"{count} {key}" for key, count in said.items())
        place.note("wrong_count", f"a list has one of each for every array, not {several}")


_INPUT = Schema(
    "input",
    InputEntry,
    Field("shape", Shape(), needed_without="file files"),
    Field("type", ElementType(), into="data_type", needed_without="file files"),
    Field("file", RelativePath()),
    Field("name", Word(), into="array", only_with="file files"),
    Field("files", ListOf(RelativePath(), "a list of paths", least=1), default=()),
    Field("names", ListOf(Word(), "a list of names", 1), (), into="arrays", only_with="file files"),
    Field("lengths", ListOf(Whole(), "a list of lengths", 1), default=(), only_with="shape"),
    check=_check_input,
)
_RUN: Schema[PipelineStep] = Schema(
    "a step",
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
    "a step",
    RepeatStep,
    Field("repeat", Whole(1, MAX_REPEAT), into="times", needed=True),
    Field("index", Name(), default="i"),
    Field("carry", Pairs(Name(), "a mapping from values to names", by_position=False), default=()),
    Field(
        "collect", Pairs(Name(), "a mapping from names to values", by_position=False), default=()
    ),
    Field("steps", _STEPS, needed=True, default=()),
)


def _check(pipeline: PipelineFile, place: SourceLocation) -> None:
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


_PIPELINE = Schema(
    "a pipeline",
    PipelineFile,
    Field("name", Word(), default=ParseContext.stem),
    Field("device", NameOrPath("the name of a machine, or the path of its .yaml or .ttsys")),
    Field("modules", Entries(_MODULE), needed=True, default=()),
    Field("inputs", Entries(_INPUT), default=()),
    Field("steps", _STEPS, needed=True, default=()),
    Field(
        "outputs",
        Pairs(
            Name(), "a mapping or a list of names, at least one", 1, is_named=True, has_lines=True
        ),
        needed=True,
        default=(),
    ),
    Field(
        "max_runs",
        Number(least=1, wanted="a number from 1: the programs that one pass may run"),
        default=MAX_RUNS,
    ),
    check=_check,
)
PIPELINE_KEYS = _PIPELINE.keys
