"""What torch runs of each network of the zoo, as a file: operators with their number.

Networks of which programs run everything are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

FILE = Path(__file__).resolve().parents[3] / "frontend" / "zoo.yaml"
_HEAD = """\
# What torch runs of each network of the zoo, with its number, in three graphs (results alone,
# forward, backward); of networks that are not here, nothing. Written by `tools/zoo --write`.
"""


def read() -> dict[str, dict[str, int]]:
    """What the file says, by network."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return dict(rows or {})


def write(rows: Mapping[str, Mapping[str, int]]) -> None:
    """Writes the file."""
    said = {name: dict(sorted(row.items())) for name, row in sorted(rows.items()) if row}
    text = yaml.safe_dump(said, allow_unicode=True, sort_keys=False) if said else "{}\n"
    FILE.write_text(_HEAD + text, encoding="utf-8")
