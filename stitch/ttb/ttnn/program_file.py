"""Read a TTNN binary: its version first, then verify all of it, then convert its programs.

Raises only `FormatError` with every defect, and `IncompatibleError` for a version whose order of
fields is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stitch.errors import FormatError, StitchError
from stitch.flatbuffer import (
    FieldSpec,
    ForeignFile,
    ProblemList,
    Record,
    Release,
    Schema,
    TableSpec,
    unknown_order,
    verified,
    whole_file,
)
from stitch.machine import Machine, MachineShape, room_per_bank, system_chips
from stitch.program import (
    OPAQUE_DOMAIN,
    AttributeValue,
    InputKind,
    InputSlot,
    MathFidelity,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
)
from stitch.ttb.binary import Binary, Origin, TensorLife
from stitch.ttb.ttnn.field_history import (
    HASHED_SINCE,
    TtnnSchema,
    known_versions,
    schema_of,
)
from stitch.ttb.ttnn.file_format import FORMAT
from stitch.ttb.ttnn.tensor_layouts import Counterparts, TensorReader

# Programs: slots, values, operations by name only, lifetimes.

#: The operations that end a tensor's life, by their names in turn.
_FREEING = frozenset({"DeallocOp", "DeallocateOp"})
#: What reads weights, once for all runs: an input that nothing else reads is a parameter.
_CACHED = "LoadCachedOp"
_FIDELITY = re.compile(r"\bmath_fidelity = (lofi|hifi[234])\b")
#: What a program's result is called where it is none of its own.
_GIVEN_BACK = "GivenBack"


@dataclass(frozen=True, slots=True)
class ReadProgram:
    """A program, its tensors' lives, and whether only other programs call it."""

    program: Program
    lives: tuple[TensorLife, ...]
    is_private: bool


@dataclass(slots=True)
class _Held:
    """A tensor of the file: its value now, and since when and until when it lives."""

    value: int
    name: str
    first: int = -1
    last: int | None = None
    times_written: int = 0


class ProgramReader:
    """Reads the programs of one file."""

    def __init__(
        self, schema: TtnnSchema, machine: MachineShape, problems: ProblemList,
        lacking: Counterparts,
    ) -> None:  # fmt: skip
        self.schema = schema
        self.machine = machine
        self.problems = problems
        self.lacking = lacking
        self.tensors = TensorReader(schema, machine, lacking)

    def read(self, record: Record, index: int) -> ReadProgram | None:
        """The program; None where problems were found, or where it gives nothing."""
        said = self.schema.schema.named("Program", record)
        name = said["name"] or f"program{index}"
        mesh = said.get("mesh_shape") or (1, 1)
        if mesh[0] * mesh[1] > 1:
            text = f"a program for a mesh of {mesh[0]}x{mesh[1]} chips is shown for one"
            self.lacking.add(text, name)
        if not said["outputs"]:
            self.lacking.add("a program that gives nothing is not shown", name)
            return None
        body = _Body(self, name, f"programs[{index}]")
        before = self.problems.count
        body.take_inputs(said["inputs"])
        for number, operation in enumerate(said["operations"]):
            body.take_operation(number, operation)
        body.give(said["outputs"])
        if self.problems.count > before:
            return None
        try:
            program, lives = body.program()
        except StitchError as error:
            self.problems.add("program", body.where, " ".join(str(error).split()))
            return None
        return ReadProgram(program, lives, bool(said.get("private", 0)))


class _Body:
    """One program as it is read."""

    def __init__(self, reader: ProgramReader, name: str, where: str) -> None:
        self.reader = reader
        self.name = name
        self.where = where
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self.held: dict[int, _Held] = {}
        self.inputs: list[InputSlot] = []
        self.readers: dict[int, set[str]] = {}  # a value -> the operations that read it
        self.outputs: list[OutputSlot] = []
        self.results: set[int] = set()  # ids

    def _named(self, table: str, record: Record) -> dict[str, Any]:
        return self.reader.schema.schema.named(table, record)

    def _value(self, reference: Mapping[str, Any], name: str) -> int:
        kind, layout = self.reader.tensors.describe(reference["desc"], f"{self.name}: {name}")
        self.values.append(Value(name, kind, layout))
        return len(self.values) - 1

    def take_inputs(self, records: tuple[Record, ...]) -> None:
        """Input slots, in order; they have no names in the file."""
        for at, record in enumerate(records):
            reference = self._named("TensorRef", record)
            number = reference["global_id"]
            if number in self.held:
                detail = f"tensor {number} is input {self.held[number].name!r} already"
                self.reader.problems.add("input", f"{self.where}.inputs[{at}]", detail)
                continue
            value = self._value(reference, f"arg{at}")
            self.held[number] = _Held(value, f"arg{at}")
            self.inputs.append(InputSlot(f"arg{at}", value))

    def take_operation(self, number: int, record: Record) -> None:
        """An operation: the tensors that it reads, and those that it makes or writes."""
        said = self._named("Operation", record)
        code, member = said["type"]
        name = self.reader.schema.codes["OpType"][code - 1]
        fields = {} if member is None else self._named(name, member)
        read, made = list[int](), dict[int, None]()
        before = set[int]()
        for field, references in self._references(fields):
            for reference in references:
                held = self.held.get(reference["global_id"])
                if held is None:
                    made[self._made(reference, number)] = None
                elif _is_result(field) and held.value not in made:
                    # What is written into is there before, and gone after.
                    read += [] if held.value in before else [held.value]
                    made[self._written(reference, held)] = None
                else:
                    read.append(held.value)
                    before.add(held.value)
                    if name in _FREEING:
                        held.last = number
        for value in read:
            self.readers.setdefault(value, set()).add(name)
        attributes: dict[str, AttributeValue] = {"text": said["debug_info"]}
        if "type" in fields:
            attributes["kind"] = self._kind(name, fields["type"])
        place = _place_in(said.get("loc_info") or said["debug_info"])
        fidelity = _fidelity_in(said["debug_info"])
        operation = Operation(name, tuple(read), tuple(made), attributes, OPAQUE_DOMAIN, place)
        self.operations.append(replace(operation, math_fidelity=fidelity))

    def _references(self, fields: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """The tensors of an operation by field, in the schema's order."""
        for field, value in fields.items():
            if isinstance(value, tuple):
                records = value if value and isinstance(value[0], tuple) else (value,)
                yield field, [self._named("TensorRef", r) for r in records if r]

    def _kind(self, name: str, code: int) -> str:
        (spec,) = [f for f in self.reader.schema.schema.tables[name].fields if f.name == "type"]
        return self.reader.schema.codes[spec.of][code]

    def _made(self, reference: Mapping[str, Any], number: int) -> int:
        name = f"t{reference['global_id']}"
        value = self._value(reference, name)
        self.held[reference["global_id"]] = _Held(value, name, number)
        return value

    def _written(self, reference: Mapping[str, Any], held: _Held) -> int:
        held.times_written += 1
        held.value = self._value(reference, f"{held.name}.{held.times_written}")
        return held.value

    def give(self, records: tuple[Record, ...]) -> None:
        """Output slots; what is no operation's own result is given back by one that is added."""
        made = {value for operation in self.operations for value in operation.outputs}
        for at, record in enumerate(records):
            reference, where = self._named("TensorRef", record), f"{self.where}.outputs[{at}]"
            number, name = reference["global_id"], f"result{at}"
            held = self.held.get(number)
            if held is None:
                self.reader.problems.add("output", where, f"nothing makes tensor {number}")
                continue
            value = held.value
            if value in made and number not in self.results:
                self.results.add(number)
            else:
                text = "a result that is an input, or given twice, is shown as a tensor of its own"
                self.reader.lacking.add(text, f"{self.name}: {name}")
                value = self._value(reference, name)
                self.operations.append(
                    Operation(_GIVEN_BACK, (held.value,), (value,), domain=OPAQUE_DOMAIN)
                )
            self.outputs.append(OutputSlot(name, value))

    def program(self) -> tuple[Program, tuple[TensorLife, ...]]:
        """The program, and the lives of the tensors that are neither inputs nor results."""
        end = len(self.operations) - 1
        lives = []
        for number, held in self.held.items():
            if held.first < 0 or number in self.results:
                continue
            desc = self.values[held.value].desc
            size = room_per_bank(desc, self.reader.machine)
            last = end if held.last is None else held.last
            last = max(held.first, last)
            lives.append(TensorLife(self.name, held.name, desc, size, held.first, last))
        peaks = {space: _peak(lives, space) for space in (Space.L1, Space.DRAM)}
        space = Space.L1 if peaks[Space.L1] else Space.DRAM
        if space is Space.L1 and peaks[Space.DRAM]:
            text = f"temporaries in DRAM ({peaks[Space.DRAM]} B per bank) are in no plan"
            self.reader.lacking.add(text, self.name)
        inputs = tuple(
            replace(slot, kind=InputKind.PARAMETER)
            if self.readers.get(slot.value) == {_CACHED}
            else slot
            for slot in self.inputs
        )
        program = Program(
            self.name, inputs, tuple(self.outputs), tuple(self.values),
            tuple(self.operations), (), Scratch(space, peaks[space]),
        )  # fmt: skip
        return program, tuple(lives)


def _is_result(field: str) -> bool:
    """Whether a field of an operation is for what it makes, by its name.

    >>> [_is_result(name) for name in ("out", "q_out", "outputs", "result_indices", "in0")]
    [True, True, True, True, False]
    """
    return field.startswith(("out", "result")) or field.endswith("_out")


def _place_in(text: str) -> str:
    """The place in the source that stands at the end of an operation's text.

    >>> _place_in('%0 = "ttnn.get_device"() loc("a.mlir":3:10)')
    '"a.mlir":3:10'
    """
    at = text.rfind("loc(")
    return text[at + 4 :].rstrip().removesuffix(")") if at >= 0 else ""


def _fidelity_in(text: str) -> MathFidelity:
    """The math fidelity that an operation's text tells, where it tells one: that of its compute
    config, or of all its kernels alike.

    >>> _fidelity_in("#ttnn.device_compute_kernel_config<math_fidelity = hifi4>")
    <MathFidelity.HIFI4: 'hifi4'>
    """
    told = set(_FIDELITY.findall(text))
    return MathFidelity(told.pop()) if len(told) == 1 else MathFidelity.BY_TYPE


def _peak(lives: list[TensorLife], space: Space) -> int:
    """The most bytes per bank that tensors in a space take at one time."""
    change: dict[int, int] = {}
    for life in lives:
        if life.desc.layout.space is space:
            change[life.first] = change.get(life.first, 0) + life.size_per_bank
            change[life.last + 1] = change.get(life.last + 1, 0) - life.size_per_bank
    now = most = 0
    for moment in sorted(change):
        now += change[moment]
        most = max(most, now)
    return most


_REMEDY = "copy the file again from where it was made; it is damaged"
#: What stands in every version: its number, and the hash of its schema (once, of its commit).
_PEEK = Schema(
    "root",
    {
        "root": TableSpec(
            "root",
            (
                FieldSpec(0, "version", "struct", "HHI", required=True),
                FieldSpec(1, "hash", "string", limit=1024),
            ),
        )
    },
    {},
)


def read_ttnn(file: memoryview, where: str) -> Binary:
    """The programs of a file; `where` is its name for errors."""
    data = whole_file(file, where, FORMAT)
    numbers, digest = verified(data, where, _PEEK, FORMAT)
    version = Release(*numbers)
    schema = schema_of(version, digest)
    if schema is None:
        is_hashed = version >= Release(0, 0, HASHED_SINCE)
        got = f"{version}, schema {digest[:16] or 'without a hash'}" if is_hashed else str(version)
        raise unknown_order(FORMAT, where, got, _known())
    root = verified(data, where, schema.schema, FORMAT)
    problems = ProblemList()
    try:
        binary = _binary(schema, root, problems, len(data))
    except FormatError as error:
        error.where = where
        raise
    what = "the contents of the TTNN binary do not fit together"
    problems.raise_if_any(what, where=where, remedy=_REMEDY)
    assert binary is not None, "neither a binary nor a problem"
    return binary


def _known() -> str:
    first, last = known_versions()
    return (
        f"version {first} to {last}, as tt-mlir's main branch had them (from 0.0.{HASHED_SINCE} on "
        "by the hash of the schema)"
    )


def _binary(schema: TtnnSchema, root: Record, problems: ProblemList, nbytes: int) -> Binary | None:
    said = schema.schema.named("TTNNBinary", root)
    lacking = Counterparts()
    machine = _machine(schema, said, lacking)
    reader = ProgramReader(schema, machine.shape, problems, lacking)
    read = [reader.read(record, i) for i, record in enumerate(said["programs"])]
    if problems.count:
        return None
    shown: list[ReadProgram] = [one for one in read if one is not None]
    shown.sort(key=lambda one: one.is_private)  # What others call stands behind.
    version, commit = Release(*said["version"]), said["ttmlir_git_hash"]
    lives = tuple(life for one in shown for life in one.lives)
    origin = Origin("TTNN", str(version), commit, machine, lacking.lines(), lives, nbytes)
    producer = f"tt-mlir {commit[:12] or 'of an unknown commit'}"
    try:
        programs = tuple(one.program for one in shown)
        return Binary(programs, machine.shape, producer, origin=origin)
    except StitchError as error:
        problems.add("binary", "TTNNBinary", " ".join(str(error).split()))
        return None


def _machine(schema: TtnnSchema, said: Mapping[str, Any], lacking: Counterparts) -> Machine:
    """The machine of the first chip, called by its architecture: it is no device of a name."""
    # Of a release, as descriptors count them: branches have schemas of the main one's commits.
    file = ForeignFile(Release(0, 0, schema.release), schema.schema, ())
    system = file.named("SystemDesc", said["system_desc"])
    first, *others = system_chips(file, system, "system_desc")
    if others:
        lacking.add(f"of {len(others) + 1} chips the first is shown", "system descriptor")
    return replace(first.machine, shape=replace(first.machine.shape, name=first.architecture))
