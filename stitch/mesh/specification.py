"""Machine specifications: devices, and the links between them.

A specification is a number of equal devices, or a YAML file::

    name: two                             # default: the file's name without suffix
    devices:                              # 1 to 64
      left:  {machine: wormhole_n150}     # or machine.yaml, system.ttsys:0, relative to this file
      right: {machine: wormhole_n150, node: box-2}    # optional: the label of a node
    links:                                # default of each pair: 10 us and 10 GB/s, assumed
      - {from: left, to: right, latency_seconds: 3.0e-6, bytes_per_second: 11.0e+9,
         source: "measured, 2026-05-04"}
      - {from: right, to: left, like: 0}  # the figures of link 0 of this list
      # or, for bytes_per_second, a curve of [bytes, seconds], both rising:
      # {.., curve: [[4096, 1.5e-5], [1048576, 1.1e-4]]}

A link goes one way. A transfer takes its latency and then `bytes / bytes_per_second`, or the
seconds of `curve`: linear between the points, constant below the first, on with the last slope
above the last. `source` says where the figures come from. `like` names an earlier link.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from os import PathLike
from pathlib import Path
from types import MappingProxyType

from stitch.argument_kinds import PATH, WHOLE, either, instance_of, takes
from stitch.errors import StitchError, UsageError, closest
from stitch.forms import (
    Entries,
    Field,
    FieldType,
    JsonType,
    NameOrPath,
    Node,
    Number,
    ParseContext,
    Schema,
    SchemaWriter,
    SourceLocation,
    Whole,
    Word,
    as_written,
    form_text,
    is_name,
    json_schema,
    read_yaml,
)
from stitch.machine import Machine, load_machine

MAX_DEVICES = 64
#: Of pairs of devices without a link in the file: about what one network card gives.
DEFAULT_LATENCY_SECONDS = 10e-6
DEFAULT_BYTES_PER_SECOND = 10e9
DEFAULT_PROVENANCE = "assumed: the default of links that no specification describes"

TransferCurve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Link:
    """A link from one device to another; `provenance` says where its figures come from.

    It has either `bytes_per_second` or a `curve` of (bytes, seconds), without the latency.

    >>> Link("left", "right", 1.0, bytes_per_second=100.0).seconds(200)
    3.0
    >>> curved = Link("left", "right", 1.0, curve=((100, 1.0), (300, 2.0)))
    >>> [curved.seconds(nbytes) for nbytes in (50, 200, 500)]
    [2.0, 2.5, 4.0]
    """

    source: str
    target: str
    latency_seconds: float
    bytes_per_second: float | None = None
    curve: TransferCurve | None = None
    provenance: str = ""

    def __post_init__(self) -> None:
        where = f"the link {self.source} -> {self.target}"
        if not 0 <= self.latency_seconds < math.inf:
            raise UsageError(
                f"{where} has no possible latency", expected="finite seconds of at least 0",
                got=f"{self.latency_seconds!r}",
            )  # fmt: skip
        if (self.bytes_per_second is None) == (self.curve is None):
            got = "neither" if self.curve is None else "both"
            raise UsageError(f"{where} needs bytes_per_second or a curve, one of them", got=got)
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise UsageError(
                f"{where} has no possible rate", expected="bytes per second above 0",
                got=f"{self.bytes_per_second!r}",
            )  # fmt: skip
        if self.curve is not None and not is_transfer_curve(self.curve):
            raise UsageError(f"the curve of {where} is malformed", expected=_CURVE_WANTED,
                             got=f"{self.curve!r}"[:80])  # fmt: skip

    def seconds(self, nbytes: int) -> float:
        """Return the simulated seconds of a transfer, with the latency."""
        if self.curve is None:
            assert self.bytes_per_second is not None, "checked"
            return self.latency_seconds + nbytes / self.bytes_per_second
        (before, low), (after, high) = next(
            (two for two in pairwise(self.curve) if nbytes <= two[1][0]), self.curve[-2:]
        )
        carried = low + (high - low) * max(0, nbytes - before) / (after - before)
        return self.latency_seconds + carried


def is_transfer_curve(curve: Sequence[tuple[int, float]]) -> bool:
    """Return whether bytes and seconds rise from point to point, of at least two."""
    return (
        len(curve) >= 2
        and curve[0][0] >= 1
        and curve[0][1] >= 0
        and all(a[0] < b[0] and a[1] < b[1] < math.inf for a, b in pairwise(curve))
    )


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device of a specification: its machine, and the label of the node where it runs."""

    machine: Machine
    node: str | None = None


@dataclass(frozen=True, slots=True)
class MachineSpecification:
    """Named devices and the links between them, in the order of the file.

    >>> two = MachineSpecification.of(2, "tiny")
    >>> tuple(two.devices), two.link("device0", "device1").latency_seconds
    (('device0', 'device1'), 1e-05)
    """

    name: str
    devices: Mapping[str, DeviceEntry]
    links: tuple[Link, ...] = ()
    _by_ends: Mapping[tuple[str, str], Link] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= len(self.devices) <= MAX_DEVICES:
            raise UsageError(
                f"the machine specification {self.name!r} has {len(self.devices)} devices",
                expected=f"1 to {MAX_DEVICES}",
            )
        ends = [(link.source, link.target) for link in self.links]
        for index, _, _, detail in link_defects(self.devices, ends):
            raise UsageError(f"link {index} of the machine specification {self.name!r}: {detail}")
        object.__setattr__(self, "devices", MappingProxyType(dict(self.devices)))
        object.__setattr__(self, "_by_ends", dict(zip(ends, self.links, strict=True)))

    @classmethod
    @takes(devices=WHOLE)
    def of(
        cls, devices: int = 2, machine: str | Path | Machine = "wormhole_n150"
    ) -> MachineSpecification:
        """Return a specification of equal devices `device0`, `device1`, ... with default links.

        Raises:
            UsageError: Fewer than 1 or more than 64 devices, or no such machine.
        """
        if not 1 <= devices <= MAX_DEVICES:
            raise UsageError(
                "this number of devices is not possible", expected=f"1 to {MAX_DEVICES}",
                got=str(devices),
            )  # fmt: skip
        entry = DeviceEntry(load_machine(machine))
        named = {f"device{number}": entry for number in range(devices)}
        return cls(f"{devices} {entry.machine.shape.name}", named)

    @classmethod
    @takes(path=PATH)
    def from_yaml(cls, path: str | Path) -> MachineSpecification:
        """Read a YAML file; raise `FormatError` that lists every defect."""
        path = Path(path)
        text = form_text(path, _WHAT, str(path))
        root, log = read_yaml(text, path.name)
        return _read(root, ParseContext(log, path.parent))

    def entry(self, device: str) -> DeviceEntry:
        """Return a device by name; raise `UsageError` for an unknown one."""
        found = self.devices.get(device)
        if found is None:
            near = closest(device, self.devices, "; ")
            raise UsageError(
                f"the machine specification {self.name!r} has no device {device!r}{near}",
                expected="one of " + ", ".join(self.devices),
            )
        return found

    def link(self, source: str, target: str) -> Link:
        """Return the link between two devices; a default link if none is described."""
        found = self._by_ends.get((source, target))
        return found or Link(
            source, target, DEFAULT_LATENCY_SECONDS, DEFAULT_BYTES_PER_SECOND,
            provenance=DEFAULT_PROVENANCE,
        )  # fmt: skip


@takes(devices=either(WHOLE, PATH, instance_of("a MachineSpecification", MachineSpecification)))
def specification_of(
    devices: int | str | Path | MachineSpecification,
    machine: str | Path | Machine = "wormhole_n150",
) -> MachineSpecification:
    """Return the specification of a number of devices (also as text), or of a file.

    Args:
        devices: As of `devices=` and `--devices`: 2, "2", "two.yaml", or a specification.
        machine: The machine of each device, where `devices` is a number.

    Raises:
        UsageError: An impossible number of devices, or no such machine.
        FormatError: The file is missing or malformed; lists all defects.
    """
    if isinstance(devices, MachineSpecification):
        return devices
    if isinstance(devices, str) and devices.strip().lstrip("+-").isdecimal():
        devices = int(devices)
    if isinstance(devices, str) and not Path(devices).exists() and not Path(devices).suffix:
        raise UsageError(
            f"there is no machine specification {devices!r}", expected="a YAML file, or a number",
            remedy=f"two devices of one machine: devices=2, machine={devices!r}",
        )  # fmt: skip
    if isinstance(devices, str | PathLike):
        return MachineSpecification.from_yaml(devices)
    return MachineSpecification.of(devices, machine)


def link_defects(
    devices: Collection[str], ends: Sequence[tuple[str, str] | None]
) -> Iterator[tuple[int, str, str, str]]:
    """Yield (index, key, kind, detail) for each defect of links' ends; None is skipped."""
    seen: dict[tuple[str, str], int] = {}
    for index, pair in enumerate(ends):
        if pair is None:
            continue
        for key, device in zip(("from", "to"), pair, strict=True):
            if device not in devices:
                near = closest(device, devices, "; ")
                detail = f"there is no device {device!r} (there are {', '.join(devices)}){near}"
                yield index, key, "unknown_device", detail
        if pair[0] == pair[1]:
            yield index, "to", "self_link", f"must be another device than `from`, {pair[0]!r}"
        first = seen.setdefault(pair, index)
        if first != index:
            detail = f"the link from {pair[0]!r} to {pair[1]!r} is link {first} already"
            yield index, "from", "duplicate_link", detail


# The file.

_WHAT = "machine specification"
_CURVE_WANTED = "at least two pairs [bytes, seconds], both rising"
_SECONDS = Number(least=0, below=1e15, is_float=True)
_RATE = Number(above=0, below=1e30, is_float=True)


class _MachineOf(FieldType[Machine]):
    """A machine by name, or by a path relative to the file."""

    wanted = "the name of a machine, or the path of its .yaml or .ttsys"

    def value(self, node: Node, place: SourceLocation) -> Machine | None:
        named = NameOrPath(self.wanted).value(node, place)
        if named is None:
            return None
        try:
            return load_machine(named)
        except StitchError as error:
            place.note("bad_machine", str(error))
            return None


class _Curve(FieldType[TransferCurve]):
    """Pairs of bytes and seconds."""

    wanted = _CURVE_WANTED

    def value(self, node: Node, place: SourceLocation) -> TransferCurve | None:
        points: list[tuple[int, float]] = []
        for index, pair in enumerate(node.data if isinstance(node.data, tuple) else ()):
            at, parts = place.item(index, pair), pair.data
            if not isinstance(parts, tuple) or len(parts) != 2:
                at.wrong(pair, "a pair [bytes, seconds]")
                return None
            nbytes, seconds = Whole(1).read(parts[0], at), _SECONDS.read(parts[1], at)
            if nbytes is None or seconds is None:
                return None
            points.append((nbytes, seconds))
        if points and not is_transfer_curve(points):
            place.note("not_rising", f"must be {self.wanted}")
        return tuple(points) or None

    def json_type(self, writer: SchemaWriter) -> JsonType:
        pair = [Whole(1).json_type(writer), _SECONDS.json_type(writer)]
        point = {"type": "array", "prefixItems": pair, "minItems": 2, "maxItems": 2}
        return {"type": "array", "items": point, "minItems": 2}


@dataclass(frozen=True, slots=True)
class _LinkEntry:
    """A link as described."""

    source: str
    target: str
    latency_seconds: float | None
    bytes_per_second: float | None
    curve: TransferCurve | None
    provenance: str | None
    like: int | None
    place: SourceLocation


def _check_figures(link: _LinkEntry, place: SourceLocation) -> None:
    rates = [key for key in ("bytes_per_second", "curve") if getattr(link, key) is not None]
    if link.like is not None:
        for key in (*rates, "latency_seconds"):
            if key in place.nodes:
                place.at(key).note("misplaced_key", "must be left out: `like` gives the figures")
        return
    if link.latency_seconds is None:
        place.at("latency_seconds").wrong(None, _SECONDS.wanted)
    if len(rates) != 1:
        got = " and ".join(rates) or "none"
        place.note("rate", f"exactly one of bytes_per_second, curve is needed, not {got}")


_LINK = Schema(
    _LinkEntry,
    Field("from", Word("the name of a device"), into="source", needed=True),
    Field("to", Word("the name of a device"), into="target", needed=True),
    Field("latency_seconds", _SECONDS),
    Field("bytes_per_second", _RATE),
    Field("curve", _Curve()),
    Field("source", Word("a text", is_text=True), into="provenance"),
    Field("like", Whole(0)),
    check=_check_figures,
)


class _Links(FieldType[tuple[_LinkEntry | None, ...]]):
    """A list of links; a defective one is None, so that the others keep their indices."""

    wanted = "a list of links"

    def value(self, node: Node, place: SourceLocation) -> tuple[_LinkEntry | None, ...] | None:
        if not isinstance(node.data, tuple):
            return None
        return tuple(_LINK.read(item, place.item(i, item)) for i, item in enumerate(node.data))

    def json_type(self, writer: SchemaWriter) -> JsonType:
        return {"type": "array", "items": _LINK.json_type(writer)}


class _Devices(FieldType[Mapping[str, DeviceEntry | None]]):
    """Devices by name; a defective one is None, so that links may name it."""

    wanted = f"a mapping of 1 to {MAX_DEVICES} devices"
    _ENTRY = Schema(
        DeviceEntry,
        Field("machine", _MachineOf(), needed=True),
        Field("node", Word("the label of a node")),
    )

    def value(self, node: Node, place: SourceLocation) -> Mapping[str, DeviceEntry | None] | None:
        if not isinstance(node.data, Mapping) or not 1 <= len(node.data) <= MAX_DEVICES:
            return None
        for name, item in node.data.items():
            is_name(name, item.key_line, place)
        return {
            name: self._ENTRY.read(item, place.entry(name, item))
            for name, item in node.data.items()
        }

    def json_type(self, writer: SchemaWriter) -> JsonType:
        bounds = {"minProperties": 1, "maxProperties": MAX_DEVICES}
        return {**Entries(self._ENTRY).json_type(writer), **bounds}


_SPECIFICATION = Schema(
    as_written,
    Field("name", Word(), default=ParseContext.stem),
    Field("devices", _Devices(), needed=True, default=MappingProxyType({})),
    Field("links", _Links(), default=()),
)


def mesh_json_schema() -> JsonType:
    """Return the JSON Schema of machine specifications."""
    return json_schema(_SPECIFICATION, "The devices of a mesh for Stitch")


def _read(root: Node, context: ParseContext) -> MachineSpecification:
    """Return the specification of a document; raise `FormatError` with all defects."""
    values = _SPECIFICATION.fields(root, context.root).values
    entries: tuple[_LinkEntry | None, ...] = values["links"]
    links: list[Link | None] = []
    for index, entry in enumerate(entries):
        links.append(None if entry is None else _link_of(entry, index, links))
    if values["devices"]:
        ends = [None if entry is None else (entry.source, entry.target) for entry in entries]
        for index, key, kind, detail in link_defects(values["devices"], ends):
            found = entries[index]
            assert found is not None, "it has ends"
            found.place.at(key).note(kind, detail)
    context.log.raise_any(_WHAT)
    described = tuple(link for link in links if link is not None)
    return MachineSpecification(values["name"], values["devices"], described)


def _link_of(entry: _LinkEntry, index: int, before: Sequence[Link | None]) -> Link | None:
    """Return a link with its figures, from one `before` it for `like`; None after a defect."""
    if entry.like is None:
        assert entry.latency_seconds is not None, "checked"
        return Link(
            entry.source, entry.target, entry.latency_seconds, entry.bytes_per_second,
            entry.curve, entry.provenance or "",
        )  # fmt: skip
    if entry.like >= index:
        earlier = f"from 0 to {index - 1}" if index else "none precedes this link"
        detail = f"must be the index of an earlier link ({earlier}), not {entry.like}"
        entry.place.at("like").note("bad_like", detail)
        return None
    like = before[entry.like]
    if like is None:
        return None
    return replace(like, source=entry.source, target=entry.target,
                   provenance=entry.provenance or like.provenance)  # fmt: skip
