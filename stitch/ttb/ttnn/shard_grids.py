"""Core-range sets as grids: which shards lie on cores that a grid from the corner deals the same.

Comes in: ranges of cores, as a file has them. Goes out: the grid of a `ShardSpec`, and what of the
set it does not say. Must not know: files, tensors.

Shards are dealt to a grid core by core, along its rows (or down its columns), and what is left of
the grid stays empty. So full rows and the begin of one more are a grid too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stitch.program import MemoryLayout, Orientation

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
