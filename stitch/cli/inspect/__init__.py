"""`stitch-inspect`: what is in a `.ttb` file; whether several can be stitched, and at what cost.

Comes in: words. Goes out: `main`, which says it as text or JSON and gives an exit code. Nothing is
run: plans are made without data.
"""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-inspect", "stitch.cli.inspect.inspect_command")

__all__ = ["main"]
