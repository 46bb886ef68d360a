"""`stitch machine`: list the known machines, or show one with every figure."""

from stitch.cli.command import entry_point

#: Runs the subcommand; gives its exit code.
main = entry_point("stitch machine", "stitch.cli.machine.machine_command")

__all__ = ["main"]
