"""The discrete Fourier transform; complex numbers are a last dimension of 2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from stitch.ops.batching import BatchingContext
from stitch.ops.definition import KernelArguments, OpDef, Thunk, declared
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.steps import pieces_of
from stitch.program import Array, ValueType


def batch_dft(c: BatchingContext) -> Sequence[Any]:
    """The axis is an operand; its default, -2, needs no change."""
    axis = c.ints_at(2)
    axes = [] if axis is None else [np.array(c.axis_behind(axis[0]))]
    length = c.operands[1] if c.has(1) else None
    return c.emit(c.operands[0], length, *axes)


def _check_parts(context: InferenceContext, onesided_real: bool) -> int:
    """Return the last dimension of a signal: 1 (real) or 2 (complex)."""
    parts = context.operand(0).shape[-1]
    context.require(
        parts in (1, 2), f"last dimension of the signal of {context.op} is {parts}",
        expected="1 (real) or 2 (complex)", got=parts,
    )  # fmt: skip
    if onesided_real and parts == 2:
        raise context.fail(f"onesided {context.op} requires a real signal", expected="1", got="2")
    return parts


#: Bytes per element of a signal and its transform.
_LINE_NBYTES = 48


def _infer_dft(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    rank = context.require_rank(0, 2)
    onesided = bool(context.int_of("onesided"))
    inverse = bool(context.int_of("inverse"))
    parts = _check_parts(context, onesided and not inverse)
    if onesided and inverse and parts == 1:
        raise context.fail("onesided inverse DFT requires a complex signal", expected="2", got="1")
    axis = -2 if context.present(2) is None else context.known_scalar(2, "axis")
    axis = context.axis_of(axis, rank)
    if axis == rank - 1:
        raise context.fail(
            "axis of DFT is the last dimension, which holds the parts of complex numbers"
        )
    size = x.shape[axis]
    length = 2 * (size - 1) if onesided and inverse else size
    if context.present(1) is not None:
        length = context.known_scalar(1, "dft_length")
    if length < 1:
        raise context.fail(f"length {length} of DFT is out of range", expected=">= 1", got=length)
    shape = list(x.shape)
    shape[axis] = length // 2 + 1 if onesided and not inverse else length
    shape[-1] = 1 if onesided and inverse else 2
    return (ValueType(tuple(shape), x.data_type),)


def as_complex(x: Array) -> Array:
    """Return a signal whose last dimension holds real and imaginary parts as an array."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _write_parts(numbers: Array, out: Array) -> None:
    out[..., 0] = numbers.real
    if out.shape[-1] == 2:
        out[..., 1] = numbers.imag


def _dft(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.operand(0), arguments.outputs[0]
    onesided = bool(arguments.int_of("onesided"))
    inverse = bool(arguments.int_of("inverse"))
    axis = (arguments.ints_at(2)[0] if arguments.optional(2) is not None else -2) % x.ndim
    length = out.shape[axis]
    if onesided and not inverse:
        length = arguments.ints_at(1)[0] if arguments.optional(1) is not None else x.shape[axis]
    if inverse:
        transform = np.fft.irfft if onesided else np.fft.ifft
    else:
        transform = np.fft.rfft if onesided else np.fft.fft

    if not x.shape[axis]:
        # The signal is padding only; NumPy's irfft would leave its result unwritten.
        return (lambda: out.fill(0),)
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 : -1])
    signals = x.reshape(outer, x.shape[axis], inner, x.shape[-1])
    results = out.reshape(outer, out.shape[axis], inner, out.shape[-1])
    line = _LINE_NBYTES * max(length, x.shape[axis])

    def run() -> None:
        for rows in pieces_of(outer, line * inner):
            for columns in pieces_of(inner, line * (rows.stop - rows.start)):
                index = (rows, slice(None), columns)
                _write_parts(transform(as_complex(signals[index]), length, 1), results[index])

    return (run,)


OPERATORS = (
    OpDef(
        "DFT", (1, 3), _infer_dft, _dft, attributes=declared(inverse=0, onesided=0),
        batching=batch_dft,
    ),
)  # fmt: skip
