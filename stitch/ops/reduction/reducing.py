"""Reductions over axes, ArgMax and ArgMin.

Axes are an operand and must be known at compile time; without axes everything is reduced, or
nothing (`noop_with_empty_axes`), in which case the steps around the reduction still happen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import along_axis
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import BOOLEAN, BYTES, INT64, NUMERIC, PRODUCTS, onnx_code
from stitch.ops.gradient import GradientContext, Slope, of_first
from stitch.ops.inference import InferenceContext
from stitch.ops.reduction import reduction_batching as batching
from stitch.ops.reduction.row_statistics import LONG_ROW
from stitch.ops.steps import fill_step, scalar
from stitch.ops.workspaces import few, integers, operands
from stitch.program import Array, DataType, ValueType

# --------------------------------------------------------------------------------------------------
# Gradients of reductions: what became one is spread over what it was made of.


def _axes(context: GradientContext) -> tuple[int, ...]:
    """The reduced axes of a reduction with the operand `axes`."""
    rank = len(context.type_of(0).shape)
    listed = context.constants[1] if context.has(1) else None
    axes = () if listed is None else tuple(int(a) % rank for a in listed.ravel())
    if axes or context.int_of("noop_with_empty_axes"):
        return axes
    return tuple(range(rank))


def _with_axes(context: GradientContext, value: Any) -> Any:
    """A reduced value with its reduced axes back, of length 1."""
    axes, shape = _axes(context), context.type_of(0).shape
    kept_shape = tuple(1 if i in axes else size for i, size in enumerate(shape))
    if value.shape == kept_shape:
        return value
    return context.apply("Reshape", value, list(kept_shape))


def _spread(context: GradientContext, value: Any) -> Any:
    """A reduced value, repeated over what was reduced."""
    shape, value = context.type_of(0).shape, _with_axes(context, value)
    return value if value.shape == shape else context.apply("Expand", value, list(shape))


def total(c: GradientContext) -> Any:
    return _spread(c, c.gradient)


def mean(c: GradientContext) -> Any:
    count = math.prod(c.type_of(0).shape[axis] for axis in _axes(c))
    return _spread(c, c.gradient * (1.0 / max(count, 1)))


def extreme(c: GradientContext) -> Any:
    """All places that reach the extreme share the gradient equally, as torch's amax has it."""
    hit = c.apply("Equal", c.input(0), _with_axes(c, c.output()))
    ones = c.apply("Cast", hit, to=onnx_code(c.gradient.data_type))
    axes = list(_axes(c))
    count = c.apply("ReduceSum", ones, axes, keepdims=1) if axes else ones
    return c.kept(hit, _with_axes(c, c.gradient) / count)


def product(c: GradientContext) -> Any:
    """The product of the others: among them, one zero leaves a slope only at itself."""
    x, axes = c.input(0), list(_axes(c))
    if not axes:
        return c.gradient
    zero = c.apply("Equal", x, 0.0)
    one = c.constant(np.ones((), x.data_type.dtype))
    others = c.apply("Where", zero, one, x)
    product = c.apply("ReduceProd", others, axes, keepdims=1) * _with_axes(c, c.gradient)
    ones = c.apply("Cast", zero, to=onnx_code(x.data_type))
    zeros = c.apply("ReduceSum", ones, axes, keepdims=1)
    alone = c.kept(c.apply("Equal", zeros, 1.0), product)
    whole = c.kept(c.apply("Equal", zeros, 0.0), product)
    return c.apply("Where", zero, alone, whole / others)


def absolute_sum(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient) * c.apply("Sign", c.input(0))


def norm(c: GradientContext) -> Any:
    """x / |x|, and nothing where the norm is zero."""
    y = c.output()
    share = c.apply("Where", c.apply("Equal", y, 0.0), c.zero_like(y), c.gradient / y)
    return _with_axes(c, share) * c.input(0)


def log_sum(c: GradientContext) -> Any:
    return _spread(c, c.gradient * c.apply("Exp", -c.output()))


def log_sum_exp(c: GradientContext) -> Any:
    share = c.apply("Exp", c.input(0) - _with_axes(c, c.output()))
    return _with_axes(c, c.gradient) * share


def square_sum(c: GradientContext) -> Any:
    return _with_axes(c, c.gradient * 2.0) * c.input(0)


def _reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    if keep:
        return tuple(1 if i in axes else size for i, size in enumerate(shape))
    return tuple(size for i, size in enumerate(shape) if i not in axes)


def _chosen(axes: tuple[int, ...], rank: int, noop: bool) -> tuple[int, ...]:
    return axes if axes or noop else tuple(range(rank))


def _infer(allowed: frozenset[DataType], context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, allowed)
    axes: tuple[int, ...] = ()
    if context.present(1) is not None:
        context.require_type(1, INT64)
        axes = context.axes_of(context.known_ints(1, "axes"), len(data.shape))
    noop = bool(context.int_of("noop_with_empty_axes"))
    chosen = _chosen(axes, len(data.shape), noop)
    keep = bool(context.int_of("keepdims"))
    return (ValueType(_reduced_shape(data.shape, chosen, keep), data.data_type),)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction bound to arrays; `result` has the rank of `source`."""

    source: Array
    result: Array
    axes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements that go into each result."""
        return math.prod(self.source.shape[axis] for axis in self.axes)

    def by(self, function: np.ufunc, source: Array | None = None) -> Thunk:
        """The reducing step itself."""
        read = self.source if source is None else source
        reduce: Callable[..., object] = function.reduce
        return partial(reduce, read, self.axes, self.result.dtype, self.result, True)

    def sum(self, source: Array | None = None) -> tuple[Thunk, ...]:
        """Steps of a sum: of floats, as products with ones where rows are short or stay whole.

        Along long rows, and over everything, NumPy adds pairs, which rounds less.
        """
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
        """Reduced, kept and reduced elements where that is all there is; else (0, 0, 0)."""
        kept = [i for i in range(len(shape)) if i not in self.axes]
        if not kept or any(i in self.axes and shape[i] > 1 for i in range(kept[0], kept[-1])):
            return (0, 0, 0)
        first, last = kept[0], kept[-1] + 1
        return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])


Body = Callable[[_Reduction], Sequence[Thunk]]


def _kernel(body: Body) -> Callable[[KernelArguments], Sequence[Thunk]]:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, listed = arguments.given(0), arguments.optional(1)
        axes = () if listed is None else tuple(int(a) % source.ndim for a in listed.ravel())
        noop = bool(arguments.int_of("noop_with_empty_axes"))
        chosen = _chosen(axes, source.ndim, noop)
        result = arguments.outputs[0].reshape(_reduced_shape(source.shape, chosen, True))
        return body(_Reduction(source, result, chosen))

    return kernel


def _extreme(function: np.ufunc, sign: int) -> Body:
    """The greatest (sign 1) or least (-1); of nothing what any other number replaces."""

    def body(r: _Reduction) -> Sequence[Thunk]:
        return (r.by(function) if r.count else fill_step(r.result, _end(r.result.dtype, -sign)),)

    return body


def _end(dtype: np.dtype[Any], sign: int) -> float:
    """The greatest or least number of a type."""
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
    """The exact mean, truncated: the sum of quotients, and the quotient of the remainders' sum.

    Quotients round down, so that no remainder is negative; the sum itself may exceed 64 bits.
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
        # Down is not toward zero where the mean is negative and something is left.
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
    """A body that needs real numbers; integers go through float64 and are truncated."""

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
        # An infinite maximum must not be subtracted from itself.
        partial(np.nan_to_num, row, False, 0.0, 0.0, 0.0),
        partial(np.subtract, r.source, row, work),
        partial(np.exp, work, work),
        *r.sum(work),
        partial(np.log, r.result, r.result),
        partial(np.add, r.result, row, r.result),
    )


#: These read their operand as it is.
_IN_ONE_PASS = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}


def _reduce(name: str, body: Body, slope: Slope, allowed: frozenset[DataType] = PRODUCTS) -> OpDef:
    return OpDef(
        name, (1, 2), partial(_infer, allowed), _kernel(body),
        attributes=declared(keepdims=1, noop_with_empty_axes=0), gradient=of_first(slope),
        batching=batching.reduce,
        workspace=integers(3, few if name in _IN_ONE_PASS else operands(2)),
    )  # fmt: skip


def _infer_argument(context: InferenceContext) -> tuple[ValueType, ...]:
    data = context.require_type(0, NUMERIC)
    axis = context.axis_of(context.int_of("axis"), context.require_rank(0, 1))
    keep = bool(context.int_of("keepdims"))
    shape = _reduced_shape(data.shape, (axis,), keep)
    if data.shape[axis] == 0 and 0 not in shape:
        raise context.fail(f"{context.op} over an empty axis has no answer", got=f"axis {axis}")
    return (ValueType(shape, DataType.INT64),)


def _argument(function: Callable[..., object]) -> Callable[[KernelArguments], Sequence[Thunk]]:
    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = arguments.given(0), arguments.outputs[0]
        axis = arguments.int_of("axis") % source.ndim
        result = out.reshape(_reduced_shape(source.shape, (axis,), True))
        if not arguments.int_of("select_last_index"):
            return (partial(function, source, axis, result, keepdims=True),)
        turned = np.flip(source, axis)
        return (
            partial(function, turned, axis, result, keepdims=True),
            partial(np.subtract, source.shape[axis] - 1, result, result),
        )

    return kernel


def _argument_operator(name: str, function: Callable[..., object]) -> OpDef:
    return OpDef(
        name, (1, 1), _infer_argument, _argument(function),
        attributes=declared(axis=0, keepdims=1, select_last_index=0), batching=along_axis,
    )  # fmt: skip


_EXTREMES = PRODUCTS | BYTES | BOOLEAN

OPERATORS = (
    _reduce("ReduceSum", _Reduction.sum, total),
    _reduce("ReduceMean", _mean, mean),
    _reduce("ReduceMax", _extreme(np.maximum, 1), extreme, _EXTREMES),
    _reduce("ReduceMin", _extreme(np.minimum, -1), extreme, _EXTREMES),
    _reduce("ReduceProd", lambda r: (r.by(np.multiply),), product),
    _reduce("ReduceL1", _absolute_sum, absolute_sum),
    _reduce("ReduceL2", _norm, norm),
    _reduce("ReduceLogSum", _log_sum, log_sum),
    _reduce("ReduceLogSumExp", _log_sum_exp, log_sum_exp),
    _reduce("ReduceSumSquare", _square_sum, square_sum),
    _argument_operator("ArgMax", np.argmax),
    _argument_operator("ArgMin", np.argmin),
)
