"""The form of a machine's description, and what of it has to fit each other.

Comes in: the nodes of a file. Goes out: a `Machine`, or None after every defect was noted. The form
is shown in `description`. Must not know: files, what figures are used for.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from stitch.errors import StitchError
from stitch.forms import (
    Choice,
    Form,
    FormValues,
    Kind,
    ListOf,
    Node,
    Number,
    Place,
    ProblemLog,
    Reading,
    Row,
    Whole,
    Word,
    as_written,
    number_of,
)
from stitch.machine.loop_form import LOOPS, loop_rates
from stitch.machine.machine import Compute, Machine, Path
from stitch.machine.network import Curve, Noc, Route, Routers
from stitch.machine.shape import MachineShape, Policy, SpaceShape
from stitch.program import DataType, Space


def read_description(root: Node, log: ProblemLog) -> Machine | None:
    """The machine that a file describes; None where a defect was noted."""
    reading = Reading(log, sources=[])
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
    place: Place

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


@dataclass(eq=False, repr=False)
class _Path:
    """A path between two spaces, by their names, and the figures that it is given."""

    source: str
    target: str
    bytes_per_second: float | None
    curve: Curve | None
    noc_links: int | None
    hops: float | None
    latency_seconds: float | None
    limit_bytes_per_second: float
    place: Place


class _Grid(Kind[tuple[int, int]]):
    """Rows and columns."""

    wanted = "[rows, columns], each from 1 to 1024"

    def value(self, node: Node, place: Place) -> tuple[int, int] | None:
        parts = node.data if isinstance(node.data, tuple) else ()
        sizes = [p.data for p in parts if isinstance(p.data, int) and not isinstance(p.data, bool)]
        if len(sizes) == len(parts) == 2 and all(1 <= size <= 1024 for size in sizes):
            return (sizes[0], sizes[1])
        written = f"[{', '.join(part.raw or part.describe() for part in parts)}]"[:60]
        got = written if parts else node.describe()
        place.note("wrong_type", f"must be {self.wanted}, not {got}")
        return None


class _Position(Kind[tuple[int, int]]):
    """A router: its row and column."""

    wanted = "[row, column], each from 0 to 1023"

    def value(self, node: Node, place: Place) -> tuple[int, int] | None:
        parts = node.data if isinstance(node.data, tuple) else ()
        sizes = [part.data for part in parts if type(part.data) is int and 0 <= part.data < 1024]
        return (sizes[0], sizes[1]) if len(sizes) == len(parts) == 2 else None


class _Curve(Kind[Curve]):
    """Transfer bytes and the rate at them: at least one point, sizes and rates rising."""

    wanted = "a mapping of transfer bytes to rates"

    def value(self, node: Node, place: Place) -> Curve | None:
        if not isinstance(node.data, Mapping) or not node.data:
            return None
        log = place.reading.log
        noted = log.noted
        points, places = [], []
        for word, written in node.data.items():
            nbytes = number_of(word)
            if not isinstance(nbytes, int) or nbytes < 1:
                detail = f"{word[:60]!r} is no size of a transfer"
                place.note("out_of_range", detail, written.key_line)
                continue
            at = place.entry(str(nbytes), written)
            points.append((nbytes, _POSITIVE.read(written, at) or 1.0))
            places.append(at)
        if log.noted == noted:
            self._check_rising(points, places)
        return tuple(points) if log.noted == noted else None

    def _check_rising(self, points: list[tuple[int, float]], places: list[Place]) -> None:
        for (a, b), at in zip(pairwise(points), places[1:], strict=True):
            if b[0] <= a[0] or b[1] < a[1]:
                detail = f"{b[0]} bytes at {b[1]:g} must not follow {a[0]} bytes at {a[1]:g}"
                at.note("not_rising", f"{detail}: sizes rise, and rates do not fall")


def _check_space(space: _Space, place: Place) -> None:
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
    elif base % granule or limit % granule:
        detail = (
            f"usable addresses [{base}, {limit}) must start and end at a multiple of the "
            f"{what} {granule}"
        )
        place.at("base" if base % granule else "bank_nbytes").note(what, detail)


def _check_routers(routers: Routers, place: Place) -> None:
    rows, columns = routers.grid
    for key, given, most in (("core_rows", routers.core_rows, rows),
                             ("core_columns", routers.core_columns, columns)):  # fmt: skip
        if any(at >= most for at in given) or len(set(given)) < len(given):
            place.at(key).note("routers", f"must be different numbers below {most}")
    if any(row >= rows or column >= columns for row, column in routers.dram):
        place.at("dram").note("routers", f"there are {rows} rows and {columns} columns")


def _check_path(path: _Path, place: Place) -> None:
    given = [key for key in _RATES if getattr(path, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        place.note("rate", f"exactly one of {', '.join(_RATES)} is needed, not {got}")
    elif path.noc_links is None:
        if path.hops is not None:
            place.at("hops").note("rate", "hops belong to a path with noc_links")
        if path.latency_seconds is None:
            place.at("latency_seconds").wrong(None, _NOT_NEGATIVE.wanted)
    else:
        if path.latency_seconds is not None:
            detail = "the latency of a path over the NoC follows from its hops"
            place.at("latency_seconds").note("rate", detail)


def _ends(node: Node) -> str:
    """How paths are told apart."""
    ends = node.data if isinstance(node.data, Mapping) else {}
    if all(key in ends and isinstance(ends[key].data, str) for key in ("from", "to")):
        return f"({ends['from'].raw}->{ends['to'].raw})"
    return ""


_Key = TypeVar("_Key", bound=enum.Enum)
_RATES = ("bytes_per_second", "curve", "noc_links")
_POSITIVE = Number(above=0, is_float=True)
_NOT_NEGATIVE = Number(least=0, is_float=True)
_SPACE = Form(
    "a space",
    _Space,
    Row("banks", Whole(1), needed=True),
    Row("bank_nbytes", Whole(1), needed=True),
    Row("base", Whole(0), default=0),
    Row("reserved_bottom_nbytes", Whole(0), default=0),
    Row("reserved_top_nbytes", Whole(0), default=0),
    Row("alignment", Whole(1), needed=True),
    Row("granule", Whole(1)),
    Row("policy", Choice(("best_fit", "first_fit")), default=Policy.BEST_FIT.value),
    check=_check_space,
)


def _rates(kind: type[_Key], what: str) -> Form[tuple[tuple[_Key, float], ...]]:
    """Positive rates by the members of an enumeration, as far as they are given."""

    def given(**rates: float | None) -> tuple[tuple[_Key, float], ...]:
        return tuple((kind(name), rate) for name, rate in rates.items() if rate is not None)

    return Form(what, given, *(Row(member.value, _POSITIVE) for member in kind))


_ROUTERS = Form(
    "the routers",
    Routers,
    Row("grid", _Grid(), needed=True),
    Row("core_rows", ListOf(Whole(0), "a list of rows"), needed=True),
    Row("core_columns", ListOf(Whole(0), "a list of columns"), needed=True),
    Row("dram", ListOf(_Position(), "a list of positions, one for each bank"), default=()),
    check=_check_routers,
)
_NOC = Form(
    "the NoC",
    Noc,
    Row("clock_hz", _POSITIVE, needed=True),
    Row("bytes_per_cycle", _Curve(), into="curve", needed=True),
    Row("latency_cycles", _NOT_NEGATIVE, needed=True),
    Row("latency_cycles_per_hop", _NOT_NEGATIVE, needed=True),
    Row("read_latency_cycles", _rates(Route, "the routes"), into="read_latency", default=()),
    Row("link_bytes_per_cycle", _POSITIVE, into="link"),
    Row("core_bytes_per_cycle", _POSITIVE, into="core"),
    Row("dram_bytes_per_cycle", _POSITIVE, into="dram"),
    Row("dram_queueing", Number(least=1, is_float=True), default=1.0),
    Row("turns", _NOT_NEGATIVE, default=0.0),
    Row("routers", _ROUTERS, only_with="link_bytes_per_cycle"),
)


_COMPUTE = Form(
    "compute",
    Compute,
    Row("launch_seconds", _NOT_NEGATIVE, needed=True),
    Row("flops_per_second", _rates(DataType, "the types"), default=()),
    Row("other_flops_per_second", _POSITIVE, needed=True),
    Row("bytes_per_second", _rates(Space, "the spaces"), default=()),
)
_PATH = Form(
    "a path",
    _Path,
    Row("from", Word("the name of a space"), into="source", needed=True),
    Row("to", Word("the name of a space"), into="target", needed=True),
    Row("bytes_per_second", _POSITIVE),
    Row("curve", _Curve()),
    Row("noc_links", Whole(1)),
    Row("hops", _NOT_NEGATIVE),
    Row("latency_seconds", _NOT_NEGATIVE),
    Row("limit_bytes_per_second", _POSITIVE, default=math.inf),
    check=_check_path,
    suffix=_ends,
)
_MACHINE = Form(
    "a machine",
    as_written,
    Row("name", Word("a name", is_text=True), needed=True),
    Row("description", Word("a sentence", is_text=True)),
    Row("core_grid", _Grid(), needed=True),
    Row("host", _SPACE, needed=True),
    Row("dram", _SPACE),
    Row("l1", _SPACE),
    Row("noc", _NOC),
    Row("compute", _COMPUTE),
    Row("loops", LOOPS),
    Row("paths", ListOf(_PATH, "a list of paths"), needed=True, default=()),
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
        elif path.noc_links is not None and path.hops is None and not _read_latency(noc, path):
            path.place.at("hops").wrong(None, _NOT_NEGATIVE.wanted)
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


def _machine(fields: FormValues, reading: Reading) -> Machine:
    values = fields.values
    dram, l1 = (None if space is None else space.shape for space in (values["dram"], values["l1"]))
    if dram is not None and dram.policy is Policy.FIRST_FIT:
        dram = replace(dram, policy=Policy.FIRST_FIT_UPWARDS)
    shape = MachineShape(values["name"], values["core_grid"], values["host"].shape, l1, dram)
    paths = tuple(_path(path, values["noc"]) for path in values["paths"])
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


def _path(path: _Path, noc: Noc | None) -> tuple[Space, Space, Path]:
    limit = path.limit_bytes_per_second
    if path.noc_links is not None:
        assert noc is not None, "it was checked"
        hops = path.hops
        cycles = _read_latency(noc, path) if hops is None else noc.write_latency_cycles(hops)
        assert cycles is not None, "it was checked"
        scale = path.noc_links * noc.clock_hz
        curve = tuple((nbytes, rate * scale) for nbytes, rate in noc.curve)
        cost = Path(cycles / noc.clock_hz, curve, limit, path.noc_links)
    else:
        curve = path.curve or ((1, path.bytes_per_second or 1.0),)
        cost = Path(path.latency_seconds or 0.0, curve, limit)
    return Space(path.source), Space(path.target), cost


def _read_latency(noc: Noc | None, path: _Path) -> float | None:
    """Cycles that raw reads wait, where a path does not tell its hops: for their first bytes, and
    for the barrier behind them, since the next may need their place. What a barrier takes is not
    published: as long as a read of the own core is assumed."""
    if noc is None:
        return None
    own = noc.read_latency_cycles(Route.CORE)
    found = own if path.source == path.target else noc.read_latency_cycles(Route.BOTH)
    return None if own is None or found is None else found + own
