"""Reports on compiled graphs: what programs run, what torch runs and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator of a graph that torch runs, with its source line and the reason."""

    operator: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class GraphReport:
    """A compiled graph.

    `role`: forward, backward or inference. `programs`: their number. `by_stitch`, `by_torch`:
    number of nodes by operator, without the views and constants that torch makes for itself.
    `to_programs_nbytes`: bytes of torch tensors, arguments included, that programs read in a call;
    `to_torch_nbytes`: bytes of the results that they return to torch. `recompiles`: of a graph with
    symbolic sizes, why other sizes are compiled again: guards that the compiler relied on, or what
    named sizes cannot express.
    """

    name: str
    role: str
    programs: int
    by_stitch: tuple[tuple[str, int], ...]
    by_torch: tuple[tuple[str, int], ...]
    fallbacks: tuple[Fallback, ...]
    to_programs_nbytes: int
    to_torch_nbytes: int
    recompiles: tuple[str, ...] = ()


#: Called with the report of each compiled graph.
ReportListener = Callable[[GraphReport], None]
_log = logging.getLogger(__name__)


def log_report(report: GraphReport) -> None:
    """Log a compiled graph (`TORCH_LOGS="stitch"`) and its fallbacks (`TORCH_LOGS="+stitch"`)."""
    mine, theirs = (sum(count for _, count in part) for part in (report.by_stitch, report.by_torch))
    _log.info(
        "graph %s: %d operators in %d programs, %d run by torch; %d bytes to programs, %d to torch",
        report.name, mine, report.programs, theirs, report.to_programs_nbytes,
        report.to_torch_nbytes,
    )  # fmt: skip
    for why in report.recompiles:
        _log.info("graph %s is compiled again for other sizes: %s", report.name, why)
    for fallback in report.fallbacks:
        _log.debug("graph %s: torch runs %s (%s): %s", report.name, fallback.operator,
                   fallback.where, fallback.reason)  # fmt: skip


@dataclass
class Counts:
    """Totals of the graphs compiled for a device.

    `from_cache`: graphs read from a cache; `recompilations`: further compilations of graphs with
    symbolic sizes, because a guard of the first one did not hold.
    """

    from_cache: int = 0
    recompilations: int = 0
    graphs: int = 0
    programs: int = 0
    by_stitch: Counter[str] = field(default_factory=Counter)
    by_torch: Counter[str] = field(default_factory=Counter)

    def add(self, report: GraphReport) -> None:
        """Add one graph."""
        self.graphs += 1
        self.programs += report.programs
        self.by_stitch.update(dict(report.by_stitch))
        self.by_torch.update(dict(report.by_torch))
