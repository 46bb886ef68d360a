"""Price tables: the time of operations by each library's kernels, for families of processors.

Tables are YAML files, shipped or the user's. Executors choose kernels by these figures, never by
measuring, so results are reproducible to the last bit. By default the shipped table of the nearest
family is used (`Processor.distance`, then by name). A file:

    name: x86_avx512_amd
    description: a sentence                                     # optional
    processor: {vendor: AuthenticAMD, cache_nbytes: 1_048_576}
    points: {multiply_adds: .., elements: .., round_calls: ..}
    gains: {division: {part: .., us: ..}, numpy: {..}, library: {..}}
    numpy: {call_us: .., function_us: .., convolution_us: .., matrix_us: .., round_us: ..,
            round_element_us: .., row_products_per_us: ..,
            products_per_us: {4096: .., 1048576: ..}, convolutions_per_us: ..,
            weight_gradients_per_us: .., arithmetic_ns: .., chunked_ns: .., moved_ns: ..,
            functions_ns: {Erf: .., stitch.GeluGradient: ..}, chunked_functions_ns: {Exp: ..}}
    onnxruntime: {call_us: .., node_us: .., round_node_us: .., packed_products_per_us: ..,
                  the rest as above but for function_us and convolution_us}         # optional
    torch: {call_us: .., matrix_us: .., row_products_per_us: .., products_per_us: ..,
            functions_ns: {..}}                                                     # optional

Also optional: `turned_products_per_us` of all three, `transposed_convolutions_per_us` and
`unpacked_convolutions_per_us` of the first two, `convolutions: {call_us: .., element_ns: ..,
products_per_us: ..}` of PyTorch. A library without prices is not used. Figures `_per_us` and `_ns`
are one number, or a mapping of sizes (multiply-adds, elements) to numbers, interpolated by the
logarithm of the size. Any figure may be written `{value: .., source: ..}`; a `source` in a mapping
holds for all of its figures. Shipped tables have a source for every figure. `tools/prices` writes
such files.
"""

from stitch.runtime.executors.prices.blocked_convolutions import (
    POOLS,
    REORDERED,
    BlockedConvolution,
    BlockedPart,
    blocked_part,
    filters_of,
    is_depthwise,
    is_narrow,
    is_whole,
)
from stitch.runtime.executors.prices.division import Division, divide, points
from stitch.runtime.executors.prices.element_runs import ElementRun, chunk_count, element_runs
from stitch.runtime.executors.prices.operation_prices import (
    least_copy_microseconds,
    least_microseconds,
)
from stitch.runtime.executors.prices.tables import (
    LIBRARY_PRICES,
    AtenConvolutions,
    AtenPrices,
    Curve,
    Prices,
    PriceTable,
    load_prices,
    operator_name,
    parse_prices,
    price_names,
    processor_name,
    products_rate,
    this_processor,
)

__all__ = [
    "LIBRARY_PRICES", "POOLS", "REORDERED", "AtenConvolutions", "AtenPrices", "BlockedConvolution",
    "BlockedPart", "Curve", "Division", "ElementRun", "PriceTable", "Prices", "blocked_part",
    "chunk_count", "divide", "element_runs", "filters_of", "is_depthwise", "is_narrow", "is_whole",
    "least_copy_microseconds", "least_microseconds", "load_prices", "operator_name", "parse_prices",
    "points", "price_names", "processor_name", "products_rate", "this_processor",
]  # fmt: skip
