"""What was measured as the figures of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pricing.operations import (
    BATCH,
    BLOCK_PRODUCTS,
    CHAIN,
    CHUNKED,
    MORE,
    POINT_PRODUCTS,
    ROUNDS,
)
from pricing.timing import Times
from stitch.runtime import LIBRARY_PRICES, Curve

Figure = float | Mapping[int, float]
#: Its figures by name, and those of functions by operator.
Section = Mapping[str, Any]
#: Below this a figure is lost in the noise, and a price has to be above 0.
LEAST_NS, LEAST_US = 0.005, 0.01
#: Where the powers of two end by which it is searched from where on ONNX Runtime's call pays.
MOST_POINTS = 30


class Figures:
    """The figures of one library."""

    def __init__(self, times: Times, library: str) -> None:
        self._times, self._library = times, library
        one, many = (self._least(name) for name in ("call", "calls"))
        #: One more operation of a program, and what the first takes beside. PyTorch's kernels have
        #: no additions.
        self.more = max(LEAST_US, (many - one) / (MORE - 1)) if one else self._least("function")
        self.beside = max(LEAST_US, one - self.more) if library == "onnxruntime" else 0.0

    def _sized(self, name: str) -> Sequence[tuple[int, float]]:
        return self._times.get((name, self._library), ())

    def _least(self, name: str) -> float:
        sized = self._sized(name)
        return sized[0][1] if sized else 0.0

    def per_element(self, name: str, fixed: float) -> Figure:
        """Nanoseconds an element, beside what is fixed."""
        return {
            size: max(LEAST_NS, self._own(spent, fixed) / size * 1000)
            for size, spent in self._sized(name)
        }

    def _own(self, spent: float, fixed: float) -> float:
        """What an operation takes beside what is fixed: half of it at least, for a tiny one may
        take less than others' calls."""
        whole = max(LEAST_US, spent - self.beside)
        return max(whole - fixed, whole / 2)

    def rate(self, name: str, fixed: float) -> Figure:
        """Multiply-adds per microsecond, beside what is fixed."""
        return {size: size / self._own(spent, fixed) for size, spent in self._sized(name)}

    def has(self, name: str) -> bool:
        """Whether the library could run it."""
        return bool(self._sized(name))

    def function_us(self) -> float:
        """A call of a function."""
        return max(self.more, self._least("function") - self.beside)

    def convolutions(self) -> Section:
        """PyTorch's convolutions: a call, an element that is arranged, multiply-adds of blocks."""
        call = self._least("convolution")
        blocks, points = ([(s, self._own(t, call)) for s, t in self._sized(name)]
                          for name in ("blocks", "arranged"))  # fmt: skip
        (last, spent), share = blocks[-1], 1 / POINT_PRODUCTS - 1 / BLOCK_PRODUCTS
        elements = {
            round(size / POINT_PRODUCTS): max(LEAST_NS, (own / size - spent / last) / share * 1000)
            for size, own in points
        }
        least = min(elements.values()) / 1000 / BLOCK_PRODUCTS
        rates = {size: size / max(own - size * least, own / 2) for size, own in blocks}
        return {"call_us": call, "element_ns": elements, "products_per_us": rates}

    def matrix_us(self) -> float:
        """A matrix of a batch beside its multiply-adds."""
        ((size, spent),) = self._sized("batched")
        rates = self.rate("products", self.more)
        assert isinstance(rates, Mapping)
        fastest = max(rates.values())
        return max(0.0, spent - self.beside - self.more - size / fastest) / BATCH

    def chunked(self) -> tuple[Figure, dict[str, Figure]]:
        """Nanoseconds an element in chunks: of plain arithmetic, and of functions."""
        ((size, spent),) = self._sized("chunked Add")
        plain = max(LEAST_NS, (spent - self.beside) / CHAIN / size * 1000)
        found: dict[str, Figure] = {}
        for op in CHUNKED[1:]:
            for _, chain in self._sized(f"chunked {op}"):
                pair = (chain - self.beside) / (CHAIN // 2) / size * 1000
                found[op] = max(LEAST_NS, pair - plain)
        return plain, found

    def rounds(self) -> tuple[float, float, float]:
        """Of a scan: a round, an element that it takes, an operation in it."""
        each = []
        for name in ("round", "round of operations", "round of elements"):
            twice = self._least(f"{name}, twice")
            each.append(max(0.0, twice - self._least(name)) / ROUNDS)
        operation = max(LEAST_US, (each[1] - each[0]) / (MORE - 1))
        return max(0.0, each[0] - operation), max(0.0, each[2] - each[1]) / MORE, operation


def section_of(library: str, times: Times, functions: Sequence[str]) -> Section:
    """The section of a library, with the figures that its form has, in that order."""
    figures = Figures(times, library)
    has_function = library == "numpy"
    fixed = figures.function_us() if has_function else figures.more
    found: dict[str, Any] = {
        "call_us": figures.beside or figures.more,
        "node_us": figures.more,
        "function_us": fixed,
        "convolution_us": fixed,
        "matrix_us": figures.matrix_us(),
        "row_products_per_us": figures.rate("row", figures.more),
        "products_per_us": figures.rate("products", figures.more),
        "turned_products_per_us": figures.rate("turned_products", figures.more),
        "functions_ns": {op: figures.per_element(op, fixed) for op in functions if figures.has(op)},
    }
    if library == "torch":
        found["convolutions"] = figures.convolutions()
    else:
        round_us, element_us, operation_us = figures.rounds()
        plain, chunked = figures.chunked()
        unpacked = "unpacked_convolutions" if has_function else "unblocked_convolutions"
        found |= {
            "round_us": round_us, "round_element_us": element_us, "round_node_us": operation_us,
            "packed_products_per_us": figures.rate("packed", figures.more),
            "convolutions_per_us": figures.rate("convolutions", fixed),
            "transposed_convolutions_per_us": figures.rate("transposed_convolutions", fixed),
            "unpacked_convolutions_per_us": figures.rate(unpacked, fixed),
            "weight_gradients_per_us": figures.rate("weight_gradients", fixed),
            "arithmetic_ns": figures.per_element("added", figures.more),
            "moved_ns": figures.per_element("moved", figures.more),
            "chunked_ns": plain, "chunked_functions_ns": chunked,
        }  # fmt: skip
    return {field.name: found[field.name] for field in fields(LIBRARY_PRICES[library])}


def points_of(sections: Mapping[str, Section]) -> dict[str, int]:
    """From where on ONNX Runtime's call is paid back: by multiply-adds, elements of a function, and
    operations in a scan's rounds; where it never is, or is not there, as far as is searched."""
    numpy, onnx = sections["numpy"], sections.get("onnxruntime")
    most = 1 << MOST_POINTS
    if onnx is None:
        return {"multiply_adds": most, "elements": most, "round_calls": most}
    call = _at(onnx["call_us"]) + _at(onnx["node_us"])

    def first(pays: Callable[[int], bool]) -> int:
        return next((1 << n for n in range(MOST_POINTS) if pays(1 << n)), most)

    def product_pays(size: int) -> bool:
        mine = _at(numpy["call_us"]) + size / _at(numpy["products_per_us"], size)
        return call + size / _at(onnx["packed_products_per_us"], size) <= mine

    def function_pays(size: int) -> bool:
        mine, other = (_at(s["functions_ns"]["Sigmoid"], size) / 1000 for s in (numpy, onnx))
        return call + size * other < _at(numpy["function_us"]) + size * mine

    saved = _at(numpy["call_us"]) - _at(onnx["round_node_us"])
    rounds = round(max(1.0, call - _at(numpy["call_us"])) / saved) if saved > 0 else most
    return {
        "multiply_adds": first(product_pays),
        "elements": first(function_pays),
        "round_calls": max(1, rounds),
    }


def _at(figure: Any, size: int = 1) -> float:
    """A figure for a size, as tables read it."""
    points = tuple(figure.items()) if isinstance(figure, Mapping) else ((1, float(figure)),)
    return Curve(points).at(size)
