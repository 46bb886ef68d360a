"""Schema of machine descriptions in YAML, and checks between their fields (format: `description`).

Bounds of numbers keep all sums of figures finite.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from stitch import plugins
from stitch.errors import StitchError
from stitch.forms import (
    Choice,
    Field,
    FieldType,
    Flag,
    FormValues,
    JsonType,
    ListOf,
    Node,
    Number,
    ParseContext,
    ProblemLog,
    Schema,
    SchemaWriter,
    SourceLocation,
    Whole,
    Word,
    as_written,
    is_word,
    json_schema,
    mapping_of,
    number_of,
)
from stitch.machine.machine import LOOP_EXECUTORS, Compute, LoopRates, Machine, Path
from stitch.machine.network import Curve, Noc, Route, Routers
from stitch.machine.shape import MOST_GRANULES, POLICIES, MachineShape, Policy, SpaceShape
from stitch.program import DataType, MathFidelity, Space

#: Bytes, operations or cycles a second, bytes a cycle.
POSITIVE = Number(least=1e-6, below=1e30, is_float=True)
#: Seconds, cycles, hops.
NOT_NEGATIVE = Number(least=0, below=1e15, is_float=True)


_Key = TypeVar("_Key", bound=enum.Enum)
_RATES = ("bytes_per_second", "curve", "noc_links")


@dataclass(eq=False, repr=False)
class PathEntry:
    """A path between two named spaces, as described."""

    source: str
    target: str
    bytes_per_second: float | None
    curve: Curve | None
    noc_links: int | None
    hops: float | None
    latency_seconds: float | None
    limit_bytes_per_second: float
    place: SourceLocation


@dataclass(eq=False, repr=False)
class _Pair(FieldType[tuple[int, int]]):
    """Two integers, each at least `least` and less than `least + 1024`."""

    least: int
    wanted: str

    def value(self, node: Node, place: SourceLocation) -> tuple[int, int] | None:
        parts = node.data if isinstance(node.data, tuple) else ()
        sizes = [part.data for part in parts if type(part.data) is int]
        if len(sizes) == len(parts) == 2 and all(0 <= n - self.least < 1024 for n in sizes):
            return (sizes[0], sizes[1])
        written = f"[{', '.join(part.raw or part.describe() for part in parts)}]"[:60]
        got = written if parts else node.describe()
        place.note("wrong_type", f"must be {self.wanted}, not {got}")
        return None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        size = {"type": "integer", "minimum": self.least, "maximum": self.least + 1023}
        return {"type": "array", "items": size, "minItems": 2, "maxItems": 2}


GRID = _Pair(1, "[rows, columns], each from 1 to 1024")


@dataclass(eq=False, repr=False)
class _Curve(FieldType[Curve]):
    """Transfer bytes and the rate at each, sizes ascending.

    Rates must not fall, unless `may_fall` (large transfers exceed the caches of a host); a larger
    transfer then still takes no less time, as rates are interpolated.
    """

    may_fall: bool = False
    wanted: str = "a mapping of transfer bytes to rates"

    def value(self, node: Node, place: SourceLocation) -> Curve | None:
        if not isinstance(node.data, Mapping) or not node.data:
            return None
        log = place.reading.log
        noted = log.noted
        points, places = [], []
        for word, written in node.data.items():
            nbytes = number_of(word)
            if not isinstance(nbytes, int) or nbytes < 1:
                detail = f"{word[:60]!r} is not a transfer size in bytes"
                place.note("out_of_range", detail, written.key_line)
                continue
            at = place.entry(str(nbytes), written)
            points.append((nbytes, POSITIVE.read(written, at) or 1.0))
            places.append(at)
        if log.noted == noted:
            self._check_rising(points, places)
        return tuple(points) if log.noted == noted else None

    def _check_rising(self, points: list[tuple[int, float]], places: list[SourceLocation]) -> None:
        for (a, b), at in zip(pairwise(points), places[1:], strict=True):
            if b[0] <= a[0] or (b[1] < a[1] and not self.may_fall):
                detail = f"{b[0]} bytes at {b[1]:g} must not follow {a[0]} bytes at {a[1]:g}"
                also = "" if self.may_fall else ", and rates must not fall"
                at.note("not_rising", f"{detail}: sizes must ascend{also}")

    def json_type(self, writer: SchemaWriter) -> JsonType:
        rate = writer.value(POSITIVE.json_type(writer), is_needed=True)
        return mapping_of(rate, r"\d[\d_]*", minProperties=1)


def _check_routers(routers: Routers, place: SourceLocation) -> None:
    rows, columns = routers.grid
    for key, given, most in (("core_rows", routers.core_rows, rows),
                             ("core_columns", routers.core_columns, columns)):  # fmt: skip
        if any(at >= most for at in given) or len(set(given)) < len(given):
            place.at(key).note("routers", f"must be different numbers below {most}")
    if any(row >= rows or column >= columns for row, column in routers.dram):
        place.at("dram").note(
            "routers", f"must be inside the grid of {rows} rows and {columns} columns"
        )


def _check_path(path: PathEntry, place: SourceLocation) -> None:
    given = [key for key in _RATES if getattr(path, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        place.note("rate", f"exactly one of {', '.join(_RATES)} is needed, not {got}")
    elif path.noc_links is None:
        if path.hops is not None:
            place.at("hops").note("rate", "hops require noc_links")
        if path.latency_seconds is None:
            place.at("latency_seconds").wrong(None, NOT_NEGATIVE.wanted)
    else:
        if path.latency_seconds is not None:
            detail = "is computed from the hops of a path over the NoC"
            place.at("latency_seconds").note("rate", detail)


def _rates_by(
    members: Iterable[_Key], number: Number = POSITIVE, *, needed: bool = False
) -> Schema[tuple[tuple[_Key, float], ...]]:
    """Schema of numbers by members of an enumeration."""
    by_name = {str(member.value): member for member in members}

    def given(**rates: float | None) -> tuple[tuple[_Key, float], ...]:
        return tuple((by_name[name], rate) for name, rate in rates.items() if rate is not None)

    return Schema(given, *(Field(name, number, needed=needed) for name in by_name))


_ROUTERS = Schema(
    Routers,
    Field("grid", GRID, needed=True),
    Field("core_rows", ListOf(Whole(0), "a list of rows"), needed=True),
    Field("core_columns", ListOf(Whole(0), "a list of columns"), needed=True),
    Field(
        "dram",
        ListOf(
            _Pair(0, "[row, column], each from 0 to 1023"), "a list of positions, one for each bank"
        ),
        default=(),
    ),
    check=_check_routers,
)
NOC = Schema(
    Noc,
    Field("clock_hz", POSITIVE, needed=True),
    Field("bytes_per_cycle", _Curve(), into="curve", needed=True),
    Field("latency_cycles", NOT_NEGATIVE, needed=True),
    Field("latency_cycles_per_hop", NOT_NEGATIVE, needed=True),
    Field("read_latency_cycles", _rates_by(Route), into="read_latency", default=()),
    Field("link_bytes_per_cycle", POSITIVE, into="link"),
    Field("core_bytes_per_cycle", POSITIVE, into="core"),
    Field("dram_bytes_per_cycle", POSITIVE, into="dram"),
    Field("dram_queueing", Number(least=1, is_float=True), default=1.0),
    Field("turns", NOT_NEGATIVE, default=0.0),
    Field("routers", _ROUTERS, only_with="link_bytes_per_cycle"),
)


PATH = Schema(
    PathEntry,
    Field("from", Word("the name of a space"), into="source", needed=True),
    Field("to", Word("the name of a space"), into="target", needed=True),
    Field("bytes_per_second", POSITIVE),
    Field("curve", _Curve(may_fall=True)),
    Field("noc_links", Whole(1)),
    Field("hops", NOT_NEGATIVE),
    Field("latency_seconds", NOT_NEGATIVE),
    Field("limit_bytes_per_second", POSITIVE, default=math.inf),
    check=_check_path,
)


def path_of(path: PathEntry, noc: Noc | None) -> tuple[Space, Space, Path]:
    """Return a path as `Machine` has it, and its spaces."""
    limit = path.limit_bytes_per_second
    if path.noc_links is not None:
        assert noc is not None, "it was checked"
        hops = path.hops
        cycles = read_latency(noc, path) if hops is None else noc.write_latency_cycles(hops)
        assert cycles is not None, "it was checked"
        scale = path.noc_links * noc.clock_hz
        curve = tuple((nbytes, rate * scale) for nbytes, rate in noc.curve)
        cost = Path(cycles / noc.clock_hz, curve, limit, path.noc_links)
    else:
        curve = path.curve or ((1, path.bytes_per_second or 1.0),)
        cost = Path(path.latency_seconds or 0.0, curve, limit)
    return Space(path.source), Space(path.target), cost


def read_latency(noc: Noc | None, path: PathEntry) -> float | None:
    """Return the cycles of raw reads without hops: the first bytes, and the barrier after them.

    The barrier is not published; a read within the core is assumed.
    """
    if noc is None:
        return None
    own = noc.read_latency_cycles(Route.CORE)
    found = own if path.source == path.target else noc.read_latency_cycles(Route.BOTH)
    return None if own is None or found is None else found + own


_FIDELITIES = tuple(kind for kind in MathFidelity if kind is not MathFidelity.BY_TYPE)

#: Operands of types with different fidelities.
_MIXED = "mixed"


def _fidelities(**named: str | None) -> tuple[tuple[DataType | None, MathFidelity], ...]:
    return tuple(
        (None if kind == _MIXED else DataType(kind), MathFidelity(name))
        for kind, name in named.items()
        if name is not None
    )


_SHARE = Number(above=0, most=1, is_float=True)
_PASSES = _rates_by(_FIDELITIES, Number(least=1, is_float=True), needed=True)
_FIDELITY = Schema(
    _fidelities,
    *(
        Field(name, Choice(tuple(f.value for f in _FIDELITIES)))
        for name in (*(kind.value for kind in DataType), _MIXED)
    ),
)
#: L1 is not shared.
_SHARED = _rates_by((Space.HOST, Space.DRAM))
COMPUTE = Schema(
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


_EXECUTOR = Schema(
    as_written,
    Field("has_views", Flag(), needed=True),
    Field("copies_elements", Flag(), needed=True),
    *(
        Field(f"{what}_seconds", NOT_NEGATIVE, needed=True)
        for what in ("loop", "round", "element", "operation", "function", "movement", "matrix")
    ),
    Field("flops_per_second", POSITIVE, needed=True),
    Field("packed_flops_per_second", POSITIVE, needed=True),
)
LOOPS = Schema(
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
    """Return the rates of each described executor, with the common cache figures."""
    if values is None:
        return ()
    caches = {key: value for key, value in values.items() if key not in LOOP_EXECUTORS}
    described = {each: values[each] for each in LOOP_EXECUTORS if values[each] is not None}
    return tuple(LoopRates(each, **rates, **caches) for each, rates in described.items())


def read_description(root: Node, log: ProblemLog) -> Machine | None:
    """Return the machine that a file describes; None if a problem was found."""
    reading = ParseContext(log, sources=[])
    fields = _MACHINE.fields(root, reading.root)
    _check_parts(fields)
    if log.problems:
        return None
    machine = _machine(fields, reading)
    return None if log.problems else machine


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
        """The usable addresses: without the reserved regions at both ends."""
        return SpaceShape(
            self.banks,
            self.base + self.reserved_bottom_nbytes,
            self.bank_nbytes - self.reserved_top_nbytes,
            self.alignment,
            self.granule or 0,
            Policy(self.policy) if self.policy in POLICIES else Policy.BEST_FIT,
            "" if self.policy in POLICIES else self.policy,
        )


#: Limit of the address space of a process.
_MOST_NBYTES = 1 << 46


def _check_space(space: _Space, place: SourceLocation) -> None:
    shape = space.shape
    base, limit, granule = shape.base, shape.limit, shape.granule
    what = "alignment" if space.granule is None else "granule"
    if shape.alignment & (shape.alignment - 1):
        place.at("alignment").note("alignment", f"{shape.alignment} is not a power of two")
    elif granule % shape.alignment:
        detail = f"{granule} is not a multiple of the alignment {shape.alignment}"
        place.at("granule").note("granule", detail)
    elif base >= limit:
        sizes = (
            f"(bank_nbytes {space.bank_nbytes} - reserved_top_nbytes {space.reserved_top_nbytes})"
        )
        detail = f"base {base} is not below the limit {limit} {sizes}"
        place.at("base").note("no_room", detail)
    elif space.bank_nbytes > (most := min(granule * MOST_GRANULES, _MOST_NBYTES // space.banks)):
        detail = f"{space.bank_nbytes} bytes per bank exceed what can be simulated, {most}"
        place.at("bank_nbytes").note("out_of_range", detail)
    elif base % granule or limit % granule:
        detail = (
            f"usable addresses [{base}, {limit}) must start and end at a multiple of the "
            f"{what} {granule}"
        )
        place.at("base" if base % granule else "bank_nbytes").note(what, detail)


@dataclass(eq=False, repr=False)
class _PluginOr(FieldType[str]):
    """One of Stitch's words, or the name of a plugin."""

    kind: str
    words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.wanted = "the name of a plugin"
        if self.words:
            self.wanted = f"{' or '.join(self.words)}, or {self.wanted}"

    def value(self, node: Node, place: SourceLocation) -> str | None:
        if is_word(node) and (node.raw in self.words or node.raw in plugins.names(self.kind)):
            return node.raw
        place.unknown_word(node, (*self.words, *plugins.names(self.kind)))
        return None


_SPACE = Schema(
    _Space,
    Field("banks", Whole(1), needed=True),
    Field("bank_nbytes", Whole(1), needed=True),
    Field("base", Whole(0), default=0),
    Field("reserved_bottom_nbytes", Whole(0), default=0),
    Field("reserved_top_nbytes", Whole(0), default=0),
    Field("alignment", Whole(1), needed=True),
    Field("granule", Whole(1)),
    Field("policy", _PluginOr("allocators", POLICIES), default=Policy.BEST_FIT.value),
    check=_check_space,
)


@dataclass(eq=False, repr=False)
class _Overrides(FieldType[Mapping[str, Node]]):
    """Figures by their dotted names, which `derived_description` has put in their places."""

    wanted: str = "a mapping of figures, such as {l1.bank_nbytes: 524288}"

    def value(self, node: Node, place: SourceLocation) -> Mapping[str, Node] | None:
        return node.data if isinstance(node.data, Mapping) else None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"type": "object", "additionalProperties": {}}


_MACHINE = Schema(
    as_written,
    Field("name", Word("a name", is_text=True), needed=True),
    Field("description", Word("a sentence", is_text=True)),
    Field("base", Word("the name of a machine, or the path of a description", is_text=True)),
    Field("overrides", _Overrides(), only_with="base"),
    Field("core_grid", GRID, needed_without="base"),
    Field("host", _SPACE, needed_without="base"),
    Field("dram", _SPACE),
    Field("l1", _SPACE),
    Field("noc", NOC),
    Field("compute", COMPUTE),
    Field("loops", LOOPS),
    Field("residency", _PluginOr("residency"), default=""),
    Field("paths", ListOf(PATH, "a list of paths"), needed_without="base", default=()),
)
MACHINE_KEYS = _MACHINE.keys


def machine_json_schema() -> JsonType:
    """Return the JSON Schema of machine descriptions."""
    return json_schema(_MACHINE, "A machine for Stitch", has_sources=True)


def _check_parts(fields: FormValues) -> None:
    """Report sections that contradict each other."""
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
                detail = f"{name!r} is not a space of this machine (it has {', '.join(spaces)})"
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
        outer = place.at("noc").inside(place.nodes["noc"])
        inner = outer.at("routers").inside(outer.nodes["routers"])
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
        values["residency"],
    )
    for source in shape.spaces:
        for target in shape.spaces:
            try:
                machine.route(source, target)
            except StitchError as error:
                fields.place.at("paths").note("unreachable", error.what)
    return machine
