"""Pieces: which elements of a nest one loop takes, and their results put together in their order.

Comes in: nests, what loops give for some of their elements. Goes out: numbers of elements of one
form; a nest of all results, or several. Must not know how a loop is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from stitch.errors import UsageError
from stitch.fractal.current import NestCall
from stitch.fractal.fractal_tensor import FractalTensor
from stitch.fractal.user_function import form_of, text_of
from stitch.fractal.value_forms import ValueForm, element_form, is_uniform
from stitch.fractal.zipped import Nest
from stitch.graph import SymbolicTensor


class Piece:
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


def joined(call: NestCall, pieces: Sequence[Piece]) -> Any:
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
