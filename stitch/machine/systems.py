"""Machines from tt-mlir's system descriptors (`.ttsys`).

Figures that a descriptor lacks (speed of copies and programs, bytes reserved for L1_SMALL) are
taken from the shipped machine of the chip's architecture; the machine's sources say so.

The order of fields depends on the version that wrote the file: fields are added and removed in the
middle, so a slot has no meaning without the version. Known up to release 4013. Source:
`include/ttmlir/Target/Common/types.fbs` and `system_desc.fbs` in tenstorrent/tt-mlir; the release
of a version is the number of commits since its tag v0.0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stitch.errors import FormatError, IncompatibleError, Problem
from stitch.flatbuffer import (
    FieldKind,
    FieldOrder,
    FieldSpec,
    ForeignFile,
    ForeignFormat,
    Release,
    Schema,
    TableSpec,
    read_foreign,
)
from stitch.forms import Node, ProblemLog, read_yaml
from stitch.machine.machine import Machine
from stitch.machine.machine_yaml import read_description
from stitch.machine.shape import round_up
from stitch.machine.shipped import shipped_text

Figure = tuple[int | tuple[int, ...], str]


def derived_machine(like: str, name: str, figures: Mapping[str, Figure], where: str) -> Machine:
    """Return a shipped machine with another name and other figures, by their dotted names.

    Raises FormatError naming `where` if they contradict each other.

    >>> mine = derived_machine("tiny", "mine", {"l1.base": (2_048, "measured")}, "-")
    >>> mine.shape.l1.base, dict(mine.sources)["l1.base"], dict(mine.sources)["core_grid"][:13]
    (2048, 'measured', 'as tiny: chos')
    """
    root = _set_at(_shipped_root(like), ("name",), _scalar(name))
    for key, (value, source) in figures.items():
        held = _scalar(value)
        if isinstance(value, tuple):
            held = Node(0, tuple(_scalar(item) for item in value))
        figure = Node(0, {"value": held, "source": _scalar(source)})
        root = _set_at(root, tuple(key.split(".")), figure)
    log = ProblemLog(where)
    machine = read_description(root, log)
    if machine is None:
        raise FormatError(
            f"{where} is not a valid machine: its figures contradict each other",
            problems=tuple(Problem(p.kind, where, p.detail) for p in log.problems),
            remedy="generate the descriptor again on the device; it is damaged",
        )
    sources = [(k, s if k in figures else f"as {like}: {s}") for k, s in machine.sources]
    return replace(machine, sources=tuple(sources))


@functools.cache
def _shipped_root(like: str) -> Node:
    # Parsing YAML takes most of the time, and a system has many chips.
    root, _ = read_yaml(shipped_text(like), like)
    return root


def _scalar(value: object) -> Node:
    assert isinstance(value, str | int | tuple), "no other figures are known"
    return Node(0, value if isinstance(value, str | int) else None, str(value))


def _set_at(node: Node, path: tuple[str, ...], value: Node) -> Node:
    """Return the mapping with another value at a path of keys."""
    if not path:
        return value
    assert isinstance(node.data, Mapping), "figures are nested in mappings"
    inner = node.data.get(path[0], Node(0, {}))
    return replace(node, data={**node.data, path[0]: _set_at(inner, path[1:], value)})


FIRST_RELEASE, LAST_RELEASE = 1, 4013
#: The architectures by their code; from release 2909 on without the first.
_ARCHITECTURES = ("grayskull", "wormhole_b0", "blackhole", "quasar")
_NO_GRAYSKULL_SINCE, _QUASAR_SINCE = 2909, 3599


class _Field(NamedTuple):
    name: str
    kind: FieldKind
    code: str = ""
    of: str = ""
    since: int = 0
    until: int = LAST_RELEASE + 1
    limit: int | None = None


_TABLES = {
    "SystemDescRoot": (
        _Field("version", "struct", "HHI"),
        _Field("schema_hash", "string", since=1466, limit=1024),
        _Field("ttmlir_git_hash", "string", limit=1024),
        _Field("product_identifier", "string", limit=1024),
        _Field("system_desc", "table", of="SystemDesc"),
    ),
    "SystemDesc": (
        _Field("cpu_descs", "tables", of="CPUDesc", since=407),
        _Field("chip_descs", "tables", of="ChipDesc"),
        _Field("chip_desc_indices", "scalars", "I"),
        _Field("chip_capabilities", "scalars", "I"),
        _Field("chip_coords", "structs", "IIII"),
        _Field("chip_channels", "structs", "II", until=89),
        _Field("chip_channels", "structs", "IiiIii", since=89),
    ),
    "CPUDesc": (
        _Field("role", "scalar", "B"),
        _Field("target_triple", "string", limit=1024),
    ),
    "ChipDesc": (
        _Field("arch", "scalar", "I"),
        _Field("grid_size", "struct", "ii"),
        _Field("coord_translation_offsets", "struct", "ii", since=1134),
        _Field("l1_size", "scalar", "Q"),
        _Field("num_dram_channels", "scalar", "I"),
        _Field("dram_channel_size", "scalar", "Q"),
        _Field("noc_l1_address_align_bytes", "scalar", "I", since=20),
        _Field("pcie_address_align_bytes", "scalar", "I", since=20),
        _Field("noc_dram_address_align_bytes", "scalar", "I", since=20),
        _Field("l1_unreserved_base", "scalar", "I", since=144),
        _Field("erisc_l1_unreserved_base", "scalar", "I", since=144),
        _Field("dram_unreserved_base", "scalar", "I", since=144),
        _Field("dram_unreserved_end", "scalar", "I", since=169),
        # Coordinates of cores on the die: ChipPhysicalCores, then ChipPhysicalHelperCores.
        _Field("physical_cores", "table", of="PhysicalCores", since=102, until=1753),
        _Field("supported_data_types", "scalars", "H", since=148),
        _Field("supported_tile_sizes", "structs", "ii", since=148),
        _Field("dst_physical_size_tiles", "scalar", "I", since=1422),
        _Field("num_cbs", "scalar", "I", since=325),
        _Field("num_compute_threads", "scalar", "I", since=976),
        _Field("num_datamovement_threads", "scalar", "I", since=976),
        _Field("dram_grid_size", "struct", "ii", since=3426),
        _Field("dram_bank_to_logical_worker_noc0", "structs", "ii", since=3458),
        _Field("dram_bank_to_logical_worker_noc1", "structs", "ii", since=3458),
    ),
    # Not read.
    "PhysicalCores": (),
}  # fmt: skip
_NEEDED = frozenset({"version", "system_desc", "chip_descs", "grid_size"})


def system_tables(release: int) -> dict[str, TableSpec]:
    """Return the tables of system descriptors in a release, including the root.

    Files of other kinds that contain a descriptor are verified by the same tables.
    """
    return {name: _table(name, fields, release) for name, fields in _TABLES.items()}


def architectures(release: int) -> tuple[str, ...]:
    """Return the architectures by their code in files of a release."""
    first = 1 if release >= _NO_GRAYSKULL_SINCE else 0
    return _ARCHITECTURES[first : 4 if release >= _QUASAR_SINCE else 3]


def _table(name: str, fields: tuple[_Field, ...], release: int) -> TableSpec:
    there = [field for field in fields if field.since <= release < field.until]
    specs = []
    for slot, field in enumerate(there):
        is_arch = field.name == "arch"
        specs.append(
            FieldSpec(
                slot, field.name, field.kind, field.code,
                "Arch" if is_arch else field.of,
                0 if field.kind == "scalar" else None,
                field.name in _NEEDED,
                maximum=len(architectures(release)) - 1 if is_arch else None,
                limit=field.limit,
            )
        )  # fmt: skip
    return TableSpec(name, tuple(specs))


def _orders() -> tuple[FieldOrder, ...]:
    changes = {FIRST_RELEASE, _NO_GRAYSKULL_SINCE, _QUASAR_SINCE, LAST_RELEASE + 1}
    for fields in _TABLES.values():
        for field in fields:
            changes |= {field.since, field.until}
    starts = sorted(n for n in changes if FIRST_RELEASE <= n <= LAST_RELEASE + 1)
    return tuple(
        FieldOrder(
            Release(0, 0, first),
            Release(0, 0, after - 1),
            Schema("SystemDescRoot", system_tables(first), {}),
        )
        for first, after in pairwise(starts)
    )


SYSTEM_FILES = ForeignFormat("a system descriptor of tt-mlir (.ttsys)", b"TTSY", _orders())


#: The shipped machine of each architecture.
BASE_MACHINES = {"wormhole_b0": "wormhole_n150", "blackhole": "blackhole_p150"}
#: Limits of a descriptor's size and of its chips.
_MOST_NBYTES = 1 << 20
_MOST_CHIPS = 1024


class Chip(NamedTuple):
    """One chip: its architecture and its machine."""

    architecture: str
    machine: Machine


def machines_in(content: bytes, path: str) -> tuple[Machine, ...]:
    """Return the machine of each chip of a descriptor, named after the file.

    Raises:
        FormatError: Lists every defect.
        IncompatibleError: The version or the architecture is unknown.
    """
    if len(content) > _MOST_NBYTES:
        raise FormatError(
            f"the file is too long for {SYSTEM_FILES.name}",
            where=path,
            expected=f"at most {_MOST_NBYTES} bytes",
            got=f"{len(content)} bytes",
        )
    file = read_foreign(memoryview(content), path, SYSTEM_FILES)
    root = file.named("SystemDescRoot", file.root)
    chips = system_chips(file, file.named("SystemDesc", root["system_desc"]), path)
    return tuple(chip.machine for chip in chips)


def system_chips(file: ForeignFile, system: dict[str, Any], path: str) -> tuple[Chip, ...]:
    """Return the chips of a `SystemDesc` (fields by name); raises as `machines_in` does."""
    described, indices = system["chip_descs"], system["chip_desc_indices"]
    wrong = [i for i in indices if i >= len(described)]
    if wrong or not indices or len(indices) > _MOST_CHIPS:
        raise FormatError(
            f"{SYSTEM_FILES.name} has an invalid list of chips",
            where=path,
            expected=f"from 1 to {_MOST_CHIPS} chips, each one of {len(described)} described",
            got=f"chip {wrong[0]}" if wrong else f"{len(indices)} chips",
        )
    chips: list[Chip] = []
    problems: list[Problem] = []
    stem = Path(path).stem or "system"
    for number, index in enumerate(indices):
        fields = file.named("ChipDesc", described[index])
        name = stem if len(indices) == 1 else f"{stem}:{number}"
        try:
            chips.append(_chip(fields, name, path, number, file.version))
        except IncompatibleError:
            raise
        except FormatError as error:
            problems += error.problems
    if problems:
        raise FormatError(
            f"{path} describes invalid chips",
            problems=tuple(problems[:64]),
            remedy="generate the descriptor again on the device; it is damaged",
        )
    return tuple(chips)


def _chip(fields: dict[str, Any], name: str, path: str, number: int, version: Release) -> Chip:
    known = architectures(version.release)
    architecture = known[fields["arch"]]
    if architecture not in BASE_MACHINES:
        raise IncompatibleError(
            f"Stitch ships no machine for chip {number}, a {architecture}",
            where=path,
            expected=" or ".join(BASE_MACHINES),
            got=architecture,
            remedy="describe the machine in a .yaml file",
        )
    where = f"{Path(path).name}, chip {number}"
    machine = derived_machine(BASE_MACHINES[architecture], name, _figures(fields, where), where)
    return Chip(architecture, machine)


def _figures(fields: dict[str, Any], where: str) -> dict[str, tuple[Any, str]]:
    """Return the figures of a machine's description that a descriptor states.

    Versions before 0.0.169 lack alignments or reserved regions: those stay the shipped machine's. A
    bank's size is used only together with its reserved regions (the default descriptor of 0.0.65
    has channels of 1 MiB, less than what DRAM reserves).
    """
    rows, columns = fields["grid_size"]
    said: dict[str, tuple[Any, str]] = {
        "core_grid": ((rows, columns), "grid_size"),
        "l1.banks": (rows * columns, "one bank for each core of grid_size"),
        "dram.banks": (fields["num_dram_channels"], "num_dram_channels"),
    }
    if "noc_dram_address_align_bytes" in fields:
        l1, dram = fields["noc_l1_address_align_bytes"], fields["noc_dram_address_align_bytes"]
        # tt-metal's bank_manager.cpp aligns the free list of L1 to DRAM.
        granule = round_up(dram, max(1, l1))
        said |= {
            "l1.alignment": (l1, "noc_l1_address_align_bytes"),
            "l1.granule": (granule, "noc_dram_address_align_bytes, as tt-metal's bank_manager.cpp"),
            "dram.alignment": (dram, "noc_dram_address_align_bytes"),
        }
    if "l1_unreserved_base" in fields:
        base = round_up(fields["l1_unreserved_base"], granule or 1)
        said["l1.bank_nbytes"] = (fields["l1_size"], "l1_size")
        said["l1.base"] = (base, "l1_unreserved_base")
    if "dram_unreserved_end" in fields:
        size, base = fields["dram_channel_size"], fields["dram_unreserved_base"]
        reserved = size - fields["dram_unreserved_end"] // max(1, dram) * dram
        said |= {
            "dram.bank_nbytes": (size, "dram_channel_size"),
            "dram.base": (round_up(base, dram or 1), "dram_unreserved_base"),
            "dram.reserved_top_nbytes": (reserved, "dram_unreserved_end"),
        }
    return {key: (value, f"{where}: {field}") for key, (value, field) in said.items()}
