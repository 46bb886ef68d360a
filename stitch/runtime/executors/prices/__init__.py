"""Prices: what operations take by each library's kernels, for families of processors.

A table is data that is checked in: who computes what, and with it every last digit, follows from
its figures, never from a clock.
"""

from stitch.runtime.executors.prices.price_table import (
    LIBRARY_PRICES,
    AtenConvolutions,
    AtenPrices,
    Curve,
    Gain,
    Gains,
    NumpyPrices,
    OnnxPrices,
    Points,
    PriceTable,
    operator_name,
    products_rate,
)
from stitch.runtime.executors.prices.price_tables import (
    Prices,
    load_prices,
    nearest_table,
    parse_prices,
    price_names,
)
from stitch.runtime.executors.prices.processors import (
    Processor,
    described,
    processor_name,
    this_processor,
)

__all__ = [
    "LIBRARY_PRICES", "AtenConvolutions", "AtenPrices", "Curve", "Gain", "Gains", "NumpyPrices",
    "OnnxPrices", "Points", "PriceTable", "Prices", "Processor", "described", "load_prices",
    "nearest_table", "operator_name", "parse_prices", "price_names", "processor_name",
    "products_rate", "this_processor",
]  # fmt: skip
