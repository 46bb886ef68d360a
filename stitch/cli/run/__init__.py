"""`stitch-run`: modules in a chain, a pipeline file, a training file, a recorded run, an example.

Comes in: words. Goes out: `main`, which runs what they name, writes results and reports (all files
or none), and gives an exit code. Must not know: how a training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from stitch.cli.command import Command, carry_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives its exit code."""
    return carry_out("stitch-run", _load, argv)


def _load() -> Command:
    from stitch.cli.run.run_command import command

    return command()


__all__ = ["main"]
