"""`Program`: a placed, compiled entry point, with its checks and text."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from stitch.errors import CompileError, Problem
from stitch.program.bodies import (
    Body,
    body_problems,
    definition_problems,
    name_of,
    operation_line,
)
from stitch.program.contents import Array
from stitch.program.facts import Facts, list_facts, operation_forms
from stitch.program.layout import Space, TensorDesc
from stitch.program.operation import (
    ABSENT,
    Constant,
    InputKind,
    InputSlot,
    Operation,
    OutputSlot,
    Ownership,
    Value,
)

# Seams --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seam:
    """The beginning of a part of a linked program: the index of its first operation.

    Only files of earlier linkers have them; executors take no notice. `held` lists, in ascending
    order, outputs of the part that later parts do not read.
    """

    first: int
    held: tuple[int, ...] = ()


def seam_problems(
    seams: Sequence[Seam], operations: Sequence[Operation], values: int
) -> Iterator[Problem]:
    """Yield the defects of seams for a list of operations and a number of values."""
    before = -1
    for i, seam in enumerate(seams):
        if (i == 0 and seam.first) or not before < seam.first < len(operations):
            wanted = f"behind {before}" if i else "0"
            detail = f"begins at operation {seam.first} of {len(operations)}, expected {wanted}"
            yield Problem("bad_seam", f"seam {i}", detail)
            return  # Which operations the parts have cannot be told.
        before = seam.first
    for i, seam in enumerate(seams):
        if not seam.held:
            continue
        part = range(seam.first, seams[i + 1].first if i + 1 < len(seams) else len(operations))
        made = {v for index in part for v in operations[index].outputs}
        for value in seam.held:
            if not 0 <= value < values or value not in made:
                detail = f"value {value} of {values} is not made in its operations"
                yield Problem("bad_seam", f"seam {i}", f"{detail} {part.start} to {part.stop - 1}")
        if any(a >= b for a, b in pairwise(seam.held)):
            yield Problem("bad_seam", f"seam {i}", "the values that it holds do not rise")


#: Slots on each side that a program's one-line form names.
SLOTS_IN_SUMMARY = 4


class Role(enum.Enum):
    """The role of a program; it does not affect how it runs."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Scratch:
    """Working memory for a program's intermediate values while it runs.

    In L1 it occupies the bottom `[unreserved base, unreserved base + size_per_bank)` of every
    bank; in DRAM and on the host it is a buffer that lives as long as the run. Intermediate
    values lie dense and row-major at their `layout.address`, counted in bytes over all banks
    from the start of the scratch's footprint; a multiple of 64.
    """

    space: Space
    size_per_bank: int


@dataclass(frozen=True, slots=True)
class OperationList:
    """The common part of a computation graph and a program."""

    name: str
    inputs: tuple[InputSlot, ...]
    outputs: tuple[OutputSlot, ...]
    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    constants: tuple[Constant, ...]
    #: What operations stand for, by the index that they carry.
    bodies: tuple[Body, ...] = field(default=(), kw_only=True)
    _forms: tuple[Facts, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def forms(self) -> tuple[Facts, ...]:
        """The facts of the forms of the operations; sizes must be numbers."""
        forms = self._forms
        if forms is None:
            forms = operation_forms(self.values, self.operations, self.constants)
            object.__setattr__(self, "_forms", forms)
        return forms

    @property
    def order(self) -> Facts:
        """The facts of the operations' order and values, whatever their types."""
        return list_facts(self.operations)

    def resized(self, values: tuple[Value, ...], constants: tuple[Constant, ...]) -> Self:
        """Return the list with other shapes of values and constants, without checking it again."""
        other = copy(self)
        object.__setattr__(other, "values", values)
        object.__setattr__(other, "constants", constants)
        object.__setattr__(other, "_forms", None)
        return other

    def constant_data(self) -> dict[int, Array]:
        """Return the constants by the index of their value."""
        return {constant.value: constant.data for constant in self.constants}

    def fixed_values(self) -> set[int]:
        """Return the values that depend on constants alone, with the constants."""
        fixed = {constant.value for constant in self.constants}
        for operation in self.operations:
            read = [value for value in operation.inputs if value != ABSENT]
            if read and fixed.issuperset(read):
                fixed.update(operation.outputs)
        return fixed

    def every_constant(self) -> Iterator[tuple[Constant, Value]]:
        """Yield the constants and their values, then those of bodies."""
        parts: list[OperationList | Body] = [self, *self.bodies]
        for part in parts:
            yield from ((constant, part.values[constant.value]) for constant in part.constants)

    def foreign_operations(self) -> list[Operation]:
        """Return the operations of foreign operators, also in bodies."""
        parts: list[OperationList | Body] = [self, *self.bodies]
        return [
            operation for part in parts for operation in part.operations if operation.is_foreign
        ]

    def placed_values(self) -> set[int]:
        """Return the values of slots and constants, which have their own buffers."""
        slots = {slot.value for slot in self.inputs} | {slot.value for slot in self.outputs}
        return slots | {constant.value for constant in self.constants}


@dataclass(frozen=True, slots=True)
class Program(OperationList):
    """A placed entry point: slots, values with layouts, operations in run order, constants.

    `seams` are the beginnings of the parts of a linked program, empty for a program of one part.
    Raises `CompileError` that lists every defect.
    """

    scratch: Scratch
    role: Role = Role.FORWARD
    seams: tuple[Seam, ...] = ()

    def __post_init__(self) -> None:
        problems = [*structure_problems(self), *placement_problems(self)]
        problems += seam_problems(self.seams, self.operations, len(self.values))
        self._require_none(problems)

    def _require_none(self, problems: Sequence[Problem]) -> None:
        if problems:
            listed = "; ".join(map(str, problems[:8]))
            error = CompileError(f"program {self.name!r} is not well formed: {listed}")
            error.problems = tuple(problems)
            raise error

    def __repr__(self) -> str:
        return f"<Program {summary(self)}>"

    def placed(
        self, values: tuple[Value, ...], constants: tuple[Constant, ...],
        outputs: tuple[OutputSlot, ...], scratch: Scratch,
    ) -> Program:  # fmt: skip
        """Return the program with other shapes, constants and placement, checking these only.

        Args:
            values: The same values; shapes and layouts may be others.
            constants: Constants of the same values.
            outputs: Slots of the same values; they may alias other inputs.
            scratch: The scratch.

        Raises:
            CompileError: The placement has defects; the error lists them.
        """
        other = self.resized(values, constants)
        object.__setattr__(other, "outputs", outputs)
        object.__setattr__(other, "scratch", scratch)
        other._require_none([*placement_problems(other)])
        return other

    def input_desc(self, index: int) -> TensorDesc:
        """Return the required descriptor of input `index`."""
        return self.values[self.inputs[index].value].desc

    def output_desc(self, index: int) -> TensorDesc:
        """Return the descriptor of output `index`."""
        return self.values[self.outputs[index].value].desc

    @property
    def is_opaque(self) -> bool:
        """Return whether it has opaque operations: then it is planned, and never computed."""
        parts: list[OperationList | Body] = [self, *self.bodies]
        return any(operation.is_opaque for part in parts for operation in part.operations)

    def readers(self) -> dict[int, set[int]]:
        """Return the indices of the operations that read each value; not to be changed."""
        return self.order.get("readers", _readers, self.operations)

    def text(self) -> str:
        """Return the program as stable text, as in golden files."""
        lines = [*body_lines(self, lambda i: self.values[i].desc.text())]
        if self.seams:
            lines.append("  seams before operations " + ", ".join(map(self._seam, self.seams)))
        scratch = f"  scratch {self.scratch.space.value} {self.scratch.size_per_bank} B/bank"
        first = f"program @{self.name} role={self.role.value} {{"
        return "\n".join([first, *lines, scratch, "}\n"])

    def _seam(self, seam: Seam) -> str:
        held = " ".join(f"%{self.values[v].name}" for v in seam.held)
        return f"{seam.first} (gives {held})" if held else str(seam.first)


def _readers(operations: Sequence[Operation]) -> dict[int, set[int]]:
    readers: dict[int, set[int]] = {}
    for index, operation in enumerate(operations):
        for value in operation.inputs:
            readers.setdefault(value, set()).add(index)
    return readers


def structure_problems(body: OperationList) -> Iterator[Problem]:
    """Yield bad indices, values defined twice, too late or never, and bad bodies."""
    given = [(slot.value, f"input {i} ({slot.name})") for i, slot in enumerate(body.inputs)]
    yield from definition_problems(
        body.values, given, body.constants, body.operations, body.bodies, len(body.bodies)
    )
    yield from body_problems(body.bodies, body.operations)
    defined = {slot.value for slot in body.inputs} | {c.value for c in body.constants}
    defined.update(v for operation in body.operations for v in operation.outputs if v != ABSENT)
    for i, output in enumerate(body.outputs):
        if output.value not in defined or not 0 <= output.value < len(body.values):
            yield Problem("undefined", f"output {i} ({output.name})", f"value {output.value}")
    for kind, names in (
        ("input", [s.name for s in body.inputs]),
        ("output", [s.name for s in body.outputs]),
    ):
        for name in sorted(n for n, times in Counter(names).items() if times > 1):
            yield Problem("duplicate_name", f"{kind} {name}", f"two {kind}s have this name")


def placement_problems(program: OperationList) -> Iterator[Problem]:
    """Yield defects of placement: values without layout, bad storage types, bad aliases."""
    for i, value in enumerate(program.values):
        layout, logical = value.layout, value.type.data_type
        if layout is None:
            yield Problem("unplaced", f"value {i} ({value.name})", "it has no layout")
        elif layout.data_type is not logical and not (
            layout.data_type.is_floating and logical.is_floating
        ):
            stored = f"{value.type.text()} cannot be stored as {layout.data_type.value}"
            yield Problem("storage_type", f"value {i} ({value.name})", stored)
    for side, slots in (("input", program.inputs), ("output", program.outputs)):
        for slot in slots:
            home = program.values[slot.value].layout if slot.value < len(program.values) else None
            if home is not None and home.space is Space.HOST and home.address is not None:
                yield Problem(
                    "host_address", f"{side} {slot.name}", "a host address is never fixed"
                )
    if not program.outputs:
        yield Problem("no_output", f"program {program.name}", "a program makes something")
    produced = {v for operation in program.operations for v in operation.outputs}
    seen: set[int] = set()
    taken: set[int] = set()
    for i, slot in enumerate(program.outputs):
        where = f"output {i} ({slot.name})"
        if slot.value not in produced or slot.value in seen:
            yield Problem("output_value", where, "an output is a value of its own, made here")
        seen.add(slot.value)
        if slot.aliases_input is not None:
            yield from _alias_problems(program, slot, where, taken)


def _alias_problems(
    program: OperationList, slot: OutputSlot, where: str, taken: set[int]
) -> Iterator[Problem]:
    index = slot.aliases_input
    if index is None or not 0 <= index < len(program.inputs):
        yield Problem("bad_alias", where, f"input {index} of {len(program.inputs)}")
        return
    source = program.inputs[index]
    if index in taken:
        yield Problem("bad_alias", where, f"input {source.name!r} is aliased twice")
    taken.add(index)
    if source.ownership is not Ownership.DONATE:
        yield Problem("bad_alias", where, f"input {source.name!r} is not donated")
    if not 0 <= source.value < len(program.values) or slot.value >= len(program.values):
        return
    ours, theirs = program.values[slot.value], program.values[source.value]
    if ours.type.shape != theirs.type.shape or ours.layout != theirs.layout:
        yield Problem("bad_alias", where, f"its layout differs from input {source.name!r}'s")


def summary(body: OperationList) -> str:
    """Return one line with name, slot types and sizes."""

    def listed(slots: Sequence[InputSlot] | Sequence[OutputSlot]) -> str:
        shown = [f"{s.name}: {body.values[s.value].type.text()}" for s in slots[:SLOTS_IN_SUMMARY]]
        more = len(slots) - SLOTS_IN_SUMMARY
        return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)

    nbytes = sum(constant.data.nbytes for constant in body.constants)
    return (
        f"{body.name}({listed(body.inputs)}) -> {listed(body.outputs)}; "
        f"{len(body.operations)} operations, {len(body.constants)} constants of {nbytes} B"
    )


def body_lines(
    body: OperationList,
    kind: Callable[[int], str],
    data: Callable[[Constant], str] = lambda constant: "",
) -> Iterator[str]:
    """Yield the common lines of graphs and programs; `kind` and `data` describe a value."""

    for slot in body.inputs:
        extra = "" if slot.kind is InputKind.ACTIVATION else f" {slot.kind.value}"
        extra += " donate" if slot.ownership is Ownership.DONATE else ""
        yield f"  input {slot.name}: {name_of(body.values, slot.value)} {kind(slot.value)}{extra}"
    for constant in body.constants:
        name = name_of(body.values, constant.value)
        yield f"  constant {name} {kind(constant.value)}{data(constant)}"
    for index, inner in enumerate(body.bodies):
        yield from inner.lines(index)
    for operation in body.operations:
        yield f"  {operation_line(operation, body.values, kind)}"
    for output in body.outputs:
        alias = output.aliases_input
        extra = "" if alias is None else f" aliases {body.inputs[alias].name}"
        yield f"  output {output.name}: {name_of(body.values, output.value)}{extra}"


# Unique names -------------------------------------------------------------------------------------


class FreeNames:
    """Assigns unique names by numbering.

    >>> names = FreeNames()
    >>> [names.free("x") for _ in range(3)]
    ['x', 'x.2', 'x.3']
    """

    __slots__ = ("_before", "_mark", "_numbers", "_taken")

    def __init__(self, taken: Iterable[str] = (), mark: str = ".", first: int = 2) -> None:
        """Reserve `taken`; the second use of a name appends `mark` and the number `first`."""
        self._taken = set(taken)
        self._mark, self._before = mark, first - 1
        self._numbers: dict[str, int] = {}

    def free(self, name: str, prefix: str = "") -> str:
        """Return and reserve the name, or with `prefix`, or numbered."""
        free = f"{prefix}.{name}" if prefix and name in self._taken else name
        if free in self._taken:
            longer, number = free, self._numbers.get(free, self._before)
            while free in self._taken:
                number += 1
                free = f"{longer}{self._mark}{number}"
            self._numbers[longer] = number
        self._taken.add(free)
        return free
