"""`stitch examples`: list the examples, or copy one into a folder."""

from stitch.cli.command import entry_point

#: Runs the subcommand; gives its exit code.
main = entry_point("stitch examples", "stitch.cli.examples.examples_command")

__all__ = ["main"]
