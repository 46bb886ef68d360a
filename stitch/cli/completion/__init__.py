"""`stitch completion`: print the script that completes `stitch` in a shell."""

from stitch.cli.command import entry_point

#: Runs the subcommand; gives its exit code.
main = entry_point("stitch completion", "stitch.cli.completion.completion_command")

__all__ = ["main"]
