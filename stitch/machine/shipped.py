"""The machine descriptions that Stitch ships."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def machine_names() -> tuple[str, ...]:
    """Return the names of the shipped machines, sorted.

    >>> machine_names()
    ('blackhole_p150', 'cuda', 'host', 'tiny', 'wormhole_n150')
    """
    return tuple(sorted(file.stem for file in _FOLDER.iterdir() if file.suffix == ".yaml"))


def shipped_text(name: str) -> str:
    """Return the description of a shipped machine."""
    return (_FOLDER / f"{name}.yaml").read_bytes().decode()
