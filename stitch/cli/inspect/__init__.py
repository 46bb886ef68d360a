"""`stitch-inspect`: what is in a `.ttb` file; whether several can be stitched, and at what cost.

Nothing is run: plans are made without data.
"""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-inspect", "stitch.cli.inspect.inspect_command")

__all__ = ["main"]
