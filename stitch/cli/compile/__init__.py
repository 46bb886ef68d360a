"""`stitch-compile`: compile one module into one `.ttb` file, or into several with `--split`."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-compile", "stitch.cli.compile.compile_command")

__all__ = ["main"]
