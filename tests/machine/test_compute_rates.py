"""How long programs take: rates of one core in descriptions, grids, math fidelities."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from stitch.errors import FormatError
from stitch.machine import (
    Compute,
    Machine,
    load_machine,
    machine_names,
    operation_seconds,
    parse_machine,
)
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


def test_without_a_option_the_type_of_operands_decides_the_fidelity() -> None:
    assert micros(product(1)) == pytest.approx(1.024)
    assert micros(product(1, kind=DataType.BFLOAT16)) == pytest.approx(2.048)


def test_products_of_other_types_go_through_the_vector_unit_at_any_fidelity() -> None:
    for fidelity in MathFidelity:
        work = product(1, kind=DataType.FLOAT32, fidelity=fidelity)
        assert micros(work) == pytest.approx(32 * 1024 / 8 / 1000)


def test_work_is_divided_in_whole_tiles_so_the_busiest_core_decides() -> None:
    times = [micros(product(10), cores) for cores in (1, 3, 5, 9, 10, 64)]
    assert times == pytest.approx([1.024 * busiest for busiest in (10, 4, 2, 2, 1, 1)])


def test_a_sharded_result_is_made_by_the_cores_of_its_shards() -> None:
    assert micros(product(8, shards=2), 64) == pytest.approx(4 * 1.024)


def test_a_depth_that_is_no_multiple_of_a_tile_is_padded_to_one() -> None:
    assert micros(product(1, depth=33)) == pytest.approx(micros(product(1, depth=64)))


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


def test_a_full_shard_decides_where_the_last_ones_have_less() -> None:
    # 5 x 5 tiles over 2 x 2 cores: 9, 6, 6 and 4.
    full, few = (dataclasses.replace(product(tiles, shards=4), shard_tiles=9) for tiles in (25, 2))
    assert micros(full, 64) == pytest.approx(9.216)
    assert micros(few, 64) == pytest.approx(2.048)


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


def test_more_multiply_adds_of_the_vector_unit_never_take_less_time() -> None:
    times = []
    for results in (1000, 1024, 1025, 2048, 2049, 65 * 1024, 65 * 1024 + 1):
        work = product(-(-results // 1024), kind=DataType.FLOAT32)
        times.append(micros(dataclasses.replace(work, multiply_adds=results * 32), 64))
    assert times == sorted(times) and times[0] < times[-1]


def test_the_wider_operand_decides_how_long_tiles_are_waited_for() -> None:
    slow = dataclasses.replace(RATES, tile_loads=2.0, l1_bytes_per_cycle=1.0)
    mixed = dataclasses.replace(product(1), operands=(DataType.BFLOAT16, DataType.BFP8))
    assert micros(mixed, compute=slow) == pytest.approx(2 * 2048 / 1000)


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


def test_a_share_of_the_peak_makes_products_longer_and_nothing_else() -> None:
    half = dataclasses.replace(RATES, products_share=0.5)
    assert micros(product(1), compute=half) == pytest.approx(2.048)
    assert micros(elements(1024), compute=half) == pytest.approx(0.128)


def test_other_arithmetic_takes_its_elements_or_its_bytes_of_l1() -> None:
    assert micros(elements(4096)) == pytest.approx(4096 / 8 / 1000)
    assert micros(elements(4096), 4) == pytest.approx(1024 / 8 / 1000)
    assert micros(elements(1024, ((Space.L1, 64_000),))) == pytest.approx(1.0)


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


def test_a_space_without_a_rate_costs_no_time() -> None:
    bare = dataclasses.replace(RATES, bytes_per_second=())
    work = product(1, nbytes=((Space.HOST, 1 << 30),))
    assert micros(work, compute=bare) == pytest.approx(1.024)


@pytest.mark.parametrize("name", ["blackhole_p150", "wormhole_n150"])
def test_narrower_types_are_never_slower_on_silicon(name: str) -> None:
    machine = load_machine(name)
    kinds = [DataType.BFP4, DataType.BFP8, DataType.BFLOAT16, DataType.FLOAT32]
    times = [operation_seconds(product(1000, kind=kind), machine) for kind in kinds]
    assert times == sorted(times)
    assert times[-1] < operation_seconds(product(1000, kind=DataType.INT32), machine)


def peak(machine: Machine, fidelity: MathFidelity) -> float:
    """FLOP/s of all cores, at their best."""
    compute = machine.compute
    assert compute is not None
    rows, columns = machine.shape.core_grid
    passes = dict(compute.passes)[fidelity]
    return rows * columns * compute.clock_hz * 2 * compute.multiply_adds_per_cycle / passes


def test_cores_come_to_what_the_cards_are_specified_for() -> None:
    n150, p150 = load_machine("wormhole_n150"), load_machine("blackhole_p150")
    # Of 72 cores, of which 64 carry tensors: 262, 148 and 74 TFLOP/s.
    for fidelity, card in (("lofi", 262e12), ("hifi2", 148e12), ("hifi4", 74e12)):
        assert peak(n150, MathFidelity(fidelity)) <= card * 1.01
    # 745 TFLOP/s of 140 cores (Hot Chips 2024), of which 110 are taken.
    assert peak(p150, MathFidelity.LOFI) == pytest.approx(745e12 * 110 / 140, rel=0.05)


def test_the_host_alone_describes_no_rates() -> None:
    assert [n for n in machine_names() if load_machine(n).compute is None] == ["host"]
    assert operation_seconds(product(1), load_machine("host")) == 0.0


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


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ("{lofi: 0, hifi2: 2, hifi3: 3, hifi4: 4}", ["passes.lofi", "from 1", "0"]),
        ("{lofi: 1, hifi2: 2, hifi3: 3}", ["passes.hifi4"]),
        ("{lofi: 1, hifi2: 2, hifi3: 3, hifi4: 4, hifi5: 5}", ["hifi5", "hifi4"]),
        ("3", ["passes", "a mapping"]),
    ],
)
def test_wrong_passes_are_named(passes: str, words: list[str]) -> None:
    text = (FORM % "tile_loads: 1").replace("{lofi: 1, hifi2: 2, hifi3: 3, hifi4: 4}", passes)
    with pytest.raises(FormatError) as caught:
        parse_machine(text.encode(), "m.yaml")
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "key", ["launch_seconds", "clock_hz", "multiply_adds_per_cycle", "elements_per_cycle",
            "l1_bytes_per_cycle", "passes"],
)  # fmt: skip
def test_a_rate_that_is_missing_is_named(key: str) -> None:
    text = (FORM % "tile_loads: 1").replace(f"{key}: ", f"# {key}: \n          other_{key}: ", 1)
    with pytest.raises(FormatError) as caught:
        parse_machine(text.encode(), "m.yaml")
    assert f"compute.{key}" in str(caught.value)


def test_a_machine_may_lack_rates() -> None:
    text = FORM[: FORM.index("compute")]
    assert parse_machine(text.encode(), "m.yaml").compute is None


@pytest.mark.parametrize("name", ["blackhole_p150", "wormhole_n150"])
def test_programs_read_the_host_as_fast_as_copies_of_pages_of_2_kib(name: str) -> None:
    machine = load_machine(name)
    assert machine.compute is not None
    path = machine.path(Space.DRAM, Space.HOST)
    assert path is not None
    assert dict(machine.compute.bytes_per_second)[Space.HOST] == dict(path.curve)[2048]
