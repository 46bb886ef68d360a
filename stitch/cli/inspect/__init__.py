"""`stitch-inspect`: what is in a `.ttb` file; whether several can be stitched, and at what cost.

Comes in: words. Goes out: `main`, which says it as text or JSON and gives an exit code. Nothing is
run: plans are made without data.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.cli.command import Command, carry_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    return carry_out("stitch-inspect", _load, argv)


def _load() -> Command:
    from stitch.cli.inspect.inspect_command import command

    return command()


__all__ = ["main"]
