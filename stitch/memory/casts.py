"""Casts between element types, made deterministic.

Comes in: two data types and a number of elements. Goes out: stages. Must not know: layouts.

The rules are those of ONNX Cast, with its undefined cases defined:
* float to float rounds to nearest even; too large becomes infinite; NaN stays NaN. float64 to
  bfloat16 rounds by way of float32, as ml_dtypes does.
* integer to float rounds to nearest even; integer to integer keeps the low bits (wraps).
* float to integer truncates toward zero; out of range saturates; NaN becomes 0.
* to bool is `!= 0` (NaN is true); bool is 0 or 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from stitch.memory.cells import Bytes
from stitch.memory.stages import Call, Stage, typed
from stitch.program import DataType

_FLOAT64 = np.dtype(np.float64)


def cast_stages(
    source: np.dtype[Any], target: np.dtype[Any], count: int, *, truncates: bool
) -> tuple[Stage, ...]:
    """The stages that cast `count` elements; `truncates`: from floating to integer."""
    if source == target:
        return ()
    if not truncates:
        return (_plain(source, target, count),)
    return (_plain(source, _FLOAT64, count), _saturate(target, count))


def needs_truncation(source: DataType, target: DataType) -> bool:
    """Whether a cast goes from floating numbers to integers (bool is no integer here)."""
    return source.is_floating and not target.is_floating and target is not DataType.BOOL


def _plain(source_dtype: np.dtype[Any], target_dtype: np.dtype[Any], count: int) -> Stage:
    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        ours = typed(source, source_dtype, count)
        theirs = typed(target, target_dtype, count)
        return [partial(np.copyto, theirs, ours, casting="unsafe")]

    return Stage(count * target_dtype.itemsize, calls)


def _saturate(target_dtype: np.dtype[Any], count: int) -> Stage:
    """From float64 (which it may overwrite: always staging) to an integer type."""
    limits = np.iinfo(target_dtype)
    beyond = float(limits.max) + 1.0 if limits.bits < 64 else float(limits.max)
    # The largest float64 that still fits: 2**63 - 1 itself is none.
    largest = float(limits.max) if limits.bits < 64 else float(np.nextafter(beyond, 0.0))

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        numbers = typed(source, _FLOAT64, count)
        mask = typed(scratch, np.dtype(np.bool_), count)
        theirs = typed(target, target_dtype, count)
        return [
            partial(np.isnan, numbers, out=mask),
            partial(np.copyto, numbers, 0.0, where=mask),
            partial(np.greater_equal, numbers, beyond, out=mask),
            partial(np.clip, numbers, float(limits.min), largest, out=numbers),
            partial(np.copyto, theirs, numbers, casting="unsafe"),
            partial(np.copyto, theirs, target_dtype.type(limits.max), where=mask),
        ]

    return Stage(count * target_dtype.itemsize, calls, scratch_nbytes=count)
