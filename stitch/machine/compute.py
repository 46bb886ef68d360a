"""How fast a machine computes: rates of one core, and what operations take by them (decision 0045).

An operation is divided among cores in whole tiles of 32 x 32; the core with most tiles decides:

* A sum of products takes a matrix unit so many passes as its math fidelity has. Each product of two
  tiles takes `tile_loads` tiles from L1 as well (one of the two stays while the other changes), and
  the slower of the two counts. `products_share`: of all that, what long products reach.
* Other arithmetic goes through the vector unit, an element a step, and what it reads and makes
  through L1, and again the slower counts. A core has whole tiles of it, but for the last.
* Bytes of DRAM go over DRAM's limit, which all cores share, and over the cores' own links. Of
  computing and carrying, `hidden_share` of the shorter is done beside the longer: 1 is a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stitch.ops import OperationWork
from stitch.program import TILE_SHAPE, DataType, MathFidelity, Space

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
