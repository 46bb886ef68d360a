"""`stitch-compile`: one module → one `.ttb` file.

Comes in: words. Goes out: `main`, which writes binaries and gives an exit code; `from_entry`, the
module that a word such as `file.py:function` names. Must not know: runs.
"""

from stitch.cli.compile.compile_command import from_entry, main

__all__ = ["from_entry", "main"]
