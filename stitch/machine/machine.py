"""`Machine`: a described device, its memory shape and the cost of every way between its spaces.

Comes in: figures that `machine_form.py` has read and checked. Goes out: simulated seconds. Knows
nothing of plans, tensors or files.

The cost model, from first principles:

* A published network-on-chip (NoC) table gives bytes per cycle against transfer size. Its shape
  is that of one issuer: a request costs about 23 cycles to issue, whatever its size, until the link
  itself is full. So the table is **per core**, not for the chip (`Noc.bytes_per_cycle`).
* A copy inside L1 is made by all worker cores at once, each through its own link: links x table.
  (Two rings per direction leave the bisection wide enough for uniform traffic.)
* A copy between DRAM and L1 is issued by the same cores, but they share the DRAM channels: the
  lesser of links x table and the bandwidth that the channels were measured to achieve in total.
  DRAM to DRAM reads and writes the same channels, so it gets half of that.
* A copy to or from the host is bound by the host link, whatever the cores do.
* A page is one transfer. Below the smallest size of a table the time of one transfer is constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from stitch.errors import LayoutError
from stitch.machine.shape import MachineShape
from stitch.program import DataType, Space

Curve = tuple[tuple[int, float], ...]


def read_curve(curve: Curve, transfer_nbytes: int) -> float:
    """The rate at a transfer size: linear between the points, flat above the last.

    Below the first point the time of one transfer is that of the first point, so the rate falls in
    proportion to the size.

    >>> read_curve(((128, 4.0), (256, 8.0)), 192), read_curve(((128, 4.0), (256, 8.0)), 64)
    (6.0, 2.0)
    """
    before = curve[0]
    if transfer_nbytes <= before[0]:
        return before[1] * max(1, transfer_nbytes) / before[0]
    for after in curve[1:]:
        if transfer_nbytes <= after[0]:
            share = (transfer_nbytes - before[0]) / (after[0] - before[0])
            return before[1] + share * (after[1] - before[1])
        before = after
    return before[1]


@dataclass(frozen=True, slots=True)
class Path:
    """How fast bytes go from one space to another.

    `curve` holds (transfer bytes, bytes per second), rising; `limit_bytes_per_second` is what the
    slower end allows in total, whatever the size of the transfers.
    """

    latency_seconds: float
    curve: Curve
    limit_bytes_per_second: float = math.inf

    def rate(self, transfer_nbytes: int) -> float:
        """Bytes per second for transfers of a size (see `read_curve`), capped by the limit."""
        return min(read_curve(self.curve, transfer_nbytes), self.limit_bytes_per_second)

    def seconds(self, nbytes: int, transfer_nbytes: int) -> float:
        """Simulated seconds to carry `nbytes` in transfers of `transfer_nbytes`."""
        return self.latency_seconds + nbytes / self.rate(transfer_nbytes)


@dataclass(frozen=True, slots=True)
class Noc:
    """The network on chip as one worker core sees it: rates over its link, latencies in cycles."""

    clock_hz: float
    curve: Curve
    latency_cycles: float
    latency_cycles_per_hop: float

    def bytes_per_cycle(self, transfer_nbytes: int) -> float:
        """Bytes per cycle over one core's link, in transfers of a size."""
        return read_curve(self.curve, transfer_nbytes)

    def write_latency_cycles(self, hops: float) -> float:
        """Cycles from the start of a write until its first bytes arrive, `hops` routers away."""
        return self.latency_cycles + self.latency_cycles_per_hop * hops

    def path(self, links: int, hops: float, limit_bytes_per_second: float = math.inf) -> Path:
        """The path that `links` cores make together, each over its own link."""
        scale = links * self.clock_hz
        return Path(
            self.write_latency_cycles(hops) / self.clock_hz,
            tuple((nbytes, rate * scale) for nbytes, rate in self.curve),
            limit_bytes_per_second,
        )


@dataclass(frozen=True, slots=True)
class Compute:
    """How fast a machine computes, as a roofline: peak rates of all cores together, and what
    launching a program costs.

    A program takes the time to launch it, and then the longer of two: that of its arithmetic, each
    type at its own rate, and that of its bytes, each space at its own. Rates are peaks: the time is
    a lower bound, good for weighing a copy against a program, and no promise of what silicon does.
    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.

    `flops_per_second`: sums of products (a multiply and an add are two) by the type of their
    operands; types that are not listed, and all other arithmetic, go at
    `other_flops_per_second`. `bytes_per_second`: what programs read and write, by space.
    """

    launch_seconds: float
    flops_per_second: tuple[tuple[DataType, float], ...]
    other_flops_per_second: float
    bytes_per_second: tuple[tuple[Space, float], ...]

    def seconds(
        self, products: Mapping[DataType, int], other_flops: int, nbytes: Mapping[Space, int]
    ) -> float:
        """Simulated seconds of a program: FLOPs in products by type, other FLOPs, bytes by space.

        >>> compute = Compute(1.0, ((DataType.BFLOAT16, 4.0),), 2.0, ())
        >>> compute.seconds({DataType.BFLOAT16: 8}, 4, {})
        5.0
        """
        rates, spaces = dict(self.flops_per_second), dict(self.bytes_per_second)
        arithmetic = other_flops / self.other_flops_per_second
        for kind, flops in products.items():
            arithmetic += flops / rates.get(kind, self.other_flops_per_second)
        carrying = sum(n / spaces[space] for space, n in nbytes.items() if space in spaces)
        return self.launch_seconds + max(arithmetic, carrying)


#: The executors whose rates a description may give.
LOOP_EXECUTORS = ("numpy", "onnxruntime", "torch")


@dataclass(frozen=True, slots=True)
class LoopRates:
    """What the rounds of a loop take where an executor computes them, by an estimate that is good
    for weighing one schedule against another.

    A loop takes `loop_seconds` to begin; a round `round_seconds`, and `element_seconds` for each
    element that it takes or gives (`copies_elements`: it is copied, not seen in its sequence); each
    of its operations `operation_seconds`, `function_seconds` where it is a function of several
    steps, `movement_seconds` where it only moves elements (`has_views`: without touching them,
    where it can); its FLOPs in products (`packed_flops_per_second` by matrices that are constants),
    and `matrix_seconds` for each of their matrices; and its bytes: at `near_bytes_per_second`
    as far as what a round reads and writes is no more than `near_nbytes` (the cache of one core),
    beyond that at `far_bytes_per_second`.
    """

    executor: str
    has_views: bool
    copies_elements: bool
    loop_seconds: float
    round_seconds: float
    element_seconds: float
    operation_seconds: float
    function_seconds: float
    movement_seconds: float
    matrix_seconds: float
    flops_per_second: float
    packed_flops_per_second: float
    near_nbytes: int
    near_bytes_per_second: float
    far_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A described device: name, memory shape, and a path for each pair of spaces it connects.

    `sources` pairs the dotted name of a figure with where that figure was found. Without `compute`
    programs take no simulated time; without `loops`, the rates of executors, schedules of loops are
    chosen by the figures of the machine `host`.
    """

    shape: MachineShape
    paths: tuple[tuple[Space, Space, Path], ...]
    sources: tuple[tuple[str, str], ...] = ()
    noc: Noc | None = None
    compute: Compute | None = None
    loops: tuple[LoopRates, ...] = ()

    @property
    def name(self) -> str:
        return self.shape.name

    def path(self, source: Space, target: Space) -> Path | None:
        """The direct path between two spaces, None where the machine has none."""
        for a, b, path in self.paths:
            if a is source and b is target:
                return path
        return None

    def route(self, source: Space, target: Space) -> tuple[Space, ...]:
        """The spaces that a copy visits, both ends included: direct, else through fewest others.

        Among equals DRAM comes first, since it has the room. Raises `LayoutError` where no chain of
        paths leads from one to the other.
        """
        for middle in _detours(source, target):
            stops = (source, *middle, target)
            if all(self.path(*leg) is not None for leg in pairwise(stops)):
                return stops
        known = ", ".join(f"{a.value}->{b.value}" for a, b, _ in self.paths) or "none"
        raise LayoutError(
            f"machine {self.name!r} cannot carry bytes from {source.value} to {target.value}",
            expected=f"a chain of paths {source.value} -> ... -> {target.value}",
            got=f"paths: {known}",
            remedy="add the missing path to the machine's description",
        )

    def seconds(self, source: Space, target: Space, nbytes: int, transfer_nbytes: int) -> float:
        """Simulated seconds of a copy: the sum over the legs of its route.

        `nbytes` in all, in transfers of `transfer_nbytes`. Raises `LayoutError` without a route.
        """
        direct = self.path(source, target)
        if direct is not None:
            return direct.seconds(nbytes, transfer_nbytes)
        total = 0.0
        for a, b in pairwise(self.route(source, target)):
            leg = self.path(a, b)
            assert leg is not None, "route() only returns connected stops"
            total += leg.seconds(nbytes, transfer_nbytes)
        return total


def _detours(source: Space, target: Space) -> Iterator[tuple[Space, ...]]:
    yield ()
    others = [s for s in (Space.DRAM, Space.L1, Space.HOST) if s not in (source, target)]
    yield from ((middle,) for middle in others)
    yield from ((a, b) for a in others for b in others if a is not b)
