"""What a system descriptor says, as plain data and as text: for `stitch-inspect`.

Comes in: the path of a descriptor. Goes out: data for JSON, lines for people. Must not know: the
command line, where fields stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stitch.cli.inspect.describe import machine_json
from stitch.machine import Chip, load_system
from stitch.report import counted


def describe_system(path: str) -> dict[str, Any]:
    """A descriptor as data; raises `FormatError` with all defects, `StitchError` without a file."""
    system = load_system(path)
    return {
        "format": "ttsys",
        "version": str(system.version),
        "schema_hash": system.schema_hash,
        "git_hash": system.git_hash,
        "product": system.product,
        "hosts": list(system.hosts),
        "chips": [_chip(number, chip) for number, chip in enumerate(system.chips)],
        "links": [list(link) for link in system.links],
    }


def _chip(number: int, chip: Chip) -> dict[str, Any]:
    return {
        "chip": number,
        "architecture": chip.architecture,
        "machine": machine_json(chip.machine.shape),
        "descriptor": chip.fields,
        "sources": dict(chip.machine.sources),
    }


def system_lines(path: str, described: Mapping[str, Any]) -> list[str]:
    """A descriptor as text: chips that are alike in one line."""
    chips = described["chips"]
    hosts = ", ".join(described["hosts"]) or "none named"
    lines = [
        f"{path}: system descriptor of version {described['version']}, "
        f"tt-mlir {described['git_hash'][:10] or 'unknown'}, product {described['product']}",
        f"  host {hosts}; {counted(len(chips), 'chip')}, "
        f"{counted(len(described['links']), 'link')} between them",
    ]
    alike: dict[str, list[str]] = {}
    for chip in chips:
        rows, columns = chip["machine"]["core_grid"]
        words = [f"{chip['architecture']}, {rows}x{columns} cores"]
        for name, space in chip["machine"]["spaces"].items():
            if name != "host":
                words.append(
                    f"{name} {space['banks']} x [{space['base']}, {space['limit']}) B, pages at "
                    f"{space['alignment']}, tensors at {space['granule']}"
                )
        alike.setdefault("\n    ".join(words), []).append(chip["machine"]["name"])
    for text, names in alike.items():
        lines.append(f"  machine {', '.join(names)}: {text}")
    like = sorted({s.split(":")[0] for c in chips for s in c["sources"].values()
                   if s.startswith("as ")})  # fmt: skip
    lines.append(f"  times of copies and programs: {', '.join(like)}")
    return lines
