"""Einsum: sums of products in Einstein's notation, with the order of contraction fixed once."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import NUMERIC
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape
from stitch.ops.product import matmul
from stitch.program import ValueType

_DOTS = "..."


def _split_term(context: InferenceContext, term: str, rank: int | None) -> tuple[str, int]:
    """The letters of a term with its ellipsis as one dot, and the axes that the ellipsis spans."""
    letters = term.replace(_DOTS, ".")
    named = letters.replace(".", "")
    legal = all(c in string.ascii_letters for c in named) and letters.count(".") <= 1
    if not legal:
        raise context.fail("Einsum cannot read this term", got=term)
    if rank is None:
        return letters, 0
    spans = rank - len(named)
    if spans < 0 or (spans and "." not in letters):
        raise context.fail(
            "a term of an Einsum does not fit its operand", expected=f"{rank} axes", got=term
        )
    return letters, spans


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    every = range(len(context.inputs))
    types = [context.require_type(i, NUMERIC) for i in every]
    context.require_same_type(every)
    equation = context.string_of("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(types):
        raise context.fail(
            "an Einsum has one term per operand", expected=len(types), got=len(terms)
        )
    sizes: dict[str, int] = {}
    spanned: Shape = ()
    parsed = [_split_term(context, t, len(x.shape)) for t, x in zip(terms, types, strict=True)]
    for (letters, spans), index in zip(parsed, every, strict=True):
        shape = context.operand(index).shape
        at = letters.find(".") if "." in letters else len(letters)
        spanned = context.broadcast(spanned, shape[at : at + spans])
        named = letters.replace(".", "")
        own: dict[str, int] = {}
        for letter, size in zip(named, shape[:at] + shape[at + spans :], strict=True):
            if own.setdefault(letter, size) != size:
                raise context.fail(
                    f"an Einsum takes the diagonal of axes of one size, and {letter!r} has two",
                    got=shape,
                )
            known = sizes.setdefault(letter, size)
            if known == 1:
                sizes[letter] = size
            elif size not in (1, known):
                raise context.fail(
                    f"axis {letter!r} of an Einsum has two sizes", expected=known, got=size
                )
    output = _output_term(context, right, arrow, [letters for letters, _ in parsed], sizes)
    at = output.find(".")
    shape = tuple(sizes[c] for c in output.replace(".", ""))
    if at >= 0:
        shape = shape[:at] + spanned + shape[at:]
    return (ValueType(shape, types[0].data_type),)


def _output_term(
    context: InferenceContext, right: str, arrow: str, terms: list[str], sizes: dict[str, int]
) -> str:
    if not arrow:
        together = "".join(terms)
        once = sorted(c for c in sizes if together.count(c) == 1)
        return ("." if "." in together else "") + "".join(once)
    output, _ = _split_term(context, right, None)
    named = output.replace(".", "")
    if len(set(named)) != len(named) or any(c not in sizes for c in named):
        raise context.fail("the result of an Einsum names its axes once, and known ones", got=right)
    if "." in "".join(terms) and "." not in output:
        raise context.fail("the result of an Einsum must keep the ellipsis", got=right)
    return output


def _einsum(arguments: KernelArguments) -> Sequence[Thunk]:
    equation = arguments.string_of("equation").replace(" ", "")
    operands = [arguments.given(i) for i in range(len(arguments.inputs))]
    out = arguments.outputs[0]
    path: object = False
    if len(operands) > 1 and out.dtype.kind == "f":
        path = np.einsum_path(equation, *operands, optimize="optimal")[0]
    return (partial(np.einsum, equation, *operands, out=out, optimize=path),)


def _terms(context: GradientContext) -> tuple[list[str], str]:
    """One letter per axis: of every operand, of the result. An ellipsis gets letters of its own."""
    equation = context.string_of("equation").replace(" ", "")
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
    full = [
        "".join(c for c, n in zip(term, context.type_of(i).shape, strict=True) if n == sizes[c])
        for i, term in enumerate(terms)
    ]
    return [
        _one(context, i, terms, full, result, sizes) if context.wants(i) else None
        for i in range(count)
    ]


def _one(
    context: GradientContext,
    index: int,
    terms: list[str],
    full: list[str],
    result: str,
    sizes: dict[str, int],
) -> Any:
    """Letters that no other term has were summed: the gradient is the same along them."""
    operands, given = [context.gradient], [result]
    for other, term in enumerate(full):
        if other != index:
            value = context.input(other)
            operands.append(context.shaped(value, [sizes[c] for c in term]))
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
    own = context.apply("Einsum", *operands, equation=equation)
    own = context.shaped(own, back)
    return own if tuple(back) == shape else context.apply("Expand", own, list(shape))


OPERATORS = (
    OpDef(
        "Einsum", (1, -1), _infer, _einsum,
        attributes=declared(equation=Attribute("string", required=True)), gradient=einsum_gradient,
        batching=matmul.batch_einsum,
    ),
)  # fmt: skip
