"""Price each operation of a program by NumPy's kernels, a library's, and as an ONNX Runtime node.

Prices are measured on float32 and rough. They account for what each side does for nothing: NumPy
moves elements as views, and computes long elementwise arithmetic in chunks; ONNX Runtime fuses
products with the next operations, folds constants, and takes no views, which are copied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from stitch.linker import expanded, program_of_body
from stitch.ops import RESHAPING, multiply_adds, program_work
from stitch.program import ABSENT, Operation, Program, ScanForm, Value, is_scan
from stitch.runtime.executors.host import MOVEMENTS, WINDOW, KernelLibrary, chunked_sizes
from stitch.runtime.executors.prices.blocked_convolutions import (
    NO_BLOCKS,
    blocked_part,
    weight_conversion_ns,
)
from stitch.runtime.executors.prices.element_runs import element_runs
from stitch.runtime.executors.prices.tables import (
    Curve,
    NumpyPrices,
    OnnxPrices,
    PriceTable,
    operator_name,
    products_rate,
)

#: Elements of the window for which pools were measured.
MEASURED_WINDOW = 64
#: Operators that ONNX Runtime fuses into the product or convolution before them, and the latter.
FUSED = frozenset({"Add", "BatchNormalization", "Clip", "LeakyRelu", "Relu", "Sigmoid", "Tanh"})
FUSING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class OperationPrices:
    """Prices of a program's operations, in microseconds; `is_round`: it is the body of a scan."""

    def __init__(
        self, program: Program, table: PriceTable, threads: int, *, is_round: bool = False
    ) -> None:
        self.program = program
        self.table = table
        self.numpy, self.onnx = table.numpy, table.onnxruntime
        self.threads = threads
        self.call = math.inf if self.onnx is None else self.onnx.call_us
        self.node = math.inf
        if self.onnx is not None:
            self.node = self.onnx.round_node_us if is_round else self.onnx.node_us
        self._rounds: dict[int, OperationPrices] = {}
        self.returned = {slot.value for slot in program.outputs}
        self.makers = {v: o for o in program.operations for v in o.outputs if v != ABSENT}
        self.constants = {constant.value for constant in program.constants}
        self.fixed = program.fixed_values()
        sizes = chunked_sizes(program)
        self.chunked = {
            i
            for first, (a, b) in enumerate(pairwise(sizes))
            if a == b and a is not None
            for i in (first, first + 1)
        }
        #: Nanoseconds to convert the weights of blocked convolutions (none in a scan's rounds).
        blocked = NO_BLOCKS if is_round else blocked_part(program)
        self.blocked = {
            c.convolution: weight_conversion_ns(program, c.convolution)
            for c in blocked.convolutions.values()
        }
        self.scanned = {i for run in element_runs(program).values() for i in run.operations}
        self.indices = {id(operation): i for i, operation in enumerate(program.operations)}
        self.readers: dict[int, list[Operation]] = {}
        for operation in program.operations:
            for value in operation.inputs:
                self.readers.setdefault(value, []).append(operation)
        self.work = [
            form.get("work to be priced", _work, operation, program.values)
            for form, operation in zip(program.forms, program.operations, strict=True)
        ]
        self._by_numpy: dict[int, float] = {}
        self._by_onnx: dict[int, float] = {}
        #: A library's prices that are lower than NumPy's; none before `offer`.
        self.cheaper: dict[int, float] = {}

    def offer(self, library: KernelLibrary) -> None:
        """Let a library compute what its kernels compute at a lower price than NumPy's."""
        program, priced = self.program, library.priced
        for index, operation in enumerate(program.operations):
            work, form = self.work[index], program.forms[index]
            price = priced.get(form)
            if price is None:
                price = library.price(program, operation, work.products, work.batch)
                priced[form] = price
            if price < self.of_numpy(index):
                self.cheaper[index] = price

    def of_division(self, runs: Sequence[Sequence[int]]) -> float:
        """Return the price of the program if ONNX Runtime computes these runs of operations."""
        foreign = {i for run in runs for i in run}
        price = len(runs) * self.call if runs else 0.0
        for index, operation in enumerate(self.program.operations):
            if index in foreign:
                price += self.of_onnx(index)
                continue
            price += self.cheaper.get(index) or self.of_numpy(index)
            if self._moves(operation) and operation.op not in RESHAPING:
                price += sum(self._copied(v, foreign) for v in operation.outputs)
        return price

    def _copied(self, value: int, foreign: Collection[int]) -> float:
        """Return the price of copying a view that ONNX Runtime reads; else 0."""
        readers = (self.indices[id(reader)] for reader in self._reading(value))
        if self._is_view(value) and any(index in foreign for index in readers):
            size = math.prod(self.program.values[value].type.shape)
            return self.numpy.call_us + _all(size, self.numpy.moved_ns)
        return 0.0

    def of_numpy(self, index: int) -> float:
        """Return an operation's price by NumPy's kernel; infinite for a foreign operator."""
        price = self._by_numpy.get(index)
        if price is None:
            price = self._by_numpy[index] = self._of_numpy(index)
        return price

    def of_onnx(self, index: int) -> float:
        """Return an operation's price as a node of ONNX Runtime; infinite without its prices."""
        price = self._by_onnx.get(index)
        if price is None:
            price = self._by_onnx[index] = self._of_onnx(index)
        return price

    def _of_numpy(self, index: int) -> float:
        operation, prices = self.program.operations[index], self.numpy
        if operation.is_foreign:
            return math.inf
        if is_scan(operation):
            round_us, element_us = prices.round_us, prices.round_element_us
            return prices.call_us + self._scan(
                operation, round_us, element_us, OperationPrices.of_numpy
            )
        if self._moves(operation):
            return self._moved(operation)
        size, _, products, batch = self.work[index]
        name = operator_name(operation)
        if index in self.chunked:
            rate = prices.chunked_functions_ns.get(name, prices.chunked_ns)
            return prices.call_us + _all(size, rate)
        if products:
            if operation.op not in ("Gemm", "MatMul"):
                rate = self._convolutions(operation, prices)
                return prices.convolution_us + products / rate.at(products)
            spent = products / products_rate(prices, self.program, operation).at(products)
            return prices.call_us + spent + batch * prices.matrix_us
        function = prices.functions_ns.get(name)
        if function is not None:
            return prices.function_us + _all(size, function)
        return prices.call_us + _all(size, prices.arithmetic_ns)

    def _of_onnx(self, index: int) -> float:
        operation, prices = self.program.operations[index], self.onnx
        if prices is None:
            return math.inf
        if is_scan(operation):
            round_us, element_us = prices.round_us, prices.round_element_us
            return self.node + self._scan(operation, round_us, element_us, OperationPrices.of_onnx)
        if self.fixed.issuperset(operation.outputs):
            # Computed once, from constants.
            return 0.0
        if self._is_fused(operation) or self._is_merged_transpose(operation):
            return self.node
        size, results_size, products, batch = self.work[index]
        name = operator_name(operation)
        if operation.op in RESHAPING and not operation.domain:
            # ONNX Runtime copies a reshaped model output.
            is_returned = operation.outputs[0] in self.returned
            return self.node + (_all(size, prices.moved_ns) if is_returned else 0)
        if index in self.scanned:
            rate = prices.chunked_functions_ns.get(name, prices.chunked_ns)
            return self.node + _all(size, rate)
        if products:
            if operation.op not in ("Gemm", "MatMul"):
                rate, conversion = self._convolutions(operation, prices), 0.0
                if index in self.blocked:
                    rate, conversion = prices.convolutions_per_us, self.blocked[index] / 1000
                return self.node + (products / rate.at(products) + conversion) / self.threads
            rate = products_rate(prices, self.program, operation)
            is_packed = operation.inputs[1] in self.constants
            if is_packed and rate is not prices.row_products_per_us:
                rate = prices.packed_products_per_us
            spent = products / rate.at(products)
            return self.node + (spent + batch * prices.matrix_us) / self.threads
        function, times = prices.functions_ns.get(name), 1.0
        if function is not None:
            times = _window_times(operation)
        elif self._moves(operation):
            # The elements that are moved count, not those of the operand.
            function, size = prices.moved_ns, results_size
        else:
            function = prices.arithmetic_ns
        return self.node + _all(size, function) * times / self.threads

    def _scan(
        self, operation: Operation, per_round: float, per_element: float,
        of: Callable[[OperationPrices, int], float],
    ) -> float:  # fmt: skip
        """Return the price of all rounds of a scan; `of` prices an operation of its body."""
        form = ScanForm.of(operation)
        inside = self._rounds.get(operation.body)
        if inside is None:
            body = program_of_body(self.program, operation.body, form.states)
            inside = OperationPrices(body, self.table, self.threads, is_round=True)
            self._rounds[operation.body] = inside
        spent = sum(of(inside, i) for i in range(len(inside.program.operations)))
        return form.likely_rounds * (
            per_round + per_element * (form.sequences + form.collected) + spent
        )

    def _moves(self, operation: Operation) -> bool:
        """Whether an operation only moves elements, by constant positions."""
        if operation.domain:
            is_window = (operation.domain, operation.op) == WINDOW
            return is_window and self.constants.issuperset(operation.inputs[1:])
        return operation.op in MOVEMENTS

    def _moved(self, operation: Operation) -> float:
        """Return the price of a movement: 0 if all readers take views."""
        if operation.op in RESHAPING:
            return 0.0
        for value in operation.outputs:
            if not self._is_view(value):
                size = math.prod(self.program.values[value].type.shape)
                return self.numpy.call_us + _all(size, self.numpy.moved_ns)
        return 0.0

    def _reading(self, value: int) -> Sequence[Operation]:
        return self.readers.get(value, ())

    def _is_view(self, value: int) -> bool:
        """Whether all readers of a moved value take views: batched products and movements."""
        return all(
            self.work[self.indices[id(reader)]].batch > 1 or self._moves(reader)
            for reader in self._reading(value)
        )

    def _is_fused(self, operation: Operation) -> bool:
        maker = self.makers.get(operation.inputs[0]) if operation.inputs else None
        return (
            not operation.domain
            and operation.op in FUSED
            and maker is not None
            and maker.op in FUSING
            and len(self.readers[operation.inputs[0]]) == 1
        )

    def _is_merged_transpose(self, operation: Operation) -> bool:
        """Whether ONNX Runtime merges a Transpose into the next one, or, of the last two axes, into
        a product."""
        if operation.op != "Transpose" or operation.domain:
            return False
        if operation.outputs[0] in self.returned:
            return False
        readers = {reader.op for reader in self._reading(operation.outputs[0])}
        if readers == {"Transpose"}:
            return True
        maker, order = self.makers.get(operation.inputs[0]), operation.attributes.get("perm")
        rank = len(self.program.values[operation.inputs[0]].type.shape)
        turned = (*range(rank - 2), rank - 1, rank - 2)
        is_turned = isinstance(order, tuple) and order == turned
        return is_turned and readers == {"MatMul"} and (maker is None or maker.op != "Transpose")

    def _convolutions(self, operation: Operation, prices: NumpyPrices | OnnxPrices) -> Curve:
        """Return the multiply-adds per microsecond of a convolution or a weight gradient."""
        if operation.domain:
            return prices.weight_gradients_per_us
        rate = prices.convolutions_per_us
        if operation.op == "ConvTranspose":
            return prices.transposed_convolutions_per_us or rate
        if operation.inputs[1] in self.fixed:
            return rate
        return prices.unpacked_convolutions_per_us or rate


class Work(NamedTuple):
    """The work of an operation.

    Attributes:
        size: Elements of the largest operand or result.
        results_size: Elements of all results.
        products: Multiply-adds, but for a scan.
        batch: Matrices of a batched product; else 1.
    """

    size: int
    results_size: int
    products: int
    batch: int


def _work(operation: Operation, values: Sequence[Value]) -> Work:
    def elements(of: Sequence[int]) -> list[int]:
        return [math.prod(values[v].type.shape) for v in of if v != ABSENT]

    batch, results = 1, elements(operation.outputs)
    if operation.op == "MatMul" and len(values[operation.inputs[1]].type.shape) > 2:
        batch = math.prod(values[operation.outputs[0]].type.shape[:-2])
    size = max([*elements(operation.inputs), *results], default=0)
    return Work(size, sum(results), multiply_adds(operation, values), batch)


def _window_times(operation: Operation) -> float:
    """Return the time of an AveragePool relative to the measured window: all elements are read."""
    kernel = operation.attributes.get("kernel_shape")
    if operation.op != "AveragePool" or not isinstance(kernel, tuple):
        return 1.0
    return max(1.0, math.prod(map(int, kernel)) / MEASURED_WINDOW)


def _all(size: int, nanoseconds: Curve) -> float:
    """Return the microseconds of `size` elements."""
    return size * nanoseconds.at(size) / 1000


# Lower bounds

#: Per microsecond at most, on a server core with AVX-512: floating-point operations of products
#: (2 x 16 multiply-adds at 3.1 GHz), elements of other operators, copied bytes.
FLOPS, ELEMENTS, COPIED = 200_000.0, 8_000.0, 50_000.0


def least_microseconds(program: Program) -> float:
    """Return a lower bound for the time of one run."""
    work = program_work(expanded(program))
    return sum(work.products.values()) / FLOPS + work.other_flops / ELEMENTS


def least_copy_microseconds(nbytes: int) -> float:
    """Return a lower bound for the time of a copy.

    >>> least_copy_microseconds(5_000_000)
    100.0
    """
    return nbytes / COPIED
