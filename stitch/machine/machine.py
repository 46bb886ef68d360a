"""`Machine`: a described device, its memory shape and the cost of every way between its spaces.

Knows nothing of plans, tensors or files.

The cost model, from first principles (decision 0002 has its errors on silicon):

* A published network-on-chip (NoC) table gives bytes per cycle against transfer size. Its shape
  is that of one issuer: a request costs about 23 cycles to issue, whatever its size, until the link
  itself is full. So the table is **per core**, not for the chip (`Noc.bytes_per_cycle`).
* A copy of a tensor takes as long as its slowest part (`CopyCounts`): the core that carries most,
  over its own link; the core or DRAM bank that most is read from; the link of the network that
  most goes over; the DRAM's measured total. To this the time until the first bytes arrive is added.
* Readers wait for each other: what comes from DRAM takes longer than the bytes of its busiest link
  (`Noc.dram_queueing`), and readers that take their sources in the same order leave all others
  idle in part (`Noc.turns`). Both were measured; they are the only figures that are fitted.
* A raw transfer of bytes (`Machine.seconds`: what moves inside L1 goes on in each bank alike) is
  carried by all cores evenly, each with what is its own: links x table, no more than the limit.
* A copy to or from the host is bound by the host link, by the size of its pages, whatever the
  cores do.
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

# Compute rates (decision 0045) --------------------------------------------------------------------

_TILE = math.prod(TILE_SHAPE)


@dataclass(frozen=True, slots=True)
class Compute:
    """Rates of one core, in steps a cycle, and what all cores share.

    `multiply_adds_per_cycle`: of the matrix unit in one pass; `passes`: how many each math fidelity
    takes; `fidelity`: which one the kernels' library takes for operands of a type; None: for two
    whose types have different ones (without it, the one of more passes). Other types are none of
    the matrix unit: their products go through the vector unit.
    `bytes_per_second`: what programs read and write in spaces that all cores share. A program takes
    `launch_seconds` to begin.
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
        """The math fidelity of a sum of products; None where the vector unit computes it."""
        known, passes = dict(self.fidelity), dict(self.passes)
        by_type = [known[kind] for kind in operands if kind in known]
        if len(by_type) < len(operands):
            return None
        if asked is not MathFidelity.BY_TYPE:
            return asked
        most = max(by_type, key=lambda fidelity: passes[fidelity])
        return most if len(set(by_type)) == 1 else known.get(None, most)

    def seconds(self, work: OperationWork, cores: int, link_bytes_per_cycle: float) -> float:
        """Simulated seconds of one operation on a machine of so many cores.

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
                computed / self.elements_per_cycle,
                of_busiest(Space.L1) / self.l1_bytes_per_cycle,
            )
        shared = sum(n / rate for space, rate in self.bytes_per_second
                     if (n := nbytes.get(space, 0)))  # fmt: skip
        linked = of_busiest(Space.DRAM) / link_bytes_per_cycle
        on_cores, carried = cycles / self.clock_hz, max(shared, linked / self.clock_hz)
        return max(on_cores, carried) + (1 - self.hidden_share) * min(on_cores, carried)

    def _product_cycles(self, work: OperationWork, busiest: int) -> float:
        """Cycles of the core with most tiles of a sum of products."""
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
    """How fast bytes go from one space to another.

    `curve` holds (transfer bytes, bytes per second), sizes rising; `limit_bytes_per_second` is what
    the slower end allows in total, whatever the size of the transfers. `links`: so many cores make
    the curve together, each over its own link; 0, where the path does not lead over the NoC.
    """

    latency_seconds: float
    curve: Curve
    limit_bytes_per_second: float = math.inf
    links: int = 0

    def rate(self, transfer_nbytes: int) -> float:
        """Bytes per second for transfers of a size (see `read_curve`), capped by the limit."""
        return min(read_curve(self.curve, transfer_nbytes), self.limit_bytes_per_second)

    def seconds(self, nbytes: int, transfer_nbytes: int) -> float:
        """Simulated seconds to carry `nbytes` in transfers of `transfer_nbytes`."""
        return self.latency_seconds + nbytes / self.rate(transfer_nbytes)

    def core_seconds(self, nbytes: int, transfers: int, transfer_nbytes: int, more: float) -> float:
        """Seconds that one core takes for its part, each transfer `more` than to issue it."""
        size, rate = self.curve[0]
        carrying = nbytes * self.links / read_curve(self.curve, transfer_nbytes)
        return max(carrying, transfers * (size * self.links / rate + more)) if more else carrying


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """What of a copy decides how long it takes: how its bytes spread over cores, banks and links.

    `transfers` of `page_nbytes` are made by `reading_cores` from `source_nodes` cores or DRAM
    banks; of each the busiest is told. Where the source is sharded and the target is not, cores
    write instead: then the nodes are those that they write to.

    `networks`: over how many of the two the transfers go. Of one of them, `busiest_port_nbytes`:
    what its busiest source gives; `busiest_link_nbytes`: what its busiest link carries;
    `in_turn_nbytes`: what its busiest source gives in each turn, over all turns, where all readers
    take their sources in the same order. `route`: how far the bytes go; None for writes, and where
    each is read and written.
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

    def __hash__(self) -> int:
        # What copies cost is looked up by machine: hashing every figure takes longer.
        return hash(self.shape)

    def copy_seconds(self, counts: CopyCounts, recording_cycles: float = 0.0) -> float:
        """Simulated seconds of a copy of a tensor; the sum over the legs of its route.

        `recording_cycles`: what each transfer takes longer to issue in a kernel that records them,
        as traces of silicon do. Raises `LayoutError` without a route.
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
        """Simulated seconds of bytes that all cores carry evenly: the sum over the legs of a route.

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


# Time of operations and programs ------------------------------------------------------------------

_SECONDS = "seconds"


def operation_seconds(work: OperationWork, machine: Machine) -> float:
    """What one run of an operation takes; 0 where the machine describes no compute rates."""
    compute = machine.compute
    if compute is None:
        return 0.0
    rows, columns = machine.shape.core_grid
    return compute.seconds(work, rows * columns, _link_bytes_per_cycle(machine))


def program_seconds(
    operations: OperationList, machine: Machine, space: Space | None = None
) -> float:
    """What one run takes: its launch, and its operations one after the other.

    Bodies must be those of scans alone. Values without a layout lie in `space`. It is 0 where the
    machine describes no compute rates.
    """
    if machine.compute is None:
        return 0.0

    def figures(work: OperationWork) -> Mapping[str, float]:
        return {_SECONDS: operation_seconds(work, machine)}

    found = summed_over_operations(operations, figures, space)
    return machine.compute.launch_seconds + found.get(_SECONDS, 0.0)


def _link_bytes_per_cycle(machine: Machine) -> float:
    """What a core carries over its own link at best."""
    noc = machine.noc
    if noc is None:
        return math.inf
    return noc.curve[-1][1] if noc.link is None else noc.link
