"""What became of a graph: how much of it programs run, what torch runs and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operator of a graph that torch runs: which, the user's line, and why."""

    operator: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class GraphReport:
    """A graph that was compiled.

    `role`: forward, backward or inference. `programs`: how many run it. `by_stitch`, `by_torch`:
    operators by name with their number; views and constants that torch makes for itself are not
    counted. `to_programs_nbytes`: what programs read of torch's at each call, arguments included;
    `to_torch_nbytes`: what they give to torch.
    """

    name: str
    role: str
    programs: int
    by_stitch: tuple[tuple[str, int], ...]
    by_torch: tuple[tuple[str, int], ...]
    fallbacks: tuple[Fallback, ...]
    to_programs_nbytes: int
    to_torch_nbytes: int


#: What is told of each graph when it has been compiled.
Heard = Callable[[GraphReport], None]


_log = logging.getLogger(__name__)


def log_report(report: GraphReport) -> None:
    """Tells the log of a graph that was compiled (`TORCH_LOGS="stitch"`), and why torch runs what
    it runs (`TORCH_LOGS="+stitch"`)."""
    mine, theirs = (sum(count for _, count in part) for part in (report.by_stitch, report.by_torch))
    _log.info(
        "graph %s: %d operators in %d programs, %d run by torch; %d bytes to programs, %d to torch",
        report.name, mine, report.programs, theirs, report.to_programs_nbytes,
        report.to_torch_nbytes,
    )  # fmt: skip
    for fallback in report.fallbacks:
        _log.debug("graph %s: torch runs %s (%s): %s", report.name, fallback.operator,
                   fallback.where, fallback.reason)  # fmt: skip


@dataclass
class Counts:
    """All graphs that were compiled for a device so far, and how many were read from a cache."""

    from_cache: int = 0
    graphs: int = 0
    programs: int = 0
    by_stitch: Counter[str] = field(default_factory=Counter)
    by_torch: Counter[str] = field(default_factory=Counter)

    def add(self, report: GraphReport) -> None:
        """One graph more."""
        self.graphs += 1
        self.programs += report.programs
        self.by_stitch.update(dict(report.by_stitch))
        self.by_torch.update(dict(report.by_torch))
