"""How much computing an operation is, by an estimate from types alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from stitch.ops.attributes import Attributes
from stitch.program import ABSENT, Body, Operation, ScanForm, Value, ValueType, is_scan

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
