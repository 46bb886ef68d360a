"""`tools/prices` writes the prices of this machine, and judges a table's choices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import UsageError
from stitch.runtime.executors import load_prices
from stitch.runtime.executors.blocked_convolutions import NO_BLOCKS, blocked_part
from tests.support.stitched_models import model, one

LONG = pytest.mark.campaign("benchmarks")
ROOT = Path(__file__).resolve().parents[2]
#: Elements of the largest operands: as few as tell something.
SMALLEST = 64


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that measures; what it imports is found beside it."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return import_module("pricing.tuner")


def layer(b: stitch.ComputationGraphBuilder) -> None:
    x, w = b.input("x", (64, 256), "float32"), np.full((256, 256), 0.01, np.float32)
    b.output("y", b.op("Erf", b.matmul(x, b.parameter("w", w))))


def test_what_is_measured_is_a_file_that_devices_take(tuner: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    table = tuner.tune(file, largest=SMALLEST, tries=1)
    assert table.name == "mine" and load_prices(file) == table
    assert table.onnxruntime is not None and table.torch is not None
    with (
        stitch.open_device("host", executor="auto", prices=file) as device,
        stitch.open_device("host") as plain,
    ):
        compiled, x = model("layer", layer, target="host"), np.ones((64, 256), np.float32)
        found, right = (one(d.load(compiled)(x)).numpy() for d in (device, plain))
        np.testing.assert_allclose(found, right, rtol=1e-5)
        assert "by the prices 'mine'" in device.explain()


def test_a_library_that_is_not_installed_has_no_prices(
    tuner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "LIBRARY_PRICES", ["numpy"])
    table = tuner.tune(tmp_path / "mine.yaml", largest=SMALLEST, tries=1)
    assert table.onnxruntime is None and table.torch is None


def test_operations_are_measured_at_several_sizes(tuner: Any) -> None:
    sizes = sorted({o.size for o in tuner.measured_operations(1 << 12) if o.name == "Erf"})
    assert sizes == [64, 256, 4096]


def test_convolutions_that_are_priced_out_of_blocks_are_in_none(tuner: Any) -> None:
    """Else ONNX Runtime would be measured in the layout that has another price."""
    measured = tuner.measured_operations(1 << 20)
    found = [o.program for o in measured if o.name == "unblocked_convolutions"]
    assert [blocked_part(program) for program in found] == [NO_BLOCKS] * 3


def test_the_points_of_a_table_are_where_the_call_is_paid_back(tuner: Any) -> None:
    numpy = {"call_us": 1.0, "function_us": 1.0, "products_per_us": 100.0,
             "functions_ns": {"Sigmoid": 1000.0}}  # fmt: skip
    onnx = {"call_us": 4.0, "node_us": 1.0, "packed_products_per_us": 200.0, "round_node_us": 0.5,
            "functions_ns": {"Sigmoid": {1: 500.0}}}  # fmt: skip
    # Half of 1/100 us for each multiply-add, and of 1 us for each element, pay for 4 us more.
    assert tuner.points_of({"numpy": numpy, "onnxruntime": onnx}) == {
        "multiply_adds": 1024, "elements": 16, "round_calls": 8,
    }  # fmt: skip


@pytest.mark.parametrize("words", [{"largest": 1}, {"largest": 1 << 40}, {"tries": 0}])
def test_sizes_that_tell_nothing_are_refused_and_no_file_is_written(
    tuner: Any, words: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="nothing to be told"):
        tuner.tune(tmp_path / "mine.yaml", **words)
    assert list(tmp_path.iterdir()) == []


def prices(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "prices", *words],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@LONG
@pytest.mark.parametrize("networks", ["mlp", "mlp,lstm"])
def test_the_tool_runs_networks_by_who_chooses_and_who_does_not(networks: str) -> None:
    ran = prices("--check", "--small", "--rounds", "1", "--networks", networks, "--json")
    found = json.loads(ran.stdout)
    assert [choice["network"] for choice in found] == networks.split(",")
    for choice in found:
        assert set(choice["least_us"]) == {"numpy", "onnxruntime", "auto", "torch"}
        assert set(choice["ratios"]) == {"auto", "torch"}
    missed = any(ratio > 1.05 for choice in found for ratio in choice["ratios"].values())
    assert ran.returncode == int(missed)


def test_the_tool_names_the_networks_that_there_are() -> None:
    ran = prices("--check", "--networks", "mpl")
    assert ran.returncode == 2
    assert "there is no network 'mpl'" in ran.stderr and "gpt2_small" in ran.stderr
