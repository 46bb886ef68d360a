"""The command `stitch` with its subcommands, and `stitch-compile`, `stitch-run` and their like.

A subcommand is a module `NAME_command`, loaded when it is called; the others are shared.
"""

from stitch.cli.stitch_command import MAINS, main
from stitch.installation import check_installation
from stitch.on_demand import names_on_demand

# The other distribution may have overwritten `stitch/__init__.py`, which checks it as well.
check_installation()

TYPE_CHECKING = False

if TYPE_CHECKING:
    from stitch.cli.planned_pass import PlannedPass, plan_pass
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"planned_pass": "PlannedPass plan_pass"})

#: What `stitch-compile` and its like run; each gives its exit code.
compile_main, inspect_main = MAINS["compile"], MAINS["inspect"]
link_main, run_main = MAINS["link"], MAINS["run"]

__all__ = [
    "PlannedPass", "compile_main", "inspect_main", "link_main", "main", "plan_pass", "run_main",
]  # fmt: skip
