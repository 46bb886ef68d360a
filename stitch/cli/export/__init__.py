"""`stitch export`: write the programs of a `.ttb` file for other viewers."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch export", "stitch.cli.export.export_command")

__all__ = ["main"]
