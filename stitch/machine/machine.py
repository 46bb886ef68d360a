"""`Machine`: a described device, its memory shape and the cost of every path between its spaces.

The cost model, from first principles (decision 0002 has its errors on silicon):

* A published network-on-chip (NoC) table gives bytes per cycle against transfer size. Its shape is
  that of one issuer: a request costs about 23 cycles to issue, whatever its size, until the link
  itself is full. So the table is **per core**, not for the chip (`Noc.curve`).
* A copy of a tensor takes as long as its slowest part (`CopyCounts`): the busiest core, over its
  own link; the busiest source core or DRAM bank; the busiest link of the network; the DRAM's
  measured total. The latency of the first bytes is added.
* Readers wait for each other: reads from DRAM take longer than the bytes of the busiest link
  (`Noc.dram_queueing`), and readers that take their sources in the same order leave the others
  partly idle (`Noc.turns`). Both were measured; they are the only fitted figures.
* A raw transfer of bytes (`Machine.seconds`: moves inside L1 are equal in each bank) is carried by
  all cores evenly, each with its own bytes: links x table, at most the limit.
* A copy to or from the host is bound by the host link and the size of its pages.
* A page is one transfer. Below the smallest size of a table the time of one transfer is constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stitch.errors import LayoutError
from stitch.machine.network import Curve, Noc, Route, read_curve
from stitch.machine.shape import MachineShape
from stitch.ops import OperationWork, summed_over_operations
from stitch.program import TILE_SHAPE, DataType, MathFidelity, OperationList, Space

_TILE = math.prod(TILE_SHAPE)


@dataclass(frozen=True, slots=True)
class Compute:
    """Rates of one core, in steps a cycle, and of what all cores share (decision 0045).

    `multiply_adds_per_cycle`: of the matrix unit in one pass; `passes`: passes per math fidelity;
    `fidelity`: the one that the kernel library uses for operands of a type, or (None) of two types
    with different ones (default: the one of more passes). Products of other types use the vector
    unit. `bytes_per_second`: of spaces that all cores share. A program takes `launch_seconds` to
    start.
    """

    launch_seconds: float
    clock_hz: float
    multiply_adds_per_cycle: float
    passes: tuple[tuple[MathFidelity, float], ...]
    fidelity: tuple[tuple[DataType | None, MathFidelity], ...]
    elements_per_cycle: float
    l1_bytes_per_cycle: float
    tile_loads: float = 0.0
    products_share: float = 1.0
    hidden_share: float = 1.0
    bytes_per_second: tuple[tuple[Space, float], ...] = ()

    def fidelity_of(self, operands: Sequence[DataType], asked: MathFidelity) -> MathFidelity | None:
        """Return the math fidelity of a sum of products; None if the vector unit computes it."""
        known, passes = dict(self.fidelity), dict(self.passes)
        by_type = [known[kind] for kind in operands if kind in known]
        if len(by_type) < len(operands):
            return None
        if asked is not MathFidelity.BY_TYPE:
            return asked
        most = max(by_type, key=lambda fidelity: passes[fidelity])
        return most if len(set(by_type)) == 1 else known.get(None, most)

    def seconds(self, work: OperationWork, cores: int, link_bytes_per_cycle: float) -> float:
        """Return the simulated seconds of one operation on so many cores.

        >>> compute = Compute(0.0, 1.0, 8.0, (), (), 1.0, 4.0)
        >>> work = OperationWork(0, 0, (DataType.FLOAT32,), 4096, 4, 0, (), ())
        >>> [compute.seconds(work, cores, 1.0) for cores in (1, 4, 3)]
        [4096.0, 1024.0, 2048.0]
        """
        used = min(work.shards or work.tiles, work.tiles, cores)
        busiest = max(-(-work.tiles // used), min(work.shard_tiles, work.tiles))
        nbytes, padded = dict(work.nbytes), dict(work.padded_nbytes)

        def of_busiest(space: Space) -> float:
            return min(nbytes.get(space, 0), padded.get(space, 0) * busiest / work.tiles)

        if work.multiply_adds:
            cycles = self._product_cycles(work, busiest)
        else:
            computed = 0 if work.only_moves else min(work.elements, busiest * _TILE)
            cycles = max(
                computed / self.elements_per_cycle, of_busiest(Space.L1) / self.l1_bytes_per_cycle
            )
        shared = sum(n / rate for space, rate in self.bytes_per_second
                     if (n := nbytes.get(space, 0)))  # fmt: skip
        linked = of_busiest(Space.DRAM) / link_bytes_per_cycle
        on_cores, carried = cycles / self.clock_hz, max(shared, linked / self.clock_hz)
        return max(on_cores, carried) + (1 - self.hidden_share) * min(on_cores, carried)

    def _product_cycles(self, work: OperationWork, busiest: int) -> float:
        """Return the cycles of the core with the most tiles of a sum of products."""
        fidelity = self.fidelity_of(work.operands, work.math_fidelity)
        if fidelity is None:
            return min(work.multiply_adds, busiest * _TILE * work.depth) / self.elements_per_cycle
        products = busiest * -(-work.depth // TILE_SHAPE[1])
        passes = dict(self.passes)[fidelity]
        arithmetic = passes * _TILE * TILE_SHAPE[1] / self.multiply_adds_per_cycle
        loading = self.tile_loads * work.operands[0].nbytes(_TILE) / self.l1_bytes_per_cycle
        return products * max(arithmetic, loading) / self.products_share


@dataclass(frozen=True, slots=True)
class Path:
    """The cost of a path between two spaces.

    `curve` holds (transfer bytes, bytes per second), sizes rising; `limit_bytes_per_second` is the
    total limit of the slower end. `links`: the number of cores that the curve stands for, each with
    its own link; 0 if the path does not use the NoC.
    """

    latency_seconds: float
    curve: Curve
    limit_bytes_per_second: float = math.inf
    links: int = 0

    def rate(self, transfer_nbytes: int) -> float:
        """Return the bytes per second at a transfer size (see `read_curve`), up to the limit."""
        return min(read_curve(self.curve, transfer_nbytes), self.limit_bytes_per_second)

    def seconds(self, nbytes: int, transfer_nbytes: int) -> float:
        """Return the simulated seconds of `nbytes` in transfers of `transfer_nbytes`."""
        return self.latency_seconds + nbytes / self.rate(transfer_nbytes)

    def core_seconds(self, nbytes: int, transfers: int, transfer_nbytes: int, more: float) -> float:
        """Return the seconds of one core's part; each transfer takes `more` seconds to issue."""
        size, rate = self.curve[0]
        carrying = nbytes * self.links / read_curve(self.curve, transfer_nbytes)
        return max(carrying, transfers * (size * self.links / rate + more)) if more else carrying


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """What determines the time of a copy: how its bytes spread over cores, banks and links.

    `transfers` of `page_nbytes` are made by `reading_cores` from `source_nodes` cores or DRAM
    banks; the figures of the busiest of each are given. If only the source is sharded, cores write
    instead, and the nodes are their targets.

    `networks`: how many of the two are used. On one of them, `busiest_port_nbytes` leave the
    busiest source and `busiest_link_nbytes` pass the busiest link; `in_turn_nbytes` is the sum of
    what the busiest source provides in each turn, if all readers take their sources in the same
    order. `route`: how far the bytes go; None for writes, and if cores both read and write.
    """

    source: Space
    target: Space
    transfers: int
    nbytes: int
    page_nbytes: int
    reading_cores: int = 1
    busiest_reader_nbytes: int = 0
    busiest_reader_transfers: int = 0
    source_nodes: int = 1
    busiest_source_nbytes: int = 0
    networks: int = 1
    busiest_port_nbytes: int = 0
    busiest_link_nbytes: int = 0
    in_turn_nbytes: int = 0
    route: Route | None = None


#: Executors with rates for loops.
LOOP_EXECUTORS = ("numpy", "onnxruntime", "torch", "cuda")


@dataclass(frozen=True, slots=True)
class LoopRates:
    """Rates that estimate the time of a loop in an executor, to compare schedules.

    A loop takes `loop_seconds` to start and `round_seconds` for each round, plus `element_seconds`
    for each element of a sequence that a round reads or writes (`copies_elements`: by a copy
    instead of a view). Each operation takes `operation_seconds`, or `function_seconds` if it is a
    function of several steps, or `movement_seconds` if it only moves elements (`has_views`: without
    a copy if possible). Products take `matrix_seconds` for each matrix and their FLOPs at
    `flops_per_second`, or `packed_flops_per_second` by constant matrices. Bytes move at
    `near_bytes_per_second` if a round uses at most `near_nbytes` (the cache of one core), else at
    `far_bytes_per_second`.
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
    """A described device: name, memory shape, and paths between spaces.

    `sources` pairs the dotted name of a figure with its source. Without `compute` programs take no
    simulated time; without `loops`, schedules of loops are chosen by the figures of `host` (on
    cards of `cuda`). `residency` names a plugin's eviction rule, which replaces those of the
    planner.
    """

    shape: MachineShape
    paths: tuple[tuple[Space, Space, Path], ...]
    sources: tuple[tuple[str, str], ...] = ()
    noc: Noc | None = None
    compute: Compute | None = None
    loops: tuple[LoopRates, ...] = ()
    residency: str = ""

    @property
    def has_plugin_policies(self) -> bool:
        """Whether an allocator or an eviction rule is a plugin's."""
        return bool(self.residency) or any(
            self.shape.space(space).allocator for space in self.shape.spaces
        )

    @property
    def name(self) -> str:
        return self.shape.name

    def path(self, source: Space, target: Space) -> Path | None:
        """Return the direct path between two spaces, or None."""
        for a, b, path in self.paths:
            if a is source and b is target:
                return path
        return None

    def route(self, source: Space, target: Space) -> tuple[Space, ...]:
        """Return the spaces that a copy visits, both ends included: the fewest, DRAM preferred.

        Raises LayoutError if no chain of paths connects them.
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

    def __hash__(self) -> int:
        # Hashing every figure would slow the cache of copy costs.
        return hash(self.shape)

    def copy_seconds(self, counts: CopyCounts, recording_cycles: float = 0.0) -> float:
        """Return the simulated seconds of copying a tensor: the sum over the legs of its route.

        `recording_cycles`: the extra cycles to issue a transfer in a kernel that records traces.
        Raises LayoutError without a route.
        """
        path, noc = self.path(counts.source, counts.target), self.noc
        if path is None or not path.links or noc is None:
            return self.seconds(counts.source, counts.target, counts.nbytes, counts.page_nbytes)
        reader = path.core_seconds(
            counts.busiest_reader_nbytes, counts.busiest_reader_transfers, counts.page_nbytes,
            recording_cycles / noc.clock_hz,
        ) / counts.networks  # fmt: skip
        latency = None if counts.route is None else noc.read_latency_cycles(counts.route)
        wait = path.latency_seconds if latency is None else latency / noc.clock_hz
        if counts.route is Route.CORE:
            return wait + reader
        is_in_l1 = Space.DRAM not in (counts.source, counts.target)
        rate = (noc.core if is_in_l1 else noc.dram) or math.inf
        link = counts.busiest_link_nbytes / (noc.link or math.inf)
        if is_in_l1:
            cycles = max(counts.busiest_port_nbytes / rate, link)
            cycles += noc.turns * max(0.0, counts.in_turn_nbytes / rate - cycles)
        else:
            cycles = max(counts.busiest_port_nbytes / rate, link * noc.dram_queueing)
        shared = cycles / noc.clock_hz
        return wait + max(reader, shared, counts.nbytes / path.limit_bytes_per_second)

    def seconds(self, source: Space, target: Space, nbytes: int, transfer_nbytes: int) -> float:
        """Return the simulated seconds of bytes that all cores carry evenly, over the legs of a
        route.

        `nbytes` in all, in transfers of `transfer_nbytes`. Raises LayoutError without a route.
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


def operation_seconds(work: OperationWork, machine: Machine) -> float:
    """Return the simulated seconds of an operation; 0 without compute rates."""
    compute = machine.compute
    if compute is None:
        return 0.0
    rows, columns = machine.shape.core_grid
    return compute.seconds(work, rows * columns, _link_bytes_per_cycle(machine))


def program_seconds(
    operations: OperationList, machine: Machine, space: Space | None = None
) -> float:
    """Return the simulated seconds of a program: its launch and its operations in sequence; 0
    without compute rates.

    Bodies must be those of scans. Values without a layout count as being in `space`.
    """
    if machine.compute is None:
        return 0.0

    def figures(work: OperationWork) -> Mapping[str, float]:
        return {"seconds": operation_seconds(work, machine)}

    found = summed_over_operations(operations, figures, space)
    return machine.compute.launch_seconds + found.get("seconds", 0.0)


def estimated_seconds(operations: OperationList, machine: Machine) -> float:
    """Return the simulated seconds of a program, to compare placements.

    Without compute rates (the host) it is the time to copy what operations read and write.
    """
    if machine.compute is not None:
        return program_seconds(operations, machine)
    near = Space.HOST if machine.shape.l1 is None else Space.L1

    def figures(work: OperationWork) -> Mapping[str, float]:
        carried = (machine.seconds(space, near, n, n) for space, n in work.nbytes if n)
        return {"seconds": sum(carried)}

    return summed_over_operations(operations, figures).get("seconds", 0.0)


def _link_bytes_per_cycle(machine: Machine) -> float:
    """Return the best rate of a core's own link."""
    noc = machine.noc
    if noc is None:
        return math.inf
    return noc.curve[-1][1] if noc.link is None else noc.link
