"""The form of a machine's description, and what of it has to fit each other.

The form is shown in `description`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from stitch.errors import StitchError
from stitch.forms import (
    Choice,
    Field,
    Flag,
    FormValues,
    ListOf,
    Node,
    Number,
    ParseContext,
    ProblemLog,
    Schema,
    SourceLocation,
    Whole,
    Word,
    as_written,
)
from stitch.machine.compute import Compute
from stitch.machine.figure_kinds import NOT_NEGATIVE, POSITIVE
from stitch.machine.machine import LOOP_EXECUTORS, LoopRates, Machine
from stitch.machine.network_form import (
    NOC,
    PATH,
    GridKind,
    path_of,
    read_latency,
)
from stitch.machine.shape import MOST_GRANULES, MachineShape, Policy, SpaceShape
from stitch.program import DataType, MathFidelity, Space

# --------------------------------------------------------------------------------------------------
# The form of `compute` in a machine's description: the rates of one core.

_FIDELITIES = tuple(kind for kind in MathFidelity if kind is not MathFidelity.BY_TYPE)

#: Operands whose types have different ones.
_MIXED = "mixed"


def _passes(**passes: float | None) -> tuple[tuple[MathFidelity, float], ...]:
    return tuple((MathFidelity(name), n) for name, n in passes.items() if n is not None)


def _fidelities(**named: str | None) -> tuple[tuple[DataType | None, MathFidelity], ...]:
    return tuple(
        (None if kind == _MIXED else DataType(kind), MathFidelity(name))
        for kind, name in named.items()
        if name is not None
    )


def _by_space(**rates: float | None) -> tuple[tuple[Space, float], ...]:
    return tuple((Space(name), rate) for name, rate in rates.items() if rate is not None)


_SHARE = Number(above=0, most=1, is_float=True)
_PASSES = Schema(
    "the passes",
    _passes,
    *(Field(kind.value, Number(least=1, is_float=True), needed=True) for kind in _FIDELITIES),
)
_FIDELITY = Schema(
    "the math fidelity of types",
    _fidelities,
    *(
        Field(name, Choice(tuple(f.value for f in _FIDELITIES)))
        for name in (*(kind.value for kind in DataType), _MIXED)
    ),
)
#: L1 is each core's own.
_SHARED = Schema(
    "the spaces that cores share",
    _by_space,
    *(Field(space.value, POSITIVE) for space in Space if space is not Space.L1),
)
COMPUTE = Schema(
    "compute",
    Compute,
    Field("launch_seconds", NOT_NEGATIVE, needed=True),
    Field("clock_hz", POSITIVE, needed=True),
    Field("multiply_adds_per_cycle", POSITIVE, needed=True),
    Field("passes", _PASSES, needed=True),
    Field("fidelity", _FIDELITY, default=()),
    Field("elements_per_cycle", POSITIVE, needed=True),
    Field("l1_bytes_per_cycle", POSITIVE, needed=True),
    Field("tile_loads", NOT_NEGATIVE, default=0.0),
    Field("products_share", _SHARE, default=1.0),
    Field("hidden_share", Number(least=0, most=1, is_float=True), default=1.0),
    Field("bytes_per_second", _SHARED, default=()),
)


# --------------------------------------------------------------------------------------------------
# The form of `loops` in a machine's description: the caches, and the rates of each executor.

_EXECUTOR = Schema(
    "rates of an executor",
    as_written,
    Field("has_views", Flag(), needed=True),
    Field("copies_elements", Flag(), needed=True),
    Field("loop_seconds", NOT_NEGATIVE, needed=True),
    Field("round_seconds", NOT_NEGATIVE, needed=True),
    Field("element_seconds", NOT_NEGATIVE, needed=True),
    Field("operation_seconds", NOT_NEGATIVE, needed=True),
    Field("function_seconds", NOT_NEGATIVE, needed=True),
    Field("movement_seconds", NOT_NEGATIVE, needed=True),
    Field("matrix_seconds", NOT_NEGATIVE, needed=True),
    Field("flops_per_second", POSITIVE, needed=True),
    Field("packed_flops_per_second", POSITIVE, needed=True),
)
LOOPS = Schema(
    "loops",
    as_written,
    Field("near_nbytes", Whole(1), needed=True),
    Field("near_bytes_per_second", POSITIVE, needed=True),
    Field("far_bytes_per_second", POSITIVE, needed=True),
    *(
        Field(each, _EXECUTOR, needed_without=" ".join(e for e in LOOP_EXECUTORS if e != each))
        for each in LOOP_EXECUTORS
    ),
)


def loop_rates(values: Mapping[str, Any] | None) -> tuple[LoopRates, ...]:
    """The rates of each executor that is described, with the caches, which all have."""
    if values is None:
        return ()
    caches = {key: value for key, value in values.items() if key not in LOOP_EXECUTORS}
    described = {each: values[each] for each in LOOP_EXECUTORS if values[each] is not None}
    return tuple(LoopRates(each, **rates, **caches) for each, rates in described.items())


def read_description(root: Node, log: ProblemLog) -> Machine | None:
    """The machine that a file describes; None where a defect was noted."""
    reading = ParseContext(log, sources=[])
    fields = _MACHINE.fields(root, reading.root)
    _check_parts(fields)
    if log.problems:
        return None
    machine = _machine(fields, reading)
    return None if log.problems else machine


# -- what stands in the file -----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class _Space:
    """The figures of a space."""

    banks: int
    bank_nbytes: int
    base: int
    reserved_bottom_nbytes: int
    reserved_top_nbytes: int
    alignment: int
    granule: int | None
    policy: str
    place: SourceLocation

    @property
    def shape(self) -> SpaceShape:
        """It as machines have it: its usable addresses, less what is reserved at either end."""
        return SpaceShape(
            self.banks,
            self.base + self.reserved_bottom_nbytes,
            self.bank_nbytes - self.reserved_top_nbytes,
            self.alignment,
            self.granule or 0,
            Policy(self.policy),
        )


#: What a process has addresses for.
_MOST_NBYTES = 1 << 46


def _check_space(space: _Space, place: SourceLocation) -> None:
    shape = space.shape
    base, limit, granule = shape.base, shape.limit, shape.granule
    what = "alignment" if space.granule is None else "granule"
    if shape.alignment & (shape.alignment - 1):
        place.at("alignment").note("alignment", f"{shape.alignment} is no power of two")
    elif granule % shape.alignment:
        detail = f"{granule} is no multiple of the alignment {shape.alignment}"
        place.at("granule").note("granule", detail)
    elif base >= limit:
        sizes = (
            f"(bank_nbytes {space.bank_nbytes} - reserved_top_nbytes {space.reserved_top_nbytes})"
        )
        detail = f"base {base} leaves no room below the limit {limit} {sizes}"
        place.at("base").note("no_room", detail)
    elif space.bank_nbytes > (most := min(granule * MOST_GRANULES, _MOST_NBYTES // space.banks)):
        detail = f"{space.bank_nbytes} bytes a bank are more than can be simulated, {most}"
        place.at("bank_nbytes").note("out_of_range", detail)
    elif base % granule or limit % granule:
        detail = (
            f"usable addresses [{base}, {limit}) must start and end at a multiple of the "
            f"{what} {granule}"
        )
        place.at("base" if base % granule else "bank_nbytes").note(what, detail)


_SPACE = Schema(
    "a space",
    _Space,
    Field("banks", Whole(1), needed=True),
    Field("bank_nbytes", Whole(1), needed=True),
    Field("base", Whole(0), default=0),
    Field("reserved_bottom_nbytes", Whole(0), default=0),
    Field("reserved_top_nbytes", Whole(0), default=0),
    Field("alignment", Whole(1), needed=True),
    Field("granule", Whole(1)),
    Field("policy", Choice(("best_fit", "first_fit")), default=Policy.BEST_FIT.value),
    check=_check_space,
)


_MACHINE = Schema(
    "a machine",
    as_written,
    Field("name", Word("a name", is_text=True), needed=True),
    Field("description", Word("a sentence", is_text=True)),
    Field("core_grid", GridKind(), needed=True),
    Field("host", _SPACE, needed=True),
    Field("dram", _SPACE),
    Field("l1", _SPACE),
    Field("noc", NOC),
    Field("compute", COMPUTE),
    Field("loops", LOOPS),
    Field("paths", ListOf(PATH, "a list of paths"), needed=True, default=()),
)
MACHINE_KEYS = _MACHINE.keys


# -- what has to fit each other --------------------------------------------------------------------


def _check_parts(fields: FormValues) -> None:
    """Notes parts that do not fit each other, as far as they are sound by themselves."""
    place, values = fields.place, fields.values
    present = {key for key, node in place.nodes.items() if node.data is not None}
    l1, grid, noc = values["l1"], values["core_grid"], values["noc"]
    if l1 is not None and grid is not None and l1.banks != grid[0] * grid[1]:
        detail = f"L1 has one bank for each core: {grid[0] * grid[1]} of core_grid, not {l1.banks}"
        l1.place.at("banks").note("banks_per_core", detail)
    if "l1" in present and "dram" not in present:
        place.at("dram").note("missing_key", "a machine with L1 needs DRAM, to evict to")
    spaces = tuple(s.value for s in Space if s is Space.HOST or s.value in present)
    seen: set[tuple[str, str]] = set()
    for path in values["paths"]:
        for key, name in (("from", path.source), ("to", path.target)):
            if name not in spaces:
                detail = f"{name!r} is no space of this machine (it has {', '.join(spaces)})"
                path.place.at(key).note("unknown_space", detail)
        if (path.source, path.target) in seen:
            path.place.note("duplicate_path", "this path is described twice")
        seen.add((path.source, path.target))
        if path.noc_links is not None and "noc" not in present:
            path.place.at("noc_links").note("rate", "the machine has no `noc` section")
        elif path.noc_links is not None and path.hops is None and not read_latency(noc, path):
            path.place.at("hops").wrong(None, NOT_NEGATIVE.wanted)
    if noc is not None and noc.routers is not None and grid is not None:
        fit = [
            ("core_rows", len(noc.routers.core_rows), "row", grid[0]),
            ("core_columns", len(noc.routers.core_columns), "column", grid[1]),
            ("dram", len(noc.routers.dram), "bank", values["dram"].banks if values["dram"] else 0),
        ]
        outer = place.inside(place.nodes["noc"], "noc")
        inner = outer.inside(outer.nodes["routers"], "noc.routers")
        for key, found, each, wanted in fit:
            if found < wanted:
                detail = f"one for each {each} is needed: {wanted}, not {found}"
                inner.at(key).note("routers", detail)


def _machine(fields: FormValues, reading: ParseContext) -> Machine:
    values = fields.values
    dram, l1 = (None if space is None else space.shape for space in (values["dram"], values["l1"]))
    if dram is not None and dram.policy is Policy.FIRST_FIT:
        dram = replace(dram, policy=Policy.FIRST_FIT_UPWARDS)
    shape = MachineShape(values["name"], values["core_grid"], values["host"].shape, l1, dram)
    paths = tuple(path_of(path, values["noc"]) for path in values["paths"])
    machine = Machine(
        shape,
        paths,
        tuple(reading.sources or ()),
        values["noc"],
        values["compute"],
        loop_rates(values["loops"]),
    )
    for source in shape.spaces:
        for target in shape.spaces:
            try:
                machine.route(source, target)
            except StitchError as error:
                fields.place.at("paths").note("unreachable", error.what)
    return machine
