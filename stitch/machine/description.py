"""Machine descriptions: a YAML file → a checked `Machine`; ours and a user's work in the same way.

Comes in: the name of a machine that Stitch ships, the path of a YAML file, or a `Machine`.
Goes out: a `Machine`, or one `FormatError` that lists every problem with its line. The form:

    name: my_device
    description: a sentence                     # optional
    core_grid: [rows, columns]
    host:  {banks: 1, bank_nbytes: .., alignment: 64}
    dram:  {banks: .., bank_nbytes: .., alignment: ..}          # optional
    l1:    {banks: rows x columns, bank_nbytes: .., base: .., reserved_top_nbytes: ..,
            alignment: ..}                                      # optional
    noc:   {clock_hz: .., bytes_per_cycle: {128: 5.5, ..}, latency_cycles: ..,
            latency_cycles_per_hop: ..}                         # optional
    paths:
      - {from: host, to: dram, bytes_per_second: .., latency_seconds: ..}
      - {from: host, to: host, curve: {4096: 1.0e+9, ..}, latency_seconds: ..}
      - {from: dram, to: l1, noc_links: .., hops: .., limit_bytes_per_second: ..}

A path has exactly one of `bytes_per_second`, `curve` and `noc_links` (so many cores copy, each
over its own link). A path that is left out does not exist: without `l1 -> l1`, moves inside L1 go
through DRAM. Any figure may be written `{value: .., source: ..}`; a `source` in a mapping speaks
for all of its figures. The machines that Stitch ships name the source of every figure (a test
keeps that); a user's file may leave them all out. Must not know tensors, plans or devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath

from stitch.errors import FormatError, StitchError, UsageError, closest
from stitch.files import identity, open_file
from stitch.forms import Node, read_yaml
from stitch.machine.figures import Findings, Section
from stitch.machine.machine import Machine, Noc, Path
from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import Space

#: A description is a page of text; anything longer is another kind of file.
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = FilePath(__file__).parent

MACHINE_KEYS = ("name", "description", "core_grid", "host", "dram", "l1", "noc", "paths")
_SPACE_KEYS = ("banks", "bank_nbytes", "base", "reserved_top_nbytes", "alignment")
_NOC_KEYS = ("clock_hz", "bytes_per_cycle", "latency_cycles", "latency_cycles_per_hop")
_RATE_KEYS = ("bytes_per_second", "curve", "noc_links")
_PATH_KEYS = ("from", "to", *_RATE_KEYS, "hops", "latency_seconds", "limit_bytes_per_second")
_SPACES = {space.value: space for space in Space}
_FORM = "the form of the file is shown by: python -m pydoc stitch.machine.description"


def machine_names() -> tuple[str, ...]:
    """The machines that Stitch ships, in alphabetical order.

    >>> machine_names()
    ('blackhole_p150', 'host', 'tiny', 'wormhole_n150')
    """
    return tuple(sorted(file.stem for file in _SHIPPED.iterdir() if file.suffix == ".yaml"))


def load_machine(name_or_path: str | FilePath | Machine) -> Machine:
    """The machine of a shipped name or of a YAML file; a `Machine` is given back as it is.

    A text that ends in `.yaml` or `.yml`, or holds a slash, is a path. Raises `UsageError` where
    there is no such machine or file, `FormatError` with all problems where the file is not sound.

    >>> load_machine("wormhole_n150").shape.l1.banks
    64
    """
    if isinstance(name_or_path, Machine):
        return name_or_path
    if not isinstance(name_or_path, str | FilePath):
        raise UsageError(
            "a machine is a name, the path of a .yaml description, or a Machine",
            got=type(name_or_path).__name__,
        )
    if isinstance(name_or_path, FilePath) or _looks_like_path(name_or_path):
        return _read_file(FilePath(name_or_path))
    try:
        return _shipped(name_or_path)
    except UsageError as error:
        beside = FilePath(f"{name_or_path}.yaml")
        # A name may be too long to ask the system for.
        if identity(beside) is not None and beside.is_file():
            error.remedy = f"the file {str(beside)!r} is named with its ending"
        raise


def _looks_like_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text or "\\" in text


@functools.cache
def _shipped(name: str) -> Machine:
    try:
        names = machine_names()
        if name not in names:
            near = closest(name, names)
            raise UsageError(
                f"there is no machine {name!r}{f'; {near}' if near else ''}",
                expected="one of " + ", ".join(names),
                remedy="choose one of these, or give the path of a .yaml description",
            )
        content = (_SHIPPED / f"{name}.yaml").read_bytes()
    except OSError as error:
        raise StitchError(
            "cannot read the machines that Stitch ships", got=error.strerror or str(error)
        ) from error
    return parse_machine(content, f"{name}.yaml")


def _read_file(file: FilePath) -> Machine:
    try:
        with open_file(file) as stream:
            content = stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the machine description {str(file)!r}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="give an existing .yaml file, or one of " + ", ".join(machine_names()),
        ) from error
    return parse_machine(content, str(file))


def parse_machine(content: bytes, file_name: str) -> Machine:
    """A checked machine from the bytes of a YAML file; raises `FormatError` with all problems."""
    if len(content) > MAX_FILE_NBYTES:
        raise FormatError(
            "this is not a machine description",
            where=file_name,
            expected=f"at most {MAX_FILE_NBYTES} bytes",
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            "the machine description is no UTF-8 text", where=file_name, got=error.reason
        ) from error
    root, log = read_yaml(text, file_name)
    machine = _machine(root, Findings(log))
    log.raise_any("machine description", f"correct the keys named below; {_FORM}")
    return machine


def _machine(root: Node, findings: Findings) -> Machine:
    top = Section(root, "", findings, MACHINE_KEYS)
    name = top.text("name")
    grid = _core_grid(top)
    if top.has("description"):
        top.text("description")
    sections = {
        space: Section(_section(top, space.value), space.value, findings, _SPACE_KEYS)
        for space in (Space.HOST, Space.DRAM, Space.L1)
        if top.has(space.value)
    }
    spaces = {space: _space(section) for space, section in sections.items()}
    if Space.HOST not in spaces:
        top.reject("missing_key", "host", "this key is needed")
        spaces[Space.HOST] = SpaceShape(1, 0, 1, 1)
    l1, cores = spaces.get(Space.L1), grid[0] * grid[1]
    if l1 is not None and sections[Space.L1].sound and top.sound and l1.banks != cores:
        detail = f"L1 has one bank for each core: {cores} of core_grid, not {l1.banks}"
        sections[Space.L1].reject("banks_per_core", "banks", detail)
    if l1 is not None and Space.DRAM not in spaces:
        top.reject("missing_key", "dram", "a machine with L1 needs DRAM, to evict to")
    noc = (
        _noc(Section(_section(top, "noc"), "noc", findings, _NOC_KEYS)) if top.has("noc") else None
    )
    paths = tuple(_paths(top, spaces, noc))
    shape = MachineShape(name, grid, spaces[Space.HOST], l1, spaces.get(Space.DRAM))
    machine = Machine(shape, paths, tuple(findings.sources), noc)
    if not findings.log.problems:
        _check_reachable(machine, top)
    return machine


def _section(top: Section, key: str) -> Node:
    """The node that stands there; an empty one on the line of the file's form where none does."""
    return top.content.get(key, Node(top.line, None))


def _core_grid(top: Section) -> tuple[int, int]:
    found = top.value("core_grid")
    if found is None:
        return (1, 1)
    listed = [n.data for n in found.data] if isinstance(found.data, tuple) else []
    sizes = [n for n in listed if isinstance(n, int) and not isinstance(n, bool)]
    if len(sizes) == len(listed) == 2 and all(1 <= n <= 1024 for n in sizes):
        return (sizes[0], sizes[1])
    raws = [n.raw or n.describe() for n in found.data] if isinstance(found.data, tuple) else []
    got = f"[{', '.join(raws)}]"[:60] if raws else found.describe()
    top.reject(
        "wrong_type",
        "core_grid",
        f"[rows, columns] is needed, each from 1 to 1024, not {got}",
    )
    return (1, 1)


def _space(section: Section) -> SpaceShape:
    banks = section.integer("banks", least=1)
    bank_nbytes = section.integer("bank_nbytes", least=1)
    base = section.integer("base", least=0, default=0)
    top = section.integer("reserved_top_nbytes", least=0, default=0)
    alignment = section.integer("alignment", least=1)
    limit = bank_nbytes - top
    if section.sound:
        if alignment & (alignment - 1):
            section.reject("alignment", "alignment", f"{alignment} is no power of two")
        if base >= limit:
            section.reject(
                "no_room",
                "base",
                f"base {base} leaves no room below the limit {limit} "
                f"(bank_nbytes {bank_nbytes} - reserved_top_nbytes {top})",
            )
        for key, address in (("base", base), ("bank_nbytes", limit)):
            if section.sound and address % alignment:
                section.reject(
                    "alignment",
                    key,
                    f"usable addresses [{base}, {limit}) must start and end at a multiple "
                    f"of the alignment {alignment}",
                )
    return SpaceShape(banks, base, limit, alignment)


def _noc(section: Section) -> Noc:
    return Noc(
        section.number("clock_hz", positive=True),
        section.curve("bytes_per_cycle"),
        section.number("latency_cycles", positive=False),
        section.number("latency_cycles_per_hop", positive=False),
    )


def _paths(
    top: Section, spaces: dict[Space, SpaceShape], noc: Noc | None
) -> Iterator[tuple[Space, Space, Path]]:
    listed = top.value("paths")
    if listed is None:
        return
    if not isinstance(listed.data, tuple):
        top.reject("wrong_type", "paths", f"a list of paths is needed, not {listed.describe()}")
        return
    seen: set[tuple[Space, Space]] = set()
    for index, content in enumerate(listed.data):
        section = Section(content, _path_place(content, index), top.findings, _PATH_KEYS)
        source, target = (_end(section, key, spaces) for key in ("from", "to"))
        path = _path(section, noc)
        if source is None or target is None:
            continue
        if (source, target) in seen:
            section.reject("duplicate_path", "", "this path is described twice")
        seen.add((source, target))
        yield source, target, path


def _path_place(node: Node, index: int) -> str:
    ends = node.data if isinstance(node.data, Mapping) else {}
    if all(key in ends and isinstance(ends[key].data, str) for key in ("from", "to")):
        return f"paths[{index}]({ends['from'].data}->{ends['to'].data})"
    return f"paths[{index}]"


def _end(section: Section, key: str, spaces: dict[Space, SpaceShape]) -> Space | None:
    found = section.value(key)
    if found is None:
        return None
    known = tuple(space.value for space in spaces)
    if isinstance(found.data, str) and found.data in known:
        return _SPACES[found.data]
    section.reject(
        "unknown_space",
        key,
        f"{found.describe()} is no space of this machine (it has {', '.join(known)})",
    )
    return None


def _path(section: Section, noc: Noc | None) -> Path:
    given = [key for key in _RATE_KEYS if section.has(key)]
    if len(given) != 1 and section.sound_mapping:
        section.reject(
            "rate",
            "",
            f"exactly one of {', '.join(_RATE_KEYS)} is needed, "
            f"not {' and '.join(given) or 'none'}",
        )
    if len(given) != 1:
        return Path(0.0, ((1, 1.0),))
    limit = section.number("limit_bytes_per_second", positive=True, default=math.inf)
    if given[0] == "noc_links":
        return _noc_path(section, noc, limit)
    if section.has("hops"):
        section.reject("rate", "hops", "hops belong to a path with noc_links")
    latency = section.number("latency_seconds", positive=False)
    if given[0] == "curve":
        return Path(latency, section.curve("curve"), limit)
    return Path(latency, ((1, section.number("bytes_per_second", positive=True)),), limit)


def _noc_path(section: Section, noc: Noc | None, limit: float) -> Path:
    links = section.integer("noc_links", least=1)
    hops = section.number("hops", positive=False)
    if section.has("latency_seconds"):
        detail = "the latency of a path over the NoC follows from its hops"
        section.reject("rate", "latency_seconds", detail)
    if noc is None:
        section.reject("rate", "noc_links", "the machine has no `noc` section")
        return Path(0.0, ((1, 1.0),))
    return noc.path(links, hops, limit)


def _check_reachable(machine: Machine, top: Section) -> None:
    for source in machine.shape.spaces:
        for target in machine.shape.spaces:
            try:
                machine.route(source, target)
            except StitchError as error:
                top.reject("unreachable", "paths", error.what)
