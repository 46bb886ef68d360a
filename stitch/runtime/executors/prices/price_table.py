"""`PriceTable`: what operations take by each library's kernels on a family of processors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from stitch.program import Operation, Program
from stitch.runtime.executors.prices.processors import Processor


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
