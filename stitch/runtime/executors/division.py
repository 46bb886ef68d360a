"""Which operations of a program go to ONNX Runtime, and which to NumPy's or a library's kernels.

Comes in: a program. Goes out: runs of operations, each one call of ONNX Runtime; of all others,
which are the library's (`KernelLibrary`). The choice rests on operators and shapes, never on a
clock: the same program is always computed in the same way. Must not know sessions.

Every operation has two prices, and a run of ONNX Runtime's the price of its call; the cheapest
division is found by dynamic programming over the program's order. Prices are microseconds on one
thread of an AVX-512 machine, measured on float32, and rough: what decides is which is several times
the other. NumPy moves elements for nothing, as views, computes long plain arithmetic by chunks that
stay in the caches, and multiplies batches of small matrices where they lie. ONNX Runtime has the
functions (Erf in a quarter of the time), convolutions, pools, and the large products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stitch.linker import program_of_body
from stitch.ops import RESHAPING, multiply_adds
from stitch.program import ABSENT, Operation, Program, ScanForm, is_scan
from stitch.runtime.executors.element_runs import element_runs
from stitch.runtime.executors.host import MOVEMENTS, WINDOW, KernelLibrary, chunked_sizes

#: A call of ONNX Runtime, with its inputs and outputs; a node in it; a call of NumPy.
CALL, NODE, FUNCTION = 5.0, 0.7, 0.6
#: A round of a scan, and an element that it takes or gives: NumPy's, ONNX Runtime's; a node there.
NUMPY_ROUND, NUMPY_ELEMENT = 0.6, 0.5
ONNX_ROUND, ONNX_ELEMENT, ROUND_NODE = 0.1, 0.12, 0.2
#: Multiply-adds per microsecond.
NUMPY_PRODUCTS, ONNX_PRODUCTS = 66_000.0, 78_000.0
#: What one matrix of a batch costs beside its multiply-adds.
NUMPY_MATRIX, ONNX_MATRIX = 0.25, 0.8
#: Nanoseconds an element of plain arithmetic: by chunks, else below and above the size that the
#: second-level cache holds; and of functions by chunks.
CHUNKED_ARITHMETIC, SHORT, LONG = 0.17, 0.15, 0.35
CHUNKED = {"Exp": 0.4, "Where": 0.4, "Sqrt": 0.2, "Div": 0.2}
#: The same in chunks of ONNX Runtime's.
SCANNED_ARITHMETIC = 0.17
SCANNED = {"Erf": 0.35, "Exp": 0.2, "Log": 0.3, "Sigmoid": 0.3, "Tanh": 0.3}
LONG_SIZE = 1 << 18
#: Nanoseconds an element that is moved.
COPIED = 0.5
#: Nanoseconds an element of the longest operand or result: NumPy's, ONNX Runtime's.
FUNCTIONS = {
    "AveragePool": (0.8, 0.4), "BatchNormalization": (0.9, 0.6), "Erf": (1.7, 0.5),
    "Exp": (0.5, 0.35), "Gelu": (2.0, 0.8), "GlobalAveragePool": (0.2, 0.2),
    "LayerNormalization": (1.1, 0.6), "Log": (0.6, 0.5), "LogSoftmax": (4.0, 0.7),
    "MaxPool": (0.7, 0.5), "Pow": (3.0, 1.0), "RMSNormalization": (1.1, 0.6),
    "ReduceMean": (0.15, 0.2), "ReduceSum": (0.15, 0.2), "ScatterND": (5.0, 0.4),
    "Sigmoid": (1.0, 0.5), "Softmax": (1.0, 0.6), "Softplus": (1.4, 1.0), "Tanh": (1.0, 0.5),
    "Where": (0.5, 1.4),
}  # fmt: skip
OWN_FUNCTIONS = {
    "GeluGradient": (3.0, 2.2), "LayerNormalizationGradient": (2.0, 5.0),
    "MaxPoolGradient": (1.6, 5.9), "SoftmaxGradient": (0.9, 1.2),
}  # fmt: skip
#: Multiply-adds per microsecond of convolutions: NumPy's, ONNX Runtime's. NumPy multiplies unfolded
#: images, and so do both for the weights' gradient.
CONVOLUTIONS = (28_000.0, 40_000.0)
WEIGHT_GRADIENTS = (28_000.0, 16_000.0)
#: Elements of a window that the figures of pools are for.
USUAL_WINDOW = 64
#: What ONNX Runtime computes with the product or convolution before it, for nothing.
JOINED = frozenset({"Add", "BatchNormalization", "Clip", "LeakyRelu", "Relu", "Sigmoid", "Tanh"})
MAKES_JOINED = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
#: What a division may cost, over one call for all, and the microseconds that it must gain: prices
#: are too rough for less.
GAIN, LEAST_GAIN = 0.9, 20.0


@dataclass(frozen=True, slots=True)
class Division:
    """The runs of operations that go to ONNX Runtime, and those that go to the library."""

    runs: tuple[tuple[int, ...], ...]
    library: frozenset[int] = frozenset()


def divide(
    program: Program,
    able: Sequence[bool],
    threads: int = 1,
    library: KernelLibrary | None = None,
) -> Division:
    """The cheapest division; `able` says which operations ONNX Runtime can run.

    One run of all where nothing else is much cheaper; none where kernels are. With a library, which
    is there only where it was asked for, a little cheaper is enough.
    """
    prices = _Prices(program, threads, library)
    count = len(program.operations)
    runs, least = _cheapest(prices, able)
    if all(able):
        whole = CALL + sum(prices.of_onnx(i) for i in range(count))
        if least > (min(GAIN * whole, whole - LEAST_GAIN) if library is None else whole):
            return Division((tuple(range(count)),))
    foreign = {i for run in runs for i in run}
    return Division(runs, frozenset(i for i in prices.cheaper if i not in foreign))


def _cheapest(prices: _Prices, able: Sequence[bool]) -> tuple[tuple[tuple[int, ...], ...], float]:
    """The cheapest division, and its price."""
    # Price so far when the last operation is NumPy's, and when it is ONNX Runtime's.
    ends = (0.0, math.inf)
    before: list[tuple[int, int]] = []
    for index, foreign in enumerate(able):
        plain = prices.cheaper.get(index) or prices.of_numpy(index)
        other = prices.of_onnx(index) if foreign else math.inf
        from_plain = int(ends[1] < ends[0])
        from_other = int(ends[1] <= ends[0] + CALL)
        before.append((from_plain, from_other))
        ends = min(ends) + plain, (ends[1] if from_other else ends[0] + CALL) + other
    state = int(ends[1] <= ends[0])
    least = min(ends)
    states = [0] * len(able)
    for index in reversed(range(len(able))):
        states[index] = state
        state = before[index][state]
    runs: list[list[int]] = []
    for index, state in enumerate(states):
        if state and index and states[index - 1]:
            runs[-1].append(index)
        elif state:
            runs.append([index])
    return tuple(map(tuple, runs)), least


class _Prices:
    def __init__(
        self, program: Program, threads: int, library: KernelLibrary | None, node: float = NODE
    ) -> None:
        self.program = program
        self.threads = threads
        #: What a node of ONNX Runtime's costs where these are.
        self.node = node
        self._rounds: dict[int, _Prices] = {}
        self.given = {slot.value for slot in program.outputs}
        self.makers = {v: o for o in program.operations for v in o.outputs if v != ABSENT}
        self.constants = {constant.value for constant in program.constants}
        sizes = chunked_sizes(program)
        self.chunked = {
            i
            for first, (a, b) in enumerate(pairwise(sizes))
            if a == b and a is not None
            for i in (first, first + 1)
        }
        self.scanned = {i for run in element_runs(program).values() for i in run.operations}
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

    def of_numpy(self, index: int) -> float:
        """What an operation takes by NumPy's kernel."""
        operation = self.program.operations[index]
        if is_scan(operation):
            return FUNCTION + self._scan(operation, NUMPY_ROUND, NUMPY_ELEMENT, _Prices.of_numpy)
        if self._moves(operation):
            return self._moved(operation)
        size = self._size(operation)
        if index in self.chunked:
            return FUNCTION + size * CHUNKED.get(operation.op, CHUNKED_ARITHMETIC) / 1000
        products = multiply_adds(operation, self.program.values)
        if products:
            if operation.op not in ("Gemm", "MatMul"):
                return 10 + products / _convolutions(operation)[0]
            return FUNCTION + products / NUMPY_PRODUCTS + self._batch(operation) * NUMPY_MATRIX
        figures = (OWN_FUNCTIONS if operation.domain else FUNCTIONS).get(operation.op)
        if figures is not None:
            return 3 + size * figures[0] / 1000
        return FUNCTION + size * (LONG if size >= LONG_SIZE else SHORT) / 1000

    def of_onnx(self, index: int) -> float:
        """What an operation takes as a node of ONNX Runtime's."""
        operation = self.program.operations[index]
        if is_scan(operation):
            return self.node + self._scan(operation, ONNX_ROUND, ONNX_ELEMENT, _Prices.of_onnx)
        if self._is_joined(operation):
            return self.node
        if operation.op in RESHAPING and not operation.domain:
            # It copies what it gives out of the model.
            is_given = operation.outputs[0] in self.given
            return self.node + (self._size(operation) * COPIED / 1000 if is_given else 0)
        size = self._size(operation)
        if index in self.scanned:
            return self.node + size * SCANNED.get(operation.op, SCANNED_ARITHMETIC) / 1000
        products = multiply_adds(operation, self.program.values)
        if products:
            if operation.op not in ("Gemm", "MatMul"):
                return self.node + products / (_convolutions(operation)[1] * self.threads)
            rate = ONNX_PRODUCTS * self.threads
            return self.node + products / rate + self._batch(operation) * ONNX_MATRIX / self.threads
        figures = (OWN_FUNCTIONS if operation.domain else FUNCTIONS).get(operation.op)
        rate = LONG if size >= LONG_SIZE else SHORT
        if figures is not None:
            rate = figures[1] * _window_times(operation)
        elif self._moves(operation):
            rate = COPIED
        return self.node + size * rate / 1000 / self.threads

    def _scan(
        self, operation: Operation, per_round: float, per_element: float,
        of: Callable[[_Prices, int], float],
    ) -> float:  # fmt: skip
        """What all rounds of a scan take, where `of` is the price of an operation in them."""
        form = ScanForm.of(operation)
        inside = self._rounds.get(operation.body)
        if inside is None:
            body = program_of_body(self.program, operation.body, form.states)
            inside = _Prices(body, self.threads, None, ROUND_NODE)
            self._rounds[operation.body] = inside
        spent = sum(of(inside, i) for i in range(len(inside.program.operations)))
        return form.count * (per_round + per_element * (form.sequences + form.collected) + spent)

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
        values = self.program.values
        for value in operation.outputs:
            for reader in self.readers.get(value, ()):
                batch = reader.op == "MatMul" and self._batch(reader) > 1
                if not batch and not self._moves(reader):
                    return FUNCTION + math.prod(values[value].type.shape) * COPIED / 1000
        return 0.0

    def _is_joined(self, operation: Operation) -> bool:
        maker = self.makers.get(operation.inputs[0]) if operation.inputs else None
        return (
            not operation.domain
            and operation.op in JOINED
            and maker is not None
            and maker.op in MAKES_JOINED
            and len(self.readers[operation.inputs[0]]) == 1
        )

    def _batch(self, operation: Operation) -> int:
        shapes = [self.program.values[v].type.shape for v in operation.inputs[:2]]
        if operation.op != "MatMul" or len(shapes[1]) < 3:
            return 1
        return math.prod(self.program.values[operation.outputs[0]].type.shape[:-2])

    def _size(self, operation: Operation) -> int:
        values = (v for v in (*operation.inputs, *operation.outputs) if v != ABSENT)
        return max((math.prod(self.program.values[v].type.shape) for v in values), default=0)


def _window_times(operation: Operation) -> float:
    """How much longer ONNX Runtime averages than over a usual window: it reads all of each one."""
    kernel = operation.attributes.get("kernel_shape")
    if operation.op != "AveragePool" or not isinstance(kernel, tuple):
        return 1.0
    return max(1.0, math.prod(map(int, kernel)) / USUAL_WINDOW)


def _convolutions(operation: Operation) -> tuple[float, float]:
    return WEIGHT_GRADIENTS if operation.domain else CONVOLUTIONS
