"""Pieces: which elements of a nest one loop takes, as what, and their results in their order.

Comes in: nests, what loops give for some of their elements. Goes out: numbers of elements of one
form, and tensors of them; a nest of all results, or several. Must not know how a loop is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import NestCall
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.user_function import form_of, text_of
from stitch.fractal.value_forms import ValueForm, element_form, is_uniform, rows_of
from stitch.fractal.zipped import Nest, Zipped
from stitch.graph import SymbolicTensor
from stitch.program import ValueType


class LoopPiece:
    """What some elements, by number, give: tensors with all of them along the first axis."""

    __slots__ = ("form", "numbers", "tensors")

    def __init__(
        self, numbers: Sequence[int], form: ValueForm, tensors: Sequence[SymbolicTensor]
    ) -> None:
        self.numbers, self.form, self.tensors = numbers, form, tensors


def alike(xs: Nest) -> list[Sequence[int]]:
    """The numbers of the elements of each form."""
    if is_uniform(xs):
        return [range(len(xs))]
    groups: dict[ValueForm, list[int]] = {}
    for number in range(len(xs)):
        groups.setdefault(element_form(xs, number), []).append(number)
    return list(groups.values())


def first_stretch(xs: Nest, order: Sequence[int]) -> Sequence[int]:
    """The first elements of an order, as long as they have one form."""
    if is_uniform(xs):
        return order
    _, first = next(groupby(order, lambda number: element_form(xs, number)))
    return list(first)


def joined(call: NestCall, pieces: Sequence[LoopPiece]) -> Any:
    """The results of all elements in their order: a nest, or several."""
    nests = [p.form.nest(iter(p.tensors), len(p.numbers)) for p in pieces]
    for piece, nest in zip(pieces, nests, strict=True):
        if form_of(nest) != form_of(nests[0]):
            raise UsageError(
                f"the results of the function of {call.name} are not alike",
                where=f"element {piece.numbers[0]}",
                expected=f"{text_of(_one_of(nests[0]))}, as for element {pieces[0].numbers[0]}",
                got=text_of(_one_of(nest)),
            )
    order = np.argsort(np.concatenate([np.asarray(p.numbers, np.int64) for p in pieces]))
    return _in_order(nests, None if np.array_equal(order, np.arange(len(order))) else order)


def _one_of(nest: Any) -> Any:
    """An element of a nest, or of several."""
    return tuple(map(_one_of, nest)) if isinstance(nest, tuple) else nest[0]


def _in_order(nests: Sequence[Any], order: Any) -> Any:
    first = nests[0]
    if isinstance(first, tuple):
        return tuple([
            _in_order([nest[i] for nest in nests], order) for i in range(len(first))
        ])  # fmt: skip
    if len(nests) == 1 and order is None:
        return first
    listed = FractalTensor(list(nests))
    whole = FractalTensor.of(listed.data, listed.index.flattened())
    return whole if order is None else FractalTensor.of(whole.data, whole.index.taken(order))


def sequences_of(
    xs: Nest, numbers: Sequence[int], tensor: Callable[[Any], SymbolicTensor]
) -> list[SymbolicTensor]:
    """Elements of one form, a tensor for each leaf or nest of an element; `tensor` makes one of
    data."""
    if isinstance(xs, Zipped):
        return [t for part in xs.parts for t in sequences_of(part, numbers, tensor)]
    first, end = numbers[0], numbers[-1] + 1
    part = xs[first:end] if len(numbers) == end - first else xs[list(numbers)]
    rows = rows_of(part, tensor(part.data))
    form = element_form(xs, numbers[0])
    if form.tree is None:
        return [rows]
    return [rows.reshape(len(numbers), form.tree.numel, *rows.shape[1:])]


def has_numbers(xs: Nest) -> bool:
    """Whether some elements are numbers that are known."""
    parts = xs.parts if isinstance(xs, Zipped) else (xs,)
    return any(
        has_numbers(part) if isinstance(part, Zipped)
        else isinstance(part.data, np.ndarray) and part.dtype.kind in "iub"
        for part in parts
    )  # fmt: skip


def named_inputs(
    states: Sequence[ValueType], elements: Sequence[ValueType]
) -> list[tuple[str, ValueType]]:
    """The inputs of a loop's body by their names."""
    return [
        *[(f"state_{i}", kind) for i, kind in enumerate(states)],
        *[(f"element_{i}", kind) for i, kind in enumerate(elements)],
    ]
