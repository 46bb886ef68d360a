"""How numbers of one compute type become numbers of another: the one place that decides it.

`Cast` and the copies between layouts both use it, so they agree bit for bit. NumPy's own cast is
right but for two cases:

* Rounding twice: float64 and integers of 32 and 64 bits go to float16, bfloat16 and the block
  formats by way of float32. There float32 is rounded to odd, so that only the second rounding
  counts (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
  using rounding to odd", 2008).
* Floating to integer: it truncates toward zero. ONNX's Cast leaves numbers out of range, infinity
  and NaN undefined, and processors differ. Here what is out of range saturates and NaN becomes 0.

Types of eight bits and fewer that NumPy lacks have rules of their own: `narrow_conversions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.ops.definition import Thunk
from stitch.ops.types.narrow_conversions import DEFAULT, WIDER, Rounding, narrow_steps, stops
from stitch.program import Array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOAT64 = np.dtype(np.float64)
#: What rounding to odd leaves of float64: 14 bits of fraction. The types rounded to next have at
#: most 10; and the least float32, 2**-149, still holds all 14 where half of bfloat16's least
#: number, 2**-134, lies, so that going on to float32 changes nothing that is left of a number.
_DROPPED_BITS = 52 - 14
#: Below 2**40 a 64-bit integer is an exact float64; above, 24 bits may go and 16 are left.
_DROPPED_INTEGER_BITS = 24
_EXACT_INTEGER = 1 << 40


def workspace_nbytes(source: np.dtype[Any], target: np.dtype[Any], rounds_again: bool) -> int:
    """Bytes per element that `conversion_steps` needs as workspace."""
    if source in WIDER or target in WIDER:
        path = (source, *stops(source, target), target)
        plain = ((a, b) for a, b in pairwise(path) if a not in WIDER and b not in WIDER)
        inner = (workspace_nbytes(a, b, target in WIDER) for a, b in plain)
        # Every stop has 8 bytes an element, so that what comes behind it is aligned.
        return 8 * (len(path) - 1) + max(inner, default=0)
    if _truncates(source, target):
        return 9
    if not _rounds_to_odd(source, target, rounds_again):
        return 0
    return 8 if source == _FLOAT64 else 17


def conversion_steps(
    source: Array,
    out: Array,
    workspace: NDArray[np.uint8],
    *,
    rounds_again: bool,
    rounding: Rounding = DEFAULT,
) -> Sequence[Thunk]:
    """Steps that convert `source` to `out` (flat, same length; they may be the same bytes).

    `rounds_again`: a float32 `out` will be rounded to a type of at most 11 bits of precision.
    `rounding` is how types of ml_dtypes are reached. `workspace` has `workspace_nbytes` for each
    element. Run under `np.errstate(all="ignore")`.
    """
    if source.dtype in WIDER or out.dtype in WIDER:
        return _by_stops(source, out, workspace, rounding)
    if _truncates(source.dtype, out.dtype):
        return _truncation(source, out, workspace)
    if _rounds_to_odd(source.dtype, out.dtype, rounds_again):
        return _rounding_to_odd(source, out, workspace)
    return (partial(np.copyto, out, source, "unsafe"),)


def _by_stops(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> list[Thunk]:
    """By way of types that NumPy converts; only the last step rounds."""
    size, current = source.size, source
    path = stops(source.dtype, out.dtype)
    inner = workspace[8 * size * (len(path) + 1) :]
    steps: list[Thunk] = []
    for index, stop in enumerate(path):
        following = workspace[8 * size * index :][: size * stop.itemsize].view(stop)
        if current.dtype in WIDER:
            steps.append(partial(np.copyto, following, current, "unsafe"))
        else:
            narrow = out.dtype in WIDER
            steps += conversion_steps(current, following, inner, rounds_again=narrow)
        current = following
    if out.dtype in WIDER:
        spare = workspace[8 * size * len(path) :][: 8 * size]
        return [*steps, *narrow_steps(current, out, spare, rounding)]
    return [*steps, *conversion_steps(current, out, inner, rounds_again=False)]


def _truncates(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    return source.kind == "f" and target.kind in "iu"


def _rounds_to_odd(source: np.dtype[Any], target: np.dtype[Any], rounds_again: bool) -> bool:
    # float32 holds integers of 8 and 16 bits exactly.
    wide = source == _FLOAT64 or (source.kind in "iu" and source.itemsize > 2)
    return rounds_again and target == np.float32 and wide


def _rounding_to_odd(source: Array, out: Array, workspace: NDArray[np.uint8]) -> list[Thunk]:
    first = workspace[: 8 * source.size]
    exact: Array = source
    steps: list[Thunk] = []
    if source.dtype != _FLOAT64:
        exact, mask = _numbers_and_mask(workspace[8 * source.size :], source.size)
        steps = _integers_to_odd(source, exact, first.view(np.uint64), mask)
    steps += _sticky(exact.view(np.uint64), first.view(np.uint64), _DROPPED_BITS)
    return [*steps, partial(np.copyto, out, first.view(np.float64), "unsafe")]


def _integers_to_odd(source: Array, out: Array, work: Array, small: Array) -> list[Thunk]:
    """Integers to float64: exact, but those of 40 bits and more are rounded to odd."""
    if source.itemsize < 8:
        return [partial(np.copyto, out, source)]
    bits, limit = source.view(np.uint64), _EXACT_INTEGER
    signed = source.dtype.kind == "i"
    return [
        *_sticky(bits, work, _DROPPED_INTEGER_BITS),
        partial(np.copyto, out, work.view(source.dtype)),
        # -limit <= source < limit, or source < limit, as one comparison without a sign.
        partial(np.add, bits, np.uint64(limit if signed else 0), work),
        partial(np.less, work, np.uint64(2 * limit if signed else limit), small),
        partial(np.copyto, out, source, where=small),
    ]


def _sticky(bits: Array, out: Array, dropped: int) -> list[Thunk]:
    """Clears the low bits; where one was set, the lowest that is left becomes 1.

    That rounds to odd a magnitude with a sign bit and a two's complement number alike.
    """
    low = np.uint64((1 << dropped) - 1)
    return [
        partial(np.bitwise_and, bits, low, out),
        partial(np.add, out, low, out),
        partial(np.bitwise_or, out, bits, out),
        partial(np.bitwise_and, out, ~low, out),
    ]


def _truncation(source: Array, out: Array, workspace: NDArray[np.uint8]) -> list[Thunk]:
    limits = np.iinfo(out.dtype)
    # The largest float64 that still fits: 2**63 - 1 itself is none.
    beyond = float(limits.max) + 1.0 if limits.bits < 64 else float(limits.max)
    largest = float(limits.max) if limits.bits < 64 else float(np.nextafter(beyond, 0.0))
    numbers, mask = _numbers_and_mask(workspace, source.size)
    return [
        partial(np.copyto, numbers, source),
        partial(np.isnan, numbers, mask),
        partial(np.copyto, numbers, 0.0, where=mask),
        partial(np.greater_equal, numbers, beyond, mask),
        partial(np.clip, numbers, float(limits.min), largest, numbers),
        partial(np.copyto, out, numbers, "unsafe"),
        partial(np.copyto, out, out.dtype.type(limits.max), where=mask),
    ]


def _numbers_and_mask(workspace: NDArray[np.uint8], size: int) -> tuple[Array, Array]:
    """`size` float64 and `size` truth values in a workspace."""
    split = size * _FLOAT64.itemsize
    return workspace[:split].view(_FLOAT64), workspace[split : split + size].view(np.bool_)
