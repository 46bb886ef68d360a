"""System descriptors (`.ttsys`) to machines: what a device said of itself.

What it does not say (how fast copies and programs are, what is reserved for L1_SMALL) is as in the
machine of the chip's architecture that Stitch ships; the machine's sources say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stitch.errors import FormatError, IncompatibleError, Problem
from stitch.files import open_source
from stitch.flatbuffer import ForeignFile, Release, read_foreign
from stitch.machine.derived import derived_machine
from stitch.machine.machine import Machine
from stitch.machine.shape import round_up
from stitch.machine.systems.system_fields import SYSTEM_FILES, architectures

#: The shipped machine of each architecture.
LIKE = {"wormhole_b0": "wormhole_n150", "blackhole": "blackhole_p150"}
#: A system of more chips, or a longer descriptor, is none.
_MOST_NBYTES = 1 << 20
_MOST_CHIPS = 1024


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip: its architecture, the fields of its descriptor by their names, its machine."""

    architecture: str
    fields: dict[str, Any]
    machine: Machine


@dataclass(frozen=True, slots=True)
class System:
    """What a descriptor says; links between chips are (chip, core, chip, core)."""

    version: Release
    schema_hash: str
    git_hash: str
    product: str
    hosts: tuple[str, ...]
    chips: tuple[Chip, ...]
    links: tuple[tuple[int, ...], ...]


def machines_in(content: bytes, path: str) -> tuple[Machine, ...]:
    """The machine of each chip, named after the file; raises as `read_system` does."""
    return tuple(chip.machine for chip in read_system(content, path).chips)


def load_system(path: str | Path) -> System:
    """The descriptor in a file; raises as `read_system` does, `StitchError` without a file."""
    _, view = open_source(path)
    return read_system(view, str(path))


def read_system(content: bytes | memoryview, path: str) -> System:
    """A whole descriptor.

    Raises `FormatError` with every defect, `IncompatibleError` for a version or an architecture
    that is not known.
    """
    if len(content) > _MOST_NBYTES:
        raise FormatError(
            f"{SYSTEM_FILES.name} is a short file",
            where=path,
            expected=f"at most {_MOST_NBYTES} bytes",
            got=f"{len(content)} bytes",
        )
    file = read_foreign(memoryview(content), path, SYSTEM_FILES)
    root = file.named("SystemDescRoot", file.root)
    system = file.named("SystemDesc", root["system_desc"])
    hosts = [file.named("CPUDesc", host)["target_triple"] for host in system.get("cpu_descs", ())]
    return System(
        file.version,
        root.get("schema_hash", ""),
        root["ttmlir_git_hash"],
        root["product_identifier"],
        tuple(hosts),
        system_chips(file, system, path),
        system["chip_channels"],
    )


def system_chips(file: ForeignFile, system: dict[str, Any], path: str) -> tuple[Chip, ...]:
    """The chips of a system's descriptor, which may stand in a file of another kind; `system`: its
    `SystemDesc`, by names. Raises as `read_system` does."""
    described, indices = system["chip_descs"], system["chip_desc_indices"]
    wrong = [i for i in indices if i >= len(described)]
    if wrong or not indices or len(indices) > _MOST_CHIPS:
        raise FormatError(
            f"{SYSTEM_FILES.name} is not sound",
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
            f"{path} describes no sound system",
            problems=tuple(problems[:64]),
            remedy="make the descriptor again on the device; it is damaged",
        )
    return tuple(chips)


def _chip(fields: dict[str, Any], name: str, path: str, number: int, version: Release) -> Chip:
    known = architectures(version.release)
    architecture = known[fields["arch"]]
    if architecture not in LIKE:
        raise IncompatibleError(
            f"chip {number} is a {architecture}, of which Stitch ships no machine",
            where=path,
            expected=" or ".join(LIKE),
            got=architecture,
            remedy="describe the machine in a .yaml file",
        )
    where = f"{Path(path).name}, chip {number}"
    machine = derived_machine(LIKE[architecture], name, _figures(fields, where), where)
    return Chip(architecture, fields, machine)


def _figures(fields: dict[str, Any], where: str) -> dict[str, tuple[Any, str]]:
    """The figures of a machine's description that a descriptor states.

    Versions before 0.0.169 lack alignments or reserved regions: those stay the shipped machine's. A
    bank's size is taken only together with its reserved regions, for it is no use without them (the
    default descriptor of 0.0.65 has channels of 1 MiB, less than what DRAM reserves).
    """
    rows, columns = fields["grid_size"]
    said: dict[str, tuple[Any, str]] = {
        "core_grid": ((rows, columns), "grid_size"),
        "l1.banks": (rows * columns, "one bank for each core of grid_size"),
        "dram.banks": (fields["num_dram_channels"], "num_dram_channels"),
    }
    if "noc_dram_address_align_bytes" in fields:
        l1, dram = fields["noc_l1_address_align_bytes"], fields["noc_dram_address_align_bytes"]
        # The free list of L1 has the alignment of DRAM (tt-metal, bank_manager.cpp).
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
