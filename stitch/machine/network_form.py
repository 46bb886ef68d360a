"""The form of a network on chip, and of the paths between spaces."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from stitch.forms import (
    Field,
    FieldType,
    ListOf,
    Node,
    Number,
    Schema,
    SourceLocation,
    Whole,
    Word,
    number_of,
)
from stitch.machine.figure_kinds import NOT_NEGATIVE, POSITIVE
from stitch.machine.machine import Path
from stitch.machine.network import Curve, Noc, Route, Routers
from stitch.program import Space

_Key = TypeVar("_Key", bound=enum.Enum)
_RATES = ("bytes_per_second", "curve", "noc_links")


@dataclass(eq=False, repr=False)
class WrittenPath:
    """A path between two spaces, by their names, and the figures that it is given."""

    source: str
    target: str
    bytes_per_second: float | None
    curve: Curve | None
    noc_links: int | None
    hops: float | None
    latency_seconds: float | None
    limit_bytes_per_second: float
    place: SourceLocation


class GridKind(FieldType[tuple[int, int]]):
    """Rows and columns."""

    wanted = "[rows, columns], each from 1 to 1024"

    def value(self, node: Node, place: SourceLocation) -> tuple[int, int] | None:
        parts = node.data if isinstance(node.data, tuple) else ()
        sizes = [p.data for p in parts if isinstance(p.data, int) and not isinstance(p.data, bool)]
        if len(sizes) == len(parts) == 2 and all(1 <= size <= 1024 for size in sizes):
            return (sizes[0], sizes[1])
        written = f"[{', '.join(part.raw or part.describe() for part in parts)}]"[:60]
        got = written if parts else node.describe()
        place.note("wrong_type", f"must be {self.wanted}, not {got}")
        return None


class _Position(FieldType[tuple[int, int]]):
    """A router: its row and column."""

    wanted = "[row, column], each from 0 to 1023"

    def value(self, node: Node, place: SourceLocation) -> tuple[int, int] | None:
        parts = node.data if isinstance(node.data, tuple) else ()
        sizes = [part.data for part in parts if type(part.data) is int and 0 <= part.data < 1024]
        return (sizes[0], sizes[1]) if len(sizes) == len(parts) == 2 else None


@dataclass(eq=False, repr=False)
class _Curve(FieldType[Curve]):
    """Transfer bytes and the rate at them: at least one point, sizes rising.

    Rates rise, too; where a curve `may_fall` (large transfers leave the caches of a host), a larger
    transfer takes no less time all the same, as between two points rates are on a line.
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
                detail = f"{word[:60]!r} is no size of a transfer"
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
                also = "" if self.may_fall else ", and rates do not fall"
                at.note("not_rising", f"{detail}: sizes rise{also}")


def _check_routers(routers: Routers, place: SourceLocation) -> None:
    rows, columns = routers.grid
    for key, given, most in (("core_rows", routers.core_rows, rows),
                             ("core_columns", routers.core_columns, columns)):  # fmt: skip
        if any(at >= most for at in given) or len(set(given)) < len(given):
            place.at(key).note("routers", f"must be different numbers below {most}")
    if any(row >= rows or column >= columns for row, column in routers.dram):
        place.at("dram").note("routers", f"there are {rows} rows and {columns} columns")


def _check_path(path: WrittenPath, place: SourceLocation) -> None:
    given = [key for key in _RATES if getattr(path, key) is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        place.note("rate", f"exactly one of {', '.join(_RATES)} is needed, not {got}")
    elif path.noc_links is None:
        if path.hops is not None:
            place.at("hops").note("rate", "hops belong to a path with noc_links")
        if path.latency_seconds is None:
            place.at("latency_seconds").wrong(None, NOT_NEGATIVE.wanted)
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


def rates_by(kind: type[_Key], what: str) -> Schema[tuple[tuple[_Key, float], ...]]:
    """Positive rates by the members of an enumeration, as far as they are given."""

    def given(**rates: float | None) -> tuple[tuple[_Key, float], ...]:
        return tuple((kind(name), rate) for name, rate in rates.items() if rate is not None)

    return Schema(what, given, *(Field(member.value, POSITIVE) for member in kind))


_ROUTERS = Schema(
    "the routers",
    Routers,
    Field("grid", GridKind(), needed=True),
    Field("core_rows", ListOf(Whole(0), "a list of rows"), needed=True),
    Field("core_columns", ListOf(Whole(0), "a list of columns"), needed=True),
    Field("dram", ListOf(_Position(), "a list of positions, one for each bank"), default=()),
    check=_check_routers,
)
NOC = Schema(
    "the NoC",
    Noc,
    Field("clock_hz", POSITIVE, needed=True),
    Field("bytes_per_cycle", _Curve(), into="curve", needed=True),
    Field("latency_cycles", NOT_NEGATIVE, needed=True),
    Field("latency_cycles_per_hop", NOT_NEGATIVE, needed=True),
    Field("read_latency_cycles", rates_by(Route, "the routes"), into="read_latency", default=()),
    Field("link_bytes_per_cycle", POSITIVE, into="link"),
    Field("core_bytes_per_cycle", POSITIVE, into="core"),
    Field("dram_bytes_per_cycle", POSITIVE, into="dram"),
    Field("dram_queueing", Number(least=1, is_float=True), default=1.0),
    Field("turns", NOT_NEGATIVE, default=0.0),
    Field("routers", _ROUTERS, only_with="link_bytes_per_cycle"),
)


PATH = Schema(
    "a path",
    WrittenPath,
    Field("from", Word("the name of a space"), into="source", needed=True),
    Field("to", Word("the name of a space"), into="target", needed=True),
    Field("bytes_per_second", POSITIVE),
    Field("curve", _Curve(may_fall=True)),
    Field("noc_links", Whole(1)),
    Field("hops", NOT_NEGATIVE),
    Field("latency_seconds", NOT_NEGATIVE),
    Field("limit_bytes_per_second", POSITIVE, default=math.inf),
    check=_check_path,
    suffix=_ends,
)


def path_of(path: WrittenPath, noc: Noc | None) -> tuple[Space, Space, Path]:
    """A path as machines have it, between its spaces."""
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


def read_latency(noc: Noc | None, path: WrittenPath) -> float | None:
    """Cycles that raw reads wait, where a path does not tell its hops: for their first bytes, and
    for the barrier behind them, since the next may need their place. What a barrier takes is not
    published: as long as a read of the own core is assumed."""
    if noc is None:
        return None
    own = noc.read_latency_cycles(Route.CORE)
    found = own if path.source == path.target else noc.read_latency_cycles(Route.BOTH)
    return None if own is None or found is None else found + own
