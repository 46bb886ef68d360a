"""Layouts: space, address, data type, tiles and shards of a tensor."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from functools import cache

from stitch.argument_kinds import WHOLE, ArgumentKind, check_fields, instance_of
from stitch.errors import LayoutError
from stitch.program.data_type import DataType

#: The tile of the device: 32 rows of 32, stored as four 16 x 16 faces (tt-metal tensor layouts).
TILE_SHAPE = (32, 32)
MAX_RANK = 32
#: NumPy counts the bytes of an array in a signed 64-bit number, dimensions of size 0 left out.
_MOST_ELEMENTS = (2**63 - 1) // 8


class Space(enum.Enum):
    """A memory: of the host, the device's DRAM, or the L1 of its cores."""

    HOST = "host"
    DRAM = "dram"
    L1 = "l1"

    # Members are singletons: identity hashes in C, where enum's own hash runs Python code, and
    # descriptors are looked up on every call path.
    __hash__ = object.__hash__


class MemoryLayout(enum.Enum):
    """The distribution of pages over banks: round robin, or one shard per core."""

    INTERLEAVED = "interleaved"
    HEIGHT_SHARDED = "height_sharded"
    WIDTH_SHARDED = "width_sharded"
    BLOCK_SHARDED = "block_sharded"

    __hash__ = object.__hash__


class Orientation(enum.Enum):
    """The order in which shards are assigned to the cores of a grid."""

    ROW_MAJOR = "row_major"
    COL_MAJOR = "col_major"

    __hash__ = object.__hash__


_PAIR = ArgumentKind(
    "two whole numbers",
    lambda value: isinstance(value, tuple) and len(value) == 2 and all(map(WHOLE.accepts, value)),
)
_DATA_TYPE = instance_of("a DataType", DataType)
_SPACE = instance_of("a Space", Space)
_MEMORY_LAYOUT = instance_of("a MemoryLayout", MemoryLayout)
_SHAPE = ArgumentKind(
    "a tuple of whole numbers",
    lambda value: isinstance(value, tuple) and all(map(WHOLE.accepts, value)),
)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The core grid (rows, columns) and the shard shape (rows, columns) in elements."""

    core_grid: tuple[int, int]
    shape: tuple[int, int]
    orientation: Orientation = Orientation.ROW_MAJOR

    def __post_init__(self) -> None:
        check_fields(self, core_grid=_PAIR, shape=_PAIR)
        if min(*self.core_grid, *self.shape) < 1:
            raise LayoutError(
                "a shard needs a positive grid and a positive shape",
                got=f"grid {self.core_grid}, shape {self.shape}",
            )

    @property
    def cores(self) -> int:
        return self.core_grid[0] * self.core_grid[1]


@dataclass(frozen=True, slots=True)
class Layout:
    """Data type, space, tile shape (None: row-major), memory layout, and optionally an address.

    Addresses are per bank, in bytes. Raises `LayoutError` for contradictions: block formats are
    tiled, the host is never sharded, a sharded layout has a shard spec.

    >>> Layout(DataType.FLOAT32, Space.L1, TILE_SHAPE).text()
    'f32:l1:tile:interleaved'
    """

    data_type: DataType
    space: Space = Space.HOST
    tile_shape: tuple[int, int] | None = None
    memory_layout: MemoryLayout = MemoryLayout.INTERLEAVED
    shard_spec: ShardSpec | None = None
    address: int | None = None

    def __post_init__(self) -> None:
        enums = type(self.data_type), type(self.space), type(self.memory_layout)
        # Layouts are made by the thousand: the words are looked for only where they are needed.
        if enums != (DataType, Space, MemoryLayout):
            check_fields(self, data_type=_DATA_TYPE, space=_SPACE, memory_layout=_MEMORY_LAYOUT)
        wrong = self._contradictions()
        if wrong:
            raise LayoutError("this layout is not legal: " + "; ".join(wrong))

    def _contradictions(self) -> list[str]:
        wrong = []
        if self.tile_shape not in (None, TILE_SHAPE):
            wrong.append(f"tiles are {TILE_SHAPE}, not {self.tile_shape}")
        if self.data_type.is_block and self.tile_shape is None:
            wrong.append(f"{self.data_type.value} exists only in tiles")
        if self.is_sharded != (self.shard_spec is not None):
            wrong.append("a sharded memory layout and a shard spec go together")
        if self.is_sharded and self.space is Space.HOST:
            wrong.append("the host is never sharded")
        if self.shard_spec is not None and self.tile_shape == TILE_SHAPE:
            rows, columns = self.shard_spec.shape
            if rows % TILE_SHAPE[0] or columns % TILE_SHAPE[1]:
                wrong.append(f"a tiled shard is whole tiles, not {rows}x{columns}")
        if self.address is not None and not 0 <= self.address < 2**63:
            wrong.append(f"address {self.address} is out of range")
        return wrong

    @property
    def is_tiled(self) -> bool:
        return self.tile_shape is not None

    @property
    def is_sharded(self) -> bool:
        return self.memory_layout is not MemoryLayout.INTERLEAVED

    @property
    def is_dense(self) -> bool:
        """Return whether the elements are row-major and contiguous."""
        return self.tile_shape is None and not self.is_sharded

    def without_address(self) -> Layout:
        """Return the layout without its address."""
        return self if self.address is None else replace(self, address=None)

    def text(self) -> str:
        """Return a stable text for errors, `Program.text` and `--explain`."""
        words = [self.data_type.short, self.space.value]
        words.append("tile" if self.is_tiled else "row_major")
        spec = self.shard_spec
        if spec is None:
            words.append(self.memory_layout.value)
        else:
            grid, shape = spec.core_grid, spec.shape
            order = "" if spec.orientation is Orientation.ROW_MAJOR else ",col_major"
            words.append(
                f"{self.memory_layout.value}({grid[0]}x{grid[1]} cores,"
                f"{shape[0]}x{shape[1]}{order})"
            )
        at = "" if self.address is None else f"@{self.address:#x}"
        return ":".join(words) + at


@cache
def host_layout(data_type: DataType) -> Layout:
    """Return the canonical host layout: row-major, interleaved, no address."""
    return Layout(data_type)


_LAYOUT = instance_of("a Layout", Layout)


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """Shape and layout of a tensor: the ABI between compiler and runtime.

    >>> TensorDesc((2, 3), host_layout(DataType.FLOAT32)).text()
    '2x3xf32:host:row_major:interleaved'
    """

    shape: tuple[int, ...]
    layout: Layout

    def __post_init__(self) -> None:
        if type(self.shape) is not tuple or type(self.layout) is not Layout:
            check_fields(self, shape=_SHAPE, layout=_LAYOUT)
        if len(self.shape) > MAX_RANK or any(d < 0 for d in self.shape):
            raise LayoutError(
                f"a tensor has at most {MAX_RANK} dimensions, none of them negative",
                got=str(self.shape),
            )
        if 0 in self.shape and math.prod([d for d in self.shape if d]) > _MOST_ELEMENTS:
            raise LayoutError("a tensor without elements is beyond any array", got=str(self.shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """Return (rows, columns) of the tensor as a matrix, with outer dimensions in the rows.

        Tiles pad the last two dimensions before that (as in ttnn: 2x3x5x7 is 192x32 elements, 6
        tiles).
        """
        columns = self.shape[-1] if self.shape else 1
        rows = self.shape[-2] if len(self.shape) > 1 else 1
        outer = math.prod(self.shape[:-2])
        tile = self.layout.tile_shape
        if tile is not None:
            rows = -(-rows // tile[0]) * tile[0]
            columns = -(-columns // tile[1]) * tile[1]
        return outer * rows, columns

    def without_address(self) -> TensorDesc:
        """Return the descriptor without its address.

        >>> desc = TensorDesc((2, 3), Layout(DataType.FLOAT32, Space.DRAM, address=64))
        >>> desc.without_address().layout.address is None
        True
        """
        return (
            self
            if self.layout.address is None
            else replace(self, layout=self.layout.without_address())
        )

    def text(self) -> str:
        return "".join(f"{d}x" for d in self.shape) + self.layout.text()


# Links between tensors ----------------------------------------------------------------------------


def link_problem(
    source: TensorDesc, target: TensorDesc, strict_types: bool = False
) -> tuple[str, str] | None:
    """Return why a value cannot feed a slot, and a remedy; None if it can.

    Shapes must be equal, and only floating types convert into each other; with `strict_types` no
    storage type does.
    """
    if source.shape != target.shape:
        return (
            f"shape {list(source.shape)} is not {list(target.shape)}",
            "compile one of the two modules for the other's shape",
        )
    given, wanted = source.layout.data_type, target.layout.data_type
    if given is wanted:
        return None
    if not (given.is_floating and wanted.is_floating):
        return (
            f"{given.value} never turns into {wanted.value} on a link",
            "add a Cast to one of the modules",
        )
    if strict_types:
        return (
            f"{given.value} would be stored as {wanted.value}, and strict_types is set",
            f"compile the consumer with data_type={given.value}, or allow type changes",
        )
    return None
