"""How much computing an operation is, by an estimate from types alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stitch.ops import indexing, shape, types
from stitch.ops.inference import Attributes
from stitch.program import (
    ABSENT,
    TILE_SHAPE,
    Body,
    DataType,
    MathFidelity,
    Operation,
    OperationList,
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


def has_products(operation: Operation) -> bool:
    """Whether an operation sums products, whatever its shapes.

    >>> [has_products(Operation(op, (0, 1), (2,))) for op in ("MatMul", "Add")]
    [True, False]
    """
    return (operation.domain, operation.op) in _ESTIMATES


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
        return ScanForm.of(operation).likely_rounds * in_round
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


# Work of an operation and of a program ------------------------------------------------------------

#: Families that move elements and compute nothing.
_MOVING = frozenset(
    (definition.domain, definition.name)
    for family in (indexing, shape, types)
    for definition in family.OPERATORS
)
#: Those whose results are matrices, each padded to whole tiles by itself.
_OF_MATRICES = frozenset({("", "Gemm"), ("", "MatMul"), ("", "MatMulInteger")})
#: Those that multiply their first operand by their second.
_OF_TWO = _OF_MATRICES | {
    ("", "Conv"), ("", "ConvTranspose"), ("", "Einsum"), ("stitch", "ConvWeightGradient"),
}  # fmt: skip
_TILE = math.prod(TILE_SHAPE)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class OperationWork:
    """What one run of an operation computes and carries.

    `multiply_adds` of a sum of products, whose operands are stored as `operands` (each type once,
    the widest first), `depth` for each element of the result; of other operators `elements`: those
    that they read or make, whichever are more (`only_moves`: nothing is computed of them). It is
    divided among cores by `tiles` (32 x 32) of the result, or of what has most elements: among
    `shards` cores where that is sharded, `shard_tiles` to each as far as they go (0: evenly, among
    as many as there are). `nbytes`: what is read and written, by space; `padded_nbytes`: were it
    whole tiles.
    """

    multiply_adds: int
    depth: int
    operands: tuple[DataType, ...]
    elements: int
    tiles: int
    shards: int
    nbytes: tuple[tuple[Space, int], ...]
    padded_nbytes: tuple[tuple[Space, int], ...]
    math_fidelity: MathFidelity = MathFidelity.BY_TYPE
    only_moves: bool = False
    shard_tiles: int = 0


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """`products`: FLOPs of sums of products by the (widest) type that their operands are stored in
    (a multiply and an add are two); `other_flops`: one for each element that other operators read
    or make, whichever are more; `nbytes`: what operations read and write, by space."""

    products: Mapping[DataType, int]
    other_flops: int
    nbytes: Mapping[Space, int]


def program_work(program: Program) -> ProgramWork:
    """The work of one run of a program, without padding; of a scan, of all its rounds."""

    def figures(work: OperationWork) -> Mapping[DataType | Space | None, int]:
        found: Counter[DataType | Space | None] = Counter(dict(work.nbytes))
        if work.multiply_adds:
            found[work.operands[0]] += 2 * work.multiply_adds
        elif work.elements and not work.only_moves:
            found[None] += work.elements
        return found

    totals = summed_over_operations(program, figures)
    return ProgramWork(
        {key: round(n) for key, n in totals.items() if isinstance(key, DataType)},
        round(totals.get(None, 0)),
        {key: round(n) for key, n in totals.items() if isinstance(key, Space)},
    )


def summed_over_operations(
    operations: OperationList,
    figures: Callable[[OperationWork], Mapping[K, float]],
    space: Space | None = None,
) -> dict[K, float]:
    """The sum of the `figures` of every operation that runs, those of a scan in each round.

    Each body is counted once, however many carry it. Values without a layout lie in `space`.
    """
    return _Sum(operations.bodies, figures).of(operations.operations, operations.values, space)


class _Sum(Generic[K]):
    """Sums figures, and remembers those of bodies."""

    def __init__(
        self, bodies: Sequence[Body], figures: Callable[[OperationWork], Mapping[K, float]]
    ) -> None:
        self.bodies, self.figures = bodies, figures
        self._known: dict[tuple[int, Space], dict[K, float]] = {}

    def of(
        self, operations: Sequence[Operation], values: Sequence[Value], space: Space | None
    ) -> dict[K, float]:
        totals: dict[K, float] = {}
        for operation in operations:
            found: Mapping[K, float]
            if is_scan(operation):
                times = ScanForm.of(operation).likely_rounds
                found = self._body(operation, values, space)
            else:
                times, found = 1, self.figures(work_of(operation, values, space))
            for key, number in found.items():
                totals[key] = totals.get(key, 0) + times * number
        return totals

    def _body(
        self, scan: Operation, values: Sequence[Value], space: Space | None
    ) -> dict[K, float]:
        # What is between its rounds lies where its results do.
        made = [values[v] for v in scan.outputs if v != ABSENT]
        home = made[0].layout if made else None
        inside = (Space.HOST if space is None else space) if home is None else home.space
        found = self._known.get((scan.body, inside))
        if found is None:
            body = self.bodies[scan.body]
            found = self._known[scan.body, inside] = self.of(body.operations, body.values, inside)
        return found


def work_of(
    operation: Operation, values: Sequence[Value], space: Space | None = None
) -> OperationWork:
    """What an operation computes and carries; values without a layout lie in `space`."""
    inputs = [None if v == ABSENT else values[v] for v in operation.inputs]
    outputs = [values[v] for v in operation.outputs if v != ABSENT]
    present = [value for value in inputs if value is not None]
    nbytes: Counter[Space] = Counter()
    padded: Counter[Space] = Counter()
    largest, most = None, -1
    for value in (*outputs, *present):
        stored, where = _stored(value, space)
        size = math.prod(value.type.shape)
        nbytes[where] += stored.nbytes(size)
        padded[where] += stored.nbytes(-(-size // _TILE) * _TILE)
        if size > most:
            largest, most = value, size
    sums = sums_of_products(
        operation,
        [None if value is None else value.type for value in inputs],
        [value.type for value in outputs],
    )
    made = outputs[0] if sums and outputs else largest
    is_moving = (operation.domain, operation.op) in _MOVING
    is_matrix = (operation.domain, operation.op) in _OF_MATRICES
    results = 1 if made is None else max(1, math.prod(made.type.shape))
    shards, shard_tiles = _shards(made, is_matrix)
    return OperationWork(
        sums, -(-sums // results), _operands(operation, present, space),
        0 if sums else max(0, most),
        1 if made is None else _tiles(made.type.shape, is_matrix), shards, tuple(nbytes.items()),
        tuple(padded.items()), operation.math_fidelity, is_moving, shard_tiles,
    )  # fmt: skip


def _operands(
    operation: Operation, present: Sequence[Value], space: Space | None
) -> tuple[DataType, ...]:
    """The types that operands are stored in, the widest first."""
    both = present[: 2 if (operation.domain, operation.op) in _OF_TWO else 1]
    found = dict.fromkeys(_stored(value, space)[0] for value in both) or (DataType.FLOAT32,)
    return tuple(sorted(found, key=lambda kind: -kind.nbytes(_TILE)))


def _tiles(shape: Sequence[int], is_matrix: bool) -> int:
    """The tiles of a result."""
    if not is_matrix:
        return max(1, -(-math.prod(shape) // _TILE))
    rows = shape[-2] if len(shape) > 1 else 1
    columns = shape[-1] if shape else 1
    return max(1, math.prod(shape[:-2]) * -(-rows // TILE_SHAPE[0]) * -(-columns // TILE_SHAPE[1]))


def _shards(value: Value | None, is_matrix: bool) -> tuple[int, int]:
    """In how many cores a value lies, and the tiles of each that is full; 0: it is not sharded."""
    spec = None if value is None or value.layout is None else value.layout.shard_spec
    return (0, 0) if spec is None else (spec.cores, _tiles(spec.shape, is_matrix))


def _stored(value: Value, space: Space | None) -> tuple[DataType, Space]:
    """In which type a value is stored, and where."""
    if value.layout is None and space is not None:
        return value.type.data_type, space
    return value.desc.layout.data_type, value.desc.layout.space
