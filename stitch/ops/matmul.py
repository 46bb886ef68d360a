"""MatMul, Gemm, Einsum and Det.

`ndarray.dot` with a contiguous result is NumPy's fastest call for two matrices. Constant operands
are rearranged once, at binding.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, of_last_axes
from stitch.ops.definition import Attribute, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS, NUMERIC, PRODUCTS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import InferenceContext, Shape, float_of, int_of
from stitch.ops.steps import fill_step, scalar
from stitch.program import Array, DataType, ValueType

# Batching (of all products) -----------------------------------------------------------------------


def _matrix_shape(shape: Shape, is_left: bool) -> Shape:
    """Return the shape of an operand as matrices: vectors are rows on the left, columns right."""
    if len(shape) > 1:
        return shape
    return (1, *shape) if is_left else (*shape, 1)


def _sides(c: BatchingContext) -> list[Any]:
    """Return both operands as stacks of matrices that broadcast against each other."""
    shapes = [_matrix_shape(c.shape(0), True), _matrix_shape(c.shape(1), False)]
    rank = max(map(len, shapes))
    sides = []
    for index, shape in enumerate(shapes):
        batch = (c.batch_size, *(1,) * (rank - len(shape))) if c.varies(index) else ()
        sides.append(c.reshape(c.operands[index], (*batch, *shape)))
    return sides


def batch_matmul(c: BatchingContext) -> Sequence[Any]:
    a, b = c.operands
    if not c.varies(1) and c.rank(1) <= 2:
        return c.emit(a, b)
    if not c.varies(0) and c.rank(1) == 1:
        # One column per example.
        product = c.emit(a, c.apply("Transpose", b, perm=[1, 0]))[0]
        return (c.move_to_front(product, c.rank(0) - 1),)
    if c.varies(0) and c.varies(1) and c.rank(0) > 2 and c.rank(1) == 2:
        # Rows that share one example's matrix form one matrix.
        rows, width = math.prod(c.shape(0)[:-1]), c.shape(0)[-1]
        product = c.emit(c.reshape(a, (c.batch_size, rows, width)), b)[0]
        return (c.reshape(product, (c.batch_size, *c.result_shape())),)
    product = c.emit(*_sides(c))[0]
    return (c.reshape(product, (c.batch_size, *c.result_shape())),)


def batch_gemm(c: BatchingContext) -> Sequence[Any]:
    """Stack the rows of all examples if B and C are shared, else emit MatMul, Mul and Add."""
    shared_bias = not c.has(2) or (not c.varies(2) and c.shape(2)[:-1] in ((), (1,)))
    if not c.varies(1) and shared_bias:
        a = c.operands[0]
        if c.int_of("transA"):
            a = c.apply("Transpose", a, perm=[0, 2, 1])
        (result,) = c.emit(c.merge(a), *c.operands[1:], transA=0)
        return (c.reshape(result, (c.batch_size, *c.result_shape())),)
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
        result = c.apply("Add", result, _scaled(c, c.wide(c.align(2, 2)), beta))
    if len(result.shape) == 2:
        # Only C varies, and beta is 0.
        result = c.repeat(result, c.result_shape())
    return (c.cast(result, data_type),)


def _scaled(c: BatchingContext, value: Any, factor: float) -> Any:
    """Return a value times a number, truncated for integers."""
    if factor == 1.0:
        return value
    data_type = DataType.from_dtype(value.dtype)
    if data_type.is_floating:
        return c.apply("Mul", value, factor)
    return c.cast(c.apply("Mul", c.cast(value, DataType.FLOAT64), factor), data_type)


def batch_einsum(c: BatchingContext) -> Sequence[Any] | None:
    """Add a letter for the batch axis; no rule if all 52 letters are used."""
    terms, right = _split_equation(c.string_of("equation"))
    free = [x for x in string.ascii_letters if x not in "".join(terms)]
    if not free:
        return None
    batch = free[0]
    marked = [batch + term if c.varies(index) else term for index, term in enumerate(terms)]
    equation = ",".join(marked) + f"->{batch}{right}"
    return c.emit(*c.operands, equation=equation.replace(".", "..."))


def _split_equation(equation: str) -> tuple[list[str], str]:
    """Return the terms of an Einsum's operands and result, with ellipses as one dot; an implicit
    result has the letters that occur once, sorted."""
    left, arrow, right = equation.replace(" ", "").replace("...", ".").partition("->")
    named = left.replace(",", "").replace(".", "")
    if not arrow:
        right = "".join(sorted(x for x in named if named.count(x) == 1))
        right = ("." if "." in left else "") + right
    return left.split(","), right


#: Up to this size a constant bias is expanded to the result's shape: adding arrays of equal shape
#: is faster than broadcasting while both stay in the cache.
SPREAD_BIAS_NBYTES = 1 << 20


def product_shape(context: InferenceContext, second: int = 1) -> Shape:
    """Return the shape of operand 0 times operand `second`."""
    a, b = context.operand(0).shape, context.operand(second).shape
    context.require_rank(0, 1)
    context.require_rank(second, 1)
    inner = b[-2] if len(b) > 1 else b[0]
    if a[-1] != inner:
        raise context.fail(f"inner dimensions of {context.op} differ", expected=a[-1], got=inner)
    columns = b[-1:] if len(b) > 1 else ()
    return (*context.broadcast(a[:-2], b[:-2]), *a[-2:-1], *columns)


def _infer_matmul(context: InferenceContext) -> tuple[ValueType, ...]:
    a = context.require_type(0, PRODUCTS)
    context.require_type(1, PRODUCTS)
    context.require_same_type((0, 1))
    return (ValueType(product_shape(context), a.data_type),)


def _matmul(arguments: KernelArguments) -> Sequence[Thunk]:
    a, b, out = arguments.operand(0), arguments.operand(1), arguments.outputs[0]
    if a.shape[-1] == 0:
        return (fill_step(out, 0),)
    if b.ndim == 2 and a.ndim > 2:
        # One matrix on the right: stack all rows on the left.
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
    context.require(inner == other, "inner dimensions of Gemm differ", expected=inner, got=other)
    context.require_broadcast_to(2, (rows, columns))
    return (ValueType((rows, columns), a.data_type),)


def _transposed(arguments: KernelArguments, index: int, transpose: bool) -> Array:
    matrix = arguments.operand(index)
    if not transpose:
        return matrix
    if not arguments.is_constant(index):
        return matrix.T
    return arguments.memoize(f"transposed {index}", lambda: np.ascontiguousarray(matrix.T))


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
        bias = arguments.memoize("bias", partial(_constant_bias, bias, beta, out))
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


def _infer_det(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_rank(0, 2)
    if x.shape[-1] != x.shape[-2]:
        raise context.fail("Det requires square matrices", expected="two equal last dimensions",
                           got=x.shape)  # fmt: skip
    return (ValueType(x.shape[:-2], x.data_type),)


def _det(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.operand(0), arguments.outputs[0]

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
        # One matrix on the right: stack all rows on the left.
        return _tall(context, a, b, gradient)
    return context.by_operand(
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
    """Treat a vector on either side as a matrix of one row or column."""
    if len(a) == 1:
        gradient = context.apply("Unsqueeze", gradient, [-1 if len(b) == 1 else -2])
    if len(b) == 1:
        gradient = context.apply("Unsqueeze", gradient, [-1])
    da = db = None
    if context.wants(0):
        right = context.input(1)
        right = context.apply("Unsqueeze", right, [0]) if len(b) == 1 else _swapped(context, 1)
        da = context.apply("MatMul", gradient, right)
        da = context.sum_to(da, 0)
    if context.wants(1):
        left = context.input(0)
        left = context.apply("Unsqueeze", left, [1]) if len(a) == 1 else _swapped(context, 0)
        db = context.apply("MatMul", left, gradient)
        db = context.apply("Squeeze", db, [-1]) if len(b) == 1 else db
        db = context.sum_to(db, 1)
    return da, db


def _swapped(context: GradientContext, index: int) -> Any:
    """Return an operand with its last two dimensions exchanged."""
    rank = len(context.type_of(index).shape)
    order = [*range(rank - 2), rank - 1, rank - 2]
    return context.apply("Transpose", context.input(index), perm=order)


def gemm_gradient(context: GradientContext) -> Sequence[Any]:
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
        dc = context.sum_to(gradient, 2)
        dc = dc if beta == 1.0 else dc * beta
    return da, db, dc


def letters_of_axes(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return one letter per axis for each operand of an Einsum and for its result; axes that an
    ellipsis spans get unused letters.

    >>> letters_of_axes("...a,ab", [3, 2])
    (['cda', 'ab'], 'cdb')
    """
    listed, right = _split_equation(equation)
    spans = [rank - len(t.replace(".", "")) for t, rank in zip(listed, ranks, strict=True)]
    free = [c for c in string.ascii_letters if c not in equation]
    spanned = "".join(free[: max(spans)])
    terms = [
        term.replace(".", spanned[len(spanned) - span :])
        for term, span in zip(listed, spans, strict=True)
    ]
    return terms, right.replace(".", spanned)


def _infer_einsum(context: InferenceContext) -> tuple[ValueType, ...]:
    every = range(len(context.inputs))
    types = [context.require_type(i, NUMERIC) for i in every]
    context.require_same_type(every)
    equation = context.string_of("equation")
    listed, right = _split_equation(equation)
    is_legal = "." not in equation.replace("...", "")
    context.require(is_legal, "Einsum has a dot that is part of no ellipsis", got=equation)
    context.require(
        len(listed) == len(types), f"Einsum has {len(listed)} terms for {len(types)} operands",
        expected=len(types), got=len(listed),
    )  # fmt: skip
    for term, kind in zip(listed, types, strict=True):
        rank, named = len(kind.shape), term.replace(".", "")
        context.require(
            set(named) <= set(string.ascii_letters) and term.count(".") <= 1,
            f"Einsum term {term!r} is invalid", expected="letters and at most one ...", got=term,
        )  # fmt: skip
        context.require(
            len(named) == rank or ("." in term and len(named) < rank),
            f"Einsum term {term!r} does not match its operand of rank {rank}",
            expected=f"{rank} axes", got=term,
        )  # fmt: skip
    terms, result = letters_of_axes(equation, [len(kind.shape) for kind in types])
    sizes: dict[str, int] = {}
    for term, kind in zip(terms, types, strict=True):
        own: dict[str, int] = {}
        for letter, size in zip(term, kind.shape, strict=True):
            if own.setdefault(letter, size) != size:
                what = f"Einsum takes a diagonal over {letter!r} of two sizes"
                raise context.fail(what, got=kind.shape)
            previous = sizes.setdefault(letter, size)
            if previous == 1:
                sizes[letter] = size
            elif size not in (1, previous):
                what = f"axis {letter!r} of Einsum has two sizes"
                raise context.fail(what, expected=previous, got=size)
    context.require(
        len(set(result)) == len(result) and set(result) <= set(sizes) and right.count(".") <= 1,
        "result term of Einsum repeats a letter or has one that no operand has", got=right,
    )  # fmt: skip
    has_ellipsis = "." in right or not any("." in term for term in listed)
    context.require(has_ellipsis, "result term of Einsum lacks the ellipsis", got=right)
    return (ValueType(tuple(sizes[letter] for letter in result), types[0].data_type),)


def _einsum(arguments: KernelArguments) -> Sequence[Thunk]:
    equation = arguments.string_of("equation").replace(" ", "")
    operands = [arguments.operand(i) for i in range(len(arguments.inputs))]
    out = arguments.outputs[0]
    path: object = False
    if len(operands) > 1 and out.dtype.kind == "f":
        path = np.einsum_path(equation, *operands, optimize="optimal")[0]
    return (partial(np.einsum, equation, *operands, out=out, optimize=path),)


def einsum_gradient(context: GradientContext) -> Sequence[Any]:
    """Broadcast axes of length 1 are left out of the terms and reshaped back."""
    ranks = [len(context.type_of(i).shape) for i in range(len(context.input_types))]
    terms, result = letters_of_axes(context.string_of("equation"), ranks)
    sizes: dict[str, int] = {}
    for index, term in enumerate(terms):
        for letter, size in zip(term, context.type_of(index).shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    full = [
        "".join(c for c, n in zip(term, context.type_of(i).shape, strict=True) if n == sizes[c])
        for i, term in enumerate(terms)
    ]
    return [
        _operand_gradient(context, i, terms, full, result, sizes) if context.wants(i) else None
        for i in range(len(terms))
    ]


def _operand_gradient(
    context: GradientContext,
    index: int,
    terms: list[str],
    full: list[str],
    result: str,
    sizes: dict[str, int],
) -> Any:
    """Return the gradient of operand `index`, expanded along letters that no other term has."""
    values, listed = [context.gradient], [result]
    for other, term in enumerate(full):
        if other != index:
            value = context.input(other)
            values.append(context.reshape(value, [sizes[c] for c in term]))
            listed.append(term)
    shape = context.type_of(index).shape
    free = [c for c in string.ascii_letters if c not in "".join(terms) + result]
    wanted, back = "", []
    for letter, size in zip(terms[index], shape, strict=True):
        is_shared = any(letter in term for term in listed)
        if not is_shared or (size == 1 and sizes[letter] != 1):
            back.append(1)
            continue
        if letter in wanted:
            # A diagonal was read: elements off the diagonal get 0.
            fresh = free.pop()
            values.append(context.constant(np.eye(size, dtype=context.gradient.dtype)))
            listed.append(letter + fresh)
            letter = fresh
        wanted += letter
        back.append(size)
    equation = ",".join(listed) + "->" + wanted
    own = context.apply("Einsum", *values, equation=equation)
    own = context.reshape(own, back)
    return own if tuple(back) == shape else context.apply("Expand", own, list(shape))


OPERATORS: tuple[OpDef, ...] = (
    OpDef(
        "Det", (1, 1), _infer_det, _det, batching=of_last_axes,
    ),
    OpDef(
        "MatMul", (2, 2), _infer_matmul, _matmul, gradient=matmul_gradient, batching=batch_matmul,
    ),
    OpDef(
        "Gemm", (2, 3), _infer_gemm, _gemm,
        attributes=declared(alpha=1.0, beta=1.0, transA=0, transB=0), gradient=gemm_gradient,
        batching=batch_gemm,
    ),
    OpDef(
        "Einsum", (1, -1), _infer_einsum, _einsum,
        attributes=declared(equation=Attribute("string", required=True)), gradient=einsum_gradient,
        batching=batch_einsum,
    ),
)  # fmt: skip
