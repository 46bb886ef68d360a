"""Batching of products: of more rows where lanes share the other side, else of stacks.

Products of another shape may round otherwise.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, Shape
from stitch.program import DataType


def _matrix_shape(shape: Shape, is_left: bool) -> Shape:
    """A vector as what MatMul takes it for: a row on the left, a column on the right."""
    if len(shape) > 1:
        return shape
    return (1, *shape) if is_left else (*shape, 1)


def sides_of(c: BatchingContext, right: int, left_varies: bool, right_varies: bool) -> list[Any]:
    """Operands 0 and `right` as stacks of matrices that broadcast against each other."""
    shapes = [_matrix_shape(c.shape(0), True), _matrix_shape(c.shape(right), False)]
    rank = max(map(len, shapes))
    sides = []
    for index, shape, varies in zip((0, right), shapes, (left_varies, right_varies), strict=True):
        ones = (1,) * (rank - len(shape))
        value = c.broadcast(index) if varies else c.operands[index]
        sides.append(c.shaped(value, (c.lanes, *ones, *shape) if varies else shape))
    return sides


def matmul(c: BatchingContext) -> Sequence[Any]:
    a, b = c.operands
    if not c.varies(1) and c.rank(1) <= 2:
        return c.again(a, b)
    if not c.varies(0) and c.rank(1) == 1:
        # A column for each lane.
        product = c.again(a, c.apply("Transpose", b, perm=[1, 0]))[0]
        return (c.in_front(product, c.rank(0) - 1),)
    if c.varies(0) and c.varies(1) and c.rank(0) > 2 and c.rank(1) == 2:
        # All that is multiplied by the matrix of a lane is one matrix.
        rows, width = math.prod(c.shape(0)[:-1]), c.shape(0)[-1]
        product = c.again(c.shaped(a, (c.lanes, rows, width)), b)[0]
        return (c.shaped(product, (c.lanes, *c.result_shape())),)
    product = c.again(*sides_of(c, 1, c.varies(0), c.varies(1)))[0]
    return (c.shaped(product, (c.lanes, *c.result_shape())),)


def gemm(c: BatchingContext) -> Sequence[Any]:
    """Rows of all lanes as one matrix, if the rest is shared; else a MatMul, scaled and shifted."""
    shared_bias = not c.has(2) or (not c.varies(2) and c.shape(2)[:-1] in ((), (1,)))
    if not c.varies(1) and shared_bias:
        a = c.operands[0]
        if c.int_of("transA"):
            a = c.apply("Transpose", a, perm=[0, 2, 1])
        (result,) = c.again(c.merged(a), *c.operands[1:], transA=0)
        return (c.shaped(result, (c.lanes, *c.result_shape())),)
    alpha, beta = c.float_of("alpha"), c.float_of("beta")
    data_type = c.type_of(0).data_type
    sides = []
    for index, name in ((0, "transA"), (1, "transB")):
        side = c.wide(c.operands[index])
        if c.int_of(name):
            order = [0, 2, 1] if c.varies(index) else [1, 0]
            side = c.apply("Transpose", side, perm=order)
        sides.append(side)
    result = c.apply("MatMul", *sides)
    result = _scaled(c, result, alpha)
    if c.has(2) and beta != 0.0:
        result = c.apply("Add", result, _scaled(c, c.wide(c.aligned(2, 2)), beta))
    if len(result.shape) == 2:
        # All that varies is a bias that does not count.
        result = c.repeated(result, c.result_shape())
    return (c.in_type(result, data_type),)


def _scaled(c: BatchingContext, value: Any, factor: float) -> Any:
    """A value times a number; what was whole is again: the rest is cut off."""
    if factor == 1.0:
        return value
    data_type = DataType.from_dtype(value.dtype)
    if data_type.is_floating:
        return c.apply("Mul", value, factor)
    return c.in_type(c.apply("Mul", c.in_type(value, DataType.FLOAT64), factor), data_type)


def einsum(c: BatchingContext) -> Sequence[Any] | None:
    """One more letter."""
    equation = c.string_of("equation").replace(" ", "")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    if not free:
        return None
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        named = left.replace(",", "").replace(".", "")
        right = "".join(sorted(x for x in set(named) if named.count(x) == 1))
        right = ("..." if "." in left else "") + right
    lane = free[0]
    marked = [lane + t if varies else t for t, varies in zip(terms, c.batched, strict=True)]
    return c.again(*c.operands, equation=f"{','.join(marked)}->{lane}{right}")


def dft(c: BatchingContext) -> Sequence[Any]:
    """The axis is an operand; where it is not given, it counts from the end."""
    axis = c.ints_at(2)
    given = [] if axis is None else [np.array(c.axis_behind(axis[0]))]
    length = c.operands[1] if c.has(1) else None
    return c.again(c.operands[0], length, *given)
