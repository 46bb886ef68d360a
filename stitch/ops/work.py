"""The work of an operation (multiply-adds, elements, bytes), estimated from types alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from stitch.ops import (
    indexing,
    matmul,
    rearranging,
    reshaping,
    sharding,
    types,
    window_of_rows,
)
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
#: Returns multiply-adds from the shapes of operands (() if absent) and results, and attributes.
_Estimate = Callable[[_Shapes, _Shapes, Attributes], int]


def _filtered(weights: int) -> _Estimate:
    """Each result element takes the weights of one filter."""
    return lambda inputs, outputs, _: math.prod(outputs[0]) * math.prod(inputs[weights][1:])


def _product(inputs: _Shapes, outputs: _Shapes, _: Attributes) -> int:
    return math.prod(outputs[0]) * math.prod(inputs[0][-1:])


def _cells(inputs: _Shapes, _: _Shapes, __: Attributes) -> int:
    return math.prod(inputs[0][:2]) * (math.prod(inputs[1]) + math.prod(inputs[2]))


def _einsum(inputs: _Shapes, _: _Shapes, attributes: Attributes) -> int:
    """One multiply-add per combination of all indices, at most."""
    terms = matmul.letters_of_axes(str(attributes["equation"]), list(map(len, inputs)))[0]
    sizes: dict[str, int] = {}
    for term, lengths in zip(terms, inputs, strict=True):
        for letter, size in zip(term, lengths, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return math.prod(sizes.values())


def _samples(_: _Shapes, outputs: _Shapes, attributes: Attributes) -> int:
    ratio = attributes.get("sampling_ratio")
    return math.prod(outputs[0]) * 4 * (ratio if isinstance(ratio, int) else 1) ** 2


def _resized(inputs: _Shapes, outputs: _Shapes, _: Attributes) -> int:
    """One product with a matrix of weights per axis, and the computation of the matrix."""
    sizes = tuple(zip(inputs[0], outputs[0], strict=False))
    longest = max((before for before, after in sizes if before != after), default=1)
    elements = math.prod(max(pair) for pair in sizes)
    return elements * longest + sum(before * after for before, after in sizes if before != after)


#: Multiply-adds by domain and operator.
_ESTIMATES: Mapping[tuple[str, str], _Estimate] = {
    ("", "Conv"): _filtered(1),
    ("", "ConvInteger"): _filtered(1),
    ("", "ConvTranspose"): lambda inputs, *_: math.prod(inputs[0]) * math.prod(inputs[1][1:]),
    ("", "DeformConv"): _filtered(1),
    ("", "Det"): lambda inputs, *_: math.prod(inputs[0]) * math.prod(inputs[0][-1:]),
    ("", "Einsum"): _einsum,
    ("", "GRU"): _cells,
    ("", "Gemm"): (
        lambda inputs, outputs, a: math.prod(outputs[0]) * inputs[0][0 if a.get("transA") else 1]
    ),
    ("", "LSTM"): _cells,
    ("", "MatMul"): _product,
    ("", "MatMulInteger"): _product,
    ("", "QLinearConv"): _filtered(3),
    ("", "QLinearMatMul"): _product,
    ("", "RNN"): _cells,
    ("", "Resize"): _resized,
    ("", "RoiAlign"): _samples,
    ("stitch", "ConvWeightGradient"): (
        lambda inputs, outputs, _: math.prod(inputs[1]) * math.prod(outputs[0][1:])
    ),
}
#: Operators of matrices and images that libraries (BLAS, ONNX Runtime) compute as products.
_PRODUCTS = frozenset({
    ("", "Conv"), ("", "ConvTranspose"), ("", "Gemm"), ("", "MatMul"),
    ("stitch", "ConvWeightGradient"),
})  # fmt: skip


def has_products(operation: Operation) -> bool:
    """Return whether an operation sums products.

    >>> [has_products(Operation(op, (0, 1), (2,))) for op in ("MatMul", "Add")]
    [True, False]
    """
    return (operation.domain, operation.op) in _ESTIMATES


def sums_of_products(
    operation: Operation, inputs: Sequence[ValueType | None], outputs: Sequence[ValueType]
) -> int:
    """Estimate the multiply-adds of an operation that sums products; 0 for all others.

    >>> from stitch.program import DataType
    >>> kind = ValueType((10, 10), DataType.FLOAT32)
    >>> sums_of_products(Operation("MatMul", (0, 0), (1,)), [kind, kind], [kind])
    1000
    """
    estimate = _ESTIMATES.get((operation.domain, operation.op))
    if estimate is None:
        return 0
    shapes = [() if kind is None else kind.shape for kind in inputs]
    return estimate(shapes, [kind.shape for kind in outputs] or [()], operation.attributes)


def multiply_adds(
    operation: Operation, values: Sequence[Value], bodies: Sequence[Body] = ()
) -> int:
    """Estimate the multiply-adds of a matrix product or convolution, or of all iterations of a Scan
    if `bodies` has its body; 0 for other operators."""
    if is_scan(operation) and bodies:
        body = bodies[operation.body]
        once = sum(multiply_adds(o, body.values, bodies) for o in body.operations)
        return ScanForm.of(operation).likely_rounds * once
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
    """Estimate the elementary steps of an operation: its elements plus its multiply-adds.

    >>> from stitch.program import DataType
    >>> kind = ValueType((10, 10), DataType.FLOAT32)
    >>> estimated_steps(Operation("MatMul", (0, 0), (1,)), [kind, kind], [kind])
    1300
    """
    touched = sum(math.prod(kind.shape) for kind in (*inputs, *outputs) if kind is not None)
    return touched + sums_of_products(operation, inputs, outputs)


# Work of an operation and of a program ------------------------------------------------------------

#: Operators that only move elements.
_MOVING = frozenset(
    (definition.domain, definition.name)
    for family in (indexing, rearranging, reshaping, sharding, types, window_of_rows)
    for definition in family.OPERATORS
    if definition.name != "Reduction"
)
#: Operators whose results are matrices, each padded to whole tiles.
_OF_MATRICES = frozenset({("", "Gemm"), ("", "MatMul"), ("", "MatMulInteger")})
#: Operators that multiply their first operand by their second.
_OF_TWO = _OF_MATRICES | {
    ("", "Conv"), ("", "ConvTranspose"), ("", "Einsum"), ("stitch", "ConvWeightGradient"),
}  # fmt: skip
_TILE = math.prod(TILE_SHAPE)
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class OperationWork:
    """The work of one run of an operation.

    Args:
        multiply_adds: Of a sum of products; 0 for other operators.
        depth: Multiply-adds for each element of the result.
        operands: The types in which operands are stored, without duplicates, widest first.
        elements: For other operators, the elements of the largest operand or result.
        tiles: Tiles (32 x 32) of the result, or of the largest value, to divide among cores.
        shards: Cores that hold that value if it is sharded; 0: all cores, evenly.
        nbytes: Bytes read and written, by space.
        padded_nbytes: The same with values padded to whole tiles.
        only_moves: The operator moves elements and computes nothing.
        shard_tiles: Tiles of a full shard.
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
    """The work of one run of a program.

    Args:
        products: FLOPs of sums of products (two for each multiply-add), by the widest type in which
            operands are stored.
        other_flops: One for each element of the largest operand or result of other operators.
        nbytes: Bytes that operations read and write, by space.
    """

    products: Mapping[DataType, int]
    other_flops: int
    nbytes: Mapping[Space, int]


def program_work(program: Program) -> ProgramWork:
    """Return the work of one run of a program, without padding; a Scan counts all iterations."""

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
    """Sum the `figures` of every operation; those of a Scan count for each iteration.

    Args:
        figures: Numbers by key for the work of one operation.
        space: The space of values without a layout.
    """
    bodies: dict[tuple[int, Space], dict[K, float]] = {}

    def total(
        listed: Sequence[Operation], values: Sequence[Value], at: Space | None
    ) -> dict[K, float]:
        totals: dict[K, float] = {}
        for operation in listed:
            is_loop = is_scan(operation)
            times = ScanForm.of(operation).likely_rounds if is_loop else 1
            numbers = (
                of_body(operation, values, at)
                if is_loop
                else figures(work_of(operation, values, at))
            )
            for key, number in numbers.items():
                totals[key] = totals.get(key, 0) + times * number
        return totals

    def of_body(scan: Operation, values: Sequence[Value], at: Space | None) -> dict[K, float]:
        # Values inside a body are in the space of the Scan's results.
        results = [values[v] for v in scan.outputs if v != ABSENT]
        layout = results[0].layout if results else None
        inside = (at or Space.HOST) if layout is None else layout.space
        if (scan.body, inside) not in bodies:
            body = operations.bodies[scan.body]
            bodies[scan.body, inside] = total(body.operations, body.values, inside)
        return bodies[scan.body, inside]

    return total(operations.operations, operations.values, space)


def work_of(
    operation: Operation, values: Sequence[Value], space: Space | None = None
) -> OperationWork:
    """Return the work of an operation; values without a layout are in `space`."""
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
    divided = outputs[0] if sums and outputs else largest
    is_moving = (operation.domain, operation.op) in _MOVING
    is_matrix = (operation.domain, operation.op) in _OF_MATRICES
    shape = () if divided is None else divided.type.shape
    shards, shard_tiles = _shards(divided, is_matrix)
    return OperationWork(
        sums, -(-sums // max(1, math.prod(shape))), _operand_types(operation, present, space),
        0 if sums else max(0, most), _tiles(shape, is_matrix), shards, tuple(nbytes.items()),
        tuple(padded.items()), operation.math_fidelity, is_moving, shard_tiles,
    )  # fmt: skip


def _operand_types(
    operation: Operation, present: Sequence[Value], space: Space | None
) -> tuple[DataType, ...]:
    """Return the types in which operands are stored, widest first."""
    both = present[: 2 if (operation.domain, operation.op) in _OF_TWO else 1]
    types = dict.fromkeys(_stored(value, space)[0] for value in both) or (DataType.FLOAT32,)
    return tuple(sorted(types, key=lambda kind: -kind.nbytes(_TILE)))


def _tiles(shape: Sequence[int], is_matrix: bool) -> int:
    if not is_matrix:
        return max(1, -(-math.prod(shape) // _TILE))
    rows = shape[-2] if len(shape) > 1 else 1
    columns = shape[-1] if shape else 1
    return max(1, math.prod(shape[:-2]) * -(-rows // TILE_SHAPE[0]) * -(-columns // TILE_SHAPE[1]))


def _shards(value: Value | None, is_matrix: bool) -> tuple[int, int]:
    """Return the cores that hold a sharded value, and the tiles of a full shard; 0: interleaved."""
    spec = None if value is None or value.layout is None else value.layout.shard_spec
    return (0, 0) if spec is None else (spec.cores, _tiles(spec.shape, is_matrix))


def _stored(value: Value, space: Space | None) -> tuple[DataType, Space]:
    """Return the type and the space in which a value is stored."""
    if value.layout is None and space is not None:
        return value.type.data_type, space
    return value.desc.layout.data_type, value.desc.layout.space
