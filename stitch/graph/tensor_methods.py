"""Builder methods for elementwise operators and for operators that move elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from stitch.errors import CompileError, UsageError
from stitch.graph.emitter import DataTypeLike, Emitter, axes_of, axis_of, data_type_of
from stitch.graph.source_location import mistake
from stitch.graph.symbolic import Axes, Operand, SymbolicTensor
from stitch.program import (
    Array,
    DataType,
    SymbolicSize,
    is_same_size,
    size_of,
    slice_bounds,
)


def _unary(op: str, says: str) -> Callable[[Any, Operand], SymbolicTensor]:
    """Return a method with docstring `says` that applies a unary operator."""

    def method(self: Emitter, x: Operand) -> SymbolicTensor:
        return self._one(op, x)

    method.__doc__ = says
    return method


def _binary(op: str, says: str) -> Callable[[Any, Operand, Operand], SymbolicTensor]:
    """Return a method with docstring `says` that applies a binary operator."""

    def method(self: Emitter, a: Operand, b: Operand) -> SymbolicTensor:
        return self._one(op, *self._pair(op, a, b))

    method.__doc__ = says
    return method


def _logical(op: str, says: str) -> Callable[[Any, Operand, Operand], SymbolicTensor]:
    """Return a method that applies `op` to booleans and `Bitwise{op}` to integers."""

    def method(self: Emitter, a: Operand, b: Operand) -> SymbolicTensor:
        x, y = self._pair(op, a, b)
        return self._one(op if x.data_type is DataType.BOOL else f"Bitwise{op}", x, y)

    method.__doc__ = f"{says}: logical on booleans, bitwise on integers."
    return method


class ElementwiseMethods(Emitter):
    """Elementwise operators. Two operands broadcast as in NumPy; their data types must agree."""

    __slots__ = ()

    # Arithmetic --------------------------------------------------------------------------------

    add = _binary("Add", "a + b.")
    sub = _binary("Sub", "a - b.")
    mul = _binary("Mul", "a * b.")

    def div(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a / b; raises `CompileError` for integers, whose ONNX Div truncates."""
        x, y = self._pair("Div", a, b)
        if not x.data_type.is_floating:
            raise mistake(
                f"ONNX has no true division of {x.data_type.value}",
                remedy="use // for integers, or cast both operands to float32",
            )
        return self._one("Div", x, y)

    def floordiv(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a // b, rounded towards minus infinity as in Python."""
        x, y = self._pair("FloorDiv", a, b)
        quotient = self._one("Div", x, y)
        if x.data_type.is_floating:
            return self._one("Floor", quotient)
        if x.data_type.value.startswith("uint"):
            return quotient
        remainder = self._one("Sub", x, self._one("Mul", quotient, y))
        too_high = self._signs_differ(remainder, y)
        return self._one("Sub", quotient, self.cast(too_high, x.data_type))

    def mod(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a % b with the sign of b, as in Python."""
        x, y = self._pair("Mod", a, b)
        if not x.data_type.is_floating:
            return self._one("Mod", x, y)
        remainder = self._one("Mod", x, y, fmod=1)
        shifted = self._one("Add", remainder, y)
        return self._one("Where", self._signs_differ(remainder, y), shifted, remainder)

    def _signs_differ(self, remainder: SymbolicTensor, divisor: SymbolicTensor) -> SymbolicTensor:
        """Whether a remainder is not zero and its sign differs from the divisor's."""
        different = self.logical_xor(self.less(remainder, 0), self.less(divisor, 0))
        return self.logical_and(self.not_equal(remainder, 0), different)

    pow = _binary("Pow", "a ** b; the result has the type of a.")
    maximum = _binary("Max", "The elementwise maximum; NaN if either is.")
    minimum = _binary("Min", "The elementwise minimum; NaN if either is.")

    # Comparison and logic ----------------------------------------------------------------------

    equal = _binary("Equal", "a == b, as booleans.")

    def not_equal(self, a: Operand, b: Operand) -> SymbolicTensor:
        """a != b, as booleans."""
        return self._one("Not", self.equal(a, b))

    less = _binary("Less", "a < b, as booleans.")
    less_or_equal = _binary("LessOrEqual", "a <= b, as booleans.")
    greater = _binary("Greater", "a > b, as booleans.")
    greater_or_equal = _binary("GreaterOrEqual", "a >= b, as booleans.")
    logical_and = _logical("And", "a & b")
    logical_or = _logical("Or", "a | b")
    logical_xor = _logical("Xor", "a ^ b")

    def logical_not(self, x: Operand) -> SymbolicTensor:
        """~x: logical on booleans, bitwise on integers."""
        tensor = self.tensor(x)
        is_bool = tensor.data_type is DataType.BOOL
        return self._one("Not" if is_bool else "BitwiseNot", tensor)

    def where(self, condition: Operand, a: Operand, b: Operand) -> SymbolicTensor:
        """a where `condition` is true, else b."""
        return self._one("Where", self.tensor(condition), *self._pair("Where", a, b))

    # Unary -------------------------------------------------------------------------------------

    identity = _unary("Identity", "A copy of x as a value of its own.")
    noop = identity
    neg = _unary("Neg", "-x.")
    abs = _unary("Abs", "|x|.")
    sign = _unary("Sign", "-1, 0 or 1.")
    exp = _unary("Exp", "e to the x.")
    log = _unary("Log", "The natural logarithm.")
    sqrt = _unary("Sqrt", "The square root.")
    reciprocal = _unary("Reciprocal", "1 / x.")

    def rsqrt(self, x: Operand) -> SymbolicTensor:
        """1 / sqrt(x)."""
        return self._one("Reciprocal", self._one("Sqrt", x))

    def square(self, x: Operand) -> SymbolicTensor:
        """x * x."""
        tensor = self.tensor(x)
        return self._one("Mul", tensor, tensor)

    sin = _unary("Sin", "The sine.")
    cos = _unary("Cos", "The cosine.")
    floor = _unary("Floor", "x rounded down.")
    ceil = _unary("Ceil", "x rounded up.")
    round = _unary("Round", "x rounded to the nearest integer, halves to even.")
    erf = _unary("Erf", "The error function.")

    def clip(
        self, x: Operand, low: Operand | None = None, high: Operand | None = None
    ) -> SymbolicTensor:
        """x limited to [low, high]; either bound may be absent."""
        tensor = self.tensor(x)
        bounds = [None if b is None else self.tensor(b, tensor) for b in (low, high)]
        if any(b is not None and b.shape != () for b in bounds):
            clipped = tensor if low is None else self.maximum(tensor, low)
            return clipped if high is None else self.minimum(clipped, high)
        return self._one("Clip", tensor, *bounds)

    # Activations -------------------------------------------------------------------------------

    relu = _unary("Relu", "max(x, 0).")

    def leaky_relu(self, x: Operand, alpha: float = 0.01) -> SymbolicTensor:
        """x where x > 0, else alpha x."""
        return self._one("LeakyRelu", x, alpha=alpha)

    def gelu(self, x: Operand, approximate: str = "none") -> SymbolicTensor:
        """x times the normal distribution function of x; `approximate` is `none` or `tanh`."""
        return self._one("Gelu", x, approximate=None if approximate == "none" else approximate)

    sigmoid = _unary("Sigmoid", "1 / (1 + exp(-x)).")
    tanh = _unary("Tanh", "The hyperbolic tangent.")

    def elu(self, x: Operand, alpha: float = 1.0) -> SymbolicTensor:
        """x where x > 0, else alpha (exp(x) - 1)."""
        return self._one("Elu", x, alpha=None if alpha == 1.0 else alpha)

    def silu(self, x: Operand) -> SymbolicTensor:
        """x sigmoid(x)."""
        tensor = self.tensor(x)
        return self._one("Mul", tensor, self._one("Sigmoid", tensor))

    softplus = _unary("Softplus", "log(1 + exp(x)).")

    def dropout(self, x: Operand, rate: float = 0.5) -> SymbolicTensor:
        """Dropout for inference: returns x. A graph with a rate above 0 cannot be trained."""
        if not 0 <= rate < 1:
            raise UsageError("a rate of dropout is at least 0 and below 1", got=repr(rate))
        return self._one("Dropout", x, np.float32(rate))

    def cast(self, x: Operand, data_type: DataTypeLike) -> SymbolicTensor:
        """Convert x to another data type: a `DataType`, its name, or a NumPy type."""
        tensor, wanted = self.tensor(x), data_type_of(data_type)
        if tensor.data_type is wanted:
            return tensor
        return self._one("Cast", tensor, to=wanted)

    def activation(self, x: Operand, name: str | None) -> SymbolicTensor:
        """Apply an activation by name: relu, gelu, sigmoid, tanh, elu, silu, identity or none."""
        allowed = {
            "relu": self.relu, "gelu": self.gelu, "sigmoid": self.sigmoid, "tanh": self.tanh,
            "elu": self.elu, "silu": self.silu, "identity": self.identity,
        }  # fmt: skip
        if name is None or name == "none":
            return self.tensor(x)
        if name not in allowed:
            raise mistake(f"unknown activation {name!r}", expected=", ".join([*allowed, "none"]))
        return allowed[name](x)


# Indexing: `tensor[key]` with NumPy's rules, from the shape alone --------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """An index as ONNX operations, in order: slice, gather, drop axes, insert axes.

    Attributes:
        axes, starts, ends, steps: Arguments of ONNX Slice.
        dropped: Axes of the sliced tensor to remove.
        new_axes: Axes of the result to insert.
        gathered: Pairs of an axis of the sliced tensor and its index array.
        place: Axis of the result before which the axes of the index arrays go.
    """

    axes: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    steps: tuple[int, ...]
    dropped: tuple[int, ...]
    new_axes: tuple[int, ...]
    gathered: tuple[tuple[int, Any], ...]
    place: int


def selection_of(shape: tuple[int, ...], key: object) -> Selection:
    """Translate a NumPy index of a tensor of that shape; raise `CompileError` if it is invalid."""
    parts = _expanded(key if isinstance(key, tuple) else (key,), shape)
    # NumPy treats integers beside index arrays as 0-d index arrays.
    has_arrays = any(not _is_basic(part) for part in parts)
    slices: list[tuple[int, int, int, int]] = []
    dropped: list[int] = []
    new_axes: list[int] = []
    gathered: list[tuple[int, Any]] = []
    at: list[int] = []
    axis = position = kept = 0
    for number, part in enumerate(parts):
        if part is None:
            new_axes.append(position)
            position += 1
            continue
        length = shape[axis]
        if isinstance(part, slice):
            start, end, step = _slice(part, length)
            # Whether a bound is the axis's own depends on sizes: the passes remove such slices.
            if step != 1 or part.start is not None or part.stop is not None:
                slices.append((axis, start, end, step))
            position, kept = position + 1, kept + 1
        elif _is_basic(part) and not has_arrays:
            place = _place(size_of(part), length, axis)
            slices.append((axis, place, place + 1, 1))
            dropped.append(axis)
        else:
            gathered.append((axis, indices_of(part, length, axis)))
            at.append(number)
            if len(at) == 1:
                before, first = position, kept
        axis += 1
    place = 0
    if gathered:
        is_together = at[-1] - at[0] == len(at) - 1
        place = first if is_together else 0
        rank = len(np.broadcast_shapes(*[tuple(indices.shape) for _, indices in gathered]))
        begin = before if is_together else 0
        new_axes = [n + rank if n >= begin else n for n in new_axes]
    axes, starts, ends, steps = (tuple(part[i] for part in slices) for i in range(4))
    return Selection(
        axes, starts, ends, steps, tuple(dropped), tuple(new_axes), tuple(gathered), place
    )


def _is_basic(part: object) -> bool:
    """Whether a part of an index is no index array."""
    is_number = isinstance(part, int | np.integer | SymbolicSize)
    is_number = is_number and not isinstance(part, bool | np.bool_)
    return part is None or isinstance(part, slice) or is_number


def _expanded(key: tuple[object, ...], shape: tuple[int, ...]) -> list[object]:
    """Return the index with `...` and masks expanded, one part per axis."""
    written: list[object] = []
    for part in key:
        array = np.asarray(part) if isinstance(part, list | np.ndarray) else None
        if array is not None and array.dtype == np.bool_ and array.ndim > 1:
            used = sum(1 for p in written if p is not None and not isinstance(p, EllipsisType))
            if array.shape != shape[used : used + array.ndim] or EllipsisType in map(type, written):
                raise _refused(
                    f"a mask of shape {list(array.shape)}",
                    f"use a mask of the tensor's shape {list(shape)}",
                )
            written.extend(np.nonzero(array))
        else:
            written.append(part)
    return _with_dots(tuple(written), len(shape))


def _with_dots(key: tuple[object, ...], rank: int) -> list[object]:
    """Return the index with `...` expanded."""
    dots = [i for i, part in enumerate(key) if isinstance(part, EllipsisType)]
    used = sum(1 for part in key if part is not None and not isinstance(part, EllipsisType))
    if len(dots) > 1 or used > rank:
        raise mistake(
            "this index does not fit the tensor",
            expected=f"at most {rank} indices and one '...'",
            got=repr(key),
        )
    at = dots[0] if dots else len(key)
    return [*key[:at], *[slice(None)] * (rank - used), *key[at + 1 :]]


def _slice(part: slice, length: int) -> tuple[int, int, int]:
    """Return start, end and step for ONNX; an end before the first element is -length - 1."""
    try:
        start, end, step, count = slice_bounds(part, length)
    except (TypeError, ValueError) as error:
        raise _refused(f"the slice {part!r}", f"use whole numbers ({error})") from error
    if count == 0:
        return 0, 0, 1
    return start, (end if end >= 0 else -length - 1), step


def _place(index: int, length: int, axis: int) -> int:
    if not -length <= index < length:
        raise mistake(
            f"index {index} is outside axis {axis}",
            expected=f"{-length} to {length - 1}" if length else "an axis that is not empty",
        )
    return index + length if index < 0 else index


def indices_of(part: object, length: int, axis: int) -> Any:
    """Return an index list as a checked int64 array; a symbolic integer tensor as it is."""
    if isinstance(part, SymbolicTensor):
        if part.dtype.kind in "iu":
            return part
        raise _refused(
            f"an index of type {part.data_type.value}",
            "the shape of a masked tensor depends on data: use where(mask, x, 0), or cast to int64",
        )
    if _is_basic(part):
        return np.asarray(_place(int(part), length, axis), np.int64)  # type: ignore[call-overload]
    if not isinstance(part, np.ndarray | Sequence) or isinstance(part, str):
        raise _refused(f"the index {part!r}", "use integers, slices, '...', None or lists")
    indices: Array = np.asarray(part)
    if indices.size == 0:
        indices = indices.astype(np.int64)
    if indices.dtype == np.bool_ and indices.shape == (length,):
        indices = np.flatnonzero(indices)
    if indices.dtype.kind not in "iu":
        raise _refused(f"an index of type {indices.dtype}", "use integers")
    for index in indices.reshape(-1):
        _place(int(index), length, axis)
    indices = indices.astype(np.int64)
    is_negative = indices < 0
    return np.where(is_negative, indices + length, indices) if is_negative.any() else indices


def _refused(what: str, remedy: str) -> CompileError:
    return mistake(f"{what} cannot be used to index a tensor", remedy=remedy)


class ShapeMethods(ElementwiseMethods):
    """Operators that move elements without changing them."""

    __slots__ = ()

    def reshape(self, x: Operand, shape: int | Sequence[int]) -> SymbolicTensor:
        """Return the same elements in another shape; one dimension may be -1."""
        tensor = self.tensor(x)
        wanted = [size_of(d) for d in (shape if isinstance(shape, Iterable) else [shape])]
        rest = math.prod(d for d in wanted if d != -1)
        if wanted.count(-1) == 1 and rest > 0 and tensor.size % rest == 0:
            wanted[wanted.index(-1)] = tensor.size // rest
        if any(d < 0 for d in wanted) or math.prod(wanted) != tensor.size:
            raise mistake(
                "a reshape must keep the number of elements",
                expected=f"{tensor.size} elements, as in {list(tensor.shape)}",
                got=str(list(shape) if isinstance(shape, Sequence) else shape),
            )
        return self._one("Reshape", tensor, wanted, allowzero=1 if 0 in wanted else None)

    def flat(self, x: Operand) -> SymbolicTensor:
        """Join all axes but the first: NxCxHxW becomes N x (C H W)."""
        return self._one("Flatten", x)

    def flatten(self, x: Operand, start: int = 1, end: int = -1) -> SymbolicTensor:
        """Join the axes from `start` to `end` (inclusive); by default all but the first."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        if rank == 0:
            return self.reshape(tensor, (1,))
        if rank == 1 and start == 1:
            return tensor
        first, last = axis_of(start, rank, "flatten"), axis_of(end, rank, "flatten")
        joined = math.prod(tensor.shape[first : last + 1])
        return self.reshape(tensor, (*tensor.shape[:first], joined, *tensor.shape[last + 1 :]))

    def transpose(self, x: Operand, axes: Sequence[int] | None = None) -> SymbolicTensor:
        """Permute axes; reverse them by default."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        order = axes_of(axes, rank, "transpose") if axes is not None else tuple(range(rank))[::-1]
        if len(order) != rank:
            raise mistake("transpose must name every axis", expected=f"{rank} axes", got=str(axes))
        return self._one("Transpose", tensor, perm=order) if rank > 1 else tensor

    def swapaxes(self, x: Operand, first: int, second: int) -> SymbolicTensor:
        """Exchange two axes (torch's transpose)."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        order = list(range(rank))
        a, b = axis_of(first, rank, "swapaxes"), axis_of(second, rank, "swapaxes")
        order[a], order[b] = order[b], order[a]
        return self.transpose(tensor, order)

    def squeeze(self, x: Operand, axis: Axes = None) -> SymbolicTensor:
        """Remove the given axes of length 1, or all of them."""
        tensor = self.tensor(x)
        rank = len(tensor.shape)
        if axis is None:
            axes = tuple(i for i, d in enumerate(tensor.shape) if d == 1)
        else:
            axes = axes_of(axis, rank, "squeeze")
        return self._one("Squeeze", tensor, list(axes)) if axes else tensor

    def unsqueeze(self, x: Operand, axis: int | Sequence[int]) -> SymbolicTensor:
        """Insert axes of length 1; `axis` counts in the result."""
        tensor = self.tensor(x)
        count = 1 if isinstance(axis, int) else len(axis)
        axes = axes_of(axis, len(tensor.shape) + count, "unsqueeze")
        return self._one("Unsqueeze", tensor, list(axes))

    def broadcast(self, x: Operand, shape: Sequence[int]) -> SymbolicTensor:
        """Broadcast to a shape by NumPy's rule; raise `CompileError` if it does not fit."""
        tensor, wanted = self.tensor(x), tuple(size_of(d) for d in shape)
        padded = (1,) * (len(wanted) - len(tensor.shape)) + tensor.shape
        if len(padded) != len(wanted) or any(
            not (is_same_size(d, w) or d in (1, w)) or w < 0
            for d, w in zip(padded, wanted, strict=True)
        ):
            raise mistake(
                "a tensor broadcasts only along axes of length 1",
                expected=f"a shape ending in {list(tensor.shape)}",
                got=str(list(wanted)),
            )
        return self._one("Expand", tensor, list(wanted))

    def concat(self, tensors: Sequence[Operand], axis: int = 0) -> SymbolicTensor:
        """Join tensors of one data type along an axis."""
        like = next((t for t in tensors if isinstance(t, SymbolicTensor)), None)
        parts = [self.tensor(t, like) for t in tensors]
        if not parts:
            raise mistake("concat needs at least one tensor, got none")
        self._same_type("Concat", parts)
        return self._one("Concat", *parts, axis=axis_of(axis, len(parts[0].shape), "concat"))

    def stack(self, tensors: Sequence[Operand], axis: int = 0) -> SymbolicTensor:
        """Join tensors of one shape along a new axis."""
        return self.concat([self.unsqueeze(t, axis) for t in tensors], axis)

    def split(
        self, x: Operand, sizes: int | Sequence[int], axis: int = 0
    ) -> tuple[SymbolicTensor, ...]:
        """Split along an axis into parts of these sizes, or of `sizes` elements each (torch)."""
        tensor = self.tensor(x)
        place = axis_of(axis, len(tensor.shape), "split")
        length = tensor.shape[place]
        if isinstance(sizes, int):
            whole = max(1, sizes)
            sizes = [min(whole, length - start) for start in range(0, length, whole)] or [0]
        if sum(sizes) != length or min(sizes, default=-1) < 0:
            raise mistake(
                "the sizes of a split must add up to the length of the axis",
                expected=f"sizes that add up to {length}",
                got=str(list(sizes)),
            )
        return self.apply("Split", [tensor, list(sizes)], len(sizes), {"axis": place})

    def chunk(self, x: Operand, count: int, axis: int = 0) -> tuple[SymbolicTensor, ...]:
        """Split along an axis into `count` parts; the last may be smaller (torch's chunk)."""
        tensor = self.tensor(x)
        length = tensor.shape[axis_of(axis, len(tensor.shape), "chunk")]
        return self.split(tensor, -(-length // max(1, count)), axis)

    def gather(self, x: Operand, indices: Operand, axis: int = 0) -> SymbolicTensor:
        """Select slices along an axis by index (ONNX Gather, `numpy.take`)."""
        tensor = self.tensor(x)
        place = axis_of(axis, len(tensor.shape), "gather")
        return self._one("Gather", tensor, self._indices(indices), axis=place)

    def window_rows(
        self, x: Operand, base: Operand, strides: Operand | Sequence[int], lengths: Sequence[int]
    ) -> SymbolicTensor:
        """Select rows `base + i * strides[0] + j * strides[1] + ...` for each index of `lengths`.

        A row out of range raises `TaskError` at run time.
        """
        operands = [x, self._indices(base), self._indices(strides)]
        words = {"lengths": [int(n) for n in lengths]}
        return self.apply("Window", operands, 1, words, "stitch")[0]

    def gather_elements(self, x: Operand, indices: Operand, axis: int = 0) -> SymbolicTensor:
        """Select one element per index along an axis (ONNX GatherElements, torch's gather)."""
        tensor = self.tensor(x)
        place = axis_of(axis, len(tensor.shape), "gather_elements")
        return self._one("GatherElements", tensor, self._indices(indices), axis=place)

    def _indices(self, indices: Operand | Sequence[int]) -> SymbolicTensor:
        if isinstance(indices, SymbolicTensor):
            return indices
        return self.tensor(np.asarray(indices, np.int64))

    def slice(
        self,
        x: Operand,
        starts: Sequence[int],
        ends: Sequence[int],
        axes: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
    ) -> SymbolicTensor:
        """Select `starts` to `ends` along some axes (ONNX Slice)."""
        places = list(range(len(starts))) if axes is None else list(axes)
        return self._one("Slice", x, list(starts), list(ends), places, list(steps or ()) or None)

    def reverse(self, x: Operand, axis: Axes = 0) -> SymbolicTensor:
        """Reverse the order of elements along one or more axes."""
        tensor = self.tensor(x)
        axes = axes_of(axis, len(tensor.shape), "reverse")
        if not axes:
            return tensor
        ends = [-tensor.shape[a] - 1 for a in axes]
        return self.slice(tensor, [-1] * len(axes), ends, axes, [-1] * len(axes))

    def topk(
        self, x: Operand, k: int, axis: int = -1, largest: bool = True, sorted: bool = True
    ) -> tuple[SymbolicTensor, SymbolicTensor]:
        """Return the k largest (or smallest) elements along an axis, and their int64 indices."""
        tensor = self.tensor(x)
        place = axis_of(axis, len(tensor.shape), "topk")
        attributes = {"axis": place, "largest": int(largest), "sorted": int(sorted)}
        values, places = self.apply("TopK", [tensor, [k]], 2, dict(attributes))
        return values, places

    def index(self, x: SymbolicTensor, key: object) -> SymbolicTensor:
        """Return `x[key]`; see `selection_of`."""
        chosen = selection_of(x.shape, key)
        result = x
        if chosen.axes:
            steps = chosen.steps if set(chosen.steps) != {1} else None
            result = self.slice(result, chosen.starts, chosen.ends, chosen.axes, steps)
        if chosen.gathered:
            result = self._elements(result, chosen.gathered, chosen.place)
        if chosen.dropped:
            result = self._one("Squeeze", result, list(chosen.dropped))
        if chosen.new_axes:
            result = self._one("Unsqueeze", result, list(chosen.new_axes))
        return result

    def _elements(
        self, x: SymbolicTensor, gathered: Sequence[tuple[int, Operand]], place: int
    ) -> SymbolicTensor:
        """Select the elements of index arrays; their axes come before axis `place` of the rest."""
        numbers = [self.cast(self._indices(indices), DataType.INT64) for _, indices in gathered]
        if len(numbers) == 1:
            return self._one("Gather", x, numbers[0], axis=gathered[0][0])
        named = [axis for axis, _ in gathered]
        wide = np.broadcast_shapes(*[each.shape for each in numbers])
        together = self.stack([self.broadcast(each, wide) for each in numbers], len(wide))
        others = [axis for axis in range(len(x.shape)) if axis not in named]
        found = self._one("GatherND", self.transpose(x, [*named, *others]), together)
        rank, count = len(wide), len(wide) + len(others)
        order = [*range(rank, rank + place), *range(rank), *range(rank + place, count)]
        return self.transpose(found, order) if place and rank else found
