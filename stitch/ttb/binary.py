"""`Binary`: one or more programs and the machine they were compiled for, as a file holds them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stitch.errors import CompileError, StitchError
from stitch.flatbuffer import ProblemList
from stitch.machine import Machine, MachineShape
from stitch.program import (
    INITIAL_STATE,
    Array,
    Body,
    DataType,
    MathFidelity,
    OperationList,
    Program,
    TensorDesc,
    is_scan,
)

#: What to do about a file that is not sound.
DAMAGED = "compile the module again; the file is damaged or was not written by Stitch"


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """The version of the file format; text form `major.minor`."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


#: The version that this reader writes, and the newest that it reads.
CURRENT = Version(1, 1)
#: The ONNX operator set whose semantics programs follow.
OPSET = 26
#: The features that a file may require of this reader.
FEATURES: frozenset[str] = frozenset(
    {
        "bodies",
        "conditions",
        "foreign_operators",
        "math_fidelity",
        "narrow_types",
        "numbered_values",
        "scans",
        "seams",
        "symbolic_sizes",
    }
)


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """One segment: where it stands behind the data's start, its length and its CRC-32."""

    offset: int
    nbytes: int
    crc32: int


class SegmentChecks:
    """Which segments of one file have been checked; the bytes are those of the constants."""

    def __init__(
        self,
        where: str,
        rows: tuple[SegmentRow, ...],
        bytes_of: tuple[Array, ...],
        used_by: dict[str, tuple[int, ...]],
    ) -> None:
        self.rows = rows
        self._where = where
        self._bytes_of = bytes_of
        self._used_by = used_by  # a program's name -> the segments of its constants
        self._checked: set[int] = set()

    def segments_of(self, program: OperationList) -> tuple[int, ...]:
        """The segments that hold a program's constants, in the order of `every_constant`."""
        return self._used_by.get(program.name, ())

    def check(self, programs: Sequence[OperationList], *, every: bool) -> None:
        """Raise `FormatError` naming each unchecked segment whose bytes do not match."""
        wanted = set(range(len(self.rows))) if every else set[int]()
        names: dict[int, str] = {}
        problems = ProblemList()
        for program in programs:
            held = zip(program.every_constant(), self.segments_of(program), strict=False)
            for (_, value), index in held:
                wanted.add(index)
                names.setdefault(index, f"constant {value.name!r} of program {program.name!r}")
        for index in sorted(wanted - self._checked):
            computed, stored = zlib.crc32(self._bytes_of[index].data), self.rows[index].crc32
            if computed != stored:
                detail = f"CRC-32 is {computed:#010x}, the file says {stored:#010x}"
                place = f"segment {index} ({names.get(index, 'unused')})"
                problems.add("segment_crc", place, detail)
            else:
                self._checked.add(index)
        for program in programs:
            _check_elements(program, problems)
        problems.raise_if_any(
            "constants of the file are damaged", where=self._where, remedy=DAMAGED
        )


def _check_elements(program: OperationList, problems: ProblemList) -> None:
    """A bool that is neither 0 nor 1 would mean different things to different kernels."""
    for constant, value in program.every_constant():
        kind = DataType.from_dtype(constant.data.dtype)
        if not kind.holds(constant.data):
            place = f"program {program.name}, value {value.name}"
            wrong = "a bool is neither 0 nor 1" if kind is DataType.BOOL else f"no {kind.value}"
            problems.add(kind.value, place, wrong)


def _features(programs: tuple[Program, ...]) -> frozenset[str]:
    """What a reader of these programs must know."""
    held = [body for program in programs for body in program.bodies]
    parts: list[Program | Body] = [*programs, *held]
    values = (value for part in parts for value in part.values)
    narrow = any(
        v.type.data_type.is_narrow or (v.layout is not None and v.layout.data_type.is_narrow)
        for v in values
    )
    seams = any(program.seams for program in programs)
    operations = [operation for part in parts for operation in part.operations]
    wanted = {
        "bodies": bool(held),
        "conditions": any(is_scan(o) and o.attributes.get("has_condition") for o in operations),
        "foreign_operators": any(o.is_foreign for o in operations),
        "math_fidelity": any(o.math_fidelity is not MathFidelity.BY_TYPE for o in operations),
        "narrow_types": narrow,
        "scans": any(map(is_scan, operations)),
        "seams": seams,
    }
    return frozenset(name for name, is_used in wanted.items() if is_used)


@dataclass(frozen=True, slots=True)
class TensorLife:
    """A tensor that an opaque program makes and does not give: from the operation that makes it to
    the last that has it; `size_per_bank` in bytes."""

    program: str
    name: str
    desc: TensorDesc
    size_per_bank: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What a binary of another compiler was: for people.

    `kind`, `version` and `commit` as its file says; `lacking`: what of it has no counterpart here,
    and how it is shown; `machine`: the one that the file itself describes; `lives`: of its
    programs' tensors.
    """

    kind: str
    version: str
    commit: str
    machine: Machine
    lacking: tuple[str, ...] = ()
    lives: tuple[TensorLife, ...] = ()
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Binary:
    """What a `.ttb` file holds. Raises `CompileError` without programs, or with equal names.

    `requires` names features that a reader must know, those of its programs at least. `segments`
    belongs to binaries that were loaded; it takes no part in comparisons. `origin`: of a binary of
    another compiler, whose programs are opaque.
    """

    programs: tuple[Program, ...]
    machine: MachineShape
    producer: str
    opset: int = OPSET
    version: Version = CURRENT
    requires: tuple[str, ...] = ()
    segments: SegmentChecks | None = field(default=None, compare=False, repr=False)
    origin: Origin | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [program.name for program in self.programs]
        if not names:
            raise CompileError("a binary holds at least one program", got="none")
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        if twice:
            raise CompileError("programs of one binary have different names", got=", ".join(twice))
        lacking = _features(self.programs).difference(self.requires)
        if lacking:
            object.__setattr__(self, "requires", (*self.requires, *sorted(lacking)))

    def __repr__(self) -> str:
        names = ", ".join(program.name for program in self.programs[:8])
        more = ", ..." if len(self.programs) > 8 else ""
        return f"<Binary {self.version} for {self.machine.name}: {names}{more}>"

    def program(self, name_or_index: str | int) -> Program:
        """A program by its name or its index; raises `StitchError` listing the names."""
        if isinstance(name_or_index, int):
            if -len(self.programs) <= name_or_index < len(self.programs):
                return self.programs[name_or_index]
        else:
            for program in self.programs:
                if program.name == name_or_index:
                    return program
        raise StitchError(
            f"the binary has no program {name_or_index!r}",
            expected=", ".join(f"{i}: {p.name}" for i, p in enumerate(self.programs)),
            remedy="use one of these names, or an index",
        )

    def crc32_of(self, program: Program) -> tuple[int | None, ...]:
        """What the file says of the bytes of a program's constants, in the order of
        `every_constant`; nothing where the binary was not loaded from a file."""
        held = () if self.segments is None else self.segments.segments_of(program)
        if self.segments is None or not held:
            return (None,) * sum(1 for _ in program.every_constant())
        return tuple([self.segments.rows[index].crc32 for index in held])

    def verify_segments(self, program: Program | None = None) -> None:
        """Check the CRC-32 of constants not checked yet: of one program, or of the whole file.

        Raises `FormatError` naming each damaged segment and its constant. Does nothing for a
        binary that was not loaded from a file.
        """
        if self.segments is not None:
            programs = self.programs if program is None else (program,)
            self.segments.check(programs, every=program is None)


def state_names(binary: Binary, program: Program) -> tuple[str, ...]:
    """The states of a program that begin with values of the file: what its program of that name
    (`INITIAL_STATE`) gives."""
    start = _start_of(binary, program)
    if start is None:
        return ()
    slots = {slot.name for slot in program.inputs} & {slot.name for slot in program.outputs}
    return tuple([slot.name for slot in start.outputs if slot.name in slots])


def initial_values(binary: Binary, program: Program) -> dict[str, Array]:
    """What states of a program begin with, by name, where the file holds it as constants."""
    start = _start_of(binary, program)
    if start is None:
        return {}
    data = {constant.value: constant.data for constant in start.constants}
    copied = {
        one.outputs[0]: data[one.inputs[0]]
        for one in start.operations
        if one.op == "Identity" and not one.domain and one.inputs[0] in data
    }
    known = state_names(binary, program)
    return {s.name: copied[s.value] for s in start.outputs if s.name in known and s.value in copied}


def _start_of(binary: Binary, program: Program) -> Program | None:
    """The program without inputs that gives what another one begins with."""
    wanted = f"{program.name}{INITIAL_STATE}"
    start = next((one for one in binary.programs if one.name == wanted), None)
    return None if start is None or start.inputs else start
