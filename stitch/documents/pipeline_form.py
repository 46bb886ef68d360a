"""Pipeline files: separately compiled binaries, and how data flows through them.

Reads and checks the file alone; `yaml_pipeline` checks shapes and types against the binaries, and
runs it. The keys::

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

`inputs` of a step names every input slot of the program, `outputs` the results that are used; both
may be lists, by position. An unused result gives a warning, unless its name begins with `_`. A name
is defined once; names defined in a repeat end with it, except carried and collected ones. `xs[i]`,
`xs[i+1]`, `xs[i-1]`, `xs[3]`, `xs[-1]` take one element of the first dimension, or one array of a
list; `xs[-1-i]` goes from the last to the first. Bounds and shapes are checked before anything
runs. `collect` gives the values of all rounds, along a new first axis.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stitch.errors import Problem
from stitch.forms import (
    ByKey,
    ElementType,
    Entries,
    Field,
    FieldType,
    ListOf,
    Name,
    NameOrPath,
    Node,
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
    is_word,
    read_yaml,
)
from stitch.program import DataType

# References: a value, or one element of its first dimension.

_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
_FORWARD = rf"({_WORD})\s*(?:([+-])\s*(\d+))?"
_BACKWARD = rf"(-?\d+)\s*-\s*({_WORD})"
_REFERENCE = re.compile(rf"({_WORD})(?:\[\s*(?:(-?\d+)|{_FORWARD}|{_BACKWARD})\s*\])?")
#: Digits of a number that can be meant.
_MOST_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Reference:
    """A value by name, or one element of its first dimension.

    `offset` counts from the variable `index` (None: from 0, or from the end where negative);
    `is_element` tells `xs[0]` from `xs`. One that `is_backward` takes the variable off: `xs[-1-i]`
    counts from the end, `xs[9-i]` from the start.
    """

    name: str
    is_element: bool = False
    index: str | None = None
    offset: int = 0
    is_backward: bool = False

    def text(self) -> str:
        """As it is written."""
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
        """Whether it counts from the end."""
        return self.offset < 0 and (self.index is None or self.is_backward)

    def at(self, indices: Mapping[str, int]) -> int:
        """The element's number; negative where it counts from the end.

        >>> reference = parse_reference("xs[-1-i]")
        >>> [reference.at({"i": i}) for i in range(3)]
        [-1, -2, -3]
        """
        start = 0 if self.index is None else indices[self.index]
        return self.offset - start if self.is_backward else self.offset + start


def parse_reference(text: str) -> Reference | None:
    """`h`, `xs[i]`, `xs[i-1]`, `xs[-1-i]`, `xs[3]`; None for anything else.

    >>> parse_reference("xs[i+1]").text(), parse_reference("xs[ -1 - i ]").text()
    ('xs[i+1]', 'xs[-1-i]')
    """
    match = _REFERENCE.fullmatch(text.strip())
    if match is None:
        return None
    name, number, index, sign, offset, start, taken = match.groups()
    if max(len(digits or "") for digits in (number, offset, start)) > _MOST_DIGITS:
        return None
    if number is not None:
        return Reference(name, True, None, int(number))
    if taken is not None:
        return Reference(name, True, taken, int(start), is_backward=True)
    if index is None:
        return Reference(name)
    return Reference(name, True, index, int(f"{sign}{offset}") if sign else 0)


class ReferenceKind(FieldType[Reference]):
    """What a step reads."""

    wanted = "a value: x, xs[i], xs[i-1], xs[-1-i]"

    def value(self, node: Node, place: SourceLocation) -> Reference | None:
        reference = parse_reference(node.raw) if is_word(node) else None
        if reference is None:
            place.reading.log.note(
                "bad_value", node.line, f"{node.raw[:60]!r} is no value: x, xs[i], xs[i-1], "
                "xs[-1-i]"
            )  # fmt: skip
        return reference


# The file.

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


# Names that steps define and read.


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
    >>> from stitch.documents.pipeline_form import PipelineFile, RunStep
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
