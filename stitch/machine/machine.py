"""`Machine`: a described device, its memory shape and the rates of the paths between its spaces."""

from __future__ import annotations

from dataclasses import dataclass

from stitch.machine.shape import MachineShape
from stitch.program import Space


@dataclass(frozen=True, slots=True)
class Path:
    """How fast bytes go from one space to another.

    `seconds(nbytes, transfer)` = operation latency + bytes / rate, where the rate depends on the
    size of a single transfer (a page): `curve` holds (transfer bytes, bytes per second), rising.
    """

    latency_seconds: float
    curve: tuple[tuple[int, float], ...]

    def rate(self, transfer_nbytes: int) -> float:
        """Bytes per second for transfers of a size: linear between the points of the curve."""
        before = self.curve[0]
        if transfer_nbytes <= before[0]:
            return before[1]
        for after in self.curve[1:]:
            if transfer_nbytes <= after[0]:
                share = (transfer_nbytes - before[0]) / (after[0] - before[0])
                return before[1] + share * (after[1] - before[1])
            before = after
        return before[1]

    def seconds(self, nbytes: int, transfer_nbytes: int) -> float:
        """Simulated seconds to carry `nbytes` in transfers of `transfer_nbytes`."""
        return self.latency_seconds + nbytes / self.rate(transfer_nbytes)


@dataclass(frozen=True, slots=True)
class Machine:
    """A described device: name, memory shape, and a path for each pair of spaces it connects."""

    shape: MachineShape
    paths: tuple[tuple[Space, Space, Path], ...]
    sources: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.shape.name

    def path(self, source: Space, target: Space) -> Path | None:
        """The direct path between two spaces, None where the machine has none."""
        for a, b, path in self.paths:
            if a is source and b is target:
                return path
        return None

    @property
    def moves_inside_l1(self) -> bool:
        """Whether bytes can move from L1 to L1 without passing through DRAM."""
        return self.path(Space.L1, Space.L1) is not None

    def seconds(self, source: Space, target: Space, nbytes: int, transfer_nbytes: int) -> float:
        """Simulated seconds of a copy; by way of DRAM where there is no direct path."""
        direct = self.path(source, target)
        if direct is not None:
            return direct.seconds(nbytes, transfer_nbytes)
        if Space.DRAM in (source, target):
            return 0.0
        return self.seconds(source, Space.DRAM, nbytes, transfer_nbytes) + self.seconds(
            Space.DRAM, target, nbytes, transfer_nbytes
        )
