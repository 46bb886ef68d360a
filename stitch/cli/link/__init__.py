"""`stitch-link`: several `.ttb` modules → one module with one program, the same to the last bit.

Comes in: words. Goes out: `main`, which writes a binary and gives an exit code. Must not know:
devices, runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.cli.command import Command, carry_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    return carry_out("stitch-link", _load, argv)


def _load() -> Command:
    from stitch.cli.link.link_command import command

    return command()


__all__ = ["main"]
