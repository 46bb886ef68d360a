"""How much computing an operation is: an estimate from types alone, before anything is computed.

Comes in: an operation's name, attributes, and the types of its operands and results. Goes out: a
number of elementary steps, a multiply-add or an element touched each. Must not know machines: the
estimate says what is worth doing ahead of time, it is no price.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from stitch.ops.attributes import Attributes
from stitch.program import ValueType

_Types = Sequence[ValueType | None]


def _shape(types: _Types, index: int) -> tuple[int, ...]:
    kind = types[index] if index < len(types) else None
    return () if kind is None else kind.shape


def _product(inputs: _Types, outputs: _Types, _: Attributes) -> int:
    return math.prod(_shape(outputs, 0)) * math.prod(_shape(inputs, 0)[-1:])


def _gemm(inputs: _Types, outputs: _Types, attributes: Attributes) -> int:
    depth = _shape(inputs, 0)[0 if attributes.get("transA") else 1]
    return math.prod(_shape(outputs, 0)) * depth


def _filtered(weights: int) -> Callable[[_Types, _Types, Attributes], int]:
    def estimate(inputs: _Types, outputs: _Types, _: Attributes) -> int:
        return math.prod(_shape(outputs, 0)) * math.prod(_shape(inputs, weights)[1:])

    return estimate


def _spread(inputs: _Types, _: _Types, __: Attributes) -> int:
    return math.prod(_shape(inputs, 0)) * math.prod(_shape(inputs, 1)[1:])


def _weights_gradient(inputs: _Types, outputs: _Types, _: Attributes) -> int:
    return math.prod(_shape(inputs, 1)) * math.prod(_shape(outputs, 0)[1:])


def _steps_of_cells(inputs: _Types, _: _Types, __: Attributes) -> int:
    places = math.prod(_shape(inputs, 0)[:2])
    return places * (math.prod(_shape(inputs, 1)) + math.prod(_shape(inputs, 2)))


def _einsum(inputs: _Types, _: _Types, attributes: Attributes) -> int:
    """At most one step per combination of all indices."""
    terms = str(attributes.get("equation", "")).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    spanned = 1
    for term, kind in zip(terms, inputs, strict=False):
        shape = () if kind is None else kind.shape
        before, dots, after = term.partition("...")
        last = len(shape) - len(after)
        named = (*zip(before, shape, strict=False), *zip(after, shape[last:], strict=False))
        for letter, size in named:
            sizes[letter] = max(size, sizes.get(letter, 1))
        if dots:
            spanned = max(spanned, math.prod(shape[len(before) : last]))
    return spanned * math.prod(sizes.values())


def _square(inputs: _Types, _: _Types, __: Attributes) -> int:
    """Of matrices: elements times rows."""
    return math.prod(_shape(inputs, 0)) * math.prod(_shape(inputs, 0)[-1:])


def _samples(_: _Types, outputs: _Types, attributes: Attributes) -> int:
    ratio = attributes.get("sampling_ratio")
    return math.prod(_shape(outputs, 0)) * 4 * (ratio if isinstance(ratio, int) else 1) ** 2


def _resized(inputs: _Types, outputs: _Types, _: Attributes) -> int:
    """Per axis one product with a matrix of weights, which itself is made first."""
    sizes = tuple(zip(_shape(inputs, 0), _shape(outputs, 0), strict=False))
    longest = max((before for before, after in sizes if before != after), default=1)
    places = math.prod(max(pair) for pair in sizes)
    return places * longest + sum(before * after for before, after in sizes if before != after)


#: By domain and operator: steps beyond one per element of operands and results.
_ESTIMATES: Mapping[tuple[str, str], Callable[[_Types, _Types, Attributes], int]] = {
    ("", "Conv"): _filtered(1),
    ("", "ConvInteger"): _filtered(1),
    ("", "ConvTranspose"): _spread,
    ("", "DeformConv"): _filtered(1),
    ("", "Det"): _square,
    ("", "Einsum"): _einsum,
    ("", "GRU"): _steps_of_cells,
    ("", "Gemm"): _gemm,
    ("", "LSTM"): _steps_of_cells,
    ("", "MatMul"): _product,
    ("", "MatMulInteger"): _product,
    ("", "QLinearConv"): _filtered(3),
    ("", "QLinearMatMul"): _product,
    ("", "RNN"): _steps_of_cells,
    ("", "Resize"): _resized,
    ("", "RoiAlign"): _samples,
    ("stitch", "ConvWeightGradient"): _weights_gradient,
}


def estimated_steps(
    op: str,
    inputs: Sequence[ValueType | None],
    outputs: Sequence[ValueType],
    *,
    domain: str = "",
    attributes: Attributes,
) -> int:
    """Elementary steps of an operation, roughly: never less than the elements that it touches.

    >>> from stitch.program import DataType
    >>> kind = ValueType((10, 10), DataType.FLOAT32)
    >>> estimated_steps("MatMul", [kind, kind], [kind], attributes={})
    1300
    """
    touched = sum(math.prod(kind.shape) for kind in (*inputs, *outputs) if kind is not None)
    estimate = _ESTIMATES.get((domain, op))
    return touched + (estimate(inputs, outputs, attributes) if estimate is not None else 0)
