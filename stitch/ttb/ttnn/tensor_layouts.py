"""Convert tensor descriptions of TTNN binaries: type, space, tile, memory layout, shards.

Until 0.0.795 a layout gave the memref of one core (in tiles, if tiled) and ranges of cores; since
then it has a shard spec, in elements. Tensors have no fixed addresses: the device's allocator
assigns them at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from stitch.errors import FormatError, LayoutError, Problem
from stitch.flatbuffer import Record
from stitch.machine import MachineShape, footprint, round_up, shard_counts
from stitch.program import (
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
    ValueType,
)
from stitch.ttb.ttnn.field_history import TtnnSchema

# Parts of a foreign binary without a counterpart here.

#: Places that are listed of one line; the rest are counted.
MOST_PLACES = 3


class Counterparts:
    """Collects what is shown otherwise than the file has it.

    >>> lacking = Counterparts()
    >>> for place in ("a", "b", "b", "c", "d"):
    ...     lacking.add("rings are shown as lines", place)
    >>> lacking.lines()
    ('rings are shown as lines: a, b, c and 1 more',)
    """

    def __init__(self) -> None:
        self._places: dict[str, dict[str, None]] = {}

    def add(self, what: str, where: str) -> None:
        """Note something, and a place where it is."""
        self._places.setdefault(what, {})[where] = None

    def lines(self) -> tuple[str, ...]:
        """Each thing with its places, in the order in which they were met."""
        return tuple(f"{what}: {_listed(list(places))}" for what, places in self._places.items())


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_PLACES
    return ", ".join(places[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")


# Core-range sets as grids.

Grid = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class CoreRange:
    """A rectangle of cores; both ends are in it."""

    first_row: int
    first_column: int
    last_row: int
    last_column: int

    @property
    def size(self) -> Grid:
        """Rows and columns; nothing where the ends are the wrong way round."""
        rows = self.last_row - self.first_row + 1
        return max(0, rows), max(0, self.last_column - self.first_column + 1)

    @property
    def cores(self) -> int:
        """How many cores it has."""
        return self.size[0] * self.size[1]


def grid_of(
    ranges: Sequence[CoreRange], orientation: Orientation, shards: Grid, width: int
) -> tuple[Grid, str]:
    """The grid that deals so many shards (down, across) as a set of cores has them, and what it
    does not say: nothing where it deals them to the very same cores.

    `width`: columns of the machine, in which other sets are shown from the corner on.

    >>> row, rest = CoreRange(0, 0, 0, 7), CoreRange(1, 0, 1, 1)
    >>> grid_of([row, rest], Orientation.ROW_MAJOR, (10, 1), 8)
    ((2, 8), '')
    """
    if len(ranges) == 1:
        (one,) = ranges
        if (one.first_row, one.first_column) == (0, 0):
            return one.size, ""
        where = f"cores from ({one.first_row}, {one.first_column}) on"
        return one.size, f"{where} are shown from the corner on: bytes per core hold"
    grid = _full_lines(sorted(ranges), orientation)
    if grid is not None:
        return grid, ""
    text = f"a set of {len(ranges)} ranges of cores is shown from the corner on"
    return _packed(sum(one.cores for one in ranges), shards, width), f"{text}: bytes per core hold"


def turned(grid: Grid, layout: MemoryLayout, orientation: Orientation) -> Grid:
    """The blocks (down, across) of a grid of cores, and the other way round: blocks in columns lie
    beside each other on the cores where they are below each other in the tensor.

    >>> turned((2, 4), MemoryLayout.BLOCK_SHARDED, Orientation.COL_MAJOR)
    (4, 2)
    """
    is_turned = layout is MemoryLayout.BLOCK_SHARDED and orientation is Orientation.COL_MAJOR
    return grid[::-1] if is_turned else grid


def _full_lines(ranges: Sequence[CoreRange], orientation: Orientation) -> Grid | None:
    """The grid of which a set is full rows and the begin of the next (or columns)."""
    if len(ranges) != 2:
        return None
    block, rest = ranges
    if (block.first_row, block.first_column) != (0, 0):
        return None
    (rows, columns), (more_rows, more_columns) = block.size, rest.size
    corner = rest.first_row, rest.first_column
    if orientation is Orientation.ROW_MAJOR:
        follows = corner == (rows, 0) and more_rows == 1 and more_columns < columns
        return (rows + 1, columns) if follows else None
    follows = corner == (0, columns) and more_columns == 1 and more_rows < rows
    return (rows, columns + 1) if follows else None


def _packed(cores: int, shards: Grid, width: int) -> Grid:
    """A grid from the corner that has room for shards."""
    if min(shards) > 1:
        return shards
    cores = max(1, cores, *shards)
    return (1, cores) if cores <= width else (-(-cores // width), width)


_TILE = (32, 32)
_TYPES = {
    "Float32": DataType.FLOAT32, "Float16": DataType.FLOAT16, "BFloat16": DataType.BFLOAT16,
    "BFP_BFloat8": DataType.BFP8, "BFP_BFloat4": DataType.BFP4, "UInt32": DataType.UINT32,
    "UInt16": DataType.UINT16, "UInt8": DataType.UINT8, "Int32": DataType.INT32,
    "Float64": DataType.FLOAT64, "Int64": DataType.INT64, "UInt64": DataType.UINT64,
    "Int16": DataType.INT16, "Int8": DataType.INT8, "Bool": DataType.BOOL,
}  # fmt: skip
#: Types of the device that have no name here, and the nearest by size.
_NEAREST = {
    "BFP_Float8": DataType.BFP8,
    "BFP_Float4": DataType.BFP4,
    "BFP_Float2": DataType.BFP4,
    "BFP_BFloat2": DataType.BFP4,
}
#: What versions before 0.0.4 called the block formats.
_OLD_BLOCK_PREFIX = "BC_"  # fmt: skip
_SPACES = {
    "System": Space.HOST, "SystemMMIO": Space.HOST, "DeviceDRAM": Space.DRAM, "DeviceL1": Space.L1,
    "SystemMemory": Space.HOST, "DRAM": Space.DRAM, "L1": Space.L1,
}  # fmt: skip
#: Regions of their own on the device, and the spaces that they are parts of.
_REGIONS = {"L1Small": Space.L1, "Trace": Space.DRAM}
_SHARDED = {
    "HeightSharded": MemoryLayout.HEIGHT_SHARDED, "WidthSharded": MemoryLayout.WIDTH_SHARDED,
    "BlockSharded": MemoryLayout.BLOCK_SHARDED,
}  # fmt: skip
_ORIENTATIONS = {"RowMajor": Orientation.ROW_MAJOR, "ColMajor": Orientation.COL_MAJOR}


@dataclass(frozen=True, slots=True)
class _Shards:
    """What a core holds, in elements, and which cores."""

    shape: tuple[int, ...]
    ranges: tuple[CoreRange, ...]
    orientation: Orientation


@dataclass(frozen=True, slots=True)
class _Placement:
    """Where a tensor is, in the words of the file."""

    space: str
    memory_layout: str
    shards: _Shards | None
    is_nd: bool = False


class TensorReader:
    """Reads the descriptions of one file; each is looked at once, however many tensors have it."""

    def __init__(self, schema: TtnnSchema, machine: MachineShape, lacking: Counterparts) -> None:
        self._codes = schema.codes
        self._named = schema.schema.named
        self._machine = machine
        self._lacking = lacking
        self._known: dict[int, tuple[Record, ValueType, Layout]] = {}

    def describe(self, desc: Record, where: str) -> tuple[ValueType, Layout]:
        """The type and the layout of a record of `TensorDesc`."""
        known = self._known.get(id(desc))
        if known is None:
            known = self._known[id(desc)] = (desc, *self._described(desc, where))
        return known[1], known[2]

    def _described(self, desc: Record, where: str) -> tuple[ValueType, Layout]:
        tensor = self._named("TensorDesc", desc)
        layout = self._named("LayoutDesc", tensor["layout"])
        memory = self._named("MemoryDesc", layout["memory_desc"])
        shape = tensor["shape"]
        mesh = tensor.get("mesh_shape", ())
        if math.prod(mesh) > 1:
            shown = "x".join(map(str, mesh))
            self._lacking.add(f"a tensor over a mesh of {shown} is shown whole, on one chip", where)
        data_type = self._data_type(memory["data_type"], where)
        logical = DataType.FLOAT32 if data_type.is_block else data_type
        tile = self._tile(memory["tile_shape"], data_type, where)
        is_old = "memory_space" in memory
        placed = self._by_memref(layout, memory, tile) if is_old else self._by_config(memory, tile)
        space = self._space(placed.space, where)
        plain = Layout(data_type, space, tile)
        try:
            whole = TensorDesc(shape, plain)
        except LayoutError as error:
            problem = Problem("shape", where, " ".join(str(error).split()))
            raise FormatError("the TTNN binary is not sound", problems=(problem,)) from error
        return ValueType(shape, logical), self._sharded(whole, placed, where)

    def _member(self, enum: str, code: int) -> str:
        return self._codes[enum][code]

    def _data_type(self, code: int, where: str) -> DataType:
        name = self._member("DataType", code)
        if name.startswith(_OLD_BLOCK_PREFIX):
            name = "BFP_" + name.removeprefix(_OLD_BLOCK_PREFIX)
        known = _TYPES.get(name)
        if known is not None:
            return known
        nearest = _NEAREST.get(name, DataType.FLOAT32)
        self._lacking.add(f"elements of {name} are shown as {nearest.value}", where)
        return nearest

    def _tile(
        self, shape: tuple[int, int] | None, data_type: DataType, where: str
    ) -> tuple[int, int] | None:
        if shape is None or max(shape) <= 1:
            if data_type.is_block:
                self._lacking.add(f"{data_type.value} without tiles is shown in tiles", where)
                return _TILE
            return None
        if shape != _TILE:
            text = f"tiles of {shape[0]}x{shape[1]} are shown as tiles of 32x32"
            self._lacking.add(text, where)
        return _TILE

    def _space(self, name: str, where: str) -> Space:
        region = _REGIONS.get(name)
        if region is None:
            return _SPACES[name]
        self._lacking.add(f"the region {name} is shown as {region.value}", where)
        return region

    # Where, in the words of each time ------------------------------------------------------

    def _by_memref(
        self, layout: dict[str, Any], memory: dict[str, Any], tile: tuple[int, int] | None
    ) -> _Placement:
        """Until 0.0.795: a memref says what a core holds. Before 0.0.172 all tensors on the device
        are interleaved, and a layout says no more."""
        space = self._member("MemorySpace", memory["memory_space"])
        if "memory_layout" not in memory:
            return _Placement(space, "Interleaved", None)
        held = memory["shape"]
        shape = math.prod(held[:-1]), held[-1] if held else 1
        if tile is not None:
            shape = shape[0] * tile[0], shape[1] * tile[1]
        ranges = _by_size(layout["core_range_set"])
        return _Placement(
            space,
            self._member("TensorMemoryLayout", memory["memory_layout"]),
            _Shards(shape, ranges, Orientation.ROW_MAJOR),
        )

    def _by_config(self, memory: dict[str, Any], tile: tuple[int, int] | None) -> _Placement:
        """Since 0.0.796: what lies on the device has a memory config."""
        if memory["memory_config"] is None:
            return _Placement("SystemMemory", "Interleaved", None)
        config = self._named("MemoryConfig", memory["memory_config"])
        spec, nd_spec = config["shard_spec"], config.get("nd_shard_spec")
        layout = self._member("TensorMemoryLayout", config["tensor_memory_layout"])
        space = self._member("BufferType", config["buffer_type"])
        if spec is None:
            nd_shards = None if nd_spec is None else self._nd_shards(nd_spec)
            return _Placement(space, layout, nd_shards, nd_shards is not None)
        said = self._named("ShardSpec", spec)
        if "grid" in said:
            shape, ranges = said["shard_shape"], _by_size(said["grid"])
            return _Placement(space, layout, _Shards(shape, ranges, Orientation.ROW_MAJOR))
        shape = said.get("physical_shard_shape") or said["shape"]
        return _Placement(space, layout, self._shards(said, shape))

    def _nd_shards(self, record: Record) -> _Shards:
        said = self._named("NDShardSpec", record)
        return self._shards(said, said["shape"])

    def _shards(self, said: dict[str, Any], shape: tuple[int, ...]) -> _Shards:
        cores = said["core_range_set"]
        held = () if cores is None else self._named("CoreRangeSet", cores)["core_ranges"]
        ranges = tuple(
            CoreRange(first_row, first_column, last_row, last_column)
            for first_column, first_row, last_column, last_row in held
        )
        orientation = _ORIENTATIONS[self._member("ShardOrientation", said["orientation"])]
        return _Shards(shape, ranges, orientation)

    # Shards --------------------------------------------------------------------------------

    def _sharded(self, plain: TensorDesc, placed: _Placement, where: str) -> Layout:
        """The layout with its shards, where they have a form here; else interleaved, and noted."""
        layout, add = plain.layout, self._lacking.add
        kind = _SHARDED.get(placed.memory_layout)
        if layout.space is Space.HOST:
            return layout
        if placed.is_nd or placed.memory_layout == "NDSharded":
            add(f"ND shards{_sized(placed.shards)} are shown as interleaved", where)
            return layout
        if kind is None:
            if placed.memory_layout == "SingleBank":
                add("a tensor in a single bank is shown as interleaved", where)
            return layout
        shards = placed.shards
        if shards is None or len(shards.shape) != 2 or not shards.ranges or min(shards.shape) < 1:
            add(f"{placed.memory_layout} without shape or cores is shown as interleaved", where)
            return layout
        try:
            return self._with_shards(plain, kind, shards, where)
        except LayoutError as error:
            add(f"shards that are not legal here are shown as interleaved ({error.what})", where)
            return layout

    def _with_shards(
        self, plain: TensorDesc, kind: MemoryLayout, shards: _Shards, where: str
    ) -> Layout:
        rows, columns = shards.shape
        if plain.layout.is_tiled and (rows % _TILE[0] or columns % _TILE[1]):
            text = f"tiled shards of {rows}x{columns} are shown in whole tiles"
            self._lacking.add(text, where)
            rows, columns = round_up(rows, _TILE[0]), round_up(columns, _TILE[1])
        counts = shard_counts(plain, ShardSpec((1, 1), (rows, columns)))
        width = self._machine.core_grid[1]
        order = shards.orientation
        grid, unsaid = grid_of(shards.ranges, order, turned(counts, kind, order), width)
        spec = ShardSpec(turned(grid, kind, order), (rows, columns), order)
        layout = replace(plain.layout, memory_layout=kind, shard_spec=spec)
        footprint(TensorDesc(plain.shape, layout), self._machine)
        if unsaid:
            self._lacking.add(unsaid, where)
        return layout


def _by_size(ranges: Sequence[tuple[int, int, int, int]]) -> tuple[CoreRange, ...]:
    """Ranges given by their corner (row, column) and their size."""
    return tuple(
        CoreRange(row, column, row + rows - 1, column + columns - 1)
        for row, column, rows, columns in ranges
    )


def _sized(shards: _Shards | None) -> str:
    return "" if shards is None else " of " + "x".join(map(str, shards.shape))
