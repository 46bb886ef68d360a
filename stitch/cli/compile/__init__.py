"""`stitch-compile`: one module → one `.ttb` file.

Comes in: words. Goes out: `main`, which writes binaries and gives an exit code; `from_entry`, the
module that a word such as `file.py:factory` names. Must not know: runs.
"""

from typing import TYPE_CHECKING

from stitch.cli.command import entry_point
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.cli.compile.python_factories import from_entry
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"python_factories": "from_entry"})


#: Runs the command; gives its exit code.
main = entry_point("stitch-compile", "stitch.cli.compile.compile_command")

__all__ = ["from_entry", "main"]
