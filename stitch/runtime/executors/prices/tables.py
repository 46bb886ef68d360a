"""Price tables as dataclasses, and their YAML files (the package describes the keys)."""

from __future__ import annotations

import math
import platform
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

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
    read_entry,
    read_yaml_bytes,
)
from stitch.ops import operators
from stitch.program import Operation, Program

# The processor

CPUINFO = Path("/proc/cpuinfo")
#: Caches of the first core, each with its level, type and size.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
#: Bytes to read of a file of the system: enough for the first core.
MAX_NBYTES = 1 << 16
#: Distance of families of different vendors; 1 for each halving of the cache.
VENDOR = 2.0
_SIZE = re.compile(r"(\d+)([KM]?)")
_NBYTES = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True, slots=True)
class Processor:
    """A family of processors: vendor, and size of a core's second-level cache.

    Unknown fields are empty or 0, and do not count in `distance`.
    """

    vendor: str
    cache_nbytes: int

    def distance(self, other: Processor) -> float:
        """Return the distance of two families, 0 for equal ones.

        >>> mine = Processor("AuthenticAMD", 1 << 20)
        >>> mine.distance(Processor("GenuineIntel", 1 << 19)), mine.distance(Processor("", 0))
        (3.0, 0.0)
        """
        apart = VENDOR if self.vendor and other.vendor and self.vendor != other.vendor else 0.0
        if self.cache_nbytes and other.cache_nbytes:
            apart += abs(math.log2(self.cache_nbytes / other.cache_nbytes))
        return apart

    def text(self) -> str:
        """Describe the family.

        >>> Processor("AuthenticAMD", 1 << 20).text()
        'AuthenticAMD, 1024 KiB of second-level cache'
        """
        return f"{self.vendor}, {self.cache_nbytes >> 10} KiB of second-level cache"


def parse_cpuinfo(cpuinfo: str, cache_nbytes: int = 0) -> Processor:
    """Return the family of a processor from the text of /proc/cpuinfo.

    >>> parse_cpuinfo("vendor_id\\t: GenuineIntel\\nflags\\t\\t: fpu sse2 avx avx2 avx512f\\n")
    Processor(vendor='GenuineIntel', cache_nbytes=0)
    """
    # Arm has the designer's number instead of a vendor.
    found = re.search(r"^(?:vendor_id|CPU implementer)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return Processor(found[1].strip() if found else "", cache_nbytes)


@cache
def this_processor() -> Processor:
    """Return the family of the processor that this process runs on."""
    return parse_cpuinfo(_read(CPUINFO), _second_cache_nbytes())


def processor_name() -> str:
    """Return the model name of this processor."""
    named = re.search(r"^model name\s*:\s*(.+)$", _read(CPUINFO), re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _second_cache_nbytes() -> int:
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
    """A figure by size: points (size, figure) with ascending sizes.

    Interpolates by the logarithm of the size, and is constant beyond the first and last point.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        assert sizes and sizes == sorted(set(sizes)), "sizes rise"

    def at(self, size: int) -> float:
        """Return the figure for a size.

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
    """Return an operator's name in a table: `Exp`, `stitch.GeluGradient`."""
    return f"{operation.domain}.{operation.op}" if operation.domain else operation.op


def _is_row_product(program: Program, operation: Operation) -> bool:
    """Whether a product multiplies single rows by matrices, so that each matrix is read once."""
    shape = program.values[operation.outputs[0]].type.shape
    if operation.op == "Gemm" or len(program.values[operation.inputs[1]].type.shape) < 3:
        return math.prod(shape[:-1]) == 1
    return len(shape) < 2 or shape[-2] == 1


def products_rate(
    prices: NumpyPrices | OnnxPrices | AtenPrices, program: Program, operation: Operation
) -> Curve:
    """Return the multiply-adds per microsecond of a product by an operand that is not constant."""
    if _is_row_product(program, operation):
        return prices.row_products_per_us
    is_turned = operation.op == "Gemm" and operation.attributes.get("transB")
    return (is_turned and prices.turned_products_per_us) or prices.products_per_us


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPrices:
    """Prices that NumPy's and ONNX Runtime's kernels share.

    Attributes:
        call_us: A call: of one kernel, or of a session with its inputs and outputs.
        matrix_us: A matrix of a batched product.
        round_us: A round of a scan; `round_element_us` per sequence and collection of a round.
        row_products_per_us: Multiply-adds of single rows by matrices, each of which is read once.
        arithmetic_ns: An element of plain arithmetic; `chunked_ns` in chunks.
        moved_ns: An element that is copied.
        turned_products_per_us: Products by a transposed second operand, as in torch's linear
            layers (None: as `products_per_us`).
        unpacked_convolutions_per_us: Convolutions by weights that are neither constant nor in
            blocks (None: as `convolutions_per_us`).
    """

    call_us: float
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
    turned_products_per_us: Curve | None = None
    transposed_convolutions_per_us: Curve | None = None
    unpacked_convolutions_per_us: Curve | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumpyPrices(KernelPrices):
    """NumPy's kernels; calls of functions and of convolutions have prices of their own."""

    function_us: float
    convolution_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxPrices(KernelPrices):
    """ONNX Runtime: a node, a node in a scan's body, and products by packed constants."""

    node_us: float
    round_node_us: float
    packed_products_per_us: Curve


@dataclass(frozen=True, slots=True)
class AtenConvolutions:
    """PyTorch's convolutions, transposed convolutions and weight gradients.

    `element_ns` is per element read or written, as all are converted to blocks of channels;
    `products_per_us` counts the multiply-adds of padded blocks.
    """

    call_us: float
    element_ns: Curve
    products_per_us: Curve


@dataclass(frozen=True, slots=True)
class AtenPrices:
    """PyTorch's kernels."""

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
    """How many of each make a point; a program of one point or more may use ONNX Runtime."""

    multiply_adds: int
    elements: int
    round_calls: int


@dataclass(frozen=True, slots=True)
class Gain:
    """The gain that a choice must have, as a fraction and in microseconds: prices are rough."""

    part: float
    us: float

    def max_cost(self, price: float) -> float:
        """Return what an alternative to `price` may cost at most."""
        return min((1 - self.part) * price, price - self.us)


@dataclass(frozen=True, slots=True)
class Gains:
    """The gains that are required: of a division and of NumPy alone over one call of ONNX Runtime,
    and of a division with a library's kernels over one without."""

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
    #: (path of a figure in the file, its source).
    sources: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"<PriceTable {self.name}: {self.processor.text()}>"


# Files

#: A table, or the name or path of one.
Prices = str | Path | PriceTable
MAX_FILE_NBYTES = 1 << 20
_SHIPPED = Path(__file__).parents[1] / "price_tables"


@cache
def price_names() -> tuple[str, ...]:
    """Return the names of the shipped tables, in alphabetical order.

    >>> price_names()
    ('x86_avx512_amd', 'x86_avx512_intel')
    """
    return tuple(sorted(file.stem for file in _SHIPPED.iterdir() if file.suffix == ".yaml"))


def load_prices(prices: Prices | None = None) -> PriceTable:
    """Load a price table.

    Args:
        prices: A shipped name; a path, if it ends in `.yaml` or `.yml` or holds a slash; a table;
            or None for the shipped table nearest to this processor.

    Raises:
        UsageError: There is no such table or file.
        FormatError: The file has defects; lists all.

    >>> load_prices("x86_avx512_intel").processor.vendor
    'GenuineIntel'
    """
    if prices is None:
        return nearest_table(this_processor())
    if isinstance(prices, PriceTable):
        return prices
    if not isinstance(prices, str | Path):
        raise UsageError(
            "prices must be a name, the path of a .yaml file, or a PriceTable",
            got=type(prices).__name__,
        )
    if isinstance(prices, Path) or prices.endswith((".yaml", ".yml")) or "/" in prices:
        return parse_prices(_content(Path(prices)), str(prices))
    if prices not in price_names():
        near = closest(prices, price_names())
        raise UsageError(
            f"there is no price table {prices!r}{f'; {near}' if near else ''}",
            expected="one of " + ", ".join(price_names()),
            remedy="choose one of these, or give the path of a .yaml file",
        )
    return _shipped(prices)


def nearest_table(processor: Processor) -> PriceTable:
    """Return the shipped table of the family nearest to a processor.

    >>> nearest_table(Processor("GenuineIntel", 2 << 20)).name
    'x86_avx512_intel'
    """
    return _shipped(min(price_names(), key=lambda name: processor.distance(_processor_of(name))))


@cache
def _shipped(name: str) -> PriceTable:
    file = _SHIPPED / f"{name}.yaml"
    return parse_prices(_content(file), file.name)


@cache
def _processor_of(name: str) -> Processor:
    """Read the family of a shipped table, without its figures."""
    file = _SHIPPED / f"{name}.yaml"
    node, log = read_entry(_content(file).decode(), file.name, "processor"), ProblemLog(file.name)
    processor = None if node is None else _PROCESSOR.read(node, ParseContext(log, sources=[]).root)
    assert processor is not None, "a test reads each table that Stitch ships"
    return processor


def _content(file: Path) -> bytes:
    try:
        with open_file(file) as stream:
            return stream.read(MAX_FILE_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read price table {str(file)!r}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="give an existing .yaml file, or one of " + ", ".join(price_names()),
        ) from error


def parse_prices(content: bytes, file_name: str) -> PriceTable:
    """Parse a table from the bytes of a YAML file; raises `FormatError` listing all defects."""
    root, log = read_yaml_bytes(content, file_name, "price table")
    reading = ParseContext(log, sources=[])
    parsed = PRICE_TABLE.fields(root, reading.root)
    log.raise_any(
        "price table",
        "correct the keys named below; python -m pydoc stitch.runtime.executors.prices shows "
        "the keys of the file",
    )
    return PriceTable(**parsed.values, sources=tuple(reading.sources or ()))


# Fields of a file

_POSITIVE = Number(above=0, is_float=True)
_NOT_NEGATIVE = Number(least=0, is_float=True)
_OPERATORS = frozenset(f"{o.domain}.{o.name}" if o.domain else o.name for o in operators())


class _CurveType(FieldType[Curve]):
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
                place.note("out_of_range", f"{word[:60]!r} is not a size", written.key_line)
                continue
            figure = _POSITIVE.read(written, place.entry(word, written))
            points.append((size, figure or 1.0))
        if any(a[0] >= b[0] for a, b in pairwise(points)):
            place.note("not_rising", "sizes must rise")
        return Curve(tuple(points)) if points and place.reading.log.noted == noted else None


class _CurvesByOperator(FieldType[Mapping[str, Curve]]):
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


CURVE = _CurveType()
#: The types of keys, by the annotations of the attributes that they fill.
_KINDS: Mapping[str, FieldType[Any]] = {
    "float": _NOT_NEGATIVE, "int": Whole(1), "str": Word("a text", is_text=True), "Curve": CURVE,
    "Mapping[str, Curve]": _CurvesByOperator(),
}  # fmt: skip
Made = TypeVar("Made")


def _schema(make: type[Made], **kinds: FieldType[Any]) -> Schema[Made]:
    """Return the schema of a dataclass: a key for each attribute, needed if that has no default.

    `kinds` are the types of the keys whose annotations do not say it.
    """
    rows = []
    for attribute in fields(cast("Any", make)):
        kind = kinds.get(attribute.name) or _KINDS.get(attribute.type.removesuffix(" | None"))
        if kind is not None:
            needed = attribute.default is MISSING
            rows.append(Field(attribute.name, kind, None if needed else attribute.default,
                              needed=needed))  # fmt: skip
    return Schema(make, *rows)


_PROCESSOR = _schema(Processor)
_GAIN = _schema(Gain, part=Number(least=0, below=1, is_float=True))
PRICE_TABLE = _schema(
    PriceTable,
    processor=_PROCESSOR, points=_schema(Points),
    gains=_schema(Gains, division=_GAIN, numpy=_GAIN, library=_GAIN),
    numpy=_schema(NumpyPrices), onnxruntime=_schema(OnnxPrices),
    torch=_schema(AtenPrices, convolutions=_schema(AtenConvolutions)),
)  # fmt: skip
