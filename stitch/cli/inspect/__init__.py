"""`stitch-inspect`: print the contents of a `.ttb` file, or the cost of stitching several.

Nothing runs: plans are made without data.
"""

from stitch.cli.command import entry_point

#: Runs the command; gives its exit code.
main = entry_point("stitch-inspect", "stitch.cli.inspect.inspect_command")

__all__ = ["main"]
