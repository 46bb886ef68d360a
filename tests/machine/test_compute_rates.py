"""How long programs take: rates in descriptions, and the roofline over them."""

from __future__ import annotations

import dataclasses

import pytest

from stitch.errors import FormatError
from stitch.machine import Compute, load_machine, machine_names, parse_machine
from stitch.program import DataType, Space

RATES = Compute(1e-6, ((DataType.BFLOAT16, 8e9),), 2e9, ((Space.DRAM, 1e9), (Space.L1, 16e9)))
FORM = """
name: m
core_grid: [1, 1]
host: {banks: 1, bank_nbytes: 4096, alignment: 64}
paths: [{from: host, to: host, bytes_per_second: 1, latency_seconds: 0}]
compute: {launch_seconds: 0, other_flops_per_second: 1, %s}
"""


def test_a_program_takes_the_longer_of_arithmetic_and_bytes_and_its_launch() -> None:
    products = {DataType.BFLOAT16: 8_000}
    assert RATES.seconds(products, 0, {}) == pytest.approx(2e-6)
    assert RATES.seconds(products, 2_000, {}) == pytest.approx(3e-6)
    assert RATES.seconds(products, 2_000, {Space.DRAM: 5_000}) == pytest.approx(6e-6)
    # Both spaces are read one after the other.
    nbytes = {Space.DRAM: 5_000, Space.L1: 16_000}
    assert RATES.seconds({}, 0, nbytes) == pytest.approx(7e-6)


def test_a_type_without_a_rate_goes_at_that_of_other_arithmetic() -> None:
    assert RATES.seconds({DataType.FLOAT32: 2_000}, 0, {}) == pytest.approx(2e-6)


def test_a_space_without_a_rate_costs_no_time() -> None:
    assert RATES.seconds({}, 0, {Space.HOST: 1 << 30}) == pytest.approx(1e-6)


@pytest.mark.parametrize("name", ["blackhole_p150", "wormhole_n150"])
def test_narrower_types_are_never_slower_on_silicon(name: str) -> None:
    compute = load_machine(name).compute
    assert compute is not None
    rates = dict(compute.flops_per_second)
    ordered = [DataType.BFLOAT16, DataType.BFP8, DataType.BFP4]
    assert [rates[t] for t in ordered] == sorted(rates[t] for t in ordered)
    assert compute.other_flops_per_second < rates[DataType.BFLOAT16]


def test_n150_multiplies_no_faster_than_its_card_is_specified() -> None:
    compute = load_machine("wormhole_n150").compute
    assert compute is not None
    rates = dict(compute.flops_per_second)
    # Of 72 cores, of which 64 carry tensors.
    assert rates[DataType.BFLOAT16] <= 74e12 * 64 / 72 * 1.01
    assert rates[DataType.BFP8] <= 148e12 * 64 / 72 * 1.01


# tt-metal GEMM_FLOPS, n150, settings as they come, operands in DRAM: nanoseconds of one product
# (bfloat16 with trace; bfp8 without, which is what is published).
PRODUCTS = [
    (DataType.BFLOAT16, (2048, 2048, 2048), 298_922), (DataType.BFLOAT16, (3072,) * 3, 886_178),
    (DataType.BFLOAT16, (4096, 4096, 4096), 2_008_533), (DataType.BFP8, (2048,) * 3, 157_223),
    (DataType.BFP8, (3072, 3072, 3072), 441_465), (DataType.BFP8, (3072, 4096, 4096), 744_667),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes", "published"), PRODUCTS)
def test_a_large_product_takes_about_what_was_published(
    kind: DataType, sizes: tuple[int, int, int], published: int
) -> None:
    compute = load_machine("wormhole_n150").compute
    assert compute is not None
    m, k, n = sizes
    nbytes = sum(kind.nbytes(part) for part in (m * k, k * n, m * n))
    seconds = compute.seconds({kind: 2 * m * k * n}, 0, {Space.DRAM: nbytes})
    assert seconds * 1e9 == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("size", "published"), [(512, 19_965), (1024, 68_984)])
def test_a_small_product_takes_no_less_than_the_roofline_says(size: int, published: int) -> None:
    compute = load_machine("wormhole_n150").compute
    assert compute is not None
    nbytes = 3 * DataType.BFLOAT16.nbytes(size * size)
    seconds = compute.seconds({DataType.BFLOAT16: 2 * size**3}, 0, {Space.DRAM: nbytes})
    assert 0.45 * published < seconds * 1e9 < published


def test_the_host_alone_describes_no_rates() -> None:
    assert [n for n in machine_names() if load_machine(n).compute is None] == ["host"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("flops_per_second: {bfloat17: 1}", ["bfloat17", "bfloat16"]),
        ("flops_per_second: {bfloat16: 0}", ["flops_per_second.bfloat16", "from 1e-06"]),
        ("bytes_per_second: {l2: 1}", ["l2", "l1"]),
        ("bytes_per_second: {dram: fast}", ["bytes_per_second.dram", "fast"]),
        ("launch_secs: 1", ["launch_secs", "launch_seconds"]),
    ],
)
def test_a_wrong_rate_is_named_with_its_place(entry: str, words: list[str]) -> None:
    with pytest.raises(FormatError) as caught:
        parse_machine((FORM % entry).encode(), "m.yaml")
    text = str(caught.value)
    assert "m.yaml:6" in text
    assert all(word in text for word in words), text


def test_a_machine_may_lack_rates() -> None:
    text = "\n".join(line for line in FORM.splitlines() if not line.startswith("compute"))
    assert parse_machine(text.encode(), "m.yaml").compute is None
    assert dataclasses.replace(load_machine("tiny"), compute=None).shape.name == "tiny"


@pytest.mark.parametrize("name", ["blackhole_p150", "wormhole_n150"])
def test_programs_read_the_host_as_fast_as_copies_of_pages_of_2_kib(name: str) -> None:
    machine = load_machine(name)
    assert machine.compute is not None
    path = machine.path(Space.DRAM, Space.HOST)
    assert path is not None
    assert dict(machine.compute.bytes_per_second)[Space.HOST] == dict(path.curve)[2048]
