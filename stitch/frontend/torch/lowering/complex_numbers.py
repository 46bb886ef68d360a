"""ATen operators on complex numbers, lowered to operations on pairs of real and imaginary parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stitch.errors import CompileError
from stitch.frontend.torch.aten_call import (
    PART_TYPES,
    Call,
    ComplexTensor,
    KeptWhole,
    Lowered,
    Lowering,
    Value,
    data_type_of,
)
from stitch.frontend.torch.lowering import (
    backward_operators,
    picked_elements,
    shapes,
    single_elements,
)
from stitch.frontend.torch.lowering.single_elements import truth
from stitch.graph import SymbolicTensor
from stitch.program import DataType

# Pairs of real tensors ----------------------------------------------------------------------------

#: Tensor or Scalar of torch's schema, real or complex.
ComplexValue = ComplexTensor | Value | complex


def is_real(value: ComplexValue) -> bool:
    """Whether an operand has a real type."""
    return not isinstance(value, ComplexTensor | complex)


def wide_of(call: Call, value: ComplexValue) -> SymbolicTensor:
    """A real operand in the type of the result's parts, with a last axis of one."""
    assert not isinstance(value, ComplexTensor | complex), "a complex operand has two parts"
    number = call.cast(value)
    return call.builder.unsqueeze(number, -1) if number.shape else number


def pair_of(call: Call, value: ComplexValue, data_type: DataType | None = None) -> SymbolicTensor:
    """An operand as pairs, by default in the type of the result's parts."""
    b, kind = call.builder, call.data_type if data_type is None else data_type
    if isinstance(value, ComplexTensor):
        return b.cast(value.pairs, kind)
    if not isinstance(value, SymbolicTensor):
        number = complex(value)
        return b.constant(np.asarray([number.real, number.imag], kind.dtype))
    real = b.unsqueeze(b.cast(value, kind), -1)
    return b.concat([real, b.broadcast(b.constant(np.zeros(1, kind.dtype)), real.shape)], -1)


def parts_of(
    call: Call, value: ComplexValue, data_type: DataType | None = None
) -> tuple[SymbolicTensor, SymbolicTensor]:
    """Both parts of an operand, each with a last axis of one."""
    real, imaginary = call.builder.split(pair_of(call, value, data_type), 1, -1)
    return real, imaginary


def joined(call: Call, real: SymbolicTensor, imaginary: SymbolicTensor) -> ComplexTensor:
    """A complex tensor of the result's shape from two parts, each with a last axis of one."""
    b, shape = call.builder, (*call.shape[:-1], 1)
    return ComplexTensor(b.concat([b.broadcast(real, shape), b.broadcast(imaginary, shape)], -1))


# Arithmetic ---------------------------------------------------------------------------------------

aten = torch.ops.aten

# Conversions ---------------------------------------------------------------------------------


def _complex(call: Call, real: SymbolicTensor, imaginary: SymbolicTensor) -> ComplexTensor:
    return joined(call, wide_of(call, real), wide_of(call, imaginary))


def _polar(call: Call, length: SymbolicTensor, angle: SymbolicTensor) -> ComplexTensor:
    b, (size, turn) = call.builder, (wide_of(call, length), wide_of(call, angle))
    return joined(call, b.mul(size, b.cos(turn)), b.mul(size, b.sin(turn)))


def _view_as_complex(call: Call, x: SymbolicTensor) -> ComplexTensor:
    return ComplexTensor(x)


def _view_as_real(call: Call, x: ComplexTensor) -> SymbolicTensor:
    return x.pairs


def _of_parts(target: Any, call: Call, x: ComplexTensor) -> SymbolicTensor:
    """A real function of the imaginary and the real part."""
    b = call.builder
    real, imaginary = (b.squeeze(part, -1) for part in parts_of(call, x, x.pairs.data_type))
    lowering = single_elements.LOWERINGS[target]
    assert not isinstance(lowering, KeptWhole), "neither hypot nor atan2 is"
    result = lowering(call, imaginary, real)
    assert isinstance(result, SymbolicTensor)
    return result


def _pairs(call: Call, x: ComplexValue, *_: Any, **__: Any) -> ComplexTensor:
    """Convert to the result's complex type."""
    return ComplexTensor(pair_of(call, x))


def _to_type(call: Call, x: ComplexTensor, *_: Any, **__: Any) -> ComplexTensor | SymbolicTensor:
    """Convert to another type; to a real one, torch drops the imaginary part."""
    if call.is_complex:
        return _pairs(call, x)
    real = parts_of(call, x, x.pairs.data_type)[0]
    return call.cast(call.builder.squeeze(real, -1))


def _full(call: Call, _: Any, value: ComplexValue, **__: Any) -> ComplexTensor:
    """Also full_like, new_full, copy and fill: the result has the shape and type."""
    return ComplexTensor(call.builder.broadcast(pair_of(call, value), call.shape))


def _zeros(call: Call, *_: Any, **__: Any) -> ComplexTensor:
    return _full(call, None, 0)


def _conjugate(call: Call, x: ComplexValue) -> ComplexTensor:
    pairs = pair_of(call, x)
    return ComplexTensor(call.builder.mul(pairs, np.asarray([1, -1], pairs.data_type.dtype)))


# Arithmetic ----------------------------------------------------------------------------------


def _sum_of_two(
    sign: int, call: Call, a: ComplexValue, b: ComplexValue, alpha: complex = 1
) -> ComplexTensor:
    first, second = pair_of(call, a), pair_of(call, b)
    if alpha != 1:
        factor = alpha if isinstance(alpha, complex) else wide_of(call, alpha)
        second = _product(call, ComplexTensor(second), factor)
    return ComplexTensor(
        call.builder.add(first, second) if sign > 0 else call.builder.sub(first, second)
    )


def _product(call: Call, a: ComplexValue, b: ComplexValue) -> SymbolicTensor:
    """The product as pairs; at least one operand is complex."""
    builder = call.builder
    if is_real(a):
        a, b = b, a
    if is_real(b):
        return builder.mul(pair_of(call, a), wide_of(call, b))
    (p, q), (r, s) = parts_of(call, a), parts_of(call, b)
    real = builder.sub(builder.mul(p, r), builder.mul(q, s))
    return builder.concat([real, builder.add(builder.mul(p, s), builder.mul(q, r))], -1)


def _multiply(call: Call, a: ComplexValue, b: ComplexValue) -> ComplexTensor:
    return ComplexTensor(call.builder.broadcast(_product(call, a, b), call.shape))


def _divide(call: Call, a: ComplexValue, b: ComplexValue) -> ComplexTensor:
    """Divide by the larger part of the divisor first, because its square may overflow."""
    builder = call.builder
    if is_real(b):
        return ComplexTensor(builder.div(pair_of(call, a), wide_of(call, b)))
    (p, q), (r, s) = parts_of(call, a), parts_of(call, b)
    is_wide = builder.greater(builder.abs(s), builder.abs(r))
    large, small = builder.where(is_wide, s, r), builder.where(is_wide, r, s)
    share = builder.div(small, large)
    size = builder.add(large, builder.mul(small, share))
    # (p + qi) / (r + si) for |r| >= |s|; else that of (q - pi) / (s - ri).
    u, v = builder.where(is_wide, q, p), builder.where(is_wide, builder.neg(p), q)
    flip = builder.where(is_wide, builder.neg(share), share)
    real = builder.add(u, builder.mul(v, flip))
    imaginary = builder.sub(v, builder.mul(u, flip))
    return joined(call, builder.div(real, size), builder.div(imaginary, size))


def _reciprocal(call: Call, x: ComplexTensor) -> ComplexTensor:
    return _divide(call, 1.0 + 0j, x)


def _negative(call: Call, x: ComplexTensor) -> ComplexTensor:
    return ComplexTensor(call.builder.neg(x.pairs))


def _exponential(call: Call, x: ComplexTensor) -> ComplexTensor:
    b, (real, imaginary) = call.builder, parts_of(call, x)
    size = b.exp(real)
    # A real number stays real if its exponential is infinite.
    other = b.where(b.equal(imaginary, 0), imaginary, b.mul(size, b.sin(imaginary)))
    return joined(call, b.mul(size, b.cos(imaginary)), other)


def _power(call: Call, x: ComplexValue, exponent: Any) -> ComplexTensor:
    if isinstance(exponent, bool | int | float) and exponent in (1, 2, 3) and call.is_complex:
        power = result = ComplexTensor(pair_of(call, x))
        for _ in range(int(exponent) - 1):
            result = ComplexTensor(_product(call, result, power))
        return result
    raise CompileError(
        "this power of complex numbers is not supported", expected="an exponent of 1, 2 or 3",
        got=repr(exponent), remedy="use torch.polar(x.abs() ** p, x.angle() * p)",
    )  # fmt: skip


def _equal(differ: bool, call: Call, x: ComplexValue, y: ComplexValue) -> SymbolicTensor:
    b = call.builder
    kind = data_type_of(PART_TYPES[torch.result_type(*call.traced)])
    first, second = (pair_of(call, v, kind) for v in (x, y))
    (p, q), (r, s) = (
        [b.squeeze(part, -1) for part in b.split(pair, 1, -1)] for pair in (first, second)
    )
    same = b.broadcast(b.logical_and(b.equal(p, r), b.equal(q, s)), call.shape)
    return b.logical_not(same) if differ else same


def _where(
    call: Call, condition: SymbolicTensor, a: ComplexValue, b: ComplexValue
) -> ComplexTensor:
    builder, mask = call.builder, truth(call, condition)
    wide = builder.unsqueeze(mask, -1) if mask.shape else mask
    chosen = builder.op("Where", wide, pair_of(call, a), pair_of(call, b))
    return ComplexTensor(builder.broadcast(chosen, call.shape))


# Reductions and matrix products --------------------------------------------------------------


def _reduce(
    kind: str, call: Call, x: ComplexTensor, dim: Any = None, keepdim: bool = False, **_: Any
) -> ComplexTensor:
    pairs, rank = pair_of(call, x), len(x.shape)
    if not rank:
        return ComplexTensor(pairs)
    dims = [dim] if isinstance(dim, int) else dim or range(rank)
    return ComplexTensor(call.builder.reduce(kind, pairs, [d % rank for d in dims], keepdim))


def _matmul(call: Call, a: ComplexValue, b: ComplexValue) -> ComplexTensor:
    """A product of complex matrices as four products of real ones."""
    builder = call.builder
    (p, q), (r, s) = (
        [builder.squeeze(part, -1) for part in parts_of(call, value)] for value in (a, b)
    )
    real = builder.sub(builder.matmul(p, r), builder.matmul(q, s))
    imaginary = builder.add(builder.matmul(p, s), builder.matmul(q, r))
    return ComplexTensor(builder.stack([real, imaginary], -1 % (len(real.shape) + 1)))


def _add_product(
    call: Call, added: ComplexValue, first: ComplexValue, second: ComplexValue, *,
    beta: complex = 1, alpha: complex = 1,
) -> ComplexTensor:  # fmt: skip
    product: ComplexValue = _matmul(call, first, second)
    if alpha != 1:
        product = ComplexTensor(_product(call, product, alpha))
    if beta == 0:
        assert isinstance(product, ComplexTensor)
        return product
    if beta != 1:
        added = ComplexTensor(_product(call, ComplexTensor(pair_of(call, added)), beta))
    return ComplexTensor(call.builder.add(pair_of(call, product), pair_of(call, added)))


_OF_TWO: dict[Any, Lowering] = {
    aten.add: partial(_sum_of_two, 1), aten.sub: partial(_sum_of_two, -1), aten.mul: _multiply,
    aten.div: _divide, aten.eq: partial(_equal, False), aten.ne: partial(_equal, True),
}  # fmt: skip


# Data movement ------------------------------------------------------------------------------------

#: Arguments of schemas that are axes.
_AXES = frozenset(("dim", "dims", "dim0", "dim1"))
#: Arguments of schemas that have an entry for each axis, and the entry for the axis of pairs.
_LENGTHS = {"input_sizes": 2, "repeats": 1}


def _moved(target: Any, *, added: int = 0, whole: bool = False) -> Lowering:
    """A lowering by that for real tensors. `added`: additional axes of the result; `whole`: the
    argument lists all axes."""
    real = _real_lowering(target)
    names = [argument.name for argument in target._schema.arguments]

    def lowered(call: Call, *operands: Any, **named: Any) -> Lowered:
        first = operands[0]
        rank = len((first[0] if isinstance(first, list | tuple) else first).shape) + added

        def converted(name: str, value: Any) -> Any:
            if name in _AXES:
                return _axes(value, rank, whole)
            if name in _LENGTHS:
                return [*value, _LENGTHS[name]]
            return _in_pairs(call, value)

        by_position = [converted(name, value) for name, value in zip(names, operands, strict=False)]
        by_name = {name: converted(name, value) for name, value in named.items()}
        return _as_complex(real(call, *by_position, **by_name))

    return lowered


def _real_lowering(target: Any) -> Lowering:
    for family in (shapes, picked_elements, backward_operators):
        row = family.LOWERINGS.get(target)
        if row is not None:
            return row.lowering if isinstance(row, KeptWhole) else row
    raise AssertionError(f"{target} has no lowering for real tensors")


def _axes(value: Any, rank: int, whole: bool) -> Any:
    if isinstance(value, int):
        return value % max(rank, 1)
    return [*(axis % max(rank, 1) for axis in value), *([rank] if whole else ())]


def _in_pairs(call: Call, value: Any) -> Any:
    if isinstance(value, ComplexTensor):
        return pair_of(call, value)
    if isinstance(value, list | tuple) and any(isinstance(v, ComplexTensor) for v in value):
        return [pair_of(call, v) for v in value]
    return value


def _as_complex(results: Any) -> Lowered:
    if isinstance(results, SymbolicTensor):
        return ComplexTensor(results)
    return [None if result is None else ComplexTensor(result) for result in results]


def _with_both_complex(target: Any) -> Lowering:
    """A lowering that writes a tensor into another one, of which one may be real."""
    lowering = _moved(target)

    def lowered(
        call: Call, x: ComplexValue, source: ComplexValue, *rest: Any, **named: Any
    ) -> Lowered:
        both = [ComplexTensor(pair_of(call, value)) for value in (x, source)]
        return lowering(call, *both, *rest, **named)

    return lowered


def _index_put(
    call: Call, x: ComplexValue, places: Any, source: ComplexValue, accumulate: bool = False
) -> Lowered:
    real = _real_lowering(aten.index_put.default)
    return _as_complex(real(call, pair_of(call, x), places, pair_of(call, source), accumulate))


def _pad(call: Call, x: ComplexTensor, pad: Sequence[int], value: complex = 0) -> Lowered:
    if value != 0:
        raise CompileError(
            "padding of complex numbers is not supported with this value", expected="0",
            got=repr(value), remedy="concatenate a tensor of the value",
        )  # fmt: skip
    real = _real_lowering(aten.constant_pad_nd.default)
    return _as_complex(real(call, pair_of(call, x), [0, 0, *pad]))


# Fourier transforms -------------------------------------------------------------------------------

#: By torch's number of a normalization, the exponent of the element count in the factor.
_EXPONENTS = {0: 0.0, 1: -0.5, 2: -1.0}


def _transformed(
    call: Call, x: SymbolicTensor, axis: int, length: int, **attributes: int
) -> SymbolicTensor:
    lengths = [np.asarray(number, np.int64) for number in (length, axis)]
    return call.builder.apply("DFT", [x, *lengths], 1, attributes)[0]


def _scaled(
    call: Call, x: SymbolicTensor, count: int, normalization: int, *, is_inverse: bool
) -> SymbolicTensor:
    """Apply torch's normalization; ONNX's inverse DFT has already divided by its length."""
    factor = count ** (_EXPONENTS[normalization] + (1.0 if is_inverse else 0.0))
    return x if factor == 1 else call.builder.mul(x, factor)


def _each(call: Call, x: SymbolicTensor, axes: Sequence[int], *, inverse: bool) -> SymbolicTensor:
    for axis in axes:
        x = _transformed(call, x, axis, x.shape[axis], inverse=int(inverse))
    return x


def _complex_to_complex(
    call: Call, x: ComplexTensor, dim: Sequence[int], normalization: int, forward: bool
) -> ComplexTensor:
    axes = [d % len(x.shape) for d in dim]
    result = _each(call, x.pairs, axes, inverse=not forward)
    count = math.prod(x.shape[axis] for axis in axes)
    return ComplexTensor(_scaled(call, result, count, normalization, is_inverse=not forward))


def _real_to_complex(
    call: Call, x: SymbolicTensor, dim: Sequence[int], normalization: int, onesided: bool
) -> ComplexTensor:
    """Transform the last axis first: its input is real, and half of its result is enough."""
    *others, last = (d % len(x.shape) for d in dim)
    wide = call.builder.unsqueeze(call.cast(x), -1)
    half = _transformed(call, wide, last, x.shape[last], onesided=int(onesided))
    count = math.prod(x.shape[axis] for axis in (*others, last))
    result = _each(call, half, others, inverse=False)
    return ComplexTensor(_scaled(call, result, count, normalization, is_inverse=False))


def _complex_to_real(
    call: Call, x: ComplexTensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> SymbolicTensor:
    *others, last = (d % len(x.shape) for d in dim)
    whole = _each(call, x.pairs, others, inverse=True)
    real = _transformed(call, whole, last, last_dim_size, inverse=1, onesided=1)
    count = math.prod(x.shape[axis] for axis in others) * last_dim_size
    result = _scaled(call, real, count, normalization, is_inverse=True)
    return call.builder.squeeze(result, -1)


LOWERINGS: dict[Any, Lowering] = {
    **{packet.Tensor: lowering for packet, lowering in _OF_TWO.items()},
    **{packet.Scalar: lowering for packet, lowering in _OF_TWO.items()},
    aten.complex.default: _complex, aten.polar.default: _polar,
    aten.view_as_complex.default: _view_as_complex, aten.view_as_real.default: _view_as_real,
    aten.abs.default: partial(_of_parts, aten.hypot.default),
    aten.angle.default: partial(_of_parts, aten.atan2.default),
    **dict.fromkeys((
        aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default,
        aten.lift_fresh.default, aten.scalar_tensor.default,
    ), _pairs),
    **dict.fromkeys((
        aten._to_copy.default, torch.ops.prims.convert_element_type.default,
    ), _to_type),
    **dict.fromkeys((
        aten._conj.default, aten._conj_physical.default,
    ), _conjugate),
    **dict.fromkeys(shapes.FILLS, _full), **dict.fromkeys(shapes.ZEROS, _zeros),
    aten.neg.default: _negative, aten._neg_view.default: _negative,
    aten.reciprocal.default: _reciprocal,
    aten.exp.default: _exponential, aten.pow.Tensor_Scalar: _power,
    aten.where.self: _where, aten.sum.dim_IntList: partial(_reduce, "sum"),
    aten.mean.default: partial(_reduce, "mean"), aten.mean.dim: partial(_reduce, "mean"),
    aten.mm.default: _matmul, aten.bmm.default: _matmul, aten.addmm.default: _add_product,
    **{target: _moved(target) for target in (
        aten.view.default, aten.squeeze.dims, aten.unsqueeze.default, aten.expand.default,
        aten.slice.Tensor, aten.select.int, aten.cat.default,
        aten.split_with_sizes.default, aten.flip.default, aten.repeat.default,
        aten.index_select.default, aten.index.Tensor, aten.slice_backward.default,
    )},
    aten.select_backward.default: _moved(aten.select_backward.default, added=1),
    aten.permute.default: _moved(aten.permute.default, whole=True),
    aten.stack.default: _moved(aten.stack.default, added=1),
    aten.slice_scatter.default: _with_both_complex(aten.slice_scatter.default),
    aten.index_put.default: _index_put, aten.constant_pad_nd.default: _pad,
    aten._fft_c2c.default: _complex_to_complex, aten._fft_r2c.default: _real_to_complex,
    aten._fft_c2r.default: _complex_to_real,
}  # fmt: skip
