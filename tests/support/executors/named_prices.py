"""Tables of prices by their names, so that tests choose alike on every machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stitch.runtime.executors import load_prices
from stitch.runtime.executors.torch_executor import aten_kernels

#: Round figures, and none of convolutions by PyTorch.
FILE = Path(__file__).with_name("round_prices.yaml")
TABLE, OTHER = load_prices(FILE), load_prices("x86_avx512_amd")
assert TABLE.torch is not None and OTHER.torch is not None
ATEN_PRICES = replace(TABLE.torch, convolutions=OTHER.torch.convolutions)
ATEN = aten_kernels(ATEN_PRICES)
