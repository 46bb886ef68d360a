"""Price each operation of a program by NumPy's kernels, a library's, and as an ONNX Runtime node.

Prices are measured on float32 and rough: only ratios of several times decide.

NumPy moves elements for nothing (as views), computes long elementwise arithmetic in chunks that fit
the caches, and multiplies batches of small matrices in place. ONNX Runtime is better at functions
(Erf in a quarter of the time), convolutions, pools and large products; it fuses a product with what
follows and a Transpose with the next node, folds constants once, and rearranges other convolution
weights in each run. It takes no views: they are copied before the call.

`least_microseconds` is a lower bound by counts. Its rates: two units that multiply and add 16
float32 at 3.1 GHz do 100 multiply-adds a nanosecond (server cores with AVX-512; measured products
reach 88); such a core reads up to 100 bytes a nanosecond from its second-level cache, about eight
elements of an addition, and copies half as many bytes as it touches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from stitch.linker import expanded, program_of_body
from stitch.ops import RESHAPING, multiply_adds, program_work
from stitch.program import ABSENT, Operation, Program, ScanForm, is_scan
from stitch.runtime.executors.blocked_convolutions import NO_BLOCKS, arranging_ns, blocked_part
from stitch.runtime.executors.element_runs import element_runs
from stitch.runtime.executors.host import MOVEMENTS, WINDOW, KernelLibrary, chunked_sizes
from stitch.runtime.executors.prices import (
    Curve,
    NumpyPrices,
    OnnxPrices,
    PriceTable,
    operator_name,
    products_rate,
)

#: Elements of a window that the figures of pools are for.
USUAL_WINDOW = 64
#: What ONNX Runtime computes with the product or convolution before it, for nothing.
JOINED = frozenset({"Add", "BatchNormalization", "Clip", "LeakyRelu", "Relu", "Sigmoid", "Tanh"})
MAKES_JOINED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


class OperationPrices:
    """The prices of a program's operations by a table; `is_round`: in the rounds of a scan."""

    def __init__(
        self, program: Program, table: PriceTable, threads: int,
        library: KernelLibrary | None = None, *, is_round: bool = False,
    ) -> None:  # fmt: skip
        self.program = program
        self.table = table
        self.numpy, self.onnx = table.numpy, table.onnxruntime
        self.threads = threads
        self.call = math.inf if self.onnx is None else self.onnx.call_us
        #: What a node of ONNX Runtime's costs where these are.
        self.node = math.inf
        if self.onnx is not None:
            self.node = self.onnx.round_node_us if is_round else self.onnx.node_us
        self._rounds: dict[int, OperationPrices] = {}
        self.given = {slot.value for slot in program.outputs}
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
        #: Nanoseconds in which weights are put into blocks: never in the rounds of a scan.
        blocked = NO_BLOCKS if is_round else blocked_part(program)
        self.blocked = {
            c.convolution: arranging_ns(program, c.convolution)
            for c in blocked.convolutions.values()
        }
        self.scanned = {i for run in element_runs(program).values() for i in run.operations}
        self.places = {id(operation): i for i, operation in enumerate(program.operations)}
        self.readers: dict[int, list[Operation]] = {}
        for operation in program.operations:
            for value in operation.inputs:
                self.readers.setdefault(value, []).append(operation)
        #: What the library takes, where that is less than NumPy's kernel does.
        self.cheaper: dict[int, float] = {}
        for index, operation in enumerate(program.operations):
            if library is not None:
                price = library.price(
                    program,
                    operation,
                    multiply_adds(operation, program.values, program.bodies),
                    self._batch(operation),
                )
                if price < self.of_numpy(index):
                    self.cheaper[index] = price

    def of_division(self, runs: Sequence[Sequence[int]]) -> float:
        """What a program takes that is divided so."""
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
        """What it costs that ONNX Runtime, which takes no views, reads one that costs nothing
        else."""
        readers = (self.places[id(reader)] for reader in self._reading(value))
        if self._is_seen(value) and any(place in foreign for place in readers):
            size = math.prod(self.program.values[value].type.shape)
            return self.numpy.call_us + _all(size, self.numpy.moved_ns)
        return 0.0

    def of_numpy(self, index: int) -> float:
        """What an operation takes by NumPy's kernel; infinite for a foreign operator."""
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
        size, name = self._size(operation), operator_name(operation)
        if index in self.chunked:
            rate = prices.chunked_functions_ns.get(name, prices.chunked_ns)
            return prices.call_us + _all(size, rate)
        products = multiply_adds(operation, self.program.values)
        if products:
            if operation.op not in ("Gemm", "MatMul"):
                rate = self._convolutions(operation, prices)
                return prices.convolution_us + products / rate.at(products)
            spent = products / products_rate(prices, self.program, operation).at(products)
            return prices.call_us + spent + self._batch(operation) * prices.matrix_us
        function = prices.functions_ns.get(name)
        if function is not None:
            return prices.function_us + _all(size, function)
        return prices.call_us + _all(size, prices.arithmetic_ns)

    def of_onnx(self, index: int) -> float:
        """What an operation takes as a node of ONNX Runtime's; infinite if that has no prices."""
        operation, prices = self.program.operations[index], self.onnx
        if prices is None:
            return math.inf
        if is_scan(operation):
            round_us, element_us = prices.round_us, prices.round_element_us
            return self.node + self._scan(operation, round_us, element_us, OperationPrices.of_onnx)
        if self.fixed.issuperset(operation.outputs):
            # It computes once what depends on constants alone.
            return 0.0
        if self._is_joined(operation) or self._is_merged(operation):
            return self.node
        size, name = self._size(operation), operator_name(operation)
        if operation.op in RESHAPING and not operation.domain:
            # It copies what it gives out of the model.
            is_given = operation.outputs[0] in self.given
            return self.node + (_all(size, prices.moved_ns) if is_given else 0)
        if index in self.scanned:
            rate = prices.chunked_functions_ns.get(name, prices.chunked_ns)
            return self.node + _all(size, rate)
        products = multiply_adds(operation, self.program.values)
        if products:
            if operation.op not in ("Gemm", "MatMul"):
                rate, arranged = self._convolutions(operation, prices), 0.0
                if index in self.blocked:
                    rate, arranged = prices.convolutions_per_us, self.blocked[index] / 1000
                return self.node + (products / rate.at(products) + arranged) / self.threads
            rate = products_rate(prices, self.program, operation)
            is_packed = operation.inputs[1] in self.constants
            if is_packed and rate is not prices.row_products_per_us:
                rate = prices.packed_products_per_us
            spent = products / rate.at(products)
            return self.node + (spent + self._batch(operation) * prices.matrix_us) / self.threads
        function, times = prices.functions_ns.get(name), 1.0
        if function is not None:
            times = _window_times(operation)
        elif self._moves(operation):
            # What is taken of an operand counts, not the operand.
            function, size = prices.moved_ns, self._made(operation)
        else:
            function = prices.arithmetic_ns
        return self.node + _all(size, function) * times / self.threads

    def _scan(
        self, operation: Operation, per_round: float, per_element: float,
        of: Callable[[OperationPrices, int], float],
    ) -> float:  # fmt: skip
        """What all rounds of a scan take, where `of` is the price of an operation in them."""
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
        """Whether it only moves elements to places that are known."""
        if operation.domain:
            known = (operation.domain, operation.op) == WINDOW
            return known and self.constants.issuperset(operation.inputs[1:])
        return operation.op in MOVEMENTS

    def _moved(self, operation: Operation) -> float:
        """Nothing where readers take views: a product of batches, or another movement."""
        if operation.op in RESHAPING:
            return 0.0
        for value in operation.outputs:
            if not self._is_seen(value):
                size = math.prod(self.program.values[value].type.shape)
                return self.numpy.call_us + _all(size, self.numpy.moved_ns)
        return 0.0

    def _reading(self, value: int) -> Sequence[Operation]:
        return self.readers.get(value, ())

    def _is_seen(self, value: int) -> bool:
        """Whether all who read a value that was moved would take a view of it."""
        return all(
            (reader.op == "MatMul" and self._batch(reader) > 1) or self._moves(reader)
            for reader in self._reading(value)
        )

    def _is_joined(self, operation: Operation) -> bool:
        maker = self.makers.get(operation.inputs[0]) if operation.inputs else None
        return (
            not operation.domain
            and operation.op in JOINED
            and maker is not None
            and maker.op in MAKES_JOINED
            and len(self.readers[operation.inputs[0]]) == 1
        )

    def _is_merged(self, operation: Operation) -> bool:
        """Whether it is a Transpose that ONNX Runtime joins to the next one, or to a product: of
        the last two axes alone."""
        if operation.op != "Transpose" or operation.domain or operation.outputs[0] in self.given:
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
        """Multiply-adds per microsecond: of the stitch domain is the weights' gradient."""
        if operation.domain:
            return prices.weight_gradients_per_us
        rate = prices.convolutions_per_us
        if operation.op == "ConvTranspose":
            return prices.transposed_convolutions_per_us or rate
        if operation.inputs[1] in self.fixed:
            return rate
        return prices.unpacked_convolutions_per_us or rate

    def _batch(self, operation: Operation) -> int:
        shapes = [self.program.values[v].type.shape for v in operation.inputs[:2]]
        if operation.op != "MatMul" or len(shapes[1]) < 3:
            return 1
        return math.prod(self.program.values[operation.outputs[0]].type.shape[:-2])

    def _made(self, operation: Operation) -> int:
        made = (v for v in operation.outputs if v != ABSENT)
        return sum(math.prod(self.program.values[v].type.shape) for v in made)

    def _size(self, operation: Operation) -> int:
        values = (v for v in (*operation.inputs, *operation.outputs) if v != ABSENT)
        return max((math.prod(self.program.values[v].type.shape) for v in values), default=0)


def _window_times(operation: Operation) -> float:
    """How much longer ONNX Runtime averages than over a usual window: it reads all of each one."""
    kernel = operation.attributes.get("kernel_shape")
    if operation.op != "AveragePool" or not isinstance(kernel, tuple):
        return 1.0
    return max(1.0, math.prod(map(int, kernel)) / USUAL_WINDOW)


def _all(size: int, nanoseconds: Curve) -> float:
    """Microseconds of so many elements."""
    return size * nanoseconds.at(size) / 1000


# Lower bounds

#: In a microsecond: operations of products, elements of other operators, bytes copied.
FLOPS, ELEMENTS, COPIED = 200_000.0, 8_000.0, 50_000.0


def least_microseconds(program: Program) -> float:
    """What one run takes at least; of operations with bodies, what these take."""
    work = program_work(expanded(program))
    return sum(work.products.values()) / FLOPS + work.other_flops / ELEMENTS


def least_copy_microseconds(nbytes: int) -> float:
    """What copying so many bytes takes at least.

    >>> least_copy_microseconds(5_000_000)
    100.0
    """
    return nbytes / COPIED
