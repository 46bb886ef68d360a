"""NumPy's ufuncs on symbolic tensors: `np.exp(x)`, `x + y` and `np.add.reduce(x)`.

`ufunc.resolve_dtypes` gives the types of the computation, so promotion is NumPy's (NEP 50: Python
numbers are weak). Operands are cast to these types, then ONNX operations compute the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stitch.errors import CompileError, LayoutError
from stitch.graph.constant_pool import array_of
from stitch.graph.emitter import axes_of, axis_of, data_type_of
from stitch.graph.layer_methods import LayerMethods
from stitch.graph.source_location import mistake, user_location
from stitch.graph.symbolic import NoDataError, SymbolicTensor
from stitch.program import Array, DataType, SymbolicSize, is_symbolic

#: Computes a ufunc on tensors of the types that NumPy computes in.
Compute = Callable[..., Any]
#: Integer types for which ONNX defines sums and matrix products.
_INTEGERS = (DataType.INT32, DataType.INT64, DataType.UINT32, DataType.UINT64)


def call_ufunc(
    builder: LayerMethods,
    ufunc: np.ufunc,
    method: str,
    inputs: tuple[Any, ...],
    arguments: Mapping[str, Any],
) -> Any:
    """Return `ufunc(*inputs)`, or its `reduce`, `accumulate` or `outer`; raise `CompileError`."""
    name = f"numpy.{ufunc.__name__}{'' if method == '__call__' else f'.{method}'}"
    with_out = {k: v for k, v in arguments.items() if v is not None or k == "axis"}
    return checked(name, _METHODS.get(method), (builder, ufunc, *inputs), with_out)


def apply_ufunc(b: LayerMethods, ufunc: np.ufunc, *inputs: Any) -> Any:
    return call_ufunc(b, ufunc, "__call__", inputs, {})


def checked(
    name: str, meaning: Compute | None, inputs: tuple[Any, ...], arguments: Mapping[str, Any]
) -> Any:
    """Call a function; turn what it raises into a `CompileError` that names it."""
    if meaning is None:
        raise unsupported(name)
    try:
        return meaning(*inputs, **arguments)
    except (CompileError, LayoutError) as error:
        if isinstance(error, NoDataError) or "numpy." in error.what:
            raise
        raise CompileError(
            f"{name}: {error.what}", where=error.where or user_location(),
            expected=error.expected, got=error.got, remedy=error.remedy,
        ) from error  # fmt: skip
    except (TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        # Drop the name of our own function from Python's message.
        said = re.sub(r"^[\w.<>]+\(\) ", "", said)
        raise mistake(
            f"{name} on symbolic tensors does not support these arguments: {said}",
            remedy="use the arguments of NumPy's documentation, without out= or order=; compute "
            "the rest outside of the traced function",
        ) from error


def unsupported(name: str) -> CompileError:
    return mistake(
        f"{name} is not supported on symbolic tensors",
        remedy="call it outside of the traced function and pass its result in, or use other "
        "functions; builder.op adds any ONNX operator",
    )


# Types ------------------------------------------------------------------------------------------


def is_weak(value: object) -> bool:
    """Whether a value is a Python number, whose type adapts to the other operand's."""
    return type(value) in (int, float, complex, SymbolicSize)


def dtype_of(value: Any) -> Any:
    """Return the NumPy type of an operand, or its Python type if that is weak."""
    if isinstance(value, SymbolicTensor):
        return value.dtype
    if is_weak(value):
        return int if is_symbolic(value) else type(value)
    if _has_tensors(value):
        return np.result_type(*map(dtype_of, value))
    return _array(value).dtype


def as_tensor(b: LayerMethods, value: Any, dtype: Any = None) -> SymbolicTensor:
    """Convert an operand to a tensor, of type `dtype` if given; nested lists may hold tensors."""
    kind = None if dtype is None else data_type_of(np.dtype(dtype))
    if isinstance(value, SymbolicTensor):
        return value if kind is None else b.cast(value, kind)
    if _has_tensors(value):
        parts = [as_tensor(b, part, common_dtype(*value)) for part in value]
        return as_tensor(b, b.stack(parts), dtype)
    if is_symbolic(value):
        value = int(value)  # As data of a tensor it is a number.
    if isinstance(value, bool | int | float) and kind is not None:
        number = bool(value) if kind is DataType.BOOL else value
        return b.constant(array_of(number, user_location(), kind))
    array = _array(value)
    return b.constant(array if dtype is None else array.astype(dtype, copy=False))


def _array(value: Any) -> Array:
    """Convert an array, a device tensor or nested lists of numbers to an array."""
    listed = np.asarray(value) if isinstance(value, list | tuple | bool | int | float) else value
    return array_of(listed, user_location())


def common_dtype(*values: Any) -> np.dtype[Any]:
    """Return the type to which NumPy promotes these operands."""
    kinds = [dtype_of(value) for value in values]
    # Of a Python number only the type counts.
    weak = [
        0 if is_symbolic(value) else value
        for value, kind in zip(values, kinds, strict=True) if isinstance(kind, type)
    ]  # fmt: skip
    strong = [kind for kind in kinds if not isinstance(kind, type)]
    if weak and strong and all(kind.kind == "V" for kind in strong):
        weak = []
    return np.result_type(*strong, *weak)


def alike(b: LayerMethods, *values: Any) -> list[SymbolicTensor]:
    """Return the operands as tensors of the type to which NumPy promotes them."""
    dtype = common_dtype(*values)
    return [as_tensor(b, value, dtype) for value in values]


def strong(b: LayerMethods, *values: Any) -> list[SymbolicTensor]:
    """Like `alike`, but Python numbers are not weak (as in matrix products)."""
    return alike(b, *[as_tensor(b, value) for value in values])


def _has_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(part, SymbolicTensor) or _has_tensors(part) for part in value
    )


def _loop(ufunc: np.ufunc, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return the types that a ufunc computes in: inputs, then outputs."""
    kinds = [dtype_of(value) for value in inputs]
    strong = [kind for kind in kinds if not isinstance(kind, type)]
    if ufunc.__name__ in _COMPARISONS and any(map(_is_beyond, inputs, kinds[::-1])):
        kinds = [np.dtype(np.float64)] * 2  # An integer out of range of the other type.
    # With types that NumPy does not know (bfloat16), it would promote Python numbers to float32.
    if strong and strong[0].kind == "V":
        kinds = [strong[0] if kind in (int, float) else kind for kind in kinds]
    return ufunc.resolve_dtypes((*kinds, *[None] * ufunc.nout))


def _is_beyond(value: Any, other: Any) -> bool:
    """Whether `value` is a Python integer out of range of the other operand's integer type."""
    if type(value) is not int or isinstance(other, type) or other.kind not in "iu":
        return False
    limits = np.iinfo(other)
    return not limits.min <= value <= limits.max


# Methods of ufuncs ------------------------------------------------------------------------------


def _call(b: LayerMethods, ufunc: np.ufunc, *inputs: Any, dtype: Any = None) -> Any:
    compute = _UFUNCS.get(ufunc.__name__)
    if compute is None:
        raise unsupported(f"numpy.{ufunc.__name__}")
    loop = _loop(ufunc, inputs if dtype is None else [np.dtype(dtype)] * ufunc.nin)
    operands = [as_tensor(b, x, kind) for x, kind in zip(inputs, loop, strict=False)]
    is_negative = type(inputs[-1]) is int and inputs[-1] < 0
    if ufunc.__name__ == "power" and loop[1].kind == "i" and is_negative:
        raise ValueError("integers to negative integer powers are not allowed")
    results = compute(b, *operands)
    if isinstance(results, tuple):
        return tuple(b.cast(r, kind) for r, kind in zip(results, loop[ufunc.nin :], strict=True))
    return b.cast(results, loop[-1])


def _reduce(
    b: LayerMethods, ufunc: np.ufunc, x: Any, axis: Any = 0, dtype: Any = None, **words: Any
) -> SymbolicTensor:
    reduction = _REDUCTIONS.get(ufunc.__name__)
    if reduction is None:
        raise unsupported(f"numpy.{ufunc.__name__}.reduce")
    result: SymbolicTensor = reduction(b, x, axis, dtype=dtype, **words)
    return result


def _accumulate(b: LayerMethods, ufunc: np.ufunc, x: Any, axis: int = 0, dtype: Any = None) -> Any:
    if ufunc.__name__ not in ("add", "multiply"):
        raise unsupported(f"numpy.{ufunc.__name__}.accumulate")
    return accumulated(b, ufunc, x, axis, dtype)


def _outer(b: LayerMethods, ufunc: np.ufunc, x: Any, y: Any) -> Any:
    left, right = as_tensor(b, x), as_tensor(b, y)
    wide = b.reshape(left, (*left.shape, *[1] * right.ndim))
    return _call(b, ufunc, wide, right if isinstance(y, SymbolicTensor) else y)


_METHODS: dict[str, Compute] = {
    "__call__": _call, "reduce": _reduce, "accumulate": _accumulate, "outer": _outer,
}  # fmt: skip


# Reductions -------------------------------------------------------------------------------------


def summed_dtype(ufunc: np.ufunc, dtype: Any) -> Any:
    """Return the type in which NumPy sums or multiplies elements of a type."""
    if np.dtype(dtype).kind == "V":
        return dtype
    return ufunc.resolve_dtypes((None, np.dtype(dtype), None), reduction=True)[-1]


def _sums(op: str, ufunc: np.ufunc, identity: int) -> Compute:
    """Return a reduction by sums or products, in NumPy's accumulator types."""

    def reduce(
        b: LayerMethods, a: Any, axis: Any = None, dtype: Any = None, out: Any = None,
        keepdims: bool = False, initial: Any = None, where: Any = True,
    ) -> SymbolicTensor:  # fmt: skip
        without_out(out)
        kind = summed_dtype(ufunc, dtype_of(as_tensor(b, a))) if dtype is None else np.dtype(dtype)
        x = as_tensor(b, a, kind)
        x = x if where is True else b.where(as_tensor(b, where), x, as_tensor(b, identity, kind))
        if kind == np.bool_:
            counted = b.cast(x, DataType.INT64)
            result = b.cast(b._reduce(op, counted, axis, bool(keepdims)), DataType.BOOL)
        else:
            narrow = x.data_type.dtype.kind in "iu" and x.data_type not in _INTEGERS
            wide = b.cast(x, DataType.INT64) if narrow else x
            result = b.cast(b._reduce(op, wide, axis, bool(keepdims)), x.data_type)
        return result if initial is None else _call(b, ufunc, result, initial)

    return reduce


def _extremes(op: str, ufunc: np.ufunc) -> Compute:
    """Return a reduction by maxima or minima."""

    def reduce(
        b: LayerMethods, a: Any, axis: Any = None, out: Any = None, dtype: Any = None,
        keepdims: bool = False, initial: Any = None, where: Any = True,
    ) -> SymbolicTensor:  # fmt: skip
        without_out(out)
        x = as_tensor(b, a, dtype)
        if where is not True:
            if initial is None:
                raise ValueError("where= requires initial=")
            x = b.where(as_tensor(b, where), x, as_tensor(b, initial, x.dtype))
        axes = axes_of(axis, x.ndim, op)
        if initial is None and any(x.shape[axis] == 0 for axis in axes):
            raise ValueError("a reduction of no elements needs initial=")
        wide = b.cast(x, DataType.INT32) if x.dtype in (np.bool_, np.int16, np.uint16) else x
        if not x.size:
            least = 0 if initial is None else initial  # Without `initial` the result is empty.
            result = b.broadcast(as_tensor(b, least, x.dtype), _reduced_shape(x, axes, keepdims))
        else:
            result = b.cast(b._reduce(op, wide, axis, bool(keepdims)), x.data_type)
        return result if initial is None else _call(b, ufunc, result, initial)

    return reduce


def _reduced_shape(x: SymbolicTensor, axes: Sequence[int], keepdims: bool) -> tuple[int, ...]:
    return tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes)


def _counts(is_all: bool) -> Compute:
    """Return the reduction `all` or `any`."""

    def reduce(
        b: LayerMethods, a: Any, axis: Any = None, out: Any = None, dtype: Any = None,
        keepdims: bool = False, initial: Any = None, where: Any = True,
    ) -> SymbolicTensor:  # fmt: skip
        without_out(out)
        if initial is not None:
            raise TypeError("initial= is not supported")
        x = as_truth(b, as_tensor(b, a))
        asked = b.logical_not(x) if is_all else x
        if where is not True:
            asked = b.logical_and(asked, as_truth(b, as_tensor(b, where)))
        count = b._reduce("ReduceSum", b.cast(asked, DataType.INT64), axis, bool(keepdims))
        return b.equal(count, 0) if is_all else b.greater(count, 0)

    return reduce


def as_truth(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    """Whether each element is not zero."""
    return b.cast(x, DataType.BOOL)


def static(value: Any) -> Any:
    """Return an argument that determines the shape of a result; raise for traced tensors."""
    if isinstance(value, list | tuple):
        return type(value)([static(each) for each in value])
    if not isinstance(value, SymbolicTensor):
        return value
    if value.written is None:
        raise TypeError("the shape of the result depends on the data of a traced tensor")
    return value.written


def without_out(out: Any) -> None:
    """Raise for an `out` array."""
    if out is not None and not (isinstance(out, tuple) and all(each is None for each in out)):
        raise TypeError("out= is not supported: a graph cannot write to an array")


SUM, PRODUCT = _sums("ReduceSum", np.add, 0), _sums("ReduceProd", np.multiply, 1)
MAXIMUM, MINIMUM = _extremes("ReduceMax", np.maximum), _extremes("ReduceMin", np.minimum)
ANY, ALL = _counts(is_all=False), _counts(is_all=True)


_REDUCTIONS: dict[str, Compute] = {
    "add": SUM, "multiply": PRODUCT, "maximum": MAXIMUM, "minimum": MINIMUM,
    "logical_or": ANY, "logical_and": ALL,
}  # fmt: skip


def accumulated(b: LayerMethods, ufunc: np.ufunc, a: Any, axis: int | None, dtype: Any) -> Any:
    """Running sums or products along an axis, or of the flattened tensor."""
    x = as_tensor(b, a)
    x = b.reshape(x, (-1,)) if axis is None else x
    place = axis_of(0 if axis is None else axis, x.ndim, "an accumulation")
    kind = np.dtype(dtype) if dtype is not None else summed_dtype(ufunc, x.dtype)
    x = as_tensor(b, x, kind)
    wide = x if kind.kind in "fV" else b.cast(x, DataType.INT64)
    op = "CumSum" if ufunc is np.add else "CumProd"
    return b.cast(b._one(op, wide, np.asarray(place, np.int64)), x.data_type)


# What each ufunc computes -----------------------------------------------------------------------


def _one(op: str) -> Compute:
    return lambda b, *operands: b._one(op, *operands)


def _named(method: str) -> Compute:
    return lambda b, *operands: getattr(b, method)(*operands)


def _by_kind(*, of_bools: str, otherwise: str) -> Compute:
    """One operator for booleans, another one for numbers."""
    return lambda b, x, y: b._one(of_bools if x.dtype == np.bool_ else otherwise, x, y)


def _in_float64(compute: Compute) -> Compute:
    """Compute in float64 and round once: narrow types lose digits in intermediate results."""

    def wide(b: LayerMethods, *operands: SymbolicTensor) -> SymbolicTensor:
        kind = operands[0].data_type
        return b.cast(compute(b, *[b.cast(x, DataType.FLOAT64) for x in operands]), kind)

    return wide


def _of_floats(op: str) -> Compute:
    """An operator for floats; integers are returned unchanged."""
    return lambda b, x: b._one(op, x) if x.data_type.is_floating else x


def _widened(op: str) -> Compute:
    """An operator that ONNX has for wide integers only; narrow results wrap."""

    def compute(b: LayerMethods, *operands: SymbolicTensor) -> SymbolicTensor:
        kind = operands[0].data_type
        if kind.is_floating or kind in (DataType.INT32, DataType.INT64):
            return b._one(op, *operands)
        return b.cast(b._one(op, *[b.cast(x, DataType.INT64) for x in operands]), kind)

    return compute


def _compared(op: str) -> Compute:
    """A comparison that also takes booleans, and uint64 with int64."""

    def compute(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
        if x.data_type is not y.data_type:  # uint64 and int64: NumPy compares them exactly.
            signed = x if x.dtype.kind == "i" else y
            is_less = op.startswith("Less") if signed is x else op.startswith("Greater")
            of_negative = b.constant(np.asarray(is_less or op == "NotEqual"))
            x, y = [b.cast(b.maximum(t, 0) if t is signed else t, DataType.UINT64) for t in (x, y)]
            return b.where(b.less(signed, 0), of_negative, compute(b, x, y))
        if x.dtype == np.bool_:
            x, y = b.cast(x, DataType.UINT8), b.cast(y, DataType.UINT8)
        return b.not_equal(x, y) if op == "NotEqual" else b._one(op, x, y)

    return compute


def _logical(op: str) -> Compute:
    return lambda b, x, y: b._one(op, as_truth(b, x), as_truth(b, y))


def _floor_divide(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    if not x.data_type.is_floating:
        return _by_other_than_zero(b, b.floordiv, x, y)
    # As in Python: the remainder is exact, so the quotient is; a / b may round up.
    remainder = b._one("Mod", x, y, fmod=1)
    exact = b.round(b.div(b.sub(x, remainder), y))
    lower = b.where(b._signs_differ(remainder, y), b.sub(exact, 1), exact)
    return b.where(b.equal(y, 0), b.div(x, y), lower)


def _by_other_than_zero(
    b: LayerMethods, divide: Compute, x: SymbolicTensor, y: SymbolicTensor
) -> SymbolicTensor:
    """Integer division with 0 for a zero divisor, on which some executors abort the process."""
    known = b.known_data(y)
    if known is not None and known.all():
        result: SymbolicTensor = divide(x, y)
        return result
    is_zero = b.equal(y, 0)
    return b.where(is_zero, 0, divide(x, b.where(is_zero, 1, y)))


def _remainder(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    return b.mod(x, y) if x.data_type.is_floating else _by_other_than_zero(b, b.mod, x, y)


def _divmod(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> Any:
    return _floor_divide(b, x, y), _remainder(b, x, y)


def _fmod(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    if x.data_type.is_floating:
        return b._one("Mod", x, y, fmod=1)

    def left(n: SymbolicTensor, by: SymbolicTensor) -> SymbolicTensor:
        return b.sub(n, b.mul(b._one("Div", n, by), by))

    return _by_other_than_zero(b, left, x, y)


def _trunc(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    return b.where(b.less(x, 0), b.ceil(x), b.floor(x)) if x.data_type.is_floating else x


def _log1p(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    # Kahan: log(u) / (u - 1) cancels the rounding error of u = 1 + x.
    u = b.add(x, 1)
    exact = b.mul(b.log(u), b.div(x, b.sub(u, 1)))
    kept = b._one("Or", b.equal(u, 1), b._one("IsInf", u))
    return b.where(kept, b.where(b.equal(u, 1), x, b.log(u)), exact)


def _expm1(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    u = b.exp(x)
    rest = b.sub(u, 1)
    exact = b.mul(rest, b.div(x, b.log(u)))
    is_far = b.greater(b.abs(x), 1)
    return b.where(b.equal(u, 1), x, b.where(is_far, rest, exact))


def _is_special(op: str) -> Compute:
    def compute(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
        if x.data_type.is_floating:
            return b._one(op, x)
        return b.constant(np.zeros(x.shape, np.bool_))

    return compute


def _is_finite(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    if not x.data_type.is_floating:
        return b.constant(np.ones(x.shape, np.bool_))
    return b.logical_not(b._one("Or", b._one("IsNaN", x), b._one("IsInf", x)))


def _sign_bit(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    x = b.cast(x, DataType.FLOAT32) if x.dtype.itemsize == 2 else x
    bits = DataType.INT64 if x.data_type is DataType.FLOAT64 else DataType.INT32
    return b.less(b._one("BitCast", x, to=bits), 0)


def _copy_sign(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    size = b.abs(x)
    return b.where(_sign_bit(b, y), b.neg(size), size)


def _known_extreme(op: str) -> Compute:
    """The maximum or minimum of two; NaN only if both are."""

    def compute(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
        if not x.data_type.is_floating:
            return b._one({"Max": "Or", "Min": "And"}[op] if x.dtype == np.bool_ else op, x, y)
        found = b._one(op, x, y)
        return b.where(b._one("IsNaN", x), y, b.where(b._one("IsNaN", y), x, found))

    return compute


def _hypot(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    large = b.maximum(b.abs(x), b.abs(y))
    ratio = b.div(b.minimum(b.abs(x), b.abs(y)), b.where(b.equal(large, 0), 1.0, large))
    ratio = b.where(b._one("IsInf", large), b.mul(b.sign(ratio), 0.0), ratio)
    found = b.mul(large, b.sqrt(b.add(b.square(ratio), 1)))
    is_infinite = b._one("Or", b._one("IsInf", x), b._one("IsInf", y))
    return b.where(is_infinite, math.inf, found)


def _arctan2(b: LayerMethods, y: SymbolicTensor, x: SymbolicTensor) -> SymbolicTensor:
    both = b._one("And", b._one("IsInf", x), b._one("IsInf", y))
    # Both infinite: like (±1, ±1); both zero: like (y, ±1).
    up, across = b.where(both, b.sign(y), y), b.where(both, b.sign(x), x)
    is_zero = b._one("And", b.equal(up, 0), b.equal(across, 0))
    one = b.constant(np.ones((), x.dtype))
    across = b.where(is_zero, _copy_sign(b, one, x), across)
    angle = b._one("Atan", b.div(up, across))
    turn = _copy_sign(b, b.constant(np.asarray(math.pi, x.dtype)), y)
    return b.where(_sign_bit(b, across), b.add(angle, turn), angle)


def _log_add_exp(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    gap = b.where(b.equal(x, y), 0.0, b.neg(b.abs(b.sub(x, y))))
    return b.add(b.maximum(x, y), _log1p(b, b.exp(gap)))


def _shift(direction: str) -> Compute:
    def compute(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
        if x.dtype.kind == "u":
            return b._one("BitShift", x, y, direction=direction)
        power = b.cast(
            b._one("Pow", b.constant(np.asarray(2, np.int64)), b.cast(y, DataType.INT64)),
            x.data_type,
        )
        return b.mul(x, power) if direction == "LEFT" else b.floordiv(x, power)

    return compute


def matmul(b: LayerMethods, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
    """The matrix product for any type; of booleans, `or` of `and`s."""
    kind = x.data_type
    if kind.is_floating or kind in _INTEGERS:
        return b.matmul(x, y)
    return b.cast(b.matmul(b.cast(x, DataType.INT64), b.cast(y, DataType.INT64)), kind)


def _scaled(factor: float) -> Compute:
    return lambda b, x: b.mul(x, factor)


def _reciprocal(b: LayerMethods, x: SymbolicTensor) -> SymbolicTensor:
    if x.data_type.is_floating:
        return b.reciprocal(x)
    one = b.constant(np.ones((), x.dtype))
    return _by_other_than_zero(b, lambda n, by: b._one("Div", n, by), one, x)


_COMPARISONS = {
    "equal": "Equal", "not_equal": "NotEqual", "less": "Less", "less_equal": "LessOrEqual",
    "greater": "Greater", "greater_equal": "GreaterOrEqual",
}  # fmt: skip
_UFUNCS: dict[str, Compute] = {
    "add": _by_kind(of_bools="Or", otherwise="Add"), "subtract": _one("Sub"),
    "multiply": _by_kind(of_bools="And", otherwise="Mul"), "divide": _named("div"),
    "floor_divide": _floor_divide, "remainder": _remainder, "fmod": _fmod, "divmod": _divmod,
    "power": _widened("Pow"), "float_power": _named("pow"), "negative": _widened("Neg"),
    "positive": lambda b, x: x, "conjugate": lambda b, x: x,
    "absolute": lambda b, x: x if x.dtype == np.bool_ else b.abs(x), "fabs": _one("Abs"),
    "sign": _one("Sign"),
    "square": lambda b, x: b._one("And" if x.dtype == np.bool_ else "Mul", x, x),
    "reciprocal": _reciprocal, "sqrt": _one("Sqrt"), "cbrt": _in_float64(
        lambda b, x: b.mul(b.sign(x), b.pow(b.abs(x), 1 / 3))),
    "maximum": _by_kind(of_bools="Or", otherwise="Max"),
    "minimum": _by_kind(of_bools="And", otherwise="Min"),
    "fmax": _known_extreme("Max"), "fmin": _known_extreme("Min"), "matmul": matmul,
    "exp": _one("Exp"), "exp2": _in_float64(lambda b, x: b.exp(b.mul(x, math.log(2)))),
    "expm1": _in_float64(_expm1), "log": _one("Log"),
    "log2": _in_float64(lambda b, x: b.div(b.log(x), math.log(2))),
    "log10": _in_float64(lambda b, x: b.div(b.log(x), math.log(10))),
    "log1p": _in_float64(_log1p), "logaddexp": _in_float64(_log_add_exp),
    "sin": _one("Sin"), "cos": _one("Cos"), "tan": _one("Tan"), "arcsin": _one("Asin"),
    "arccos": _one("Acos"), "arctan": _one("Atan"), "sinh": _one("Sinh"), "cosh": _one("Cosh"),
    "tanh": _one("Tanh"), "arcsinh": _one("Asinh"), "arccosh": _one("Acosh"),
    "arctanh": _one("Atanh"), "arctan2": _arctan2, "hypot": _in_float64(_hypot),
    "degrees": _scaled(180 / math.pi), "rad2deg": _scaled(180 / math.pi),
    "radians": _scaled(math.pi / 180), "deg2rad": _scaled(math.pi / 180),
    "floor": _of_floats("Floor"), "ceil": _of_floats("Ceil"), "rint": _of_floats("Round"),
    "trunc": _trunc, "copysign": _copy_sign,
    "signbit": _sign_bit, "isnan": _is_special("IsNaN"), "isinf": _is_special("IsInf"),
    "isfinite": _is_finite, "left_shift": _shift("LEFT"), "right_shift": _shift("RIGHT"),
    **{name: _compared(op) for name, op in _COMPARISONS.items()},
    "logical_and": _logical("And"), "logical_or": _logical("Or"), "logical_xor": _logical("Xor"),
    "logical_not": lambda b, x: b.logical_not(as_truth(b, x)),
    "bitwise_and": _named("logical_and"), "bitwise_or": _named("logical_or"),
    "bitwise_xor": _named("logical_xor"), "invert": _named("logical_not"),
}  # fmt: skip
