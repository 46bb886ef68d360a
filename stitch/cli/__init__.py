"""The command `stitch` with its subcommands, and `stitch-compile`, `stitch-run` and their like.

Each subcommand is a folder whose `main` loads it when it is called; the modules beside the
folders are shared by the commands.
"""

from stitch.cli.stitch_command import main
from stitch.installation import check_installation
from stitch.on_demand import names_on_demand

# The other distribution may have overwritten `stitch/__init__.py`, which checks it as well.
check_installation()

TYPE_CHECKING = False

if TYPE_CHECKING:
    from stitch.cli.planned_pass import PlannedPass, plan_pass
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"planned_pass": "PlannedPass plan_pass"})

__all__ = ["PlannedPass", "main", "plan_pass"]
