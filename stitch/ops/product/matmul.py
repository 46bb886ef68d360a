"""Matrix products, MatMul and Gemm, and determinants of square matrices, Det.

`ndarray.dot` with a contiguous result is the fastest call that NumPy has for two matrices (`np.dot`
adds its dispatch, 0.1 us); what never changes (a transposed weight, a bias) is rearranged once, at
binding.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, of_last_axes
from stitch.ops.definition import (
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    computed_nbytes,
    declared,
    few,
    operands,
)
from stitch.ops.element_types import FLOATS, PRODUCTS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape, float_of, int_of
from stitch.ops.steps import fill_step, scalar
from stitch.program import Array, DataType, ValueType

# Batching (of all products) -----------------------------------------------------------------------


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
        sides.append(c.shaped(value, (c.batch_size, *ones, *shape) if varies else shape))
    return sides


def batch_matmul(c: BatchingContext) -> Sequence[Any]:
    a, b = c.operands
    if not c.varies(1) and c.rank(1) <= 2:
        return c.again(a, b)
    if not c.varies(0) and c.rank(1) == 1:
        # One column per example.
        product = c.again(a, c.apply("Transpose", b, perm=[1, 0]))[0]
        return (c.in_front(product, c.rank(0) - 1),)
    if c.varies(0) and c.varies(1) and c.rank(0) > 2 and c.rank(1) == 2:
        # Rows that share one example's matrix form one matrix.
        rows, width = math.prod(c.shape(0)[:-1]), c.shape(0)[-1]
        product = c.again(c.shaped(a, (c.batch_size, rows, width)), b)[0]
        return (c.shaped(product, (c.batch_size, *c.result_shape())),)
    product = c.again(*sides_of(c, 1, c.varies(0), c.varies(1)))[0]
    return (c.shaped(product, (c.batch_size, *c.result_shape())),)


def batch_gemm(c: BatchingContext) -> Sequence[Any]:
    """Stack the rows of all examples if the rest is shared; else a scaled and shifted MatMul."""
    shared_bias = not c.has(2) or (not c.varies(2) and c.shape(2)[:-1] in ((), (1,)))
    if not c.varies(1) and shared_bias:
        a = c.operands[0]
        if c.int_of("transA"):
            a = c.apply("Transpose", a, perm=[0, 2, 1])
        (result,) = c.again(c.merged(a), *c.operands[1:], transA=0)
        return (c.shaped(result, (c.batch_size, *c.result_shape())),)
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


def batch_einsum(c: BatchingContext) -> Sequence[Any] | None:
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
    batch_letter = free[0]
    marked = [batch_letter + t if varies else t for t, varies in zip(terms, c.batched, strict=True)]
    return c.again(*c.operands, equation=f"{','.join(marked)}->{batch_letter}{right}")


def batch_dft(c: BatchingContext) -> Sequence[Any]:
    """The axis is an operand; where it is not given, it counts from the end."""
    axis = c.ints_at(2)
    given = [] if axis is None else [np.array(c.axis_behind(axis[0]))]
    length = c.operands[1] if c.has(1) else None
    return c.again(c.operands[0], length, *given)


#: A constant bias is spread to the result's shape up to this size: adding equal shapes is faster
#: than broadcasting while both stay in the cache, and slower when memory has to deliver them.
SPREAD_BIAS_NBYTES = 1 << 20


def product_shape(context: InferenceContext, second: int = 1) -> Shape:
    """The shape of operand 0 times another operand."""
    a, b = context.operand(0).shape, context.operand(second).shape
    context.require_rank(0, 1)
    context.require_rank(second, 1)
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        raise context.fail(
            f"the inner dimensions of a {context.op} differ", expected=a[-1], got=inner
        )
    columns = b[-1:] if len(b) > 1 else ()
    return (*context.broadcast(a[:-2], b[:-2]), *a[-2:-1], *columns)


def _infer_matmul(context: InferenceContext) -> tuple[ValueType, ...]:
    a = context.require_type(0, PRODUCTS)
    context.require_type(1, PRODUCTS)
    context.require_same_type((0, 1))
    return (ValueType(product_shape(context), a.data_type),)


def _matmul(arguments: KernelArguments) -> Sequence[Thunk]:
    a, b, out = arguments.given(0), arguments.given(1), arguments.outputs[0]
    if a.shape[-1] == 0:
        return (fill_step(out, 0),)
    if b.ndim == 2 and a.ndim > 2:
        # One matrix on the right: all rows on the left are one tall matrix.
        a, out = a.reshape(-1, a.shape[-1]), out.reshape(-1, b.shape[1])
    if a.ndim <= 2 and b.ndim <= 2:
        return (partial(a.dot, b, out),)
    return (partial(np.matmul, a, b, out),)


def _infer_gemm(context: InferenceContext) -> tuple[ValueType, ...]:
    a, b = context.require_type(0, PRODUCTS), context.require_type(1, PRODUCTS)
    context.require_same_type(range(len(context.inputs)))
    context.require_rank(0, 2, 2)
    context.require_rank(1, 2, 2)
    rows, inner = a.shape[::-1] if context.int_of("transA") else a.shape
    other, columns = b.shape[::-1] if context.int_of("transB") else b.shape
    if inner != other:
        raise context.fail("the inner dimensions of a Gemm differ", expected=inner, got=other)
    if context.present(2) is not None:
        context.require_broadcast_to(2, (rows, columns))
    return (ValueType((rows, columns), a.data_type),)


def _transposed(arguments: KernelArguments, index: int, transpose: bool) -> Array:
    matrix = arguments.given(index)
    if not transpose:
        return matrix
    if not arguments.is_constant(index):
        return matrix.T
    return arguments.remembered(f"transposed {index}", lambda: np.ascontiguousarray(matrix.T))


def _scale(source: Array, factor: float, out: Array) -> list[Thunk]:
    if factor == 1.0:
        return []
    if out.dtype.kind == "f":
        return [partial(np.multiply, source, scalar(factor, out), out)]
    return [partial(np.multiply, source, factor, out, casting="unsafe")]


def _gemm(arguments: KernelArguments) -> Sequence[Thunk]:
    out, attributes = arguments.outputs[0], arguments.attributes
    a = _transposed(arguments, 0, bool(int_of(attributes, "transA")))
    b = _transposed(arguments, 1, bool(int_of(attributes, "transB")))
    product: Thunk = partial(a.dot, b, out) if a.shape[1] else fill_step(out, 0)
    steps = [product, *_scale(out, float_of(attributes, "alpha"), out)]
    bias, beta = arguments.optional(2), float_of(attributes, "beta")
    if bias is None or beta == 0.0:
        return steps
    if arguments.is_constant(2):
        given_bias = bias
        bias = arguments.remembered("bias", lambda: _constant_bias(given_bias, beta, out))
    elif beta != 1.0:
        scaled = np.empty_like(bias)
        steps += _scale(bias, beta, scaled)
        bias = scaled
    return [*steps, partial(np.add, out, bias, out)]


def _constant_bias(bias: Array, beta: float, out: Array) -> Array:
    if beta != 1.0:
        factor = np.asarray(beta, bias.dtype if bias.dtype.kind == "f" else None)
        bias = (bias * factor).astype(bias.dtype)
    if out.nbytes <= SPREAD_BIAS_NBYTES:
        bias = np.broadcast_to(bias, out.shape).copy()
    return bias


def _gemm_nbytes(context: WorkspaceContext) -> int:
    """Operands that are turned round once, the bias as large as the result, or scaled."""
    turned = [context.int_of(name) for name in ("transA", "transB")]
    nbytes = sum(
        computed_nbytes(kind)
        for kind, turns in zip(context.inputs[:2], turned, strict=True)
        if kind is not None and turns
    )
    bias = context.inputs[2] if len(context.inputs) > 2 else None
    if bias is not None:
        spread = computed_nbytes(context.outputs[0])
        # Scaled: in float64 if it has integers, then in its own type.
        nbytes += 8 * math.prod(bias.shape) + 2 * computed_nbytes(bias)
        nbytes += spread if spread <= SPREAD_BIAS_NBYTES else 0
    return nbytes


def _infer_det(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_rank(0, 2)
    if x.shape[-1] != x.shape[-2]:
        raise context.fail("Det takes square matrices", got=x.shape)
    return (ValueType(x.shape[:-2], x.data_type),)


def _det(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]

    def run() -> None:
        out[...] = np.linalg.det(x)

    return (run,)


def matmul_gradient(context: GradientContext) -> Sequence[Any]:
    """dA = dY·Bᵀ, dB = Aᵀ·dY, summed over broadcast batches (Giles 2008, section 2.2.1)."""
    a, b = context.type_of(0).shape, context.type_of(1).shape
    gradient = context.gradient
    if len(a) == 1 or len(b) == 1:
        return _vector(context, a, b, gradient)
    if len(b) == 2:
        # One matrix on the right: all rows on the left are one tall matrix.
        return _tall(context, a, b, gradient)
    return context.of_operands(
        lambda: context.apply("MatMul", gradient, _swapped(context, 1)),
        lambda: context.apply("MatMul", _swapped(context, 0), gradient),
    )


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
    across, down = context.int_of("transA"), context.int_of("transB")
    alpha, beta = context.float_of("alpha"), context.float_of("beta")
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


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Det", (1, 1), _infer_det, _det,
        batching=of_last_axes, workspace=operands(3, is_kept=False),
    ),
    OpDef(
        "MatMul", (2, 2), _infer_matmul, _matmul, gradient=matmul_gradient,
        batching=batch_matmul, workspace=few,
    ),
    OpDef(
        "Gemm", (2, 3), _infer_gemm, _gemm,
        attributes=declared(alpha=1.0, beta=1.0, transA=0, transB=0), gradient=gemm_gradient,
        batching=batch_gemm, workspace=WorkspaceRule(_gemm_nbytes),
    ),
)  # fmt: skip
