"""Prepared steps that many kernels share: copies, fills, chunked chains, checked indices.

Kernels may rely on their caller's `np.errstate(all="ignore")`: it costs about a microsecond, so
it is set once around a whole run, not around every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import cache, partial
from typing import Any

import numpy as np

from stitch.errors import TaskError
from stitch.ops.definition import Kernel, KernelArguments, Thunk
from stitch.program import Array

#: Elements per chunk of a chain of steps: all its arrays stay in the second-level cache.
CHUNK_SIZE = 32768
#: Kernels that make intermediate arrays work in pieces of about so many bytes of them.
PIECE_NBYTES = 1 << 22
#: Bytes of a cache line.
LINE_NBYTES = 64

Work = tuple[Array, ...]
#: Builds a chain over one flat chunk: source, out, workspaces, and attributes by name, to steps.
Chain = Callable[..., Sequence[Thunk]]


def scalar(value: float, like: Array) -> Array:
    """A number as an array without dimensions: cheaper for a ufunc than a Python number.

    One that is too large for the type is infinite there.
    """
    # Kernels are bound before their caller's error state is entered.
    with np.errstate(over="ignore"):
        return np.array(value, like.dtype)


def reciprocal_step(x: Array, out: Array) -> Thunk:
    """1 / x; `out` may be `x`. The bits of `np.reciprocal`, which takes twice as long."""
    return partial(np.divide, scalar(1, x), x, out)


@cache
def _zeros(kind: np.dtype[Any]) -> Array:
    array = np.zeros(4 * CHUNK_SIZE, kind)
    array.flags.writeable = False
    return array


def zero(like: Array) -> Array:
    """Zero as `maximum` and `minimum` take least time for it: they are slow on a single number, so
    an array of zeros for whatever is no longer than a few chunks."""
    zeros = _zeros(like.dtype)
    if like.size > zeros.size or not like.flags.c_contiguous:
        return scalar(0, like)
    return zeros[: like.size].reshape(like.shape)


class KernelMemory:
    """Bytes that kernels use while they run: those of one are free for the next.

    Kernels that are bound within `with memory:` take their workspaces here, and `restart` says
    that what was bound before never runs at the same time as what is bound from now on.
    """

    __slots__ = ("_bytes", "_first", "_taken", "_tokens")

    def __init__(self) -> None:
        self._bytes: Array = np.empty(0, np.uint8)
        self._taken = self._first = 0
        self._tokens: list[Token[KernelMemory | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_MEMORY.set(self))
        self.restart()

    def __exit__(self, *_: object) -> None:
        _MEMORY.reset(self._tokens.pop())

    def forget(self) -> None:
        """Let go of all bytes, where nothing is bound to them any more."""
        self._bytes, self._taken = np.empty(0, np.uint8), 0

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes from now on, so that they do not grow little by little."""
        if nbytes > self._bytes.nbytes:
            self._bytes, self._taken = bytes_from_a_line(nbytes), 0

    def restart(self) -> None:
        """Begin again at the first byte, or behind what is `kept`."""
        self._taken = self._first

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What was taken until now is used by all that is bound within, and goes on to be; what is
        taken within is free again afterwards."""
        before, taken = self._first, self._taken
        self._first = taken
        try:
            yield
        finally:
            self._first, self._taken = before, taken

    def take(self, nbytes: int) -> Array:
        """The next so many bytes, from a cache line on; more are made where there are too few."""
        start = -(-self._taken // LINE_NBYTES) * LINE_NBYTES
        if start + nbytes > self._bytes.nbytes:
            # Large enough for the next kernel that takes as much, and a little more each time.
            grown = max(start + nbytes, 2 * self._bytes.nbytes)
            self._bytes, start = bytes_from_a_line(grown), 0
        self._taken = start + nbytes
        return self._bytes[start : self._taken]


_MEMORY: ContextVar[KernelMemory | None] = ContextVar("kernel memory", default=None)


def bytes_from_a_line(nbytes: int) -> Array:
    """Uninitialized bytes of their own that begin at a cache line."""
    memory = np.empty(nbytes + LINE_NBYTES, np.uint8)
    start = -memory.ctypes.data % LINE_NBYTES
    return memory[start : start + nbytes]


def workspace(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialized array that begins at a cache line, where wide instructions want it.

    `np.empty` begins 16 bytes off: a step of two arrays in the caches then takes twice as long.
    Steps write it in every run before they read it: other kernels may use the same bytes.
    """
    nbytes, memory = int(np.prod(shape)) * dtype.itemsize, _MEMORY.get()
    memory_bytes = bytes_from_a_line(nbytes) if memory is None else memory.take(nbytes)
    return memory_bytes.view(dtype).reshape(shape)


def same_memory(a: Array, b: Array) -> bool:
    """Whether two dense arrays are the very same bytes."""
    return a.nbytes == b.nbytes and a.ctypes.data == b.ctypes.data


def overlaps(out: Array, *sources: Array | None) -> bool:
    """Whether writing `out` changes one of the sources."""
    return any(s is not None and np.may_share_memory(out, s) for s in sources)


def pieces_of(count: int, nbytes: int) -> Iterator[slice]:
    """Stretches of `count` things that take so many bytes each, `PIECE_NBYTES` at a time.

    >>> list(pieces_of(5, PIECE_NBYTES // 3))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    return stretches(count, max(1, PIECE_NBYTES // max(1, nbytes)))


def stretches(count: int, at_once: int) -> Iterator[slice]:
    """What there is of `count` things, so many at a time."""
    return (slice(start, min(start + at_once, count)) for start in range(0, count, at_once))


def chunks(size: int, workspaces: int, dtype: np.dtype[Any]) -> Iterator[tuple[slice, Work]]:
    """Stretches of flat arrays that stay in the caches, and for each its share of workspaces."""
    work = tuple(workspace(min(size, CHUNK_SIZE), dtype) for _ in range(workspaces))
    for part in stretches(size, CHUNK_SIZE):
        yield part, tuple(w[: part.stop - part.start] for w in work)


def copy_steps(source: Array, out: Array) -> tuple[Thunk, ...]:
    """Copy or convert `source` (any shape that broadcasts) into `out`; nothing if they are one."""
    if source.dtype == out.dtype and source.shape == out.shape and same_memory(source, out):
        return ()
    return (partial(np.copyto, out, source, "unsafe"),)


def fill_step(out: Array, value: float) -> Thunk:
    """Write one number everywhere."""
    return partial(np.copyto, out, np.array(value).astype(out.dtype))


def chain_kernel(workspaces: int, build: Chain) -> Kernel:
    """A kernel of an elementwise operator with one operand and several steps.

    Long arrays are cut into chunks that share their workspaces, so that a chain reads and writes
    main memory once. The output may be the input.
    """

    def kernel(arguments: KernelArguments) -> Sequence[Thunk]:
        source, out = arguments.given(0).reshape(-1), arguments.outputs[0].reshape(-1)
        steps: list[Thunk] = []
        for part, work in chunks(out.size, workspaces, out.dtype):
            steps += build(source[part], out[part], work, **arguments.attributes)
        return steps

    return kernel


def mask_in(work: Array) -> Array:
    """Truth values, one per element, in the memory of a workspace."""
    return work.view(np.bool_)[: work.size]


def polynomial(coefficients: Sequence[float], x: Array, out: Array) -> list[Thunk]:
    """Horner's rule, highest power first; `out` must not be `x`; at least two coefficients."""
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
    """Write `indices`, negative ones counted from the end, to `out`; raises `TaskError`."""
    if indices.size:
        least, most = int(indices.min()), int(indices.max())
        if least < -size or most >= size:
            raise TaskError(
                f"{op}: an index is out of range",
                expected=f"{-size} to {size - 1}" if size else "no index: the axis is empty",
                got=str(least if least < -size else most),
            )
        if least < 0:
            np.add(indices, np.where(indices < 0, size, 0), out, casting="unsafe")
            return
    np.copyto(out, indices)


def check_range(op: str, what: str, numbers: Array, most: int) -> None:
    """Raises `TaskError` unless all numbers are from 0 to `most`; -1: there may be none."""
    if numbers.size and not 0 <= numbers.min() <= numbers.max() <= most:
        raise TaskError(
            f"{op}: {what} is out of range",
            expected=f"0 to {most}" if most >= 0 else "no index: there is no place",
            got=f"{numbers.min()} to {numbers.max()}",
        )


def index_steps(op: str, indices: Array, size: int, fixed: bool) -> tuple[Array, Sequence[Thunk]]:
    """Checked, non-negative indices and the steps that refresh them (none where they are fixed)."""
    checked = np.empty(indices.shape, np.intp)
    return checked, bound([partial(check_indices, op, indices, size, checked)], fixed)


def along(values: Array, axis: int, rank: int) -> Array:
    """A vector as an array of `rank` dimensions that lies along one axis, ready to broadcast."""
    return values.reshape(*(1,) * axis, -1, *(1,) * (rank - 1 - axis))


def bound(steps: Sequence[Thunk], fixed: bool) -> Sequence[Thunk]:
    """The steps; none where what they read is fixed: they run now, once."""
    if not fixed:
        return steps
    for step in steps:
        step()
    return ()


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one index to the next, per dimension, of a dense row-major array.

    >>> strides_of((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
