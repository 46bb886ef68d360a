"""Price tables: the time of operations by each library's kernels, for families of processors.

Tables are data in YAML files, shipped or the user's. Executors choose by these figures, never by a
clock, so every last digit is reproducible.

If no table is named, the shipped table of the nearest family is used (`Processor.distance`; of two
equally near, the first by name). A file:

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
tables that Stitch ships name the source of every figure (a test keeps that). `tools/prices` writes
such files.
"""

from __future__ import annotations

import math
import platform
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

from stitch.errors import FormatError, UsageError, closest
from stitch.files import open_file
from stitch.forms import (
    Field,
    FieldType,
    Node,
    Number,
    ParseContext,
    ProblemLog,
    Schema,
    SourceLocation,
    Whole,
    Word,
    number_of,
)
from stitch.ops import operators
from stitch.program import Operation, Program

# The processor

CPUINFO = Path("/proc/cpuinfo")
#: Its data caches, each with its level, kind and size.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Of many cores the first is enough.
MAX_NBYTES = 1 << 16
#: Bits of a vector by the flag that says so, the widest first.
VECTORS = (
    ("avx512f", 512), ("sve", 256), ("avx2", 256), ("avx", 256), ("asimd", 128), ("sse2", 128),
)  # fmt: skip
#: How far families are apart: by another vendor, by each halving of vectors, of the cache.
#: Vectors decide how fast everything is, the vendor whose kernels use them, the cache the rest.
VENDOR, VECTORS_HALVED, CACHE_HALVED = 2.0, 4.0, 1.0
_SIZE = re.compile(r"(\d+)([KM]?)")
_NBYTES = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True, slots=True)
class Processor:
    """A family of processors: who made it, bits of its vectors, bytes of a core's second cache.

    What is not known is empty or 0, and as near to every family as to any other.
    """

    vendor: str = ""
    vector_bits: int = 0
    cache_nbytes: int = 0

    def distance(self, other: Processor) -> float:
        """How unlike two families are.

        >>> mine = Processor("AuthenticAMD", 512, 1 << 20)
        >>> mine.distance(Processor("AuthenticAMD", 256, 1 << 19))
        5.0
        >>> mine.distance(Processor())
        0.0
        """
        apart = VENDOR if self.vendor and other.vendor and self.vendor != other.vendor else 0.0
        for mine, theirs, weight in (
            (self.vector_bits, other.vector_bits, VECTORS_HALVED),
            (self.cache_nbytes, other.cache_nbytes, CACHE_HALVED),
        ):
            if mine and theirs:
                apart += weight * abs(math.log2(mine / theirs))
        return apart

    def text(self) -> str:
        """It in words.

        >>> Processor("AuthenticAMD", 512, 1 << 20).text()
        'AuthenticAMD, vectors of 512 bits, 1024 KiB of second-level cache'
        """
        parts = [self.vendor or "a vendor that is not known"]
        if self.vector_bits:
            parts.append(f"vectors of {self.vector_bits} bits")
        if self.cache_nbytes:
            parts.append(f"{self.cache_nbytes >> 10} KiB of second-level cache")
        return ", ".join(parts)


def described(cpuinfo: str, cache_nbytes: int = 0) -> Processor:
    """The family of a processor of which Linux says this.

    >>> described("vendor_id\\t: GenuineIntel\\nflags\\t\\t: fpu sse2 avx avx2 avx512f\\n")
    Processor(vendor='GenuineIntel', vector_bits=512, cache_nbytes=0)
    """
    said: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        said.setdefault(key.strip(), value.strip())
    flags = set((said.get("flags") or said.get("Features") or "").split())
    # On Arm the first line of a core says who designed it, by a number.
    vendor = said.get("vendor_id") or said.get("CPU implementer") or ""
    return Processor(vendor, next((b for flag, b in VECTORS if flag in flags), 0), cache_nbytes)


@cache
def this_processor() -> Processor:
    """The family of the processor that this process runs on."""
    return described(_read(CPUINFO), _second_cache())


def processor_name() -> str:
    """What the maker of this processor calls it."""
    named = re.search(r"^model name\s*:\s*(.+)$", _read(CPUINFO), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _second_cache() -> int:
    for index in range(8):
        folder = CACHES / f"index{index}"
        level, kind = _read(folder / "level").strip(), _read(folder / "type").strip()
        if level == "2" and kind in ("Data", "Unified"):
            size = _SIZE.fullmatch(_read(folder / "size").strip())
            return int(size[1]) * _NBYTES[size[2]] if size else 0
    return 0


def _read(path: Path) -> str:
    try:
        with open_file(path) as file:
            return file.read(MAX_NBYTES).decode(errors="replace")
    except (OSError, FormatError):
        return ""


# Tables


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure that depends on a size: points (size, figure), sizes rising, at least one.

    Between two points it goes by the logarithm of the size; beyond them it stays as it is there.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        assert sizes and sizes == sorted(set(sizes)), "sizes rise"

    def at(self, size: int) -> float:
        """The figure for a size.

        >>> Curve(((1, 8.0), (4, 4.0))).at(2), Curve(((1, 8.0), (4, 4.0))).at(100)
        (6.0, 4.0)
        """
        points = self.points
        after = bisect_right(points, size, key=lambda point: point[0])
        if after == 0 or after == len(points):
            return points[max(0, after - 1)][1]
        (low, a), (high, b) = points[after - 1], points[after]
        return a + (b - a) * math.log(size / low) / math.log(high / low)


def operator_name(operation: Operation) -> str:
    """How an operator is called in a table: `Exp`, `stitch.GeluGradient`."""
    return f"{operation.domain}.{operation.op}" if operation.domain else operation.op


def _is_row_product(program: Program, operation: Operation) -> bool:
    """Whether a product is of single rows by matrices, each of which is read once."""
    shape = program.values[operation.outputs[0]].type.shape
    if operation.op == "Gemm" or len(program.values[operation.inputs[1]].type.shape) < 3:
        return math.prod(shape[:-1]) == 1
    return len(shape) < 2 or shape[-2] == 1


def products_rate(
    prices: NumpyPrices | OnnxPrices | AtenPrices, program: Program, operation: Operation
) -> Curve:
    """Multiply-adds per microsecond of a product by what is no constant."""
    if _is_row_product(program, operation):
        return prices.row_products_per_us
    is_turned = operation.op == "Gemm" and operation.attributes.get("transB")
    return (is_turned and prices.turned_products_per_us) or prices.products_per_us


@dataclass(frozen=True, slots=True)
class NumpyPrices:
    """NumPy's kernels.

    Microseconds of a call, of one of a function or a convolution, of a matrix of a batch, of a
    scan's round, of an element that this takes or gives; multiply-adds per microsecond, of single
    rows by matrices (each is read once) and of other products; nanoseconds an element of plain
    arithmetic, whole or in chunks, of what is moved, and of functions.
    """

    call_us: float
    function_us: float
    convolution_us: float
    matrix_us: float
    round_us: float
    round_element_us: float
    row_products_per_us: Curve
    products_per_us: Curve
    convolutions_per_us: Curve
    weight_gradients_per_us: Curve
    arithmetic_ns: Curve
    chunked_ns: Curve
    moved_ns: Curve
    functions_ns: Mapping[str, Curve]
    chunked_functions_ns: Mapping[str, Curve]
    #: Of products whose second operand is turned, as torch's linear layers have it, of transposed
    #: convolutions, and of those by weights that are no constants, where ONNX Runtime does not
    #: compute these in blocks (`blocked`); None: those of others hold for them.
    turned_products_per_us: Curve | None = None
    transposed_convolutions_per_us: Curve | None = None
    unpacked_convolutions_per_us: Curve | None = None


@dataclass(frozen=True, slots=True)
class OnnxPrices:
    """ONNX Runtime's.

    Microseconds of a call with its inputs and outputs, of a node in it, of a node in a scan's
    rounds; products by constants, which it has packed before, apart from others; the rest as
    NumPy's.
    """

    call_us: float
    node_us: float
    matrix_us: float
    round_us: float
    round_element_us: float
    round_node_us: float
    row_products_per_us: Curve
    products_per_us: Curve
    packed_products_per_us: Curve
    convolutions_per_us: Curve
    weight_gradients_per_us: Curve
    arithmetic_ns: Curve
    chunked_ns: Curve
    moved_ns: Curve
    functions_ns: Mapping[str, Curve]
    chunked_functions_ns: Mapping[str, Curve]
    turned_products_per_us: Curve | None = None
    transposed_convolutions_per_us: Curve | None = None
    unpacked_convolutions_per_us: Curve | None = None


@dataclass(frozen=True, slots=True)
class AtenConvolutions:
    """PyTorch's convolutions, transposed ones, and gradients of weights.

    Microseconds of a call; nanoseconds of an element that is read or made, as all are arranged in
    blocks of channels; multiply-adds per microsecond, with those of blocks that are filled up.
    """

    call_us: float
    element_ns: Curve
    products_per_us: Curve


@dataclass(frozen=True, slots=True)
class AtenPrices:
    """PyTorch's kernels: those that have a price, products, and convolutions (None: no price)."""

    call_us: float
    matrix_us: float
    row_products_per_us: Curve
    products_per_us: Curve
    functions_ns: Mapping[str, Curve]
    turned_products_per_us: Curve | None = None
    convolutions: AtenConvolutions | None = None


#: The libraries that have prices.
LIBRARY_PRICES = {"numpy": NumpyPrices, "onnxruntime": OnnxPrices, "torch": AtenPrices}


@dataclass(frozen=True, slots=True)
class Points:
    """What speaks for ONNX Runtime, a point each: from one point on a program is divided at all."""

    multiply_adds: int
    elements: int
    round_calls: int


@dataclass(frozen=True, slots=True)
class Gain:
    """What something must gain, as a part of a price and in microseconds: prices are rough."""

    part: float
    us: float

    def may_cost(self, price: float) -> float:
        """What it may cost instead of a price."""
        return min((1 - self.part) * price, price - self.us)


@dataclass(frozen=True, slots=True)
class Gains:
    """What must be gained over one call of ONNX Runtime for all: by a division, whose call sees
    less to fuse, and by NumPy alone; and by a division with a library's kernels over none."""

    division: Gain
    numpy: Gain
    library: Gain


@dataclass(frozen=True, slots=True)
class PriceTable:
    """The prices of a family of processors; a library that was not measured has none."""

    name: str
    processor: Processor
    points: Points
    gains: Gains
    numpy: NumpyPrices
    onnxruntime: OnnxPrices | None = None
    torch: AtenPrices | None = None
    description: str = ""
    #: Places of figures, and where each was found.
    sources: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"<PriceTable {self.name}: {self.processor.text()}>"


# Files

#: What names a table.
Prices = str | Path | PriceTable
#: A table is a page or two; anything longer is another kind of file.
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = Path(__file__).parent / "price_tables"
_FORM = "the form of the file is shown by: python -m pydoc stitch.runtime.executors.prices"


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
    from stitch.runtime.executors.prices import read_processor

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
    from stitch.runtime.executors.prices import read_prices

    root, log = read_yaml_bytes(content, file_name, "table of prices")
    table = read_prices(root, log)
    log.raise_any("table of prices", f"correct the keys named below; {_FORM}")
    assert table is not None, "what is wrong has been noted"
    return table


# Fields of a file

_POSITIVE = Number(above=0, is_float=True)
_NOT_NEGATIVE = Number(least=0, is_float=True)
_PART = Number(least=0, below=1, is_float=True)
#: Operators that a table may name.
_OPERATORS = frozenset(f"{o.domain}.{o.name}" if o.domain else o.name for o in operators())


class _CurveKind(FieldType[Curve]):
    """A figure, or figures by size."""

    wanted = "a finite number above 0, or a mapping of sizes to such"

    def value(self, node: Node, place: SourceLocation) -> Curve | None:
        if not isinstance(node.data, Mapping):
            figure = _POSITIVE.read(node, place)
            return None if figure is None else Curve(((1, figure),))
        noted = place.reading.log.noted
        points: list[tuple[int, float]] = []
        for word, written in node.data.items():
            size = number_of(word)
            if not isinstance(size, int) or size < 1:
                place.note("out_of_range", f"{word[:60]!r} is no size", written.key_line)
                continue
            figure = _POSITIVE.read(written, place.entry(word, written))
            points.append((size, figure or 1.0))
        if any(a[0] >= b[0] for a, b in pairwise(points)):
            place.note("not_rising", "sizes must rise")
        return Curve(tuple(points)) if points and place.reading.log.noted == noted else None


class _ByOperator(FieldType[Mapping[str, Curve]]):
    """Figures by operator."""

    wanted = "a mapping of operators to figures"

    def value(self, node: Node, place: SourceLocation) -> Mapping[str, Curve] | None:
        if not isinstance(node.data, Mapping):
            return None
        noted, found = place.reading.log.noted, {}
        for name, written in node.data.items():
            if name not in _OPERATORS:
                near = closest(name, sorted(_OPERATORS), "; ")
                place.note("unknown_key", f"there is no operator {name!r}{near}", written.key_line)
                continue
            at = place.entry(name, written)
            figure = CURVE.read(at.bare(written), at)
            if figure is not None:
                found[name] = figure
        return found if place.reading.log.noted == noted else None


CURVE = _CurveKind()
_BY_OPERATOR = _ByOperator()
_fixed = partial(Field, kind=_NOT_NEGATIVE, needed=True)
_curve = partial(Field, kind=CURVE, needed=True)
_by_operator = partial(Field, kind=_BY_OPERATOR, needed=True)

_SHARED = (
    _fixed("matrix_us"), _fixed("round_us"), _fixed("round_element_us"),
    _curve("row_products_per_us"), _curve("products_per_us"), _curve("convolutions_per_us"),
    _curve("weight_gradients_per_us"),
    _curve("arithmetic_ns"), _curve("chunked_ns"), _curve("moved_ns"),
    _by_operator("functions_ns"), _by_operator("chunked_functions_ns"),
    Field("turned_products_per_us", CURVE), Field("transposed_convolutions_per_us", CURVE),
    Field("unpacked_convolutions_per_us", CURVE),
)  # fmt: skip
_CONVOLUTIONS = Schema(
    "prices of PyTorch's convolutions", AtenConvolutions,
    _fixed("call_us"), _curve("element_ns"), _curve("products_per_us"),
)  # fmt: skip
#: The libraries that have prices, and the form of each.
SECTIONS: Mapping[str, Schema[NumpyPrices] | Schema[OnnxPrices] | Schema[AtenPrices]] = {
    "numpy": Schema(
        "prices of NumPy's kernels", NumpyPrices,
        _fixed("call_us"), _fixed("function_us"), _fixed("convolution_us"), *_SHARED,
    ),
    "onnxruntime": Schema(
        "prices of ONNX Runtime", OnnxPrices,
        _fixed("call_us"), _fixed("node_us"), _fixed("round_node_us"),
        _curve("packed_products_per_us"), *_SHARED,
    ),
    "torch": Schema(
        "prices of PyTorch's kernels", AtenPrices,
        _fixed("call_us"), _fixed("matrix_us"), _curve("row_products_per_us"),
        _curve("products_per_us"), _by_operator("functions_ns"),
        Field("turned_products_per_us", CURVE), Field("convolutions", _CONVOLUTIONS),
    ),
}  # fmt: skip
_PROCESSOR = Schema(
    "a family of processors",
    Processor,
    Field("vendor", Word("a vendor", is_text=True), needed=True),
    Field("vector_bits", Whole(1), needed=True),
    Field("cache_nbytes", Whole(1), needed=True),
)
_POINTS = Schema(
    "what a point is given for",
    Points,
    *(Field(key, Whole(1), needed=True) for key in ("multiply_adds", "elements", "round_calls")),
)
_GAIN = Schema(
    "what must be gained",
    Gain,
    Field("part", _PART, needed=True),
    Field("us", _NOT_NEGATIVE, needed=True),
)
_GAINS = Schema(
    "what must be gained",
    Gains,
    *(Field(key, _GAIN, needed=True) for key in ("division", "numpy", "library")),
)
PRICE_TABLE = Schema(
    "a table of prices",
    PriceTable,
    Field("name", Word("a name", is_text=True), needed=True),
    Field("description", Word("a sentence", is_text=True), default=""),
    Field("processor", _PROCESSOR, needed=True),
    Field("points", _POINTS, needed=True),
    Field("gains", _GAINS, needed=True),
    Field("numpy", SECTIONS["numpy"], needed=True),
    Field("onnxruntime", SECTIONS["onnxruntime"]),
    Field("torch", SECTIONS["torch"]),
)


def read_processor(node: Node, log: ProblemLog) -> Processor | None:
    """The family that a table says it is for; None where a defect was noted."""
    return _PROCESSOR.read(node, ParseContext(log, sources=[]).root)


def read_prices(root: Node, log: ProblemLog) -> PriceTable | None:
    """The table that a file holds; None where a defect was noted."""
    reading = ParseContext(log, sources=[])
    fields = PRICE_TABLE.fields(root, reading.root)
    if not fields.sound:
        return None
    return PriceTable(**fields.values, sources=tuple(reading.sources or ()))
