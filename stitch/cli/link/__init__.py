"""`stitch-link`: several `.ttb` modules → one module with one program, the same to the last bit."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-link", "stitch.cli.link.link_command")

__all__ = ["main"]
