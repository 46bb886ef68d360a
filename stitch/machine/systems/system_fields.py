"""The fields of tt-mlir's system descriptors, by the version that a file was written in.

Source: `include/ttmlir/Target/Common/types.fbs` and `system_desc.fbs` in tenstorrent/tt-mlir; the
release of a version is the number of commits since its tag v0.0. Each change of the order there is
a line here: fields come and go in the middle, so a slot says nothing without its version. Orders
are known up to release 4013, the newest that was looked at.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from stitch.flatbuffer import (
    FieldKind,
    FieldOrder,
    FieldSpec,
    ForeignFormat,
    Release,
    Schema,
    TableSpec,
)

FIRST_RELEASE, LAST_RELEASE = 1, 4013
#: The architectures by their code in a file; from release 2909 on the first is gone.
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
    # Nothing of it is read.
    "PhysicalCores": (),
}  # fmt: skip
_NEEDED = frozenset({"version", "system_desc", "chip_descs", "grid_size"})


def system_tables(release: int) -> dict[str, TableSpec]:
    """The tables of `SystemDesc` and of what it holds, in a release; with the root of its files.

    A descriptor within another file is verified by them as that file's own tables are.
    """
    return {name: _table(name, fields, release) for name, fields in _TABLES.items()}


def architectures(release: int) -> tuple[str, ...]:
    """The architectures by their code in files of a release."""
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
