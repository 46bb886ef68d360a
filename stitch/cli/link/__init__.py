"""`stitch-link`: link several `.ttb` modules into one program with bit-identical results."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-link", "stitch.cli.link.link_command")

__all__ = ["main"]
