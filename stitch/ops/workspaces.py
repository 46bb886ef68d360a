"""Memory of kernels beside operands and results: rules that bound it, and where it is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any

import numpy as np

from stitch.ops.inference import WithAttributes
from stitch.program import Array, AttributeValue, ValueType

#: Added to every rule: a few chunks of a chain of steps, and the steps themselves.
ANY_KERNEL_NBYTES = 1 << 20
#: Bytes of a cache line.
LINE_NBYTES = 64

# Rules --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkspaceContext(WithAttributes):
    """What a workspace rule may read: as `InferenceContext`, with the inferred output types."""

    inputs: tuple[ValueType | None, ...]
    constants: tuple[Array | None, ...]
    attributes: Mapping[str, AttributeValue]
    outputs: tuple[ValueType, ...]

    def operand(self, index: int) -> ValueType:
        """Return the type of an operand that must be present."""
        kind = self.inputs[index]
        assert kind is not None
        return kind

    @property
    def nbytes(self) -> int:
        """Bytes of operands and results in the types in which kernels compute."""
        return sum(computed_nbytes(t) for t in (*self.inputs, *self.outputs) if t is not None)


@dataclass(frozen=True, slots=True)
class WorkspaceRule:
    """An upper bound of the bytes that a kernel holds at once beside operands and results.

    `is_kept`: the bytes are held from binding on; otherwise only while the steps run, and what
    several steps share comes from the memory that kernels share (`workspace`).
    """

    nbytes: Callable[[WorkspaceContext], int]
    is_kept: bool = True


def computed_nbytes(kind: ValueType) -> int:
    """Return the bytes of a value in its compute type (float32 for narrower floats)."""
    return math.prod(kind.shape) * kind.data_type.compute_dtype.itemsize


def operands(times: float, *, is_kept: bool = True) -> WorkspaceRule:
    """Return the rule: `times` the bytes of operands and results in the compute type."""
    return WorkspaceRule(lambda context: int(times * context.nbytes), is_kept)


#: The rule of operators that declare none.
twice = operands(2)
#: The rule of kernels that pass over their operands once, with steps for each chunk.
few = operands(1 / 8, is_kept=False)


def integers(times: float, otherwise: WorkspaceRule) -> WorkspaceRule:
    """Return a rule for kernels that compute integers in a wider type: `times` the operands for
    integers, `otherwise` for floats."""
    wide = operands(times)

    def nbytes(context: WorkspaceContext) -> int:
        is_floating = context.operand(0).data_type.is_floating
        return (otherwise if is_floating else wide).nbytes(context)

    return WorkspaceRule(nbytes)


# Memory -------------------------------------------------------------------------------------------


class KernelMemory:
    """Scratch memory that kernels share: a kernel's bytes are free again for the next kernel.

    Kernels that are bound within `with memory:` take their workspaces here. `restart` promises
    that what was bound before never runs at the same time as what is bound afterwards.
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
        """Release all bytes; no bound kernel may use them any more."""
        self._bytes, self._taken = np.empty(0, np.uint8), 0

    def reserve(self, nbytes: int) -> None:
        """Allocate at least `nbytes` now, so that the memory need not grow step by step."""
        if nbytes > self._bytes.nbytes:
            self._bytes, self._taken = bytes_from_a_line(nbytes), 0

    def restart(self) -> None:
        """Start again at the first byte, or behind the bytes held by `kept`."""
        self._taken = self._first

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Hold the bytes taken so far for everything bound within; release later ones on exit."""
        before, taken = self._first, self._taken
        self._first = taken
        try:
            yield
        finally:
            self._first, self._taken = before, taken

    def take(self, nbytes: int) -> Array:
        """Return the next `nbytes` from a cache line on; allocate a larger block if needed."""
        start = -(-self._taken // LINE_NBYTES) * LINE_NBYTES
        if start + nbytes > self._bytes.nbytes:
            # Doubling bounds how often the block is replaced.
            grown = max(start + nbytes, 2 * self._bytes.nbytes)
            self._bytes, start = bytes_from_a_line(grown), 0
        self._taken = start + nbytes
        return self._bytes[start : self._taken]


_MEMORY: ContextVar[KernelMemory | None] = ContextVar("kernel memory", default=None)


def bytes_from_a_line(nbytes: int) -> Array:
    """Allocate uninitialized bytes that begin at a cache line."""
    memory = np.empty(nbytes + LINE_NBYTES, np.uint8)
    start = -memory.ctypes.data % LINE_NBYTES
    return memory[start : start + nbytes]


def workspace(shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an uninitialized array that begins at a cache line.

    `np.empty` begins 16 bytes off: a step over two cached arrays then takes twice as long. Steps
    must write it in every run before they read it: other kernels may use the same bytes.
    """
    nbytes, memory = int(np.prod(shape)) * dtype.itemsize, _MEMORY.get()
    memory_bytes = bytes_from_a_line(nbytes) if memory is None else memory.take(nbytes)
    return memory_bytes.view(dtype).reshape(shape)
