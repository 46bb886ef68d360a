"""How long programs take: rates of one core in descriptions, grids, math fidelities."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from stitch.errors import FormatError
from stitch.machine import Compute, load_machine, machine_names, operation_seconds, parse_machine
from stitch.ops import OperationWork
from stitch.program import DataType, MathFidelity, Space

PASSES = tuple(
    (kind, float(count)) for count, kind in enumerate(MathFidelity) if count
)  # by_type stands first
#: A product of two tiles takes 1,024 cycles a pass, of one a microsecond is 1,000.
RATES = Compute(
    launch_seconds=0.0, clock_hz=1e9, multiply_adds_per_cycle=32.0, passes=PASSES,
    fidelity=((DataType.BFLOAT16, MathFidelity.HIFI2), (DataType.BFP8, MathFidelity.LOFI)),
    elements_per_cycle=8.0, l1_bytes_per_cycle=64.0,
    bytes_per_second=((Space.DRAM, 32e9), (Space.HOST, 8e9)),
)  # fmt: skip
FORM = """
name: m
core_grid: [1, 1]
host: {banks: 1, bank_nbytes: 4096, alignment: 64}
paths: [{from: host, to: host, bytes_per_second: 1, latency_seconds: 0}]
compute: {launch_seconds: 0, clock_hz: 1, multiply_adds_per_cycle: 1, elements_per_cycle: 1,
          l1_bytes_per_cycle: 1, passes: {lofi: 1, hifi2: 2, hifi3: 3, hifi4: 4}, %s}
"""


def product(
    tiles: int, *, shards: int = 0, nbytes: tuple[tuple[Space, int], ...] = (), depth: int = 32,
    kind: DataType = DataType.BFP8, fidelity: MathFidelity = MathFidelity.BY_TYPE,
) -> OperationWork:  # fmt: skip
    return OperationWork(
        tiles * 1024 * depth, depth, (kind,), 0, tiles, shards, nbytes, nbytes, fidelity
    )  # fmt: skip


def elements(count: int, nbytes: tuple[tuple[Space, int], ...] = ()) -> OperationWork:
    tiles = max(1, -(-count // 1024))
    padded = tuple((space, n * tiles * 1024 // count) for space, n in nbytes)
    return OperationWork(0, 0, (DataType.FLOAT32,), count, tiles, 0, nbytes, padded)


def micros(work: OperationWork, cores: int = 1, compute: Compute = RATES) -> float:
    return compute.seconds(work, cores, 8.0) * 1e6


def test_a_product_takes_as_many_passes_as_its_math_fidelity_has() -> None:
    asked = [MathFidelity.LOFI, MathFidelity.HIFI2, MathFidelity.HIFI3, MathFidelity.HIFI4]
    times = [micros(product(1, fidelity=fidelity)) for fidelity in asked]
    assert times == pytest.approx([1.024, 2.048, 3.072, 4.096])


def test_work_is_divided_in_whole_tiles_so_the_busiest_core_decides() -> None:
    times = [micros(product(10), cores) for cores in (1, 3, 5, 9, 10, 64)]
    assert times == pytest.approx([1.024 * busiest for busiest in (10, 4, 2, 2, 1, 1)])


def test_a_matrix_unit_waits_for_the_tiles_that_it_takes_from_l1() -> None:
    slow = dataclasses.replace(RATES, tile_loads=2.0, l1_bytes_per_cycle=1.0)
    assert micros(product(1), compute=slow) == pytest.approx(2 * 1088 / 1000)


def test_operands_of_two_types_take_the_fidelity_of_mixed_ones() -> None:
    both = (DataType.BFLOAT16, DataType.BFP8)
    mixed = dataclasses.replace(product(1), operands=both)
    told = dataclasses.replace(RATES, fidelity=(*RATES.fidelity, (None, MathFidelity.HIFI3)))
    assert micros(mixed) == pytest.approx(2.048)
    assert micros(mixed, compute=told) == pytest.approx(3.072)
    asked = dataclasses.replace(mixed, math_fidelity=MathFidelity.LOFI)
    assert micros(asked, compute=told) == pytest.approx(1.024)
    beside = dataclasses.replace(mixed, operands=(DataType.FLOAT32, DataType.BFP8))
    assert micros(beside, compute=told) == micros(product(1, kind=DataType.FLOAT32))


@pytest.mark.parametrize("name", ["blackhole_p150", "wormhole_n150"])
def test_mixed_operands_are_multiplied_as_ttnn_does(name: str) -> None:
    compute = load_machine(name).compute
    assert compute is not None
    kinds = [kind for kind, _ in compute.fidelity if kind is not None]
    asked = MathFidelity.BY_TYPE
    low = {DataType.BFP8, DataType.BFP4}
    for one in kinds:
        for other in kinds:
            if {one, other} <= low or one is other:
                assert compute.fidelity_of((one, other), asked) is dict(compute.fidelity)[one]
            else:
                assert compute.fidelity_of((one, other), asked) is MathFidelity.HIFI2


@pytest.mark.parametrize("name", [n for n in machine_names() if n != "host"])
@pytest.mark.parametrize("space", list(Space))
def test_more_elements_never_take_less_time(name: str, space: Space) -> None:
    machine = load_machine(name)
    for moves in (False, True):
        times = [
            operation_seconds(
                dataclasses.replace(elements(count, ((space, 8 * count),)), only_moves=moves),
                machine,
            )
            for tiles in range(1, 140)
            for count in (tiles * 1024 - 1, tiles * 1024, tiles * 1024 + 1)
        ]
        assert all(b >= a * (1 - 1e-9) for a, b in itertools.pairwise(times))


def test_bytes_of_dram_go_over_its_limit_and_over_the_links_of_the_cores_in_use() -> None:
    nbytes = ((Space.DRAM, 64_000),)
    # One core carries 8 B a cycle, eight of them more than DRAM gives.
    assert micros(elements(1024, nbytes)) == pytest.approx(8.0)
    assert micros(elements(8192, nbytes), 8) == pytest.approx(2.0)


def test_what_is_not_hidden_of_the_shorter_is_added_to_the_longer() -> None:
    work = product(1, nbytes=((Space.HOST, 4096),))
    assert micros(work) == pytest.approx(1.024)
    half = dataclasses.replace(RATES, hidden_share=0.5)
    assert micros(work, compute=half) == pytest.approx(1.024 + 0.512 / 2)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("fidelity: {bfloat17: lofi}", ["bfloat17", "bfloat16"]),
        ("fidelity: {bfloat16: hifi5}", ["fidelity.bfloat16", "hifi5", "hifi4"]),
        ("fidelity: {bfloat16: by_type}", ["fidelity.bfloat16", "by_type", "lofi"]),
        ("fidelity: {mixed: hifi5}", ["fidelity.mixed", "hifi5", "hifi4"]),
        ("tile_loads: -1", ["tile_loads", "from 0"]),
        ("products_share: 0", ["products_share", "above 0"]),
        ("products_share: 1.5", ["products_share", "at most 1"]),
        ("hidden_share: 2", ["hidden_share", "at most 1"]),
        ("bytes_per_second: {l2: 1}", ["l2", "dram"]),
        ("bytes_per_second: {l1: 1}", ["l1", "dram"]),
        ("bytes_per_second: {dram: fast}", ["bytes_per_second.dram", "fast"]),
        ("flops_per_second: {bfloat16: 1}", ["flops_per_second"]),
    ],
)
def test_a_wrong_rate_is_named_with_its_place(entry: str, words: list[str]) -> None:
    with pytest.raises(FormatError) as caught:
        parse_machine((FORM % entry).encode(), "m.yaml")
    text = str(caught.value)
    assert "m.yaml:7" in text
    assert all(word in text for word in words), text


def test_one_core_carries_what_its_link_does() -> None:
    n150 = load_machine("wormhole_n150")
    compute, noc = n150.compute, n150.noc
    assert compute is not None and noc is not None
    plain = dataclasses.replace(compute, hidden_share=1.0, clock_hz=1e9)
    work = elements(1, ((Space.DRAM, 60_000),))

    def nanos(link: float | None) -> float:
        machine = dataclasses.replace(n150, compute=plain, noc=dataclasses.replace(noc, link=link))
        return operation_seconds(work, machine) * 1e9

    assert nanos(20.0) == pytest.approx(3000)
    # Without a figure of its own, a link carries the most of its table.
    assert nanos(None) == pytest.approx(60_000 / noc.curve[-1][1])
    alone = dataclasses.replace(n150, compute=plain, noc=None)
    assert operation_seconds(work, alone) * 1e9 == pytest.approx(60_000 / 267)


def test_the_host_and_the_stand_in_for_cards_describe_no_rates() -> None:
    assert [n for n in machine_names() if load_machine(n).compute is None] == ["cuda", "host"]
    assert operation_seconds(product(1), load_machine("host")) == 0.0
