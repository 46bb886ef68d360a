"""PyTorch's kernels of Stitch's operators, on tensors in planned places, for the CUDA executor.

A kernel returns steps that a CUDA graph can capture: they run on the current stream, wait for
nothing and read no number on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import RLock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from stitch.ops import RESHAPING, are_in_range, pool_windows, row_numbers, slices_of
from stitch.program import Array, Operation
from stitch.runtime.executors.executor import Thunk
from stitch.runtime.executors.torch_executor import CONVOLUTIONS, copy_results, copy_to
from stitch.runtime.executors.torch_executor import KERNELS as ATEN_KERNELS


@dataclass(frozen=True, slots=True)
class TensorCall:
    """An operation on tensors of the compute types.

    Attributes:
        operands: Tensors; None: absent. They are contiguous unless `takes_strides`.
        results: The tensors that it writes, contiguous; none overlaps an operand, but the first of
            an elementwise operation may be one.
        known: The arrays of operands that are constants.
        flag: Returns the steps that note indices out of range, of a tensor and the size of an axis.
    """

    operands: list[Any]
    results: list[torch.Tensor]
    attributes: Mapping[str, Any]
    known: list[Array | None]
    flag: Callable[[torch.Tensor, int], list[Thunk]]

    @property
    def is_floating(self) -> bool:
        """Whether all operands and results are of one floating-point type."""
        kinds = {t.dtype for t in (*self.operands, *self.results) if t is not None}
        return len(kinds) == 1 and self.results[0].dtype.is_floating_point


_ATEN = torch.ops.aten
#: Returns the steps of an operation; None to leave it to NumPy's kernel.
TensorKernel = Callable[[TensorCall], Sequence[Thunk] | None]


def _of(function: Any, *names: str) -> TensorKernel:
    """Of a function that writes into `out`, and the attributes of these names."""

    def bind(call: TensorCall) -> Sequence[Thunk]:
        numbers = [call.attributes[name] for name in names]
        return (partial(function, *call.operands, *numbers, out=call.results[0]),)

    return bind


def _floating(kernel: TensorKernel) -> TensorKernel:
    """Of operands and results of one floating-point type."""
    return lambda call: kernel(call) if call.is_floating else None


def _ordered(kernel: TensorKernel) -> TensorKernel:
    """Of two operands of one type, which PyTorch orders."""

    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        kinds = {t.dtype for t in call.operands}
        is_ordered = len(call.operands) == 2 and len(kinds) == 1 and kinds.isdisjoint(_SIGNED)
        return kernel(call) if is_ordered else None

    return bind


#: Types without arithmetic, and those with the same bits in which sums and products wrap as theirs.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _as_signed(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [t.view(_SIGNED.get(t.dtype, t.dtype)) for t in tensors if t is not None]


def _wrapping(function: Any) -> TensorKernel:
    """Of numbers of one type; whole ones wrap around."""

    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        *operands, out = _as_signed((*call.operands, *call.results))
        kinds = {t.dtype for t in operands}
        if len(kinds) != 1 or (function is not torch.eq and kinds & {torch.bool}):
            return None
        return (partial(function, *operands, out=out),)

    return bind


def _shift(call: TensorCall) -> Sequence[Thunk] | None:
    """Shift by a constant; the sign of a signed type with the same bits is cut off."""
    (x, out), by = _as_signed((call.operands[0], *call.results)), call.known[1]
    bits = 8 * x.itemsize
    if by is None or by.size != 1 or not 0 < int(by.item()) < bits:
        return None
    number, x = int(by.item()), x.expand(out.shape)  # `by` may have more dimensions.
    if call.attributes["direction"] == "LEFT":
        return (partial(torch.bitwise_left_shift, x, number, out=out),)
    shifted = partial(torch.bitwise_right_shift, x, number, out=out)
    return shifted, partial(torch.bitwise_and, out, (1 << (bits - number)) - 1, out=out)


def _is_nan(call: TensorCall) -> Sequence[Thunk] | None:
    return (partial(torch.ne, call.operands[0], call.operands[0], out=call.results[0]),)


def _sign(call: TensorCall) -> Sequence[Thunk] | None:
    x, out = call.operands[0], call.results[0]
    # PyTorch's sign of NaN is 0.
    return (partial(torch.sign, x, out=out), partial(_put_nan, out, x))


def _put_nan(out: torch.Tensor, x: torch.Tensor) -> None:
    out.masked_fill_(torch.isnan(x), torch.nan)


def _where(call: TensorCall) -> Sequence[Thunk] | None:
    _, one, other = call.operands
    if one.dtype is not other.dtype:
        return None
    return (partial(torch.where, *call.operands, out=call.results[0]),)


def _matmul(call: TensorCall) -> Sequence[Thunk] | None:
    (a, b), out = call.operands, call.results[0]
    # A vector is a matrix of one row or column: PyTorch would resize `out` to that.
    if b.ndim == 1:
        b, out = b.unsqueeze(-1), out.unsqueeze(-1)
    if a.ndim == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
    return (partial(torch.matmul, a, b, out=out),)


def _gemm(call: TensorCall) -> Sequence[Thunk] | None:
    a, b, bias = (*call.operands, None)[:3]
    out, given = call.results[0], call.attributes
    a, b = a.t() if given["transA"] else a, b.t() if given["transB"] else b
    alpha, beta = given["alpha"], given["beta"]
    if bias is not None and beta != 0.0:
        return (partial(torch.addmm, bias, a, b, beta=beta, alpha=alpha, out=out),)
    scaled = () if alpha == 1.0 else (partial(torch.mul, out, alpha, out=out),)
    return (partial(torch.mm, a, b, out=out), *scaled)


def _reduction(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        x, given = call.operands[0], call.attributes
        is_exact = x.dtype is torch.int64 and function in (torch.sum, torch.amax, torch.amin)
        if call.results[0].dtype is not x.dtype or not (x.dtype.is_floating_point or is_exact):
            return None
        axes = given.get("axes")
        if len(call.operands) > 1 and call.operands[1] is not None:
            known = call.known[1]
            if known is None:
                return None
            axes = tuple(int(axis) for axis in known.ravel())
        if not axes and given.get("noop_with_empty_axes"):
            return None
        over = tuple(axes or range(x.ndim))
        if not over:
            return None
        keeps = bool(given.get("keepdims", 1))
        return (partial(function, x, dim=over, keepdim=keeps, out=call.results[0]),)

    return bind


def _extreme_index(function: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        given, x = call.attributes, call.operands[0]
        if given["select_last_index"] or x.dtype in _SIGNED:
            return None
        keeps = bool(given["keepdims"])
        return (partial(function, x, given["axis"], keeps, out=call.results[0]),)

    return bind


def _running_sum(call: TensorCall) -> Sequence[Thunk] | None:
    x, axis, given = call.operands[0], call.known[1], call.attributes
    if axis is None or given["exclusive"] or given["reverse"] or x.dtype in _SIGNED:
        return None
    return (partial(torch.cumsum, x, int(axis.item()), dtype=x.dtype, out=call.results[0]),)


def _top(call: TensorCall) -> Sequence[Thunk] | None:
    x, given = call.operands[0], call.attributes
    if call.known[1] is None or len(call.results) != 2 or x.dtype in _SIGNED:
        return None
    axis = given["axis"] % x.ndim

    def sort() -> None:
        # Of equal elements the first ones, which `topk` does not promise.
        made = torch.sort(x, dim=axis, descending=bool(given["largest"]), stable=True)
        for result, whole in zip(call.results, made, strict=True):
            result.copy_(whole.narrow(axis, 0, result.shape[axis]))

    return (sort,)


def _reshape(call: TensorCall) -> Sequence[Thunk] | None:
    (x, *_), out = call.operands, call.results[0]
    return (partial(out.view(x.shape).copy_, x),)


def _expand(call: TensorCall) -> Sequence[Thunk] | None:
    return (partial(call.results[0].copy_, call.operands[0]),)


def _concat(call: TensorCall) -> Sequence[Thunk] | None:
    if len({t.dtype for t in call.operands if t is not None}) != 1:
        return None
    return (partial(torch.cat, call.operands, call.attributes["axis"], out=call.results[0]),)


def _moved(op: str) -> TensorKernel:
    """Of an operator whose results are views of its operand: they are copied."""

    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        x, shapes = call.operands[0], [tuple(result.shape) for result in call.results]
        views = views_of(op, x, shapes, call.attributes, call.known)
        if views is None:
            return None
        return [partial(r.copy_, view) for r, view in zip(call.results, views, strict=True)]

    return bind


def _slice(call: TensorCall) -> Sequence[Thunk] | None:
    x = call.operands[0]
    cut = _cut(x, call.known) or ()
    backward = [axis for axis, part in enumerate(cut) if part.step < 0]
    if len(backward) != 1:
        return _moved("Slice")(call)
    (axis,) = backward
    rows = torch.arange(*cut[axis].indices(x.shape[axis]), device=x.device)
    others = x[(*cut[:axis], slice(None), *cut[axis + 1 :])]
    return _select(others, axis, rows, call.results[0])


def _cut(x: torch.Tensor, known: Sequence[Array | None]) -> tuple[slice, ...] | None:
    """Return the slices of an operand with constant bounds."""
    bounds = [None if array is None else [int(i) for i in array.ravel()] for array in known[1:]]
    starts, ends, axes, steps = (*bounds, None, None)[:4]
    if starts is None or ends is None or None in (bounds[2:]):
        return None
    axes = list(range(len(starts))) if axes is None else [axis % x.ndim for axis in axes]
    steps = steps or [1] * len(starts)
    cut = slices_of(tuple(x.shape), tuple(starts), tuple(ends), tuple(axes), tuple(steps))
    return tuple(slice(c.start, c.stop, 1 if c.step is None else c.step) for c in cut)


def _pad(call: TensorCall) -> Sequence[Thunk] | None:
    (x, out), known = (call.operands[0], call.results[0]), call.known
    (_, pads, value, axes), given = (*known, None, None)[:4], (*call.operands, None, None)[:4]
    is_known = all(given[i] is None or (*known, None, None)[i] is not None for i in (1, 2, 3))
    if pads is None or not is_known or call.attributes["mode"] != "constant":
        return None
    taken, put = [slice(None)] * x.ndim, [slice(None)] * x.ndim
    over = range(x.ndim) if axes is None else [int(axis) % x.ndim for axis in axes]
    for i, axis in enumerate(over):
        begin, end = int(pads[i]), int(pads[i + len(over)])
        size = max(0, x.shape[axis] + min(begin, 0) + min(end, 0))
        taken[axis] = slice(max(-begin, 0), max(-begin, 0) + size)
        put[axis] = slice(max(begin, 0), max(begin, 0) + size)
    filled = partial(out.fill_, 0 if value is None else value.item())
    return filled, partial(out[tuple(put)].copy_, x[tuple(taken)])


def _triangle(call: TensorCall) -> Sequence[Thunk] | None:
    x, diagonal = call.operands[0], (*call.known, None)[1]
    if len(call.operands) > 1 and diagonal is None:
        return None
    function = torch.triu if call.attributes["upper"] else torch.tril
    number = 0 if diagonal is None else int(diagonal.item())
    x, out = _as_signed((x, *call.results))
    return (partial(function, x, number, out=out),)


def _gather_rows(call: TensorCall) -> Sequence[Thunk] | None:
    x, places = call.operands[0], call.known[1]
    if places is None:
        return None
    before, depth = call.attributes["batch_dims"], places.shape[-1]
    sizes = x.shape[: before + depth]
    batch = np.indices(places.shape[:-1])[:before]
    numbers = [*batch, *np.moveaxis(places, -1, 0)]
    if any(((n < -size) | (n >= size)).any() for n, size in zip(numbers, sizes, strict=True)):
        return None  # The host says so.
    wrapped = [n % size for n, size in zip(numbers, sizes, strict=True)]
    rows = torch.from_numpy(np.ravel_multi_index(wrapped, tuple(sizes)).ravel()).to(x.device)
    rest = x.shape[before + depth :]
    out = call.results[0].view(-1, *rest)
    return _select(x.view(-1, *rest), 0, rows, out)


def _gather(call: TensorCall) -> Sequence[Thunk] | None:
    (x, indices), rows = call.operands, call.known[1]
    axis = call.attributes["axis"] % x.ndim
    size = x.shape[axis]
    out = call.results[0].view(*x.shape[:axis], -1, *x.shape[axis + 1 :])
    if rows is None:
        places = torch.empty(indices.shape, dtype=indices.dtype, device=x.device)
        wrapped = partial(torch.remainder, indices, size, out=places)
        return [*call.flag(indices, size), wrapped, *_select(x, axis, places.view(-1), out)]
    if not ((rows >= -size) & (rows < size)).all():
        return None
    flat = torch.from_numpy((rows.ravel() % size).astype(np.int64)).to(x.device)
    return _select(x, axis, flat, out)


def _gather_elements(call: TensorCall) -> Sequence[Thunk] | None:
    x, indices = call.operands
    if x.dtype in _SIGNED:
        return None
    axis = call.attributes["axis"] % x.ndim
    size = x.shape[axis]

    def gather() -> None:
        rows = torch.remainder(indices, size).to(torch.int64)
        torch.gather(x, axis, rows, out=call.results[0])

    return [*call.flag(indices, size), gather]


def _scatter_elements(call: TensorCall) -> Sequence[Thunk] | None:
    x, indices, updates = call.operands
    how, out = call.attributes["reduction"], call.results[0]
    if how not in ("none", "add") or x.dtype in _SIGNED or out.dtype is torch.bool:
        return None
    axis = call.attributes["axis"] % x.ndim
    size = x.shape[axis]
    put = out.scatter_add_ if how == "add" else out.scatter_

    def scatter() -> None:
        out.copy_(x)
        put(axis, torch.remainder(indices, size).to(torch.int64), updates)

    return [*call.flag(indices, size), scatter]


def _scatter_rows(call: TensorCall) -> Sequence[Thunk] | None:
    x, indices, updates = call.operands
    how, out, depth = call.attributes["reduction"], call.results[0], indices.shape[-1]
    if how not in ("none", "add") or x.dtype in _SIGNED or out.dtype is torch.bool:
        return None
    sizes, rest = x.shape[:depth], x.shape[depth:]
    flat, rows = out.view(-1, *rest), updates.reshape(-1, *rest)
    put = flat.index_add_ if how == "add" else flat.index_copy_

    def scatter() -> None:
        out.copy_(x)
        places = torch.zeros_like(indices[..., 0], dtype=torch.int64)
        for i, size in enumerate(sizes):
            places = places * size + torch.remainder(indices[..., i], size)
        put(0, places.view(-1), rows)

    flags = [step for i, size in enumerate(sizes) for step in call.flag(indices[..., i], size)]
    return [*flags, scatter]


def _select(x: torch.Tensor, axis: int, rows: torch.Tensor, out: torch.Tensor) -> Sequence[Thunk]:
    x, out = _as_signed((x, out))
    return (partial(torch.index_select, x, axis, rows, out=out),)


def _window(call: TensorCall) -> Sequence[Thunk] | None:
    x, (base, strides), lengths = call.operands[0], call.known[1:], call.attributes["lengths"]
    if base is None or strides is None:
        return None  # Whether rows are in range is seen on the host.
    first, steps = int(base), [int(stride) for stride in strides]
    if not are_in_range(first, steps, lengths, len(x)):
        return None
    rows = torch.from_numpy(row_numbers(first, steps, lengths).ravel()).to(x.device)
    out = call.results[0].view(-1, *x.shape[1:])
    return _select(x, 0, rows, out)


def _clip(call: TensorCall) -> Sequence[Thunk] | None:
    x, low, high = (*call.operands, None, None)[:3]
    if x.dtype in _SIGNED:
        return None
    if low is None and high is None:
        return (partial(call.results[0].copy_, x),)
    return (partial(torch.clamp, x, low, high, out=call.results[0]),)


def _cast(call: TensorCall) -> Sequence[Thunk] | None:
    x, out = call.operands[0], call.results[0]
    if x.dtype.is_floating_point and not (out.dtype.is_floating_point or out.dtype is torch.bool):
        return None  # NumPy says what becomes of numbers that an integer type does not have.
    return (partial(out.copy_, x),)


def _batch_normalization(call: TensorCall) -> Sequence[Thunk] | None:
    x, scale, shift, running_mean, running_variance = call.operands
    given = call.attributes
    if x.ndim < 2:
        return None

    def normalize() -> None:
        variance, mean = _over_batch(x)
        rest = mean, variance, False, 0.0, given["epsilon"]
        call.results[0].copy_(torch.native_batch_norm(x, scale, shift, *rest)[0])
        kept, running = given["momentum"], (running_mean, running_variance)
        pairs = zip(call.results[1:], running, (mean, variance), strict=False)
        for result, before, now in pairs:
            result.copy_(before * kept + now * (1 - kept))

    if given.get("training_mode"):
        return (normalize,)
    if len(call.results) > 1:
        return None
    unused = {name: call.results[0].new_empty(0) for name in ("save_mean", "save_invstd")}
    function = _ATEN.native_batch_norm.out
    return (
        partial(
            function, x, scale, shift, running_mean, running_variance, False, 0.0,
            given["epsilon"], out=call.results[0], **unused,
        ),
    )  # fmt: skip


def _over_batch(x: torch.Tensor) -> Any:
    return torch.var_mean(x, tuple(i for i in range(x.ndim) if i != 1), correction=0)


def _batch_gradient(call: TensorCall) -> Sequence[Thunk] | None:
    gradient, x, scale, *given = call.operands
    if x.ndim < 2:
        return None

    def put() -> None:
        mean, variance = given if len(given) == 2 else (None, None)
        if mean is None or variance is None:
            variance, mean = _over_batch(x)
        inverse = torch.rsqrt(variance + call.attributes["epsilon"])
        rest = None, None, mean, inverse, True, call.attributes["epsilon"], [True] * 3
        function = _ATEN.native_batch_norm_backward
        copy_results(partial(function, gradient, x, scale, *rest), call.results)

    return (put,)


def _group(call: TensorCall) -> Sequence[Thunk] | None:
    x, scale, shift = call.operands
    if x.ndim < 3:
        return None
    groups = call.attributes.get("num_groups", x.shape[1])
    function = partial(torch.group_norm, x, groups, scale, shift, call.attributes["epsilon"])
    return (partial(copy_to, call.results[0], function),)


def _root_mean_square(call: TensorCall) -> Sequence[Thunk] | None:
    (x, scale), given = call.operands, call.attributes
    if len(call.results) > 1:
        return None
    shape = x.shape[given["axis"] % x.ndim :]
    if scale.shape != shape:
        return None
    function = partial(functional.rms_norm, x, shape, scale, given["epsilon"])
    return (partial(copy_to, call.results[0], function),)


def _hard_sigmoid(call: TensorCall) -> Sequence[Thunk] | None:
    x, out, given = call.operands[0], call.results[0], call.attributes
    return (
        partial(torch.mul, x, given["alpha"], out=out), partial(out.add_, given["beta"]),
        partial(out.clamp_, 0, 1),
    )  # fmt: skip


def _hard_swish(call: TensorCall) -> Sequence[Thunk] | None:
    x, out = call.operands[0], call.results[0]
    # PyTorch's own multiplies by x before it divides by 6: from 6e37 on its results are infinite.
    return partial(_ATEN.hardsigmoid.out, x, out=out), partial(torch.mul, x, out, out=out)


def _windows(call: TensorCall, x: torch.Tensor) -> Any:
    """Return kernel, strides, pads and dilations of a pooling; None if PyTorch has none such."""
    given = call.attributes
    if x.ndim != 4:
        return None
    windows = pool_windows(given, tuple(x.shape[2:]))
    few = all(2 * pad <= size for pad, size in zip(windows.begin, windows.kernel, strict=True))
    # Else a window may have no element, whose index PyTorch makes up.
    few &= all(step <= size for step, size in zip(windows.dilations, x.shape[2:], strict=True))
    is_plain = windows.begin == windows.end and not any(windows.overhang) and few
    sizes = windows.kernel, windows.strides, windows.begin, windows.dilations
    return sizes if is_plain else None


def _max_pool(call: TensorCall) -> Sequence[Thunk] | None:
    x, sizes = call.operands[0], _windows(call, call.operands[0])
    if sizes is None or len(call.results) > 1:
        return None
    out = call.results[0]
    indices = torch.empty(out.shape, dtype=torch.int64, device=out.device)
    function = _ATEN.max_pool2d_with_indices.out
    return (partial(function, x, *sizes, False, out=out, indices=indices),)


def _max_pool_gradient(call: TensorCall) -> Sequence[Thunk] | None:
    gradient, x, _ = call.operands
    sizes = _windows(call, x)
    if sizes is None:
        return None

    def put() -> None:
        indices = _ATEN.max_pool2d_with_indices(x, *sizes, False)[1]
        function = _ATEN.max_pool2d_with_indices_backward.grad_input
        function(gradient, x, *sizes, False, indices, grad_input=call.results[0])

    return (put,)


def _average_pool(call: TensorCall) -> Sequence[Thunk] | None:
    x, sizes = call.operands[0], _windows(call, call.operands[0])
    if sizes is None or max(sizes[3]) > 1:
        return None
    counts = bool(call.attributes["count_include_pad"])
    function = _ATEN.avg_pool2d.out
    return (partial(function, x, *sizes[:3], False, counts, out=call.results[0]),)


def _mean_of_places(call: TensorCall) -> Sequence[Thunk] | None:
    x = call.operands[0]
    if x.ndim < 3:
        return None
    return (partial(torch.mean, x, tuple(range(2, x.ndim)), True, out=call.results[0]),)


def _aten(kernel: Any) -> TensorKernel:
    def bind(call: TensorCall) -> Sequence[Thunk] | None:
        steps: Sequence[Thunk] | None = kernel(call.operands, call.results, call.attributes)
        return steps

    return _floating(bind)


#: Operators that a card may compute in TF32.
PRODUCTS = frozenset((("", "MatMul"), ("", "Gemm"), *CONVOLUTIONS))


#: Held while PyTorch's flags for products are set: another device's thread would see them.
_FLAGS = RLock()


def with_precision(precision: str, call: Thunk) -> None:
    """Call a kernel with PyTorch's flags for float32 products set to `ieee` or `tf32`.

    They belong to the process, and by default convolutions are in TF32: they are as before after
    the call. It takes 2 us, and nothing in a captured graph.
    """
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    with _FLAGS:
        before = products.fp32_precision, convolutions.fp32_precision
        try:
            products.fp32_precision = convolutions.fp32_precision = precision
            call()
        finally:
            products.fp32_precision, convolutions.fp32_precision = before


#: Of the kernels that the executor `torch` has, those that read arrays of the host.
_ON_HOST = {("", "Gemm"), ("", "MatMul"), ("stitch", "BatchNormalizationGradient")}
#: Kernels by domain and operator.
KERNELS: Mapping[tuple[str, str], TensorKernel] = {
    **{key: _aten(kernel) for key, kernel in ATEN_KERNELS.items() if key not in _ON_HOST},
    **{("", op): _floating(_of(getattr(torch, op.lower()))) for op in (
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Div",
        "Exp", "Floor", "Log", "Neg", "Pow", "Reciprocal", "Round", "Sin", "Sinh", "Sqrt", "Tan",
    )},
    **{("", op): _wrapping(function) for op, function in {
        "Add": torch.add, "BitwiseAnd": torch.bitwise_and, "BitwiseNot": torch.bitwise_not,
        "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor, "Equal": torch.eq,
        "Mul": torch.mul, "Sub": torch.sub,
    }.items()},
    **{("", op): _ordered(_of(function)) for op, function in {
        "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le,
        "Max": torch.maximum, "Min": torch.minimum,
    }.items()},
    **{("", op): _of(getattr(torch, f"logical_{op.lower()}"))
       for op in ("And", "Not", "Or", "Xor")},
    **{("", op): _reduction(function) for op, function in {
        "ReduceMax": torch.amax, "ReduceMean": torch.mean, "ReduceMin": torch.amin,
        "ReduceSum": torch.sum, "ReduceL1": partial(torch.linalg.vector_norm, ord=1),
        "ReduceL2": torch.linalg.vector_norm,
        "ReduceLogSumExp": torch.logsumexp,
    }.items()},
    **{("", op): _reshape for op in sorted(RESHAPING)},
    ("", "ArgMax"): _extreme_index(torch.argmax),
    ("", "ArgMin"): _extreme_index(torch.argmin),
    ("", "AveragePool"): _floating(_average_pool),
    ("", "BatchNormalization"): _floating(_batch_normalization),
    ("", "BitShift"): _shift,
    ("", "Cast"): _cast,
    ("", "Clip"): _clip,
    ("", "Concat"): _concat,
    ("", "CumSum"): _running_sum,
    ("", "Elu"): _floating(_of(_ATEN.elu.out, "alpha")),
    ("", "Expand"): _expand,
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather_elements,
    ("", "GatherND"): _gather_rows,
    ("", "Gemm"): _floating(_gemm),
    ("", "GlobalAveragePool"): _floating(_mean_of_places),
    ("", "GroupNormalization"): _floating(_group),
    ("", "HardSigmoid"): _floating(_hard_sigmoid),
    ("", "HardSwish"): _floating(_hard_swish),
    ("", "InstanceNormalization"): _floating(_group),
    ("", "IsNaN"): _is_nan,
    ("", "LeakyRelu"): _floating(_of(_ATEN.leaky_relu.out, "alpha")),
    ("", "MatMul"): _floating(_matmul),
    ("", "MaxPool"): _floating(_max_pool),
    ("", "Mish"): _floating(_of(_ATEN.mish.out)),
    ("", "Pad"): _pad,
    ("", "RMSNormalization"): _floating(_root_mean_square),
    ("", "Relu"): _of(partial(torch.clamp_min, min=0)),
    ("", "ScatterElements"): _scatter_elements,
    ("", "ScatterND"): _scatter_rows,
    ("", "Sign"): _floating(_sign),
    ("", "Selu"): _floating(_of(_ATEN.elu.out, "alpha", "gamma")),
    ("", "Slice"): _slice,
    ("", "Split"): _moved("Split"),
    ("", "TopK"): _top,
    ("", "Transpose"): _moved("Transpose"),
    ("", "Trilu"): _triangle,
    ("", "Where"): _where,
    ("stitch", "BatchNormalizationGradient"): _floating(_batch_gradient),
    ("stitch", "MaxPoolGradient"): _floating(_max_pool_gradient),
    ("stitch", "Window"): _window,
}  # fmt: skip
#: Operators whose result may lie in an operand's place.
IN_PLACE = frozenset((
    "Abs", "Add", "Ceil", "Cos", "Div", "Exp", "Floor", "Log", "Max", "Min", "Mul", "Neg",
    "Reciprocal", "Relu", "Sin", "Sqrt", "Sub",
))  # fmt: skip


# Views --------------------------------------------------------------------------------------------


#: Operators whose kernels read operands with any strides.
_STRIDED = frozenset((
    *RESHAPING, *IN_PLACE, "And", "Cast", "Concat", "Equal", "Expand", "Gather", "Greater", "Less",
    "Not", "Or", "Pow", "Sigmoid", "Slice", "Split", "Tanh", "Transpose", "Where",
))  # fmt: skip


def takes_strides(operation: Operation, operand: torch.Tensor) -> bool:
    """Whether the kernel of an operation reads this operand well as it lies."""
    if operand.is_contiguous() or (not operation.domain and operation.op in _STRIDED):
        return True
    return operation.op == "MatMul" and operand.ndim > 1 and operand.mT.is_contiguous()


#: Operators whose results may be views of their first operand.
VIEWS = frozenset(("", op) for op in (*RESHAPING, "Slice", "Split", "Transpose"))


def views_of(
    op: str, x: torch.Tensor, shapes: Sequence[tuple[int, ...]],
    attributes: Mapping[str, Any], known: Sequence[Array | None],
) -> Sequence[torch.Tensor] | None:  # fmt: skip
    """Return the results of an operator of `VIEWS` as views; None if they have to be copied."""
    if op == "Transpose":
        return (x.permute(attributes.get("perm") or tuple(range(x.ndim))[::-1]),)
    if op == "Split":
        axis = attributes["axis"] % x.ndim
        parts: Sequence[torch.Tensor] = torch.split(x, [shape[axis] for shape in shapes], axis)
        return parts
    if op == "Slice":
        cut = _cut(x, known)
        return (x[cut],) if cut is not None and all(part.step > 0 for part in cut) else None
    with suppress(RuntimeError):
        return (x.view(shapes[0]),) if len(shapes) == 1 else None
    return None
