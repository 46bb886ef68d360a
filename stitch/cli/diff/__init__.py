"""`stitch diff`: compare the copies of two runs, and check budgets."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch diff", "stitch.cli.diff.diff_command")

__all__ = ["main"]
