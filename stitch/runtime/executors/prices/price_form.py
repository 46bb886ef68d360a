"""The form of a table of prices, which `price_tables` shows.

Comes in: the nodes of a file. Goes out: a `PriceTable`, or None after every defect was noted. Must
not know: files, which table is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

from stitch.errors import closest
from stitch.forms import (
    Form,
    Kind,
    Node,
    Number,
    Place,
    ProblemLog,
    Reading,
    Row,
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


class _CurveKind(Kind[Curve]):
    """A figure, or figures by size."""

    wanted = "a finite number above 0, or a mapping of sizes to such"

    def value(self, node: Node, place: Place) -> Curve | None:
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


class _ByOperator(Kind[Mapping[str, Curve]]):
    """Figures by operator."""

    wanted = "a mapping of operators to figures"

    def value(self, node: Node, place: Place) -> Mapping[str, Curve] | None:
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
_fixed = partial(Row, kind=_NOT_NEGATIVE, needed=True)
_curve = partial(Row, kind=CURVE, needed=True)
_by_operator = partial(Row, kind=_BY_OPERATOR, needed=True)

_SHARED = (
    _fixed("matrix_us"), _fixed("round_us"), _fixed("round_element_us"),
    _curve("row_products_per_us"), _curve("products_per_us"), _curve("convolutions_per_us"),
    _curve("weight_gradients_per_us"),
    _curve("arithmetic_ns"), _curve("chunked_ns"), _curve("moved_ns"),
    _by_operator("functions_ns"), _by_operator("chunked_functions_ns"),
    Row("turned_products_per_us", CURVE), Row("transposed_convolutions_per_us", CURVE),
    Row("unpacked_convolutions_per_us", CURVE),
)  # fmt: skip
_CONVOLUTIONS = Form(
    "prices of PyTorch's convolutions", AtenConvolutions,
    _fixed("call_us"), _curve("element_ns"), _curve("products_per_us"),
)  # fmt: skip
#: The libraries that have prices, and the form of each.
SECTIONS: Mapping[str, Form[NumpyPrices] | Form[OnnxPrices] | Form[AtenPrices]] = {
    "numpy": Form(
        "prices of NumPy's kernels", NumpyPrices,
        _fixed("call_us"), _fixed("function_us"), _fixed("convolution_us"), *_SHARED,
    ),
    "onnxruntime": Form(
        "prices of ONNX Runtime", OnnxPrices,
        _fixed("call_us"), _fixed("node_us"), _fixed("round_node_us"),
        _curve("packed_products_per_us"), *_SHARED,
    ),
    "torch": Form(
        "prices of PyTorch's kernels", AtenPrices,
        _fixed("call_us"), _fixed("matrix_us"), _curve("row_products_per_us"),
        _curve("products_per_us"), _by_operator("functions_ns"),
        Row("turned_products_per_us", CURVE), Row("convolutions", _CONVOLUTIONS),
    ),
}  # fmt: skip
_PROCESSOR = Form(
    "a family of processors",
    Processor,
    Row("vendor", Word("a vendor", is_text=True), needed=True),
    Row("vector_bits", Whole(1), needed=True),
    Row("cache_nbytes", Whole(1), needed=True),
)
_POINTS = Form(
    "what a point is given for",
    Points,
    *(Row(key, Whole(1), needed=True) for key in ("multiply_adds", "elements", "round_calls")),
)
_GAIN = Form(
    "what must be gained",
    Gain,
    Row("part", _PART, needed=True),
    Row("us", _NOT_NEGATIVE, needed=True),
)
_GAINS = Form(
    "what must be gained",
    Gains,
    *(Row(key, _GAIN, needed=True) for key in ("division", "numpy", "library")),
)
PRICE_TABLE = Form(
    "a table of prices",
    PriceTable,
    Row("name", Word("a name", is_text=True), needed=True),
    Row("description", Word("a sentence", is_text=True), default=""),
    Row("processor", _PROCESSOR, needed=True),
    Row("points", _POINTS, needed=True),
    Row("gains", _GAINS, needed=True),
    Row("numpy", SECTIONS["numpy"], needed=True),
    Row("onnxruntime", SECTIONS["onnxruntime"]),
    Row("torch", SECTIONS["torch"]),
)


def read_processor(node: Node, log: ProblemLog) -> Processor | None:
    """The family that a table says it is for; None where a defect was noted."""
    return _PROCESSOR.read(node, Reading(log, sources=[]).root)


def read_prices(root: Node, log: ProblemLog) -> PriceTable | None:
    """The table that a file holds; None where a defect was noted."""
    reading = Reading(log, sources=[])
    fields = PRICE_TABLE.fields(root, reading.root)
    if not fields.sound:
        return None
    return PriceTable(**fields.values, sources=tuple(reading.sources or ()))
