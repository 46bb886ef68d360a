"""`stitch-run`: modules in a chain, a pipeline file, a training file, a recorded run, an example.

Comes in: words. Goes out: `main`, which runs what they name, writes results and reports (all files
or none), and gives an exit code. Must not know: how a training goes on.
"""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-run", "stitch.cli.run.run_command")

__all__ = ["main"]
