"""A table of prices by its name, so that tests choose alike on every machine."""

from __future__ import annotations

from stitch.runtime.executors import load_prices
from stitch.runtime.executors.torch_executor import AtenKernels

TABLE = load_prices("x86_avx512_intel")
assert TABLE.torch is not None
ATEN_PRICES = TABLE.torch
ATEN = AtenKernels(ATEN_PRICES)
