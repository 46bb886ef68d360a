"""`stitch-inspect`: what is in a `.ttb` file; whether several can be stitched, and at what cost.

Comes in: words. Goes out: `main`, which says it as text or JSON and gives an exit code. Nothing is
run: plans are made without data.
"""

from stitch.cli.inspect.inspect_command import main

__all__ = ["main"]
