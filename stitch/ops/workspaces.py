"""Memory of kernels beside operands and results: bounds by family, and where it is allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.inference import Attributes, int_of
from stitch.program import Array, ValueType

#: Added to every bound: a few chunks of a chain of steps, and the steps themselves.
ANY_KERNEL_NBYTES = 1 << 20
#: What kernels that work in pieces take for a small piece (see `steps` and `convolution_tiles`),
#: but at most so many times the bytes of operands and results.
PIECES_NBYTES, MAX_TIMES = 20 << 20, 64
#: Bytes of a cache line.
LINE_NBYTES = 64

# Bounds -------------------------------------------------------------------------------------------

Types = Sequence[ValueType | None]
#: Returns bytes from the types of operands and results and the attributes.
_Bytes = Callable[[Types, Types, Attributes], int]


def computed_nbytes(kind: ValueType | None) -> int:
    """Return the bytes of a value in its compute type (float32 for narrower floats)."""
    return 0 if kind is None else math.prod(kind.shape) * kind.data_type.compute_dtype.itemsize


def _shape(kind: ValueType | None) -> tuple[int, ...]:
    return () if kind is None else kind.shape


@dataclass(frozen=True, slots=True)
class WorkspaceRule:
    """An upper bound of the bytes that a family of kernels holds beside operands and results.

    Attributes:
        times: The bytes as a multiple of those of operands and results.
        is_kept: The bytes are held from binding on; otherwise only while the steps run, and what
            several steps share comes from the memory that kernels share (`workspace`).
        axes: Leading axes of the first operand through which the kernel goes piece by piece.
        more: Additional bytes.
    """

    times: float = 1 / 8
    is_kept: bool = False
    axes: int = 0
    more: _Bytes | None = None

    def nbytes(self, inputs: Types, outputs: Types, attributes: Attributes) -> int:
        """Return the bytes of a kernel for these types."""
        every = sum(map(computed_nbytes, (*inputs, *outputs)))
        taken = int(self.times * every)
        if self.axes:
            pieces = math.prod(_shape(inputs[0])[: self.axes])
            taken = min(MAX_TIMES * every, taken // max(1, pieces) + PIECES_NBYTES)
        if self.more is not None:
            taken += self.more(inputs, outputs, attributes)
        return taken + ANY_KERNEL_NBYTES


def _indices(inputs: Types, _: Types, attributes: Attributes) -> int:
    """Indices, checked and flat; Python objects of rows that are reduced one by one."""
    shape = _shape(inputs[1])
    objects = attributes.get("reduction", "none") != "none" and "axis" not in attributes
    return 42 * math.prod(shape) + 32 * sum(shape) + 256 * objects * math.prod(shape[:-1])


def _sorted(inputs: Types, outputs: Types, attributes: Attributes) -> int:
    """One sorted line, and the positions of the results unless they are a result."""
    line = _shape(inputs[0])[int_of(attributes, "axis")]
    return 64 * line + (8 * math.prod(_shape(outputs[0])) if len(outputs) == 1 else 0)


def _positions(inputs: Types, outputs: Types, _: Attributes) -> int:
    """The positions of the maxima of a plane, if they are a result."""
    return 40 * math.prod(_shape(inputs[0])[2:]) if len(outputs) > 1 else 0


def _padded(_: Types, outputs: Types, attributes: Attributes) -> int:
    """The source index of each element, except in mode constant."""
    shape = _shape(outputs[0])
    is_constant = attributes["mode"] == "constant"
    return 0 if is_constant else 8 * math.prod(shape) + 64 * max(shape, default=0)


def _turned(inputs: Types, outputs: Types, attributes: Attributes) -> int:
    """Operands transposed at binding, and the bias of Gemm, scaled and expanded if it is small."""
    operands = zip(("transA", "transB"), inputs, strict=False)
    turned = sum(computed_nbytes(kind) for name, kind in operands if attributes[name])
    return turned + sum(24 * math.prod(_shape(kind)) for kind in inputs[2:])


def _weights(inputs: Types, outputs: Types, _: Attributes) -> int:
    """Transposed weights, and a channel of the operand and of the result."""
    places = sum(math.prod(_shape(kind)[2:]) for kind in (inputs[0], *outputs))
    return computed_nbytes(inputs[1]) + 8 * places


def _weight_sums(inputs: Types, outputs: Types, _: Attributes) -> int:
    """The products of a few samples: as many as have columns of the size of the result."""
    seen, sums = _shape(inputs[1]), computed_nbytes(outputs[0])
    columns = math.prod((_shape(inputs[0])[1], *_shape(outputs[0])[2:], *seen[2:])) * 4
    if not 0 < columns <= PIECES_NBYTES:
        return 3 * sums
    at_once = min(seen[0], max(1, max(1 << 19, sums) // columns))
    return 2 * sums + at_once * (sums + 8 * math.prod(seen[1:]))


def _deformed(inputs: Types, outputs: Types, _: Attributes) -> int:
    """Two rows of sampled points for each element of the kernel."""
    weights, width = _shape(inputs[1]), _shape(outputs[0])[-1]
    points = (60 * _shape(inputs[0])[1] + 150) * math.prod(weights[2:])
    return 2 * width * (points + 8 * weights[0])


def _resized(inputs: Types, outputs: Types, attributes: Attributes) -> int:
    """The values between resized axes, and indices and weights of each."""
    before, after = _shape(inputs[0]), _shape(outputs[0])
    is_cropped = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    sizes = [(x, y) for x, y in zip(before, after, strict=True) if x != y or is_cropped]
    size, taken = float(computed_nbytes(inputs[0])), 2 * is_cropped * math.prod(after)
    # Axes that shrink come first.
    for last, (x, y) in enumerate(sorted(sizes, key=lambda s: s[1] / max(1, s[0])), 1 - len(sizes)):
        size *= y / max(1, x)
        taken += ((last < 0) + (attributes["mode"] != "nearest")) * int(size) + 4096 * (x + y)
    return taken


def _gates(inputs: Types, _: Types, attributes: Attributes) -> int:
    """The gates of all steps of a recurrent layer, transposed weights, and the input by steps."""
    first, second = _shape(inputs[0])[:2]
    rows = _shape(inputs[1])[1]
    batch = first if attributes["layout"] else second
    weights = inputs[0 if attributes["layout"] else 1 : 3]
    return rows * (first * second + 22 * batch) * 8 + 2 * sum(map(computed_nbytes, weights))


def _region(inputs: Types, outputs: Types, attributes: Attributes) -> int:
    """A row of sampled points of the largest region that RoiAlign does not refuse."""
    x, bins, ratio = _shape(inputs[0]), _shape(outputs[0])[-1], int_of(attributes, "sampling_ratio")
    columns = bins * ratio if ratio > 0 else MOST_IMAGES * max(x[2:]) + bins
    return 4 * columns * (112 * x[1] + 200)


def _in_float64(read: int, written: int, inputs: Types, outputs: Types, _: Attributes) -> int:
    """Copies in float64: so many bytes for each element that is read and written."""
    elements = [sum(math.prod(_shape(kind)) for kind in side) for side in (inputs, outputs)]
    return read * elements[0] + written * elements[1]


#: Limit of a region of RoiAlign, in longer sides of the image.
MOST_IMAGES = 4
_ONE_PASS = WorkspaceRule()
_INTEGER_REDUCTION = WorkspaceRule(3, is_kept=True)
#: The families of operators that need more than one pass over their operands.
_FAMILIES = (
    (WorkspaceRule(1 / 2), "ArgMax ArgMin BatchNormalization GroupNormalization "
        "InstanceNormalization LayerNormalization RMSNormalization SoftmaxGradient"),
    (WorkspaceRule(1, is_kept=True), "Div LogSoftmax OneHot PRelu Trilu"),
    (WorkspaceRule(2, is_kept=True), "Einsum Hardmax LRN ReduceL1 ReduceL2 ReduceLogSum "
        "ReduceLogSumExp ReduceSumSquare TfIdfVectorizer"),
    (WorkspaceRule(4), "DequantizeLinear Det QuantizeLinear Scan"),
    (WorkspaceRule(4, axes=-1), "Softmax"),
    (WorkspaceRule(3, True, 1), "BatchNormalizationGradient LayerNormalizationGradient"),
    (WorkspaceRule(0, True, more=_indices), "Gather GatherElements GatherND ScatterElements "
        "ScatterND"),
    (WorkspaceRule(0, True, more=_padded), "Pad"),
    (WorkspaceRule(0, True, more=_turned), "Gemm"),
    (WorkspaceRule(0, axes=1, more=_sorted), "TopK"),
    (WorkspaceRule(4, axes=2, more=_positions), "AveragePool LpPool MaxPool"),
    (WorkspaceRule(7, True, 1), "MaxPoolGradient"),
    (WorkspaceRule(0, axes=1), "Col2Im DFT GridSample"),
    (WorkspaceRule(0, axes=1, more=_weights), "Conv ConvTranspose"),
    (WorkspaceRule(0, axes=1, more=_weight_sums), "ConvWeightGradient"),
    (WorkspaceRule(0, axes=1, more=_deformed), "DeformConv"),
    (WorkspaceRule(0, axes=1, more=_region), "RoiAlign"),
    (WorkspaceRule(0, True, more=_resized), "Resize"),
    (WorkspaceRule(more=_gates), "GRU LSTM RNN"),
    (WorkspaceRule(0, more=partial(_in_float64, 16, 48)), "MatMulInteger QLinearMatMul"),
    (WorkspaceRule(0, True, 1, partial(_in_float64, 32, 32)), "ConvInteger QLinearConv"),
)  # fmt: skip
_RULES = {name: rule for rule, names in _FAMILIES for name in names.split()}


def workspace_rule(op: str, inputs: Types) -> WorkspaceRule:
    """Return the bound of an operator's kernel; reductions compute integers in a wider type."""
    first = inputs[0] if inputs else None
    if op.startswith("Reduce") and first is not None and not first.data_type.is_floating:
        return _INTEGER_REDUCTION
    return _RULES.get(op, _ONE_PASS)


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
