"""Rates of loops in descriptions: executor by executor, and as the benchmark measures them."""

from __future__ import annotations

import pytest
import yaml

from stitch.errors import FormatError
from stitch.machine import Machine, parse_machine
from tests.support.benches import load_bench

PATH: dict[str, object] = {
    "from": "host",
    "to": "host",
    "bytes_per_second": 1e9,
    "latency_seconds": 0,
}
HOST: dict[str, object] = {
    "name": "mine", "core_grid": [1, 1], "paths": [PATH],
    "host": {"banks": 1, "bank_nbytes": 1 << 20, "alignment": 64},
}  # fmt: skip
CACHES: dict[str, object] = {
    "near_nbytes": 1 << 20,
    "near_bytes_per_second": 1e11,
    "far_bytes_per_second": 1e10,
}
RATES: dict[str, object] = {
    "has_views": True, "copies_elements": True,
    "loop_seconds": 9e-6, "round_seconds": 1e-6, "element_seconds": 2e-6,
    "operation_seconds": 3e-6, "function_seconds": 4e-6, "movement_seconds": 5e-6,
    "matrix_seconds": 6e-6, "flops_per_second": 7e9, "packed_flops_per_second": 8e9,
}  # fmt: skip


def described(**loops: object) -> Machine:
    """A machine with these rates."""
    return parse_machine(yaml.safe_dump({**HOST, "loops": {**CACHES, **loops}}).encode(), "m.yaml")


def test_each_executor_has_its_rates_and_all_have_the_caches() -> None:
    first, second = described(numpy=RATES, torch=RATES | {"has_views": False}).loops
    assert (first.executor, second.executor) == ("numpy", "torch")
    assert (first.has_views, second.has_views) == (True, False)
    assert first.matrix_seconds == 6e-6
    assert {each.near_nbytes for each in (first, second)} == {1 << 20}


def test_rates_of_nobody_are_refused() -> None:
    with pytest.raises(FormatError, match=r"loops\.numpy"):
        described()


def test_rates_of_an_unknown_executor_are_refused_with_the_closest() -> None:
    with pytest.raises(FormatError, match="onnxruntime"):
        described(numpy=RATES, onnxrt=RATES)


def test_what_the_benchmark_prints_is_read_as_a_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = load_bench("loop_rates")
    assert bench.main(["--executors", "numpy", "--count", "8", "--tries", "1"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    (rates,) = described(**printed["loops"]).loops
    assert rates.executor == "numpy" and rates.has_views
