"""How much computing an operation is, by an estimate from types alone, and a run of a program.

Comes in: an operation, and the types of its operands and results; a placed program. Goes out: a
number of elementary steps, a multiply-add or an element touched each; `ProgramWork`: FLOPs by type,
bytes by space. Must not know machines and executors: the estimate says what is worth doing ahead of
time, it is no price, and how long it takes is theirs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stitch.ops import indexing, shape, types
from stitch.ops.attributes import Attributes
from stitch.program import (
    ABSENT,
    Body,
    DataType,
    Operation,
    Program,
    ScanForm,
    Space,
    Value,
    ValueType,
    is_scan,
)

_Shapes = Sequence[tuple[int, ...]]
#: From the shapes of operands (empty where absent) and results, and attributes.
_Estimate = Callable[[_Shapes, _Shapes, Attributes], int]


def _filtered(weights: int) -> _Estimate:
    """Every result by the weights of one filter."""
    return lambda given, made, _: math.prod(made[0]) * math.prod(given[weights][1:])


def _product(given: _Shapes, made: _Shapes, _: Attributes) -> int:
    return math.prod(made[0]) * math.prod(given[0][-1:])


def _cells(given: _Shapes, _: _Shapes, __: Attributes) -> int:
    return math.prod(given[0][:2]) * (math.prod(given[1]) + math.prod(given[2]))


def _einsum(given: _Shapes, _: _Shapes, attributes: Attributes) -> int:
    """At most one step per combination of all indices."""
    terms = str(attributes.get("equation", "")).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    spanned = 1
    for term, lengths in zip(terms, given, strict=False):
        before, dots, after = term.partition("...")
        last = len(lengths) - len(after)
        named = (*zip(before, lengths, strict=False), *zip(after, lengths[last:], strict=False))
        for letter, size in named:
            sizes[letter] = max(size, sizes.get(letter, 1))
        if dots:
            spanned = max(spanned, math.prod(lengths[len(before) : last]))
    return spanned * math.prod(sizes.values())


def _samples(_: _Shapes, made: _Shapes, attributes: Attributes) -> int:
    ratio = attributes.get("sampling_ratio")
    return math.prod(made[0]) * 4 * (ratio if isinstance(ratio, int) else 1) ** 2


def _resized(given: _Shapes, made: _Shapes, _: Attributes) -> int:
    """Per axis one product with a matrix of weights, which itself is made first."""
    sizes = tuple(zip(given[0], made[0], strict=False))
    longest = max((before for before, after in sizes if before != after), default=1)
    places = math.prod(max(pair) for pair in sizes)
    return places * longest + sum(before * after for before, after in sizes if before != after)


#: By domain and operator: steps beyond one per element of operands and results.
_ESTIMATES: Mapping[tuple[str, str], _Estimate] = {
    ("", "Conv"): _filtered(1),
    ("", "ConvInteger"): _filtered(1),
    ("", "ConvTranspose"): lambda given, *_: math.prod(given[0]) * math.prod(given[1][1:]),
    ("", "DeformConv"): _filtered(1),
    ("", "Det"): lambda given, *_: math.prod(given[0]) * math.prod(given[0][-1:]),
    ("", "Einsum"): _einsum,
    ("", "GRU"): _cells,
    ("", "Gemm"): lambda given, made, a: math.prod(made[0]) * given[0][0 if a.get("transA") else 1],
    ("", "LSTM"): _cells,
    ("", "MatMul"): _product,
    ("", "MatMulInteger"): _product,
    ("", "QLinearConv"): _filtered(3),
    ("", "QLinearMatMul"): _product,
    ("", "RNN"): _cells,
    ("", "Resize"): _resized,
    ("", "RoiAlign"): _samples,
    ("stitch", "ConvWeightGradient"): (
        lambda given, made, _: math.prod(given[1]) * math.prod(made[0][1:])
    ),
}
#: Those of matrices and of images, which are computed by a library's products.
_PRODUCTS = frozenset({
    ("", "Conv"), ("", "ConvTranspose"), ("", "Gemm"), ("", "MatMul"),
    ("stitch", "ConvWeightGradient"),
})  # fmt: skip


def sums_of_products(
    operation: Operation, inputs: Sequence[ValueType | None], outputs: Sequence[ValueType]
) -> int:
    """The multiply-adds of an operation that sums products, roughly; 0 for all others.

    >>> from stitch.program import DataType
    >>> kind = ValueType((10, 10), DataType.FLOAT32)
    >>> sums_of_products(Operation("MatMul", (0, 0), (1,)), [kind, kind], [kind])
    1000
    """
    estimate = _ESTIMATES.get((operation.domain, operation.op))
    if estimate is None:
        return 0
    given = [() if kind is None else kind.shape for kind in inputs]
    return estimate(given, [kind.shape for kind in outputs] or [()], operation.attributes)


def multiply_adds(
    operation: Operation, values: Sequence[Value], bodies: Sequence[Body] = ()
) -> int:
    """Multiply-adds of a matrix product or convolution between values, and of all that a scan's
    rounds have, by the `bodies` there are; 0 for other operators."""
    if is_scan(operation) and bodies:
        body = bodies[operation.body]
        in_round = sum(multiply_adds(o, body.values, bodies) for o in body.operations)
        return ScanForm.of(operation).count * in_round
    if (operation.domain, operation.op) not in _PRODUCTS:
        return 0
    inputs, outputs = (
        [None if v == ABSENT else values[v].type for v in side]
        for side in (operation.inputs, operation.outputs)
    )
    return sums_of_products(operation, inputs, [kind for kind in outputs if kind is not None])


def estimated_steps(
    operation: Operation, inputs: Sequence[ValueType | None], outputs: Sequence[ValueType]
) -> int:
    """Elementary steps of an operation, roughly: never less than the elements that it touches.

    >>> from stitch.program import DataType
    >>> kind = ValueType((10, 10), DataType.FLOAT32)
    >>> estimated_steps(Operation("MatMul", (0, 0), (1,)), [kind, kind], [kind])
    1300
    """
    touched = sum(math.prod(kind.shape) for kind in (*inputs, *outputs) if kind is not None)
    return touched + sums_of_products(operation, inputs, outputs)


#: Families that move elements and compute nothing.
_MOVING = frozenset(
    (definition.domain, definition.name)
    for family in (indexing, shape, types)
    for definition in family.OPERATORS
)


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """`products`: FLOPs of sums of products by the type that their operands are stored in (a
    multiply and an add are two); `other_flops`: one for each element that other operators read or
    make, whichever are more; `nbytes`: what operations read and write, by space."""

    products: Mapping[DataType, int]
    other_flops: int
    nbytes: Mapping[Space, int]


def program_work(program: Program) -> ProgramWork:
    """The work of one run of a program, without padding; of a scan, of all its rounds."""
    work = _Work(program)
    found = work.of(program.operations, program.values, None)
    return ProgramWork(found.products, found.other, found.nbytes)


class _Totals:
    """What operations come to."""

    def __init__(self) -> None:
        self.products: Counter[DataType] = Counter()
        self.nbytes: Counter[Space] = Counter()
        self.other = 0

    def add(self, others: _Totals, times: int) -> None:
        """As much again, so many times."""
        for data_type, flops in others.products.items():
            self.products[data_type] += times * flops
        for space, nbytes in others.nbytes.items():
            self.nbytes[space] += times * nbytes
        self.other += times * others.other


class _Work:
    """Counts each body once, however many carry it."""

    def __init__(self, program: Program) -> None:
        self.bodies = program.bodies
        self._known: dict[tuple[int, Space], _Totals] = {}

    def of(
        self, operations: Sequence[Operation], values: Sequence[Value], space: Space | None
    ) -> _Totals:
        """What operations come to, each run once; values without layout lie in `space`."""
        totals = _Totals()
        for operation in operations:
            inputs = [None if v == ABSENT else values[v] for v in operation.inputs]
            outputs = [values[v] for v in operation.outputs if v != ABSENT]
            present = [value for value in inputs if value is not None]
            if is_scan(operation):
                # What is between its rounds lies where its results do.
                home = outputs[0].layout if outputs else None
                inside = (Space.HOST if space is None else space) if home is None else home.space
                rounds = ScanForm.of(operation).count
                totals.add(self._body(operation.body, inside), rounds)
                continue
            sizes = [math.prod(value.type.shape) for value in (*present, *outputs)]
            for value, size in zip((*present, *outputs), sizes, strict=True):
                stored, where = _stored(value, space)
                totals.nbytes[where] += stored.nbytes(size)
            sums = sums_of_products(
                operation,
                [None if value is None else value.type for value in inputs],
                [value.type for value in outputs],
            )
            if sums:
                totals.products[_stored(present[0], space)[0]] += 2 * sums
            elif (operation.domain, operation.op) not in _MOVING:
                totals.other += max(sizes, default=0)
        return totals

    def _body(self, index: int, space: Space) -> _Totals:
        found = self._known.get((index, space))
        if found is None:
            body = self.bodies[index]
            found = self._known[index, space] = self.of(body.operations, body.values, space)
        return found


def _stored(value: Value, space: Space | None) -> tuple[DataType, Space]:
    """In which type a value is stored, and where."""
    if value.layout is None and space is not None:
        return value.type.data_type, space
    return value.desc.layout.data_type, value.desc.layout.space
