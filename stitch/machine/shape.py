"""The shape of a machine's memory, and the footprint of a tensor in it, after tt-metal's
allocator.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import lru_cache
from operator import lt

from stitch.errors import LayoutError
from stitch.program import DataType, Layout, MemoryLayout, Orientation, ShardSpec, Space, TensorDesc


class Policy(enum.Enum):
    """Which hole a new buffer takes: the smallest that fits, or the first, as devices do: from the
    top down (L1) or from the bottom up (DRAM).

    Source: tt-metal's `tech_reports/memory/allocator.md` and `bank_manager.cpp`.
    """

    BEST_FIT = "best_fit"
    FIRST_FIT = "first_fit"
    FIRST_FIT_UPWARDS = "first_fit_upwards"


#: The policies of machine descriptions.
POLICIES = (Policy.BEST_FIT.value, Policy.FIRST_FIT.value)
#: Limit of the granules of a bank.
MOST_GRANULES = (1 << 40) - 1


@dataclass(frozen=True, slots=True, repr=False)
class SpaceShape:
    """One memory space of equal `banks`, each with usable addresses `[base, limit)` in bytes.

    Pages start at multiples of the alignment. Buffers start at multiples of the granule, a multiple
    of the alignment, and take whole granules (0: the alignment). `allocator` names a plugin that
    replaces the policy. Files store neither.
    """

    banks: int
    base: int
    limit: int
    alignment: int
    granule: int = 0
    policy: Policy = Policy.BEST_FIT
    allocator: str = ""

    def __post_init__(self) -> None:
        if not self.granule:
            object.__setattr__(self, "granule", self.alignment)

    def __repr__(self) -> str:
        names = ["banks", "base", "limit", "alignment"]
        names += ["granule"] if self.granule != self.alignment else []
        names += ["policy"] if self.policy is not Policy.BEST_FIT else []
        names += ["allocator"] if self.allocator else []
        return f"SpaceShape({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def capacity(self) -> int:
        """Usable bytes per bank."""
        return self.limit - self.base


@dataclass(frozen=True, slots=True)
class MachineShape:
    """The memory of the machine that a binary was compiled for; `l1` and `dram` may be absent."""

    name: str
    core_grid: tuple[int, int]
    host: SpaceShape
    l1: SpaceShape | None = None
    dram: SpaceShape | None = None

    def __hash__(self) -> int:
        # Hashing every field would slow the footprint cache.
        return hash((self.name, self.l1 and self.l1.limit, self.dram and self.dram.limit))

    def space(self, space: Space) -> SpaceShape:
        """Return the shape of a space; raise LayoutError if the machine has no such space."""
        shape = {Space.HOST: self.host, Space.DRAM: self.dram, Space.L1: self.l1}[space]
        if shape is None:
            raise LayoutError(
                f"machine {self.name!r} has no {space.value}",
                expected=" or ".join(s.value for s in self.spaces),
                remedy="choose another space, or another machine",
            )
        return shape

    @property
    def spaces(self) -> tuple[Space, ...]:
        """The spaces of this machine, host first."""
        present = ((Space.DRAM, self.dram), (Space.L1, self.l1))
        return (Space.HOST, *(space for space, shape in present if shape is not None))

    def shortcomings(self, compiled_for: MachineShape) -> tuple[str, ...]:
        """Return each reason why this machine cannot run what was compiled for another.

        Different usable addresses are no reason: a program fits by what it uses (`use_problems` of
        the linker).
        """
        apart = []
        if any(map(lt, self.core_grid, compiled_for.core_grid)):
            apart.append(f"core grid: needs {compiled_for.core_grid}, has {self.core_grid}")
        for space in compiled_for.spaces:
            theirs = compiled_for.space(space)
            if space not in self.spaces:
                apart.append(f"{space.value}: needed, absent")
                continue
            ours = self.space(space)
            if space is Space.HOST:
                continue
            for figure in ("alignment", "banks"):
                needed, there = getattr(theirs, figure), getattr(ours, figure)
                if needed != there:
                    apart.append(f"{space.value} {figure}: needs {needed}, has {there}")
        return tuple(apart)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a tensor in every bank of its space (lock-step allocation)."""

    pages: int
    page_nbytes: int
    aligned_page_nbytes: int
    banks: int
    size_per_bank: int

    @property
    def nbytes(self) -> int:
        """Bytes over all banks."""
        return self.size_per_bank * self.banks

    @property
    def own_nbytes(self) -> int:
        """Bytes of the pages: what a copy of the tensor counts as in every report.

        Dense tensors count their elements, tiled ones whole tiles, sharded ones whole shards; page
        padding and bank padding do not count, and a copy in pieces or through another space counts
        once.
        """
        return self.pages * self.page_nbytes


def round_up(value: int, granule: int) -> int:
    """Return the least multiple of `granule` that is at least `value`."""
    return -(-value // granule) * granule


def page_shape(desc: TensorDesc) -> tuple[int, int]:
    """Return the elements (rows, columns) of a page: a tile, or one row (of a shard)."""
    layout = desc.layout
    if layout.tile_shape is not None:
        return layout.tile_shape
    if layout.shard_spec is not None:
        return (1, layout.shard_spec.shape[1])
    return (1, desc.rows_and_columns[1])


def shard_counts(desc: TensorDesc, spec: ShardSpec) -> tuple[int, int]:
    """Return the number of shards down and across."""
    rows, columns = desc.rows_and_columns
    return max(1, -(-rows // spec.shape[0])), max(1, -(-columns // spec.shape[1]))


@lru_cache(maxsize=4096)
def footprint(desc: TensorDesc, machine: MachineShape) -> Footprint:
    """Return the pages and bytes per bank of a tensor, at least one alignment.

    Raises LayoutError if the shards do not fit the memory layout, the grid or the banks.
    """
    layout, space = desc.layout, machine.space(desc.layout.space)
    rows, columns = desc.rows_and_columns
    page = page_shape(desc)
    page_nbytes = layout.data_type.nbytes(page[0] * page[1])
    aligned = round_up(page_nbytes, space.alignment)
    spec = layout.shard_spec
    if spec is None:
        pages = (rows // page[0]) * -(-columns // page[1]) if columns else 0
        if space.banks == 1 and not layout.is_tiled:
            # With one bank dense rows are contiguous: no page padding.
            size = round_up(pages * page_nbytes, space.alignment)
        else:
            size = -(-pages // space.banks) * aligned
    else:
        _check_shards(desc, spec, machine)
        per_shard = (spec.shape[0] // page[0]) * (spec.shape[1] // page[1])
        pages = per_shard * math.prod(shard_counts(desc, spec))
        size = per_shard * aligned
    return Footprint(pages, page_nbytes, aligned, space.banks, max(size, space.alignment))


def room_per_bank(desc: TensorDesc, machine: MachineShape) -> int:
    """Return the bytes per bank of a buffer for a tensor: its footprint in whole granules.

    Source: tt-metal's `bank_manager.cpp` aligns the free list of L1 to DRAM, while pages keep L1's
    alignment.
    """
    granule = machine.space(desc.layout.space).granule
    return round_up(footprint(desc, machine).size_per_bank, granule)


def _check_shards(desc: TensorDesc, spec: ShardSpec, machine: MachineShape) -> None:
    rows, columns = desc.rows_and_columns
    down, across = shard_counts(desc, spec)
    layout = desc.layout.memory_layout
    wrong = []
    if layout is MemoryLayout.HEIGHT_SHARDED and spec.shape[1] != columns:
        wrong.append(f"height shards are {columns} columns wide, not {spec.shape[1]}")
    if layout is MemoryLayout.WIDTH_SHARDED and spec.shape[0] != rows:
        wrong.append(f"width shards are {rows} rows high, not {spec.shape[0]}")
    if layout is MemoryLayout.BLOCK_SHARDED and (
        down > spec.core_grid[0] or across > spec.core_grid[1]
    ):
        wrong.append(f"{down}x{across} blocks do not fit a grid of {spec.core_grid}")
    if down * across > spec.cores:
        wrong.append(f"{down * across} shards do not fit {spec.cores} cores")
    cores = spec.core_grid
    if layout is MemoryLayout.BLOCK_SHARDED and spec.orientation is Orientation.COL_MAJOR:
        # Column-major: tensor rows go across the core grid.
        cores = cores[::-1]
    if desc.layout.space is Space.L1 and (
        cores[0] > machine.core_grid[0] or cores[1] > machine.core_grid[1]
    ):
        wrong.append(f"a grid of {cores} cores exceeds the machine's {machine.core_grid}")
    if spec.cores > machine.space(desc.layout.space).banks:
        wrong.append(f"{spec.cores} cores exceed the space's banks")
    if wrong:
        raise LayoutError(f"the sharding of {desc.text()} is invalid: " + "; ".join(wrong))


def shard_layout(
    shape: tuple[int, ...],
    memory_layout: MemoryLayout,
    machine: MachineShape,
    *,
    data_type: DataType,
    space: Space = Space.L1,
    tile_shape: tuple[int, int] | None = None,
) -> Layout:
    """Return the even sharding of a shape over a machine's cores; raise LayoutError if there is
    none.

    The grid divides (ceiling) before tilizing, as ttnn does.
    """
    flat = TensorDesc(shape, Layout(data_type, Space.DRAM, tile_shape))
    rows, columns = flat.rows_and_columns
    grid = machine.core_grid if space is Space.L1 else (1, machine.space(space).banks)
    cores = min(grid[0] * grid[1], machine.space(space).banks)
    row_step, column_step = tile_shape or (1, 1)

    def cut(length: int, parts: int, step: int) -> int:
        return round_up(max(1, -(-length // parts)), step)

    spec_shape = {
        MemoryLayout.HEIGHT_SHARDED: (cut(rows, cores, row_step), max(1, columns)),
        MemoryLayout.WIDTH_SHARDED: (max(1, rows), cut(columns, cores, column_step)),
        MemoryLayout.BLOCK_SHARDED: (
            cut(rows, grid[0], row_step),
            cut(columns, grid[1], column_step),
        ),
    }.get(memory_layout)
    if spec_shape is None:
        raise LayoutError("an interleaved memory layout has no shards")
    return Layout(data_type, space, tile_shape, memory_layout, ShardSpec(grid, spec_shape))
