"""`stitch-run`: run a chain of modules, a pipeline file or a recorded run; copy out an example."""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-run", "stitch.cli.run.run_options")

__all__ = ["main"]
