"""The cost model against published figures, and the way it joins paths into routes."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path as FilePath

import pytest

from stitch.errors import LayoutError
from stitch.machine import CopyCounts, Route, load_machine, machine_names
from stitch.machine.network import read_curve
from stitch.program import Space
from tests.support.machines import without_path

# tt-npe's device models: transfer bytes -> bytes per cycle, per link.
PUBLISHED = [
    ("wormhole_n150", 128, 5.5),
    ("wormhole_n150", 256, 10.1),
    ("wormhole_n150", 512, 18),
    ("wormhole_n150", 1024, 27.4),
    ("wormhole_n150", 2048, 30),
    ("blackhole_p150", 128, 6),
    ("blackhole_p150", 256, 12.1),
    ("blackhole_p150", 512, 24.2),
    ("blackhole_p150", 1024, 48),
    ("blackhole_p150", 2048, 57.7),
    ("blackhole_p150", 4096, 58.7),
    ("blackhole_p150", 8192, 60.4),
    ("blackhole_p150", 16384, 60.9),
]
MANY = 1 << 30
TRANSFERS = FilePath(__file__).parents[1] / "data/tenstorrent/host_transfers/host_transfers.csv"


@pytest.mark.parametrize(("name", "transfer_nbytes", "expected"), PUBLISHED)
def test_the_noc_table_is_reproduced(name: str, transfer_nbytes: int, expected: float) -> None:
    noc = load_machine(name).noc
    assert noc is not None
    assert read_curve(noc.curve, transfer_nbytes) == pytest.approx(expected, rel=0.10)


@pytest.mark.parametrize(
    ("source", "target", "low", "high"),
    [
        (Space.HOST, Space.DRAM, 3.9, 3.9),
        (Space.HOST, Space.L1, 3.9, 3.9),
        (Space.DRAM, Space.HOST, 1.1, 1.9),
        (Space.L1, Space.HOST, 1.1, 1.9),
        (Space.DRAM, Space.L1, 267, 267),
        (Space.L1, Space.DRAM, 267, 267),
    ],
)
def test_n150_copies_run_at_the_measured_rates(
    source: Space, target: Space, low: float, high: float
) -> None:
    gigabytes = MANY / load_machine("wormhole_n150").seconds(source, target, MANY, 2048) / 1e9
    assert 0.9 * low <= gigabytes <= 1.1 * high


# tt-metal issue 27846: GiB/s of 1 GiB read by the host to memory that is not pinned, by page.
READ_BY_PAGE = [(32, 0.74), (64, 1.25), (128, 1.87), (256, 3.65), (512, 6.91), (1024, 7.21),
                (2048, 7.38)]  # fmt: skip
# tt-umd's benchmark of PCIe DMA: MB/s of one transfer of so many bytes between the host and DRAM,
# or L1.
ONE_TRANSFER = [
    (row["size"], way, row[way])
    for row in csv.DictReader(TRANSFERS.read_text().splitlines())
    for way in list(row)[1:]
    if row[way]
]


@pytest.mark.parametrize(("page_nbytes", "expected"), READ_BY_PAGE)
def test_p150_gives_the_host_what_was_measured_by_page(page_nbytes: int, expected: float) -> None:
    machine = load_machine("blackhole_p150")
    seconds = machine.seconds(Space.DRAM, Space.HOST, MANY, page_nbytes)
    assert MANY / seconds / (1 << 30) == pytest.approx(expected, rel=0.10)


@pytest.mark.parametrize(("size", "way", "expected"), ONE_TRANSFER)
def test_n150_makes_one_transfer_of_the_host_as_fast_as_was_measured(
    size: str, way: str, expected: str
) -> None:
    (source, target), nbytes = map(Space, way.split("_to_")), int(size)
    seconds = load_machine("wormhole_n150").seconds(source, target, nbytes, nbytes)
    assert nbytes / seconds / 1e6 == pytest.approx(float(expected), rel=0.10)


@pytest.mark.parametrize("name", machine_names())
def test_a_larger_transfer_of_the_host_never_takes_less_time(name: str) -> None:
    machine = load_machine(name)
    sizes = [round(4 * 1.01**step) for step in range(2000)]
    for source, target, _ in machine.paths:
        if Space.HOST in (source, target):
            times = [machine.seconds(source, target, nbytes, nbytes) for nbytes in sizes]
            assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("name", "route", "cycles"),
    [("wormhole_n150", Route.CORE, 70), ("wormhole_n150", Route.COLUMN, 154),
     ("wormhole_n150", Route.ROW, 170), ("wormhole_n150", Route.BOTH, 270),
     ("blackhole_p150", Route.CORE, 65), ("blackhole_p150", Route.COLUMN, 177),
     ("blackhole_p150", Route.ROW, 217), ("blackhole_p150", Route.BOTH, 329)],
)  # fmt: skip
def test_a_read_waits_by_its_route(name: str, route: Route, cycles: float) -> None:
    machine = load_machine(name)
    assert machine.noc is not None
    counts = CopyCounts(Space.L1, Space.L1, 1, 0, 32, route=route)
    assert machine.copy_seconds(counts) * machine.noc.clock_hz == pytest.approx(cycles)


# tt-metal's data movement tests, at best: bytes per cycle of one core from another, of one core
# from all, and of one core from its DRAM bank.
IDEAL = [("wormhole_n150", Space.L1, 1, 28), ("wormhole_n150", Space.L1, 64, 30),
         ("wormhole_n150", Space.DRAM, 1, 22), ("blackhole_p150", Space.L1, 1, 60),
         ("blackhole_p150", Space.L1, 110, 60), ("blackhole_p150", Space.DRAM, 1, 33)]  # fmt: skip


@pytest.mark.parametrize(("name", "source", "nodes", "expected"), IDEAL)
def test_one_core_reads_as_fast_as_was_measured(
    name: str, source: Space, nodes: int, expected: float
) -> None:
    machine, pages = load_machine(name), 1 << 14
    nbytes = pages * 16_384
    counts = CopyCounts(
        source, Space.L1, pages, nbytes, 16_384, 1, nbytes, pages, nodes, nbytes // nodes,
        busiest_port_nbytes=nbytes // nodes, busiest_link_nbytes=nbytes // 2, route=Route.BOTH,
    )  # fmt: skip
    assert machine.noc is not None
    cycles = machine.copy_seconds(counts) * machine.noc.clock_hz
    assert nbytes / cycles == pytest.approx(expected, rel=0.10)


def test_without_a_direct_path_a_copy_goes_by_dram_and_costs_both_legs() -> None:
    machine = load_machine("tiny")
    both = machine.seconds(Space.HOST, Space.DRAM, 4096, 64) + machine.seconds(
        Space.DRAM, Space.L1, 4096, 64
    )
    cut = without_path(machine, Space.HOST, Space.L1)
    assert cut.route(Space.HOST, Space.L1) == (Space.HOST, Space.DRAM, Space.L1)
    assert cut.seconds(Space.HOST, Space.L1, 4096, 64) == pytest.approx(both)


def test_without_an_l1_path_a_move_inside_l1_bounces_and_costs_both_legs() -> None:
    machine = without_path(load_machine("tiny"), Space.L1, Space.L1)
    both = machine.seconds(Space.L1, Space.DRAM, 4096, 64) + machine.seconds(
        Space.DRAM, Space.L1, 4096, 64
    )
    assert machine.path(Space.L1, Space.L1) is None
    assert machine.seconds(Space.L1, Space.L1, 4096, 64) == pytest.approx(both)


def test_a_copy_that_no_chain_of_paths_makes_is_a_layout_error() -> None:
    machine = load_machine("tiny")
    for source in (Space.HOST, Space.DRAM, Space.L1):
        machine = without_path(machine, source, Space.L1)
    with pytest.raises(LayoutError, match="cannot carry bytes from host to l1"):
        machine.seconds(Space.HOST, Space.L1, 4096, 64)
