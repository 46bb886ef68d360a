"""The form of a table of prices, which `price_tables` shows."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

from stitch.errors import closest
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
from stitch.runtime.executors.prices.price_table import (
    AtenConvolutions,
    AtenPrices,
    Curve,
    Gain,
    Gains,
    NumpyPrices,
    OnnxPrices,
    Points,
    PriceTable,
)
from stitch.runtime.executors.prices.processors import Processor

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
