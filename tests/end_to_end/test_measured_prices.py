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
from stitch.runtime.executors import load_prices
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
