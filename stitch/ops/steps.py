"""Prepared steps that many kernels share: copies, fills, chunked chains, checked indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.definition import Kernel, KernelArguments, Thunk
from stitch.ops.workspaces import workspace
from stitch.program import Array

#: Elements per chunk of a chain of steps: all its arrays stay in the second-level cache.
CHUNK_SIZE = 32768
#: Kernels with intermediate arrays process pieces that take about this many bytes.
PIECE_NBYTES = 1 << 22

Work = tuple[Array, ...]
#: Builds the steps of one flat chunk from source, out, workspaces, and attributes by name.
Chain = Callable[..., Sequence[Thunk]]


def scalar(value: float, like: Array) -> Array:
    """Return a number as a 0-d array (faster in a ufunc than a Python number); may overflow."""
    with np.errstate(over="ignore"):
        return np.array(value, like.dtype)


def reciprocal_step(x: Array, out: Array) -> Thunk:
    """Return the step out = 1 / x; same bits as `np.reciprocal` in half the time."""
    return partial(np.divide, scalar(1, x), x, out)


@cache
def _zeros(kind: np.dtype[Any]) -> Array:
    array = np.zeros(4 * CHUNK_SIZE, kind)
    array.flags.writeable = False
    return array


def zero(like: Array) -> Array:
    """Return zero as an operand of `maximum` and `minimum`, which are slow on a single number:
    an array of zeros for arrays of up to four chunks."""
    zeros = _zeros(like.dtype)
    if like.size > zeros.size or not like.flags.c_contiguous:
        return scalar(0, like)
    return zeros[: like.size].reshape(like.shape)


def same_memory(a: Array, b: Array) -> bool:
    """Return whether two dense arrays are the same bytes."""
    return a.nbytes == b.nbytes and a.ctypes.data == b.ctypes.data


def overlaps(out: Array, *sources: Array | None) -> bool:
    """Return whether writing `out` may change one of the sources."""
    return any(s is not None and np.may_share_memory(out, s) for s in sources)


def pieces_of(count: int, nbytes: int) -> Iterator[slice]:
    """Yield slices of `count` items of `nbytes` bytes each, about `PIECE_NBYTES` at a time.

    >>> list(pieces_of(5, PIECE_NBYTES // 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return slice_range(count, max(1, PIECE_NBYTES // max(1, nbytes)))


def slice_range(count: int, at_once: int) -> Iterator[slice]:
    """Yield slices of `count` items, `at_once` at a time."""
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def chunks(size: int, workspaces: int, dtype: np.dtype[Any]) -> Iterator[tuple[slice, Work]]:
    """Yield cache-sized slices of flat arrays of `size` elements, each with its workspaces."""
    work = tuple(workspace(min(size, CHUNK_SIZE), dtype) for _ in range(workspaces))
    for part in slice_range(size, CHUNK_SIZE):
        yield part, tuple(w[: part.stop - part.start] for w in work)


def copy_steps(source: Array, out: Array) -> tuple[Thunk, ...]:
    """Copy or convert `source`, broadcast, into `out`; no step if they are the same array."""
    if source.dtype == out.dtype and source.shape == out.shape and same_memory(source, out):
        return ()
    return (partial(np.copyto, out, source, "unsafe"),)


def fill_step(out: Array, value: float) -> Thunk:
    """Fill an array with one number."""
    return partial(np.copyto, out, np.array(value).astype(out.dtype))


def chain_kernel(workspaces: int, build: Chain) -> Kernel:
    """Return the kernel of an elementwise operator with one operand and several steps.

    Chunks share their workspaces, so that a chain reads and writes main memory once. The output
    may be the input.
    """

    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = arguments.operand(0).reshape(-1), arguments.outputs[0].reshape(-1)
        steps: list[Thunk] = []
        for part, work in chunks(out.size, workspaces, out.dtype):
            steps += build(source[part], out[part], work, **arguments.attributes)
        return steps

    return kernel


def mask_in(work: Array) -> Array:
    """Return a boolean array, one element per element of `work`, in its memory."""
    return work.view(np.bool_)[: work.size]


def polynomial(coefficients: Sequence[float], x: Array, out: Array) -> list[Thunk]:
    """Evaluate a polynomial by Horner's rule, highest power first; `out` must not be `x`."""
    first, second, *others = coefficients
    steps: list[Thunk] = [
        partial(np.multiply, x, scalar(first, x), out),
        partial(np.add, out, scalar(second, x), out),
    ]
    for coefficient in others:
        steps.append(partial(np.multiply, out, x, out))
        steps.append(partial(np.add, out, scalar(coefficient, x), out))
    return steps


def check_indices(op: str, indices: Array, size: int, out: Array) -> None:
    """Write `indices` to `out`, negative ones counted from the end.

    Raises:
        TaskError: An index is out of range.
    """
    if indices.size:
        least, most = int(indices.min()), int(indices.max())
        if least < -size or most >= size:
            raise TaskError(
                f"{op}: an index is out of range",
                expected=f"{-size} to {size - 1}" if size else "no index: axis of size 0",
                got=str(least if least < -size else most),
            )
        if least < 0:
            np.add(indices, np.where(indices < 0, size, 0), out, casting="unsafe")
            return
    np.copyto(out, indices)


def check_range(op: str, what: str, numbers: Array, most: int) -> None:
    """Raise `TaskError` unless all numbers are from 0 to `most`; -1: there must be none."""
    if numbers.size and not 0 <= numbers.min() <= numbers.max() <= most:
        raise TaskError(
            f"{op}: {what} is out of range",
            expected=f"0 to {most}" if most >= 0 else "no index: axis of size 0",
            got=f"{numbers.min()} to {numbers.max()}",
        )


def index_steps(op: str, indices: Array, size: int, fixed: bool) -> tuple[Array, Sequence[Thunk]]:
    """Return checked, non-negative indices and the steps that refresh them (none if `fixed`)."""
    checked = np.empty(indices.shape, np.intp)
    return checked, bound([partial(check_indices, op, indices, size, checked)], fixed)


def along(values: Array, axis: int, rank: int) -> Array:
    """Reshape a vector to `rank` dimensions along one axis, to broadcast."""
    return values.reshape(*(1,) * axis, -1, *(1,) * (rank - 1 - axis))


def bound(steps: Sequence[Thunk], fixed: bool) -> Sequence[Thunk]:
    """Return the steps; if their operands are `fixed`, run them now and return none."""
    if not fixed:
        return steps
    for step in steps:
        step()
    return ()


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a dense row-major array.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
