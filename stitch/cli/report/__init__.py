"""`stitch report`: write the page of a recorded run, or of two."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch report", "stitch.cli.report.report_command")

__all__ = ["main"]
