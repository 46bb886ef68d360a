"""The command `stitch` with its subcommands, and `stitch-compile`, `stitch-run` and their like.

Each subcommand is a folder whose `main` loads it when it is called; the modules beside the
folders are shared by the commands.
"""

from stitch.cli.stitch_command import main

__all__ = ["main"]
