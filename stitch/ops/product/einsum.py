"""Einsum: sums of products in Einstein's notation, with the order of contraction fixed once."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import partial

import numpy as np

from stitch.ops.attributes import string_of
from stitch.ops.definition import Attribute, InferenceContext, KernelArguments, OpDef, Thunk
from stitch.ops.element_types import NUMERIC
from stitch.ops.inference import Shape, broadcast, operand, require_same_type, require_type
from stitch.ops.product.einsum_gradients import einsum_gradient
from stitch.ops.steps import given
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
            "a term of an Einsum does not fit its operand",
            expected=f"{rank} axes",
            got=term,
        )
    return letters, spans


def _infer(context: InferenceContext) -> tuple[ValueType, ...]:
    every = range(len(context.inputs))
    types = [require_type(context, i, NUMERIC) for i in every]
    require_same_type(context, every)
    equation = string_of(context.attributes, "equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(types):
        raise context.fail(
            "an Einsum has one term per operand", expected=str(len(types)), got=str(len(terms))
        )
    sizes: dict[str, int] = {}
    spanned: Shape = ()
    parsed = [_split_term(context, t, len(x.shape)) for t, x in zip(terms, types, strict=True)]
    for (letters, spans), index in zip(parsed, every, strict=True):
        shape = operand(context, index).shape
        at = letters.find(".") if "." in letters else len(letters)
        spanned = broadcast(context, spanned, shape[at : at + spans])
        named = letters.replace(".", "")
        own: dict[str, int] = {}
        for letter, size in zip(named, shape[:at] + shape[at + spans :], strict=True):
            if own.setdefault(letter, size) != size:
                raise context.fail(
                    f"an Einsum takes the diagonal of axes of one size, and {letter!r} has two",
                    got=str(list(shape)),
                )
            known = sizes.setdefault(letter, size)
            if known == 1:
                sizes[letter] = size
            elif size not in (1, known):
                raise context.fail(
                    f"axis {letter!r} of an Einsum has two sizes",
                    expected=str(known),
                    got=str(size),
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
    equation = string_of(arguments.attributes, "equation").replace(" ", "")
    operands = [given(arguments, i) for i in range(len(arguments.inputs))]
    out = arguments.outputs[0]
    path: object = False
    if len(operands) > 1 and out.dtype.kind == "f":
        path = np.einsum_path(equation, *operands, optimize="optimal")[0]
    return (partial(np.einsum, equation, *operands, out=out, optimize=path),)


OPERATORS = (
    OpDef(
        "Einsum",
        (1, -1),
        _infer,
        _einsum,
        attributes={"equation": Attribute("string", required=True)},
        gradient=einsum_gradient,
    ),
)
