"""Reductions over axes, ArgMax, ArgMin, CumSum, CumProd, TfIdfVectorizer.

Axes are an operand that must be known at compile time. Normalizations share the steps for means
and variances of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext, along_axis
from stitch.ops.definition import Attribute, Kernel, KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import BOOLEAN, BYTES, INDICES, INT64, NUMERIC, PRODUCTS, onnx_code
from stitch.ops.gradient import Gradient, GradientContext, Slope, of_first
from stitch.ops.inference import Attributes, InferenceContext, int_of, ints_of, string_of
from stitch.ops.steps import CHUNK_SIZE, fill_step, reciprocal_step, scalar, slice_range
from stitch.program import Array, DataType, ValueType

# Batching -----------------------------------------------------------------------------------------


def batch_reduction(c: BatchingContext) -> Sequence[Any]:
    """Without axes, reduce all axes except the batch axis."""
    listed = c.ints_at(1) or ()
    if listed or c.int_of("noop_with_empty_axes"):
        return c.emit(c.operands[0], [c.axis_behind(axis) for axis in listed])
    if c.rank():
        return c.emit(c.operands[0], list(range(1, c.rank() + 1)))
    # An empty list of axes would mean all axes, including the batch axis.
    return c.emit(c.reshape(c.operands[0], (c.batch_size, 1)), [1], keepdims=0)


def batch_running(c: BatchingContext) -> Sequence[Any]:
    (axis,) = c.ints_at(1) or (0,)
    return c.emit(c.operands[0], np.array(c.axis_behind(axis)))


# CumSum and CumProd -------------------------------------------------------------------------------


def _infer_running(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, PRODUCTS)
    context.require_type(1, INDICES)
    context.axis_of(context.known_scalar(1, "axis"), context.require_rank(0, 1))
    return (data,)


def _running(function: np.ufunc, neutral: int) -> Kernel:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = arguments.operand(0), arguments.outputs[0]
        axis = arguments.ints_at(1)[0] % source.ndim
        if arguments.int_of("reverse"):
            source, out = np.flip(source, axis), np.flip(out, axis)
        if not arguments.int_of("exclusive"):
            return (partial(function.accumulate, source, axis, out.dtype, out),)
        before = (slice(None),) * axis
        size = source.shape[axis]
        first = fill_step(out[(*before, slice(0, 1))], neutral)
        if size == 1:
            return (first,)
        shifted, rest = out[(*before, slice(1, None))], source[(*before, slice(0, size - 1))]
        return (first, partial(function.accumulate, rest, axis, out.dtype, shifted))

    return kernel


def cumulative_sum_gradient(context: GradientContext) -> Sequence[Any]:
    """The cumulative sum in reverse."""
    exclusive, reverse = context.int_of("exclusive"), 1 - context.int_of("reverse")
    total = context.apply(
        "CumSum", context.gradient, context.input(1), exclusive=exclusive, reverse=reverse
    )
    return total, None


def cumulative_product_gradient(context: GradientContext) -> Sequence[Any]:
    """The reverse cumulative sum of dy y, divided by x; at the first zero without that factor."""
    x, axis, gradient = context.input(0), context.input(1), context.gradient
    exclusive, reverse = (context.int_of(name) for name in ("exclusive", "reverse"))
    zero = context.apply("Equal", x, 0.0)
    count = context.apply("Cast", zero, to=onnx_code(x.data_type))
    before = context.apply("CumSum", count, axis, exclusive=1, reverse=reverse)
    first = context.apply("And", zero, context.apply("Equal", before, 0.0))
    one = context.constant(np.ones((), x.data_type.dtype))
    without = context.apply("Where", first, one, x)
    product = context.apply("CumProd", without, axis, exclusive=exclusive, reverse=reverse)

    def back(value: Any) -> Any:
        return context.apply("CumSum", value, axis, exclusive=exclusive, reverse=1 - reverse)

    share = back(gradient * context.output()) / context.apply("Where", zero, one, x)
    rest = context.apply("Where", zero, context.zero_like(share), share)
    return context.apply("Where", first, back(gradient * product), rest), None


def _cumulative(
    name: str, function: np.ufunc, neutral: int, gradient: Gradient | None = None
) -> OpDef:
    return OpDef(
        name, (2, 2), _infer_running, _running(function, neutral),
        attributes=declared(exclusive=0, reverse=0), gradient=gradient, batching=batch_running,
    )  # fmt: skip


# TfIdfVectorizer ----------------------------------------------------------------------------------
# An n-gram occurs where its items follow each other, `skip` positions apart. Items of size 1 are
# counted once, since no skip changes them. N-grams longer than a row are not searched, so rows and
# pool bound the work.

Gram = tuple[int, ...]


def _ints(attributes: Attributes, name: str) -> Gram:
    return ints_of(attributes, name) or ()


def _pool(attributes: Attributes) -> Iterator[Gram]:
    """Yield the n-grams of the pool in order; size n begins at `ngram_counts[n - 1]`."""
    items, starts = _ints(attributes, "pool_int64s"), _ints(attributes, "ngram_counts")
    for size, (start, end) in enumerate(zip(starts, (*starts[1:], len(items)), strict=True), 1):
        for at in range(start, end - size + 1, size):
            yield items[at : at + size]


def _infer_counts(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, INDICES)
    context.require_rank(0, 0, 2)
    attributes = context.attributes
    context.require_word("mode", ("TF", "IDF", "TFIDF"))
    if attributes.get("pool_strings"):
        raise context.fail("TfIdfVectorizer does not support pool_strings: use pool_int64s")
    items, starts = _ints(attributes, "pool_int64s"), _ints(attributes, "ngram_counts")
    columns = _ints(attributes, "ngram_indexes")
    ends = (*starts[1:], len(items))
    spans = list(zip(starts, ends, strict=True)) if starts else [(-1, 0)]
    whole = all(0 <= a <= b and (b - a) % n == 0 for n, (a, b) in enumerate(spans, 1))
    if not whole or min(columns, default=-1) < 0 or len(list(_pool(attributes))) != len(columns):
        raise context.fail(
            "pool_int64s, ngram_counts and ngram_indexes of TfIdfVectorizer do not match",
            expected=f"{len(columns)} n-grams", got=f"{len(items)} items, counts {list(starts)}",
        )  # fmt: skip
    weights = attributes.get("weights")
    if isinstance(weights, tuple) and len(weights) != len(columns):
        raise context.fail(
            f"TfIdfVectorizer has {len(weights)} weights for {len(columns)} n-grams",
            expected=len(columns), got=len(weights),
        )  # fmt: skip
    sizes = [int_of(attributes, f"{side}_gram_length") for side in ("min", "max")]
    if not 1 <= sizes[0] <= sizes[1] or int_of(attributes, "max_skip_count") < 0:
        raise context.fail(
            "n-gram lengths of TfIdfVectorizer are out of range",
            expected="1 <= min_gram_length <= max_gram_length, max_skip_count >= 0", got=sizes,
        )  # fmt: skip
    return (ValueType((*x.shape[:-1], max(columns) + 1), DataType.FLOAT32),)


def _count(row: Gram, numbers: dict[Gram, int], attributes: Attributes) -> Array:
    """Count each n-gram of the pool in one row, for all sizes and skips that fit the row."""
    least, most = (int_of(attributes, f"{side}_gram_length") for side in ("min", "max"))
    skips = int_of(attributes, "max_skip_count") + 1
    counts = np.zeros(len(_ints(attributes, "ngram_indexes")), np.float32)
    for size in sorted({len(gram) for gram in numbers}):
        if not least <= size <= min(most, len(row)):
            continue
        furthest = min(skips, (len(row) - 1) // (size - 1)) if size > 1 else 1
        for skip in range(1, furthest + 1):
            for start in range(len(row) - (size - 1) * skip):
                number = numbers.get(row[start : start + (size - 1) * skip + 1 : skip])
                if number is not None:
                    counts[number] += 1
    return counts


def _tf_idf(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, attributes = arguments.operand(0), arguments.outputs[0], arguments.attributes
    columns = np.array(_ints(attributes, "ngram_indexes"))
    numbers = {gram: number for number, gram in enumerate(_pool(attributes))}
    mode, weights = string_of(attributes, "mode"), attributes.get("weights")
    factors = np.ones(len(columns), out.dtype)
    if isinstance(weights, tuple) and mode != "TF":
        factors[...] = weights
    results = out.reshape(-1, out.shape[-1])
    rows = x.reshape(len(results), x.shape[-1] if x.ndim else 1)

    def run() -> None:
        results[...] = 0
        for row, result in zip(rows.tolist(), results, strict=True):
            counts = _count(tuple(row), numbers, attributes)
            if mode == "IDF":
                # If several n-grams share a column, the first that occurs decides.
                present = np.flatnonzero(counts)[::-1]
                result[columns[present]] = factors[present]
            else:
                np.add.at(result, columns, counts * factors)

    return (run,)


_NUMBER, _NUMBERS = Attribute("int", required=True), Attribute("ints", required=True)


# Means and variances of rows ----------------------------------------------------------------------

#: From this many chunks on, a row of weights is expanded to a chunk's shape.
SPREAD_FROM = 4
#: Longer rows are summed pairwise.
LONG_ROW = 4096


def inverse_deviation(row: Array, epsilon: float) -> list[Thunk]:
    """row = 1 / sqrt(row + epsilon)."""
    return [
        partial(np.add, row, scalar(epsilon, row), row),
        partial(np.sqrt, row, row),
        reciprocal_step(row, row),
    ]


def row_chunks(shape: tuple[int, int]) -> list[slice]:
    """Slice the rows of [rows, columns] arrays into chunks that stay in the caches."""
    return list(slice_range(shape[0], max(1, CHUNK_SIZE // shape[1])))


def row_means(source: Array, mean: Array) -> list[Thunk]:
    """Return steps for the means of the rows of a [rows, columns] array.

    A product with a column is three times as fast as a sum over short rows; long rows need the
    pairwise sum, which rounds less.
    """
    columns = source.shape[1]
    if columns > LONG_ROW:
        count = scalar(columns, mean)
        return [
            partial(np.add.reduce, source, 1, None, mean),
            partial(np.divide, mean, count, mean),
        ]
    parts = np.full((columns, 1), 1.0 / columns, mean.dtype)
    return [partial(np.dot, source, parts, mean[:, None])]


def standardize(
    source: Array, out: Array, mean: Array, inverse: Array, epsilon: float
) -> list[Thunk]:
    """Return steps that bring rows of [rows, columns] arrays to mean 0 and variance 1.

    `mean` and `inverse`, [rows] each, receive the means and inverse deviations.
    """
    count = scalar(source.shape[1], out)
    return [
        *row_means(source, mean),
        partial(np.subtract, source, mean[:, None], out),
        partial(np.vecdot, out, out, inverse),
        partial(np.divide, inverse, count, inverse),
        *inverse_deviation(inverse, epsilon),
        partial(np.multiply, out, inverse[:, None], out),
    ]


# Gradients ----------------------------------------------------------------------------------------


def _axes(context: GradientContext) -> tuple[int, ...]:
    """Return the reduced axes."""
    rank = len(context.type_of(0).shape)
    listed = context.constants[1] if context.has(1) else None
    axes = () if listed is None else tuple(int(a) % rank for a in listed.ravel())
    if axes or context.int_of("noop_with_empty_axes"):
        return axes
    return tuple(range(rank))


def _with_axes(context: GradientContext, value: Any) -> Any:
    """Return a reduced value with the reduced axes restored as length 1."""
    shape = _reduced_shape(context.type_of(0).shape, _axes(context), True)
    return value if value.shape == shape else context.apply("Reshape", value, list(shape))


def _spread(context: GradientContext, value: Any) -> Any:
    """Return a reduced value, expanded to the operand's shape."""
    shape, value = context.type_of(0).shape, _with_axes(context, value)
    return value if value.shape == shape else context.apply("Expand", value, list(shape))


def reduce_sum_slope(c: GradientContext) -> Any:
    return _spread(c, c.gradient)


def reduce_mean_slope(c: GradientContext) -> Any:
    count = math.prod(c.type_of(0).shape[axis] for axis in _axes(c))
    return _spread(c, c.gradient * (1.0 / max(count, 1)))


def reduce_extreme_slope(c: GradientContext) -> Any:
    """All elements that equal the extreme share the gradient equally, as for torch's amax."""
    hit = c.apply("Equal", c.input(0), _with_axes(c, c.output()))
    ones = c.apply("Cast", hit, to=onnx_code(c.gradient.data_type))
    axes = list(_axes(c))
    count = c.apply("ReduceSum", ones, axes, keepdims=1) if axes else ones
    return c.where(hit, _with_axes(c, c.gradient) / count)


def reduce_prod_slope(c: GradientContext) -> Any:
    """The slope is the product of the other elements; a single zero has the only nonzero slope."""
    x, axes = c.input(0), list(_axes(c))
    if not axes:
        return c.gradient
    zero = c.apply("Equal", x, 0.0)
    one = c.constant(np.ones((), x.data_type.dtype))
    others = c.apply("Where", zero, one, x)
    product = c.apply("ReduceProd", others, axes, keepdims=1) * _with_axes(c, c.gradient)
    ones = c.apply("Cast", zero, to=onnx_code(x.data_type))
    zeros = c.apply("ReduceSum", ones, axes, keepdims=1)
    alone = c.where(c.apply("Equal", zeros, 1.0), product)
    whole = c.where(c.apply("Equal", zeros, 0.0), product)
    return c.apply("Where", zero, alone, whole / others)


def reduce_l1_slope(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient) * c.apply("Sign", c.input(0))


def reduce_l2_slope(c: GradientContext) -> Any:
    """dx = dy x / |x|; 0 if the norm is 0."""
    y = c.output()
    share = c.apply("Where", c.apply("Equal", y, 0.0), c.zero_like(y), c.gradient / y)
    return _with_axes(c, share) * c.input(0)


def reduce_log_sum_slope(c: GradientContext) -> Any:
    return _spread(c, c.gradient * c.apply("Exp", -c.output()))


def reduce_log_sum_exp_slope(c: GradientContext) -> Any:
    share = c.apply("Exp", c.input(0) - _with_axes(c, c.output()))
    return _with_axes(c, c.gradient) * share


def reduce_sum_square_slope(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient * 2.0) * c.input(0)


def _reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    if keep:
        return tuple(1 if i in axes else size for i, size in enumerate(shape))
    return tuple(size for i, size in enumerate(shape) if i not in axes)


def _infer_reduction(
    allowed: frozenset[DataType], context: InferenceContext
) -> tuple[ValueType, ...]:
    data = context.require_type(0, allowed)
    axes: tuple[int, ...] = ()
    if context.present(1) is not None:
        context.require_type(1, INT64)
        axes = context.axes_of(context.known_ints(1, "axes"), len(data.shape))
    if not axes and not context.int_of("noop_with_empty_axes"):
        axes = tuple(range(len(data.shape)))
    keep = bool(context.int_of("keepdims"))
    return (ValueType(_reduced_shape(data.shape, axes, keep), data.data_type),)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction bound to arrays; `result` has the rank of `source`."""

    source: Array
    result: Array
    axes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements that are reduced to one result."""
        return math.prod(self.source.shape[axis] for axis in self.axes)

    def by(self, function: np.ufunc, source: Array | None = None) -> Thunk:
        """Return the step that reduces `source` by a ufunc."""
        read = self.source if source is None else source
        reduce: Callable[..., object] = function.reduce
        return partial(reduce, read, self.axes, self.result.dtype, self.result, True)

    def sum(self, source: Array | None = None) -> tuple[Thunk, ...]:
        """Return the steps of a sum: for floats a product with ones, which is faster, except along
        long rows and over all axes, where NumPy's pairwise sum rounds less."""
        read = self.source if source is None else source
        if read.dtype.kind != "f" or read.dtype != self.result.dtype or not read.size:
            return (self.by(np.add, source),)
        before, kept, after = self._merged(read.shape)
        if kept < 2 or after > LONG_ROW or not read.flags.c_contiguous:
            return (self.by(np.add, source),)
        out = self.result.reshape(-1)
        if after == 1:
            ones = np.ones((1, before), read.dtype)
            return (partial(np.dot, ones, read.reshape(before, kept), out.reshape(1, -1)),)
        ones, rows = np.ones((after, 1), read.dtype), read.reshape(-1, after)
        if before == 1:
            return (partial(np.dot, rows, ones, out.reshape(-1, 1)),)
        sums = np.empty((before * kept, 1), read.dtype)
        total = partial(np.add.reduce, sums.reshape(before, kept), 0, None, out)
        return (partial(np.dot, rows, ones, sums), total)

    def _merged(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return sizes [reduced, kept, reduced] if axes merge to that, else (0, 0, 0)."""
        kept = [i for i in range(len(shape)) if i not in self.axes]
        if not kept or any(i in self.axes and shape[i] > 1 for i in range(kept[0], kept[-1])):
            return (0, 0, 0)
        first, last = kept[0], kept[-1] + 1
        return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])


Body = Callable[[_Reduction], Sequence[Thunk]]


def _reduction_kernel(body: Body) -> Callable[[KernelArguments], Sequence[Thunk]]:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, listed = arguments.operand(0), arguments.optional(1)
        axes = () if listed is None else tuple(int(a) % source.ndim for a in listed.ravel())
        if not axes and not arguments.int_of("noop_with_empty_axes"):
            axes = tuple(range(source.ndim))
        result = arguments.outputs[0].reshape(_reduced_shape(source.shape, axes, True))
        return body(_Reduction(source, result, axes))

    return kernel


def _extreme(function: np.ufunc, sign: int) -> Body:
    """Maximum (sign 1) or minimum (-1); of no elements the identity."""

    def body(r: _Reduction) -> Sequence[Thunk]:
        return (r.by(function) if r.count else fill_step(r.result, _end(r.result.dtype, -sign)),)

    return body


def _end(dtype: np.dtype[Any], sign: int) -> float:
    """Return the greatest (sign 1) or least (-1) number of a type."""
    if dtype.kind == "f":
        return sign * math.inf
    if dtype.kind == "b":
        return sign > 0
    return int(np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min)


def _mean(r: _Reduction) -> Sequence[Thunk]:
    if r.result.dtype.kind == "f":
        return (*r.sum(), partial(np.divide, r.result, scalar(r.count, r.result), r.result))
    return (fill_step(r.result, 0),) if r.count == 0 else _integer_mean(r)


def _integer_mean(r: _Reduction) -> Sequence[Thunk]:
    """The exact mean, truncated: the sum of quotients plus the quotient of the sum of remainders.

    The plain sum could overflow. Quotients round down, so that no remainder is negative.
    """
    count = np.array(r.count, r.source.dtype)
    quotients, remainders = np.empty_like(r.source), np.empty_like(r.source)
    rest, more = np.empty(r.result.shape, np.int64), np.empty(r.result.shape, np.int64)
    added, upwards = np.empty_like(r.result), np.empty(r.result.shape, np.bool_)
    none = np.zeros((), r.result.dtype)
    return (
        partial(np.divmod, r.source, count, quotients, remainders),
        r.by(np.add, quotients),
        partial(np.add.reduce, remainders, r.axes, np.int64, rest, True),
        partial(np.divmod, rest, r.count, more, rest),
        partial(np.copyto, added, more, "unsafe"),
        partial(np.add, r.result, added, r.result),
        # Truncate: add 1 to a negative mean with a remainder.
        partial(np.less, r.result, none, upwards),
        partial(np.logical_and, upwards, rest, upwards),
        partial(np.add, r.result, upwards, r.result, casting="unsafe"),
    )


def _absolute_sum(r: _Reduction) -> Sequence[Thunk]:
    work = np.empty_like(r.source)
    return (partial(np.absolute, r.source, work), *r.sum(work))


def _square_sum(r: _Reduction) -> Sequence[Thunk]:
    work = np.empty_like(r.source)
    return (partial(np.multiply, r.source, r.source, work), *r.sum(work))


def _in_float(body: Body) -> Body:
    """Wrap a body that needs floats: integers are converted to float64, results truncated."""

    def convert(r: _Reduction) -> Sequence[Thunk]:
        if r.source.dtype.kind == "f":
            return body(r)
        wide = np.empty(r.source.shape, np.float64)
        inner = _Reduction(wide, np.empty(r.result.shape, np.float64), r.axes)
        return (
            partial(np.copyto, wide, r.source),
            *body(inner),
            partial(np.copyto, r.result, inner.result, "unsafe"),
        )

    return convert


@_in_float
def _norm(r: _Reduction) -> Sequence[Thunk]:
    return (*_square_sum(r), partial(np.sqrt, r.result, r.result))


@_in_float
def _log_sum(r: _Reduction) -> Sequence[Thunk]:
    return (*r.sum(), partial(np.log, r.result, r.result))


@_in_float
def _log_sum_exp(r: _Reduction) -> Sequence[Thunk]:
    if r.count == 0:
        return (fill_step(r.result, -math.inf),)
    work, row = np.empty_like(r.source), np.empty_like(r.result)
    return (
        partial(np.maximum.reduce, r.source, r.axes, None, row, True),
        # inf - inf would be NaN.
        partial(np.nan_to_num, row, False, 0.0, 0.0, 0.0),
        partial(np.subtract, r.source, row, work),
        partial(np.exp, work, work),
        *r.sum(work),
        partial(np.log, r.result, r.result),
        partial(np.add, r.result, row, r.result),
    )


def _reduce(name: str, body: Body, slope: Slope, allowed: frozenset[DataType] = PRODUCTS) -> OpDef:
    return OpDef(
        name, (1, 2), partial(_infer_reduction, allowed), _reduction_kernel(body),
        attributes=declared(keepdims=1, noop_with_empty_axes=0), gradient=of_first(slope),
        batching=batch_reduction,
    )  # fmt: skip


def _infer_argument(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, NUMERIC)
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    keep = bool(context.int_of("keepdims"))
    shape = _reduced_shape(data.shape, (axis,), keep)
    if data.shape[axis] == 0 and 0 not in shape:
        raise context.fail(f"{context.op} over axis {axis} of size 0 is undefined", got=data.shape)
    return (ValueType(shape, DataType.INT64),)


def _argument(function: Callable[..., object]) -> Callable[[KernelArguments], Sequence[Thunk]]:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = arguments.operand(0), arguments.outputs[0]
        axis = arguments.int_of("axis") % source.ndim
        result = out.reshape(_reduced_shape(source.shape, (axis,), True))
        if not arguments.int_of("select_last_index"):
            return (partial(function, source, axis, result, keepdims=True),)
        flipped = np.flip(source, axis)
        return (
            partial(function, flipped, axis, result, keepdims=True),
            partial(np.subtract, source.shape[axis] - 1, result, result),
        )

    return kernel


def _argument_operator(name: str, function: Callable[..., object]) -> OpDef:
    return OpDef(
        name, (1, 1), _infer_argument, _argument(function),
        attributes=declared(axis=0, keepdims=1, select_last_index=0), batching=along_axis,
    )  # fmt: skip


_EXTREMES = PRODUCTS | BYTES | BOOLEAN


OPERATORS: tuple[OpDef, ...] = (
    _reduce("ReduceSum", _Reduction.sum, reduce_sum_slope),
    _reduce("ReduceMean", _mean, reduce_mean_slope),
    _reduce("ReduceMax", _extreme(np.maximum, 1), reduce_extreme_slope, _EXTREMES),
    _reduce("ReduceMin", _extreme(np.minimum, -1), reduce_extreme_slope, _EXTREMES),
    _reduce("ReduceProd", lambda r: (r.by(np.multiply),), reduce_prod_slope),
    _reduce("ReduceL1", _absolute_sum, reduce_l1_slope),
    _reduce("ReduceL2", _norm, reduce_l2_slope),
    _reduce("ReduceLogSum", _log_sum, reduce_log_sum_slope),
    _reduce("ReduceLogSumExp", _log_sum_exp, reduce_log_sum_exp_slope),
    _reduce("ReduceSumSquare", _square_sum, reduce_sum_square_slope),
    _argument_operator("ArgMax", np.argmax),
    _argument_operator("ArgMin", np.argmin),
    _cumulative("CumSum", np.add, 0, cumulative_sum_gradient),
    _cumulative("CumProd", np.multiply, 1, cumulative_product_gradient),
    OpDef(
        "TfIdfVectorizer", (1, 1), _infer_counts, _tf_idf,
        attributes=declared(
            max_gram_length=_NUMBER, max_skip_count=_NUMBER, min_gram_length=_NUMBER,
            mode=Attribute("string", required=True), ngram_counts=_NUMBERS, ngram_indexes=_NUMBERS,
            pool_int64s=Attribute("ints"), pool_strings=Attribute("strings"),
            weights=Attribute("floats"),
        ),
    ),
)  # fmt: skip
