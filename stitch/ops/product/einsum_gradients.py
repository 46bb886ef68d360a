"""Gradient of Einsum: one Einsum per operand, of the gradient and all other operands."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.attributes import string_of
from stitch.ops.gradient import GradientContext
from stitch.ops.shape.shape_gradients import shaped


def _terms(context: GradientContext) -> tuple[list[str], str]:
    """One letter per axis: of every operand, of the result. An ellipsis gets letters of its own."""
    equation = string_of(context.attributes, "equation").replace(" ", "")
    left, arrow, right = equation.replace("...", ".").partition("->")
    given = left.split(",")
    spans = [
        len(context.type_of(i).shape) - len(term.replace(".", "")) for i, term in enumerate(given)
    ]
    free = [c for c in string.ascii_letters if c not in equation]
    spanned = free[: max(spans)]
    terms = [
        term.replace(".", "".join(spanned[len(spanned) - span :])) if span else term.strip(".")
        for term, span in zip(given, spans, strict=True)
    ]
    terms = [term.replace(".", "") for term in terms]
    if arrow:
        return terms, right.replace(".", "".join(spanned))
    named = "".join(given).replace(".", "")
    return terms, "".join(spanned) + "".join(sorted(c for c in named if named.count(c) == 1))


def einsum_gradient(context: GradientContext) -> Sequence[Any]:
    """Axes of length 1 that were repeated are left out first, and come back as sums."""
    terms, result = _terms(context)
    count = len(terms)
    sizes: dict[str, int] = {}
    for index, term in enumerate(terms):
        for letter, size in zip(term, context.type_of(index).shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    full = [_without_repeated(context, i, terms[i], sizes) for i in range(count)]
    return [
        _one(context, i, terms, full, result, sizes) if context.wants(i) else None
        for i in range(count)
    ]


def _without_repeated(
    context: GradientContext, index: int, term: str, sizes: dict[str, int]
) -> str:
    shape = context.type_of(index).shape
    return "".join(c for c, size in zip(term, shape, strict=True) if size == sizes[c])


def _one(
    context: GradientContext,
    index: int,
    terms: list[str],
    full: list[str],
    result: str,
    sizes: dict[str, int],
) -> Any:
    """Letters that nobody else has were summed: the gradient is the same along them."""
    operands, given = [context.gradient], [result]
    for other, term in enumerate(full):
        if other != index:
            value = context.input(other)
            operands.append(shaped(context, value, [sizes[c] for c in term]))
            given.append(term)
    shape = context.type_of(index).shape
    free = [c for c in string.ascii_letters if c not in "".join(terms) + result]
    wanted, back = "", []
    for letter, size in zip(terms[index], shape, strict=True):
        there = any(letter in term for term in given)
        if not there or (size == 1 and sizes[letter] != 1):
            back.append(1)
            continue
        if letter in wanted:
            # A diagonal was read: all beside it gets nothing.
            fresh = free.pop()
            operands.append(context.constant(np.eye(size, dtype=context.gradient.data_type.dtype)))
            given.append(letter + fresh)
            letter = fresh
        wanted += letter
        back.append(size)
    equation = ",".join(given) + "->" + wanted
    made = context.apply("Einsum", *operands, equation=equation)
    made = shaped(context, made, back)
    return made if tuple(back) == shape else context.apply("Expand", made, list(shape))
