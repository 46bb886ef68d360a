"""How the bytes of a copy spread: as traces of silicon counted, and pages counted one by one."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest

from stitch.errors import LayoutError
from stitch.machine import (
    CopyCounts,
    Machine,
    Route,
    Routers,
    copy_counts,
    load_machine,
    shard_layout,
)
from stitch.program import (
    TILE_SHAPE,
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
)

TRACES = FilePath(__file__).parents[1] / "data/tenstorrent/noc_traces/noc_traces.csv"
N150, P150 = load_machine("wormhole_n150"), load_machine("blackhole_p150")
#: The matrix that the traced copies inside L1 carry, in tiles, as their pages' order shows.
RESHARDED = (16, 8)


def traces() -> list[dict[str, str]]:
    with TRACES.open(newline="") as stream:
        return list(csv.DictReader(stream))


def sharded(
    grid: tuple[int, int], kind: str, tiles: tuple[int, int], data_type: DataType
) -> Layout:
    cores = grid[0] * grid[1]
    cut = {"BLOCK": grid, "HEIGHT": (cores, 1), "WIDTH": (1, cores)}[kind]
    spec = ShardSpec(grid, (32 * (tiles[0] // cut[0]), 32 * (tiles[1] // cut[1])))
    return Layout(data_type, Space.L1, TILE_SHAPE, MemoryLayout[f"{kind}_SHARDED"], spec)


def ends_of(trace: dict[str, str]) -> tuple[TensorDesc, TensorDesc]:
    """The descriptors of a trace by its name: FROM grid and kind, TO grid and kind."""
    source, _, target = trace["name"].partition("_TO_")
    from_dram = source == "DRAM"
    rows = int(target[0])
    tiles = (rows * 8, 16) if from_dram else RESHARDED
    data_type = DataType.BFLOAT16 if from_dram else DataType.FLOAT32

    def layout(words: str) -> Layout:
        grid, kind = words.split("_")
        down, _, across = grid.partition("x")
        return sharded((int(down), int(across)), kind, tiles, data_type)

    shape = (32 * tiles[0], 32 * tiles[1])
    dram = Layout(data_type, Space.DRAM, TILE_SHAPE)
    made = TensorDesc(shape, layout(target))
    if from_dram and made.layout.memory_layout is MemoryLayout.HEIGHT_SHARDED:
        # Height shards are as wide as the matrix: here one tile, so that each has whole rows.
        pages, cores = int(trace["transfers"]), int(trace["reading_cores"])
        shape = (32 * pages, 32)
        spec = ShardSpec(made.layout.shard_spec.core_grid, (32 * pages // cores, 32))  # type: ignore[union-attr]
        made = TensorDesc(shape, dataclasses.replace(made.layout, shard_spec=spec))
    return TensorDesc(shape, dram if from_dram else layout(source)), made


@pytest.mark.parametrize("trace", traces(), ids=lambda trace: str(trace["name"]))
def test_the_counts_of_each_traced_copy_are_those_that_silicon_made(trace: dict[str, str]) -> None:
    counts = copy_counts(*ends_of(trace), N150)
    found = {
        "transfers": counts.transfers,
        "bytes": counts.nbytes,
        "page_bytes": counts.page_nbytes,
        "reading_cores": counts.reading_cores,
        "busiest_reader_bytes": counts.busiest_reader_nbytes,
        "busiest_reader_transfers": counts.busiest_reader_transfers,
        "source_nodes": counts.source_nodes,
        "busiest_source_bytes": counts.busiest_source_nbytes,
    }
    assert found == {name: int(trace[name]) for name in found}


# -- against pages that are counted one by one -----------------------------------------------------


def core_of(desc: TensorDesc, row: int, column: int, routers: Routers) -> tuple[int, int]:
    """The router of the core that holds a page, of a matrix of tiles."""
    spec = desc.layout.shard_spec
    assert spec is not None
    down, across = 32 * row // spec.shape[0], 32 * column // spec.shape[1]
    by_rows = spec.orientation is Orientation.ROW_MAJOR
    if desc.layout.memory_layout is MemoryLayout.BLOCK_SHARDED:
        at = (down, across) if by_rows else (across, down)
    elif by_rows:
        at = divmod(down + across, spec.core_grid[1])
    else:
        at = divmod(down + across, spec.core_grid[0])[::-1]
    return routers.core_rows[at[0]], routers.core_columns[at[1]]


def links(
    sent: tuple[int, int], received: tuple[int, int], grid: tuple[int, int], second: bool
) -> list[tuple[int, int, str]]:
    """East, then south; on the second network north, then west."""
    (row, column), found = sent, []
    while not second and column != received[1]:
        found.append((row, column, "east"))
        column = (column + 1) % grid[1]
    while row != received[0]:
        found.append((row, column, "north" if second else "south"))
        row = (row + (-1 if second else 1)) % grid[0]
    while column != received[1]:
        found.append((row, column, "west"))
        column = (column - 1) % grid[1]
    return found


def counted(source: TensorDesc, target: TensorDesc, machine: Machine) -> tuple[int, int, int]:
    """The busiest link's and the busiest source's bytes of one network, and the latter turn by
    turn, page by page."""
    assert machine.noc is not None and machine.noc.routers is not None
    routers, spec = machine.noc.routers, target.layout.shard_spec
    assert spec is not None
    high, wide = spec.shape[0] // 32, spec.shape[1] // 32
    nbytes = target.layout.data_type.nbytes(1024)
    both = high * wide > 2
    loads: Counter[object] = Counter()
    given: Counter[object] = Counter()
    orders: dict[object, list[tuple[int, int]]] = {}
    turns: Counter[tuple[bool, tuple[int, int], tuple[int, int]]] = Counter()
    rows, columns = target.rows_and_columns
    for row in range(rows // 32):
        for column in range(columns // 32):
            inner = (row % high, column % wide)
            late = inner[0] >= -(-high // 2) if high > 1 else inner[1] >= -(-wide // 2)
            second = both and late
            of = core_of(source, row, column, routers)
            to = core_of(target, row, column, routers)
            for link in links(of, to, routers.grid, second):
                loads[second, link] += nbytes
            given[second, of] += nbytes
            # A turn is a source along each axis.
            own = source.layout.shard_spec
            assert own is not None
            place = (32 * row // own.shape[0], 32 * column // own.shape[1])
            order = orders.setdefault((second, to), [])
            if place not in order:
                order.append(place)
            starts = order[0]
            turn = (place[0] - starts[0], place[1] - starts[1])
            turns[second, turn, of] += nbytes
    in_turn = Counter[bool]()
    for second in (False, True):
        for turn in {key[1] for key in turns if key[0] == second}:
            in_turn[second] += max(n for key, n in turns.items() if key[:2] == (second, turn))
    return max(loads.values(), default=0), max(given.values()), max(in_turn.values())


def random_shards(chance: random.Random, machine: Machine, tiles: tuple[int, int]) -> Layout:
    """Shards of whole tiles on some cores."""
    kind = chance.choice(("BLOCK", "HEIGHT", "WIDTH"))
    while True:
        grid = tuple(chance.choice([1, 2, 4, 8]) for _ in range(2))
        cores = grid[0] * grid[1]
        cut = {"BLOCK": grid, "HEIGHT": (cores, 1), "WIDTH": (1, cores)}[kind]
        if tiles[0] % cut[0] == tiles[1] % cut[1] == 0:
            layout = sharded((grid[0], grid[1]), kind, tiles, DataType.BFLOAT16)
            if kind != "BLOCK" and chance.random() < 0.3:
                spec = dataclasses.replace(layout.shard_spec, orientation=Orientation.COL_MAJOR)  # type: ignore[type-var]
                layout = dataclasses.replace(layout, shard_spec=spec)
            return layout


@pytest.mark.parametrize("machine", [N150, P150], ids=lambda machine: machine.name)
def test_loads_in_closed_form_are_those_of_pages_that_are_counted(machine: Machine) -> None:
    chance = random.Random(7)
    for _ in range(60):
        tiles = (chance.choice([8, 16, 32, 64]), chance.choice([8, 16, 32]))
        ends = [
            TensorDesc((32 * tiles[0], 32 * tiles[1]), random_shards(chance, machine, tiles))
            for _ in range(2)
        ]
        counts = copy_counts(ends[0], ends[1], machine)
        if ends[0] == ends[1]:
            assert counts.route is Route.CORE
            continue
        link, port, in_turn = counted(ends[0], ends[1], machine)
        where = f"{ends[0].text()} -> {ends[1].text()}"
        assert (counts.busiest_link_nbytes, counts.busiest_port_nbytes) == (link, port), where
        if counts.route is not Route.CORE:
            assert counts.in_turn_nbytes == in_turn, where


# -- what stays, what is written -------------------------------------------------------------------

BFLOAT16 = DataType.BFLOAT16
TILED = Layout(BFLOAT16, Space.L1, TILE_SHAPE)


@pytest.mark.parametrize("kind", list(MemoryLayout))
def test_what_keeps_its_layout_stays_in_its_cores(kind: MemoryLayout) -> None:
    layout = TILED
    if kind is not MemoryLayout.INTERLEAVED:
        layout = shard_layout(
            (2048, 2048), kind, N150.shape, data_type=BFLOAT16, tile_shape=TILE_SHAPE
        )
    source = TensorDesc((2048, 2048), layout)
    target = TensorDesc((2048, 2048), dataclasses.replace(layout, address=1 << 18))
    counts = copy_counts(source, target, N150)
    assert (counts.route, counts.busiest_link_nbytes) == (Route.CORE, 0)
    # Its own core's latency, and 32 bytes a cycle at most.
    cycles = N150.copy_seconds(counts) * 1e9
    assert cycles == pytest.approx(70 + counts.busiest_reader_nbytes / 30)


def legal_layouts(shape: tuple[int, ...], machine: Machine) -> Iterator[Layout]:
    for space in machine.shape.spaces:
        for tile in (None, TILE_SHAPE):
            yield Layout(BFLOAT16, space, tile)
            # Of no rows there are no shards of whole tiles.
            if space is Space.HOST or 0 in shape:
                continue
            for kind in (k for k in MemoryLayout if k is not MemoryLayout.INTERLEAVED):
                yield shard_layout(shape, kind, machine.shape, data_type=BFLOAT16, space=space,
                                   tile_shape=tile)  # fmt: skip


@pytest.mark.parametrize("name", ["wormhole_n150", "blackhole_p150", "tiny", "host"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 64), (1,), (3, 5, 7), (33, 65)])
def test_every_legal_copy_has_counts_and_a_price(name: str, shape: tuple[int, ...]) -> None:
    machine = load_machine(name)
    descs = [TensorDesc(shape, layout) for layout in legal_layouts(shape, machine)]
    for source, target in itertools.product(descs, repeat=2):
        counts = copy_counts(source, target, machine)
        assert 0 <= machine.copy_seconds(counts) < 1e-3, (source.text(), target.text())
        assert counts.busiest_reader_nbytes <= max(1, counts.nbytes)


def test_blocks_in_columns_lie_on_cores_that_the_machine_has() -> None:
    def blocks(grid: tuple[int, int]) -> TensorDesc:
        spec = ShardSpec(grid, (32, 32), Orientation.COL_MAJOR)
        layout = Layout(BFLOAT16, Space.L1, TILE_SHAPE, MemoryLayout.BLOCK_SHARDED, spec)
        return TensorDesc((32 * grid[0], 32 * grid[1]), layout)

    # A p150 has 10 rows of 11 cores: 11 blocks down lie beside each other in a row of cores.
    far = TensorDesc((352, 320), Layout(BFLOAT16, Space.DRAM, TILE_SHAPE))
    counts = copy_counts(blocks((11, 10)), far, P150)
    assert counts.reading_cores == 110 and P150.copy_seconds(counts) > 0
    with pytest.raises(LayoutError, match="exceeds the machine's"):
        copy_counts(blocks((10, 11)), TensorDesc((320, 352), far.layout), P150)


def test_an_empty_shard_is_copied_for_nothing_but_its_latency() -> None:
    spec = ShardSpec((1, 1), (32, 32))
    layout = Layout(BFLOAT16, Space.L1, TILE_SHAPE, MemoryLayout.BLOCK_SHARDED, spec)
    ends = TensorDesc((0, 32), Layout(BFLOAT16, Space.L1)), TensorDesc((0, 32), layout)
    assert N150.copy_seconds(copy_counts(*ends, N150)) < 1e-6


def test_counts_are_looked_up_the_second_time() -> None:
    ends = [
        TensorDesc((96, 32), dataclasses.replace(TILED, space=s)) for s in (Space.DRAM, Space.L1)
    ]
    assert copy_counts(*ends, N150) is copy_counts(*ends, N150)


# -- what counts cost ------------------------------------------------------------------------------


def test_a_recorded_kernel_takes_what_recording_takes_where_it_is_the_slowest() -> None:
    counts = CopyCounts(Space.DRAM, Space.L1, 128, 1 << 18, 2048, 1, 1 << 18, 128, 12, 22_528,
                        route=Route.BOTH)  # fmt: skip
    plain, recorded = N150.copy_seconds(counts), N150.copy_seconds(counts, 125 - 128 / 5.5)
    assert plain * 1e9 == pytest.approx(270 + (1 << 18) / 30)
    assert recorded * 1e9 == pytest.approx(270 + 128 * 125)


def test_a_machine_with_more_cores_than_routers_prices_by_cores_alone() -> None:
    shape = dataclasses.replace(N150.shape, core_grid=(8, 9))
    machine = dataclasses.replace(N150, shape=shape)
    far = TensorDesc((64, 288), Layout(BFLOAT16, Space.DRAM, TILE_SHAPE))
    near = TensorDesc((64, 288), sharded((1, 9), "BLOCK", (2, 9), BFLOAT16))
    counts = copy_counts(far, near, machine)
    assert (counts.reading_cores, counts.busiest_link_nbytes) == (9, 0)
