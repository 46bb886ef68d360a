"""Gradients of matrix products: always a Gemm that transposes in place of a copied transpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.attributes import float_of, int_of
from stitch.ops.gradient import GradientContext


def matmul_gradient(context: GradientContext) -> Sequence[Any]:
    """dA = dY·Bᵀ, dB = Aᵀ·dY, summed over broadcast batches (Giles 2008, section 2.2.1)."""
    a, b = context.type_of(0).shape, context.type_of(1).shape
    gradient = context.gradient
    if len(a) == 1 or len(b) == 1:
        return _vector(context, a, b, gradient)
    if len(b) == 2:
        # One matrix on the right: all rows on the left are one tall matrix.
        return _tall(context, a, b, gradient)
    da = db = None
    if context.wants(0):
        da = context.reduced(context.apply("MatMul", gradient, _swapped(context, 1)), 0)
    if context.wants(1):
        db = context.reduced(context.apply("MatMul", _swapped(context, 0), gradient), 1)
    return da, db


def _tall(
    context: GradientContext, a: tuple[int, ...], b: tuple[int, ...], gradient: Any
) -> Sequence[Any]:
    flat = len(a) == 2
    rows = [-1, b[1]]
    gradient = gradient if flat else context.apply("Reshape", gradient, rows)
    da = db = None
    if context.wants(0):
        da = context.apply("Gemm", gradient, context.input(1), transB=1)
        da = da if flat else context.apply("Reshape", da, list(a))
    if context.wants(1):
        left = context.input(0)
        left = left if flat else context.apply("Reshape", left, [-1, a[-1]])
        db = context.apply("Gemm", left, gradient, transA=1)
    return da, db


def _vector(
    context: GradientContext, a: tuple[int, ...], b: tuple[int, ...], gradient: Any
) -> Sequence[Any]:
    """A vector on either side is a matrix of one row or column."""
    if len(a) == 1:
        gradient = context.apply("Unsqueeze", gradient, [-1 if len(b) == 1 else -2])
    if len(b) == 1:
        gradient = context.apply("Unsqueeze", gradient, [-1])
    da = db = None
    if context.wants(0):
        right = context.input(1)
        right = context.apply("Unsqueeze", right, [0]) if len(b) == 1 else _swapped(context, 1)
        da = context.apply("MatMul", gradient, right)
        da = context.reduced(da, 0)
    if context.wants(1):
        left = context.input(0)
        left = context.apply("Unsqueeze", left, [1]) if len(a) == 1 else _swapped(context, 0)
        db = context.apply("MatMul", left, gradient)
        db = context.apply("Squeeze", db, [-1]) if len(b) == 1 else db
        db = context.reduced(db, 1)
    return da, db


def _swapped(context: GradientContext, index: int) -> Any:
    """An operand with its last two dimensions exchanged."""
    rank = len(context.type_of(index).shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    return context.apply("Transpose", context.input(index), perm=order)


def gemm_gradient(context: GradientContext) -> Sequence[Any]:
    """Y = alpha * op(A) @ op(B) + beta * C."""
    across, down = int_of(context.attributes, "transA"), int_of(context.attributes, "transB")
    alpha, beta = float_of(context.attributes, "alpha"), float_of(context.attributes, "beta")
    gradient = context.gradient
    da = db = dc = None
    if context.wants(0):
        b = context.input(1)
        if across:
            da = context.apply("Gemm", b, gradient, alpha=alpha, transA=down, transB=1)
        else:
            da = context.apply("Gemm", gradient, b, alpha=alpha, transB=1 - down)
    if context.wants(1):
        a = context.input(0)
        if down:
            db = context.apply("Gemm", gradient, a, alpha=alpha, transA=1, transB=across)
        else:
            db = context.apply("Gemm", a, gradient, alpha=alpha, transA=1 - across)
    if context.wants(2):
        dc = context.reduced(gradient, 2)
        dc = dc if beta == 1.0 else dc * beta
    return da, db, dc
