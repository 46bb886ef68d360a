"""Tables of prices: a YAML file → a checked `PriceTable`; ours and a user's work in the same way.

None means the shipped table of the family that is nearest to this processor (`Processor.distance`;
of two that are as near, the first by name). The form:

    name: x86_avx512_amd
    description: a sentence                                     # optional
    processor: {vendor: AuthenticAMD, vector_bits: 512, cache_nbytes: 1_048_576}
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

Optional besides: `turned_products_per_us` of all three, `transposed_convolutions_per_us` and
`unpacked_convolutions_per_us` of the first two, `convolutions: {call_us: .., element_ns: ..,
products_per_us: ..}` of PyTorch. A library without prices is not used. What each is for:
`price_table`, `division`. Figures `_per_us` and `_ns` may be one number, or a mapping of sizes
(multiply-adds, elements) to numbers, between which they go by the logarithm of the size. Any figure
may be written `{value: .., source: ..}`; a `source` in a mapping speaks for all of its figures. The
tables that Stitch ships name the source of every figure (a test keeps that). `tools/prices` and
`tools/prices` write such files.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stitch.errors import UsageError, closest
from stitch.files import open_file
from stitch.runtime.executors.prices.price_table import PriceTable
from stitch.runtime.executors.prices.processors import Processor, this_processor

#: What names a table.
Prices = str | Path | PriceTable
#: A table is a page or two; anything longer is another kind of file.
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = Path(__file__).parent
_FORM = (
    "the form of the file is shown by: python -m pydoc stitch.runtime.executors.prices.price_tables"
)


@cache
def price_names() -> tuple[str, ...]:
    """The tables that Stitch ships, in alphabetical order.

    >>> price_names()
    ('x86_avx512_amd', 'x86_avx512_intel')
    """
    return tuple(sorted(file.stem for file in _SHIPPED.iterdir() if file.suffix == ".yaml"))


def load_prices(prices: Prices | None = None) -> PriceTable:
    """The table of a shipped name or of a file, or that is nearest to this processor.

    A text that ends in `.yaml` or `.yml`, or holds a slash, is a path. Raises `UsageError` where
    there is no such table or file, `FormatError` with all problems where the file is not sound.

    >>> load_prices("x86_avx512_intel").processor.vendor
    'GenuineIntel'
    """
    if prices is None:
        return nearest_table(this_processor())
    if isinstance(prices, PriceTable):
        return prices
    if not isinstance(prices, str | Path):
        raise UsageError(
            "prices are a name, the path of a .yaml file, or a PriceTable",
            got=type(prices).__name__,
        )
    if isinstance(prices, Path) or prices.endswith((".yaml", ".yml")) or "/" in prices:
        return parse_prices(_content(Path(prices)), str(prices))
    if prices not in price_names():
        near = closest(prices, price_names())
        raise UsageError(
            f"there is no table of prices {prices!r}{f'; {near}' if near else ''}",
            expected="one of " + ", ".join(price_names()),
            remedy="choose one of these, or give the path of a .yaml file",
        )
    return _shipped(prices)


def nearest_table(processor: Processor) -> PriceTable:
    """The shipped table of the family that is nearest to a processor.

    >>> nearest_table(Processor("GenuineIntel", 512, 2 << 20)).name
    'x86_avx512_intel'
    """
    return _shipped(min(price_names(), key=lambda name: processor.distance(_processor_of(name))))


@cache
def _shipped(name: str) -> PriceTable:
    file = _SHIPPED / f"{name}.yaml"
    return parse_prices(_content(file), file.name)


@cache
def _processor_of(name: str) -> Processor:
    """The family that a shipped table is for; the figures, most of the file, are not read."""
    from stitch.forms import ProblemLog, read_entry
    from stitch.runtime.executors.prices.price_form import read_processor

    file = _SHIPPED / f"{name}.yaml"
    node, log = read_entry(_content(file).decode(), file.name, "processor"), ProblemLog(file.name)
    processor = None if node is None else read_processor(node, log)
    assert processor is not None, "a test reads each table that Stitch ships"
    return processor


def _content(file: Path) -> bytes:
    try:
        with open_file(file) as stream:
            return stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the prices {str(file)!r}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="give an existing .yaml file, or one of " + ", ".join(price_names()),
        ) from error


def parse_prices(content: bytes, file_name: str) -> PriceTable:
    """A checked table from the bytes of a YAML file; raises `FormatError` with all problems."""
    # Loaded when there is a text to read: who computes with NumPy alone needs no prices.
    from stitch.forms import read_yaml_bytes
    from stitch.runtime.executors.prices.price_form import read_prices

    root, log = read_yaml_bytes(content, file_name, "table of prices")
    table = read_prices(root, log)
    log.raise_any("table of prices", f"correct the keys named below; {_FORM}")
    assert table is not None, "what is wrong has been noted"
    return table
