"""`stitch simulate`: the cost of one pass on machines, and on a machine with varied figures."""

from stitch.cli.command import entry_point

#: Runs the subcommand; gives its exit code.
main = entry_point("stitch simulate", "stitch.cli.simulate.simulate_command")

__all__ = ["main"]
