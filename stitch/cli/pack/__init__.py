"""`stitch pack`: offsets for buffers with known lifetimes, in MiniMalloc's CSV."""

from typing import TYPE_CHECKING

from stitch.cli.command import entry_point
from stitch.on_demand import names_on_demand

if TYPE_CHECKING:
    from stitch.cli.pack.buffers_csv import read_buffers
else:
    __getattr__, __dir__ = names_on_demand(__name__, {"buffers_csv": "read_buffers"})

#: Runs the subcommand; gives its exit code.
main = entry_point("stitch pack", "stitch.cli.pack.pack_command")

__all__ = ["main", "read_buffers"]
