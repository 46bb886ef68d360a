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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stitch.errors import FormatError
from stitch.files import read_text
from stitch.forms import Fields, Node, ProblemLog, read_yaml
from stitch.program import DataType

PIPELINE_KEYS = ("name", "device", "modules", "inputs", "steps", "outputs", "max_runs")
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
NAME = re.compile(_WORD)
_REFERENCE = re.compile(rf"({_WORD})(?:\[\s*(?:(-?\d+)|({_WORD})\s*(?:([+-])\s*(\d+))?)\s*\])?")
MAX_REPEAT = 1_000_000
#: Programs that one pass may run unless the file allows more.
MAX_RUNS = 1_000_000_000
_STEP = "{run: encoder, inputs: {x: x}, outputs: {y: h}}"


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


#: Slots of a step: (name, or None for the next position; what is read or defined; line).
Binding: TypeAlias = tuple[str | None, str, int]


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

    @property
    def runs(self) -> int:
        """How many programs run in one pass."""
        return runs_of(self.steps)


def load_pipeline(path: str | Path) -> PipelineFile:
    """The pipeline of a YAML file; raises `FormatError` listing every defect of its form."""
    place = Path(path)
    try:
        text = read_text(place)
    except OSError as error:
        raise FormatError(
            f"cannot read the pipeline: {error.strerror}", where=str(place)
        ) from error
    except UnicodeDecodeError as error:
        raise FormatError(f"not YAML: it is no UTF-8 text ({error})", where=place.name) from error
    return pipeline_from_text(text, place.parent, place.name)


def pipeline_from_text(text: str, folder: Path, file: str = "pipeline.yaml") -> PipelineFile:
    """The pipeline of a YAML text whose files lie in `folder`; raises `FormatError`."""
    root, log = read_yaml(text, file)
    found = _Reader(root, folder, log).pipeline()
    log.raise_any("pipeline")
    return found


def parse_reference(text: str) -> Reference | None:
    """`h`, `xs[i]`, `xs[i-1]`, `xs[3]`; None for anything else.

    >>> parse_reference("xs[i+1]").text()
    'xs[i+1]'
    """
    found = _REFERENCE.fullmatch(text.strip())
    if found is None:
        return None
    name, number, index, sign, offset = found.groups()
    if number is not None:
        return Reference(name, True, None, int(number)) if len(number) < 12 else None
    if index is None:
        return Reference(name)
    if offset is not None and len(offset) > 12:
        return None
    return Reference(name, True, index, int(f"{sign}{offset}") if sign else 0)


class _Reader:
    """Reads one document."""

    def __init__(self, root: Node, folder: Path, log: ProblemLog) -> None:
        self.log = log
        self.folder = folder
        self.top = Fields(root, "a pipeline", log)
        self.top.only(PIPELINE_KEYS)

    def pipeline(self) -> PipelineFile:
        top, log = self.top, self.log
        for key in ("modules", "steps", "outputs"):
            if top.get(key) is None:
                top.wrong(key, {"steps": "a list of steps"}.get(key, "a mapping"))
        modules = [self._module(name, node) for name, node in self._entries("modules")]
        inputs = [self._input(name, node) for name, node in self._entries("inputs")]
        found = PipelineFile(
            log.file, self.folder, top.text("name") or Path(log.file).stem, self._device(),
            tuple(m for m in modules if m is not None), tuple(inputs),
            self._steps(top, "steps"), self._outputs(),
        )  # fmt: skip
        self._check_runs(found)
        return found

    def _check_runs(self, pipeline: PipelineFile) -> None:
        """Notes a product of repeats that nobody can have meant."""
        most = self.top.number("max_runs")
        if most is not None and not 1 <= most < float("inf"):
            self.top.wrong("max_runs", "a number from 1: the programs that one pass may run")
        allowed = MAX_RUNS if most is None else most
        if pipeline.runs > allowed:
            detail = (
                f"one pass runs {pipeline.runs:,} programs, and at most {int(allowed):,} are "
                "allowed: repeats multiply; say `max_runs:` if so many are meant"
            )
            longest = max(pipeline.steps, key=lambda step: runs_of([step]))
            self.log.note("too_many_runs", longest.line, detail)

    def _device(self) -> str | None:
        """A machine's name as it is; a path relative to the file, like all of its paths."""
        word = self.top.text("device")
        if word is not None and word.endswith((".yaml", ".yml")):
            return str(self.folder / word)
        return word

    def _entries(self, key: str) -> list[tuple[str, Node]]:
        node = self.top.get(key)
        if node is None:
            return []
        entries = list(Fields(node, key, self.log).items())
        for name, item in entries:
            self._check_name(name, item.line)
        return entries

    def _check_name(self, name: str, line: int) -> None:
        if NAME.fullmatch(name) is None:
            self.log.note("bad_name", line, f"{name!r} is no name: letters, digits and _ only")

    def _module(self, name: str, node: Node) -> ModuleEntry | None:
        if not isinstance(node.data, Mapping):
            if isinstance(node.data, tuple) or not node.raw:
                self.log.note("bad_value", node.line, f"module {name!r} is a path, or a mapping")
                return None
            return ModuleEntry(name, self.folder / node.raw, None, node.line)
        fields = Fields(node, f"module {name!r}", self.log)
        fields.only(("file", "program"))
        file = fields.text("file")
        if file is None:
            fields.wrong("file", "the path of a .ttb file")
            return None
        return ModuleEntry(name, self.folder / file, fields.text("program"), node.line)

    def _input(self, name: str, node: Node) -> InputEntry:
        fields = Fields(node, f"input {name!r}", self.log)
        fields.only(("shape", "type", "file", "name"))
        file = fields.text("file")
        shape = fields.shape("shape", required=file is None)
        kind = fields.data_type("type", required=file is None)
        if kind is not None and kind.is_block:
            fields.wrong("type", "a type of single elements: block formats are ways to store")
        if file is None and fields.get("name") is not None:
            fields.wrong("name", "left out: it belongs to `file`")
        path = None if file is None else self.folder / file
        return InputEntry(name, shape, kind, path, fields.text("name"), node.line)

    def _steps(self, fields: Fields, key: str) -> tuple[PipelineStep, ...]:
        node = fields.get(key)
        if node is None:
            return ()
        if not isinstance(node.data, tuple):
            fields.wrong(key, "a list of steps")
            return ()
        found = [self._step(item) for item in node.data]
        return tuple(step for step in found if step is not None)

    def _step(self, node: Node) -> PipelineStep | None:
        if not isinstance(node.data, Mapping):
            detail = f"a step is a mapping such as {_STEP}, not {node.describe()}"
            self.log.note("bad_value", node.line, detail)
            return None
        fields = Fields(node, "a step", self.log)
        if fields.get("repeat") is not None:
            return self._repeat(fields)
        fields.only(("run", "inputs", "outputs") if fields.get("run") else
                    ("run", "inputs", "outputs", "repeat", "index", "carry", "steps"))  # fmt: skip
        module = fields.text("run")
        if module is None:
            fields.wrong("run", "the name of a module (or `repeat` with steps)")
            return None
        inputs = []
        for slot, word, line in self._bindings(fields, "inputs"):
            reference = parse_reference(word)
            if reference is None:
                self.log.note("bad_value", line, f"{word[:60]!r} is no value: x, xs[i], xs[i-1]")
            else:
                inputs.append((slot, reference))
        outputs = []
        for slot, word, line in self._bindings(fields, "outputs"):
            self._check_name(word, line)
            outputs.append((slot, word))
        return RunStep(module, tuple(inputs), tuple(outputs), fields.line)

    def _bindings(self, fields: Fields, key: str) -> list[Binding]:
        node = fields.get(key)
        if node is None:
            return []
        if isinstance(node.data, tuple):
            pairs: list[tuple[str | None, Node]] = [(None, item) for item in node.data]
        elif isinstance(node.data, Mapping):
            pairs = list(node.data.items())
        else:
            fields.wrong(key, "a mapping from slots to values, or a list by position")
            return []
        found = []
        for slot, item in pairs:
            if isinstance(item.data, tuple | Mapping) or not item.raw:
                self.log.note("bad_value", item.line, f"{key}: a value's name is a word")
                continue
            found.append((slot, item.raw, item.line))
        return found

    def _repeat(self, fields: Fields) -> RepeatStep:
        fields.only(("repeat", "index", "carry", "steps"))
        times = fields.number("repeat")
        if not isinstance(times, int) or not 1 <= times <= MAX_REPEAT:
            if times is not None:
                fields.wrong("repeat", f"a whole number from 1 to {MAX_REPEAT}")
            times = 1
        index = fields.text("index") or "i"
        self._check_name(index, fields.line_of("index"))
        carry = []
        for name, node in Fields(fields.get("carry"), "carry", self.log).items():
            if isinstance(node.data, tuple | Mapping) or NAME.fullmatch(node.raw) is None:
                self.log.note("bad_value", node.line, f"carry: {name} becomes a value, by name")
                continue
            carry.append((name, node.raw))
        steps = self._steps(fields, "steps")
        if not steps and not (fields.get("steps") and self.log.problems):
            fields.wrong("steps", "a list of steps")
        return RepeatStep(times, index, tuple(carry), steps, fields.line)

    def _outputs(self) -> tuple[tuple[str, str, int], ...]:
        node = self.top.get("outputs")
        if node is None:
            return ()
        found = []
        for name, word, line in self._bindings(self.top, "outputs"):
            self._check_name(name or word, line)
            found.append((name or word, word, line))
        if not found and not self.log.problems:
            self.top.wrong("outputs", "a mapping or a list of names, at least one")
        times = Counter(name for name, _, _ in found)
        for name, _, line in found:
            if times[name] > 1:
                self.log.note("duplicate_name", line, f"two outputs are called {name!r}")
        return tuple(found)
