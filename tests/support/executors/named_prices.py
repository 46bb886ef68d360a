"""A table of prices by its name, so that tests choose alike on every machine."""

from __future__ import annotations

from dataclasses import replace

from stitch.runtime.executors import load_prices
from stitch.runtime.executors.torch_executor import AtenKernels

TABLE, OTHER = (load_prices(name) for name in ("x86_avx512_intel", "x86_avx512_amd"))
assert TABLE.torch is not None and OTHER.torch is not None
#: Convolutions were measured on one of the two.
ATEN_PRICES = replace(TABLE.torch, convolutions=OTHER.torch.convolutions)
ATEN = AtenKernels(ATEN_PRICES)
