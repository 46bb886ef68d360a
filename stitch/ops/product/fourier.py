"""Fourier transforms: DFT and STFT; complex numbers are a last dimension of two.

Source: ONNX's DFT, STFT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from stitch.ops.batching import in_first_axis
from stitch.ops.definition import (
    KernelArguments,
    OpDef,
    Thunk,
    WorkspaceContext,
    WorkspaceRule,
    computed_nbytes,
    declared,
)
from stitch.ops.element_types import FLOATS
from stitch.ops.inference import InferenceContext
from stitch.ops.product.matmul import batch_dft
from stitch.ops.steps import PIECE_NBYTES, pieces_of
from stitch.program import Array, ValueType


def _check_parts(context: InferenceContext, onesided_real: bool) -> int:
    """Whether the last dimension holds 1 (real) or 2 (complex) numbers."""
    parts = context.operand(0).shape[-1]
    if parts not in (1, 2):
        raise context.fail(
            f"the last dimension of a signal of {context.op} is 1 (real) or 2 (complex)", got=parts
        )
    if onesided_real and parts == 2:
        raise context.fail(f"a one-sided {context.op} takes real signals", expected="1", got="2")
    return parts


#: Bytes of a signal and its transform, an element of either.
_LINE_NBYTES = 48


def _dft_workspace(context: WorkspaceContext) -> int:
    """A piece, or one signal: as complex numbers, and as long as it is transformed."""
    x, result = context.operand(0), context.outputs[0]
    longest = 2 * max(*x.shape[:-1], *result.shape[:-1], 1)
    size = 2 * max(math.prod(x.shape[:-1]), math.prod(result.shape[:-1]))
    wide = x.data_type.compute_dtype.itemsize // 4
    return wide * min(max(PIECE_NBYTES, _LINE_NBYTES * longest), _LINE_NBYTES * size)


def _stft_workspace(context: WorkspaceContext) -> int:
    """The signal as complex numbers; and a piece, or one frame of every sample."""
    x, result = context.operand(0), context.outputs[0]
    wide = x.data_type.compute_dtype.itemsize // 4
    frame = 2 * _LINE_NBYTES * result.shape[0] * result.shape[2]
    return 2 * computed_nbytes(x) + wide * max(2 * PIECE_NBYTES, 2 * frame)


def _infer_dft(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    rank = context.require_rank(0, 2)
    onesided = bool(context.int_of("onesided"))
    inverse = bool(context.int_of("inverse"))
    parts = _check_parts(context, onesided and not inverse)
    if onesided and inverse and parts == 1:
        raise context.fail("a one-sided inverse DFT takes complex signals", got="1")
    axis = -2 if context.present(2) is None else context.known_scalar(2, "axis")
    axis = context.axis_of(axis, rank)
    if axis == rank - 1:
        raise context.fail("the last dimension of a DFT holds complex numbers: it is no axis")
    size = x.shape[axis]
    length = 2 * (size - 1) if onesided and inverse else size
    if context.present(1) is not None:
        length = context.known_scalar(1, "dft_length")
    if length < 1:
        raise context.fail("a DFT has at least one element", got=length)
    shape = list(x.shape)
    shape[axis] = length // 2 + 1 if onesided and not inverse else length
    shape[-1] = 1 if onesided and inverse else 2
    return (ValueType(tuple(shape), x.data_type),)


def as_complex(x: Array) -> Array:
    """A signal whose last dimension holds the parts of its numbers."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _write_parts(numbers: Array, out: Array) -> None:
    out[..., 0] = numbers.real
    if out.shape[-1] == 2:
        out[..., 1] = numbers.imag


def _dft(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out = arguments.given(0), arguments.outputs[0]
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
        # All zeros, as the signal is padding; NumPy's irfft leaves its result unwritten there.
        return (lambda: out.fill(0),)
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 : -1])
    signals = x.reshape(outer, x.shape[axis], inner, x.shape[-1])
    results = out.reshape(outer, out.shape[axis], inner, out.shape[-1])
    line = _LINE_NBYTES * max(length, x.shape[axis])

    def run() -> None:
        for rows in pieces_of(outer, line * inner):
            for columns in pieces_of(inner, line * (rows.stop - rows.start)):
                place = (rows, slice(None), columns)
                spectrum = transform(as_complex(signals[place]), length, 1)
                _write_parts(spectrum, results[place])

    return (run,)


def _stft_length(context: InferenceContext, size: int) -> int:
    window = context.present(2)
    if context.present(3) is not None:
        return context.known_scalar(3, "frame_length")
    return size if window is None else window.shape[0]


def _infer_stft(context: InferenceContext) -> tuple[ValueType, ...]:
    x = context.require_type(0, FLOATS)
    context.require_same_type((0, 2))
    context.require_rank(0, 3, 3)
    onesided = bool(context.int_of("onesided"))
    _check_parts(context, onesided)
    if context.present(2) is not None:
        context.require_rank(2, 1, 1)
    step = context.known_scalar(1, "frame_step")
    length = _stft_length(context, x.shape[1])
    if step < 1 or not 1 <= length <= x.shape[1]:
        raise context.fail(
            "the frames of an STFT do not fit its signal",
            expected=f"a step of at least 1, frames of 1 to {x.shape[1]}",
            got=f"step {step}, frames of {length}",
        )
    if context.present(2) is not None:
        context.require_shape(2, (length,))
    frames = (x.shape[1] - length) // step + 1
    bins = length // 2 + 1 if onesided else length
    return (ValueType((x.shape[0], frames, bins, 2), x.data_type),)


def _stft(arguments: KernelArguments) -> Sequence[Thunk]:
    x, out, window = arguments.given(0), arguments.outputs[0], arguments.optional(2)
    step = arguments.ints_at(1)[0]
    length = x.shape[1] if window is None else window.shape[0]
    if arguments.optional(3) is not None:
        length = arguments.ints_at(3)[0]
    transform = np.fft.rfft if arguments.int_of("onesided") else np.fft.fft

    def run() -> None:
        frames = sliding_window_view(as_complex(x), length, 1)[:, ::step]
        for part in pieces_of(out.shape[1], _LINE_NBYTES * length * len(x)):
            seen = frames[:, part]
            weighted = seen if window is None else seen * window
            _write_parts(transform(weighted, length, -1), out[:, part])

    return (run,)


OPERATORS = (
    OpDef(
        "DFT", (1, 3), _infer_dft, _dft, attributes=declared(inverse=0, onesided=0),
        batching=batch_dft, workspace=WorkspaceRule(_dft_workspace, is_kept=False),
    ),
    OpDef(
        "STFT", (2, 4), _infer_stft, _stft, attributes=declared(onesided=1),
        batching=in_first_axis(1, 2, 3), workspace=WorkspaceRule(_stft_workspace, is_kept=False),
    ),
)  # fmt: skip
