"""The last step to types of eight bits and fewer: how each rounds, and what it does with the rest.

Source: ONNX's Cast (opset 25), whose tables name two cases each: * float8: rounds to nearest even;
beyond the largest number, infinity too, it saturates, or without `saturate` becomes infinite, or
NaN where the type has no infinity. NaN stays NaN. * float8_e8m0, powers of two without sign or
zero: up, down, or to the nearest. Without `saturate` what lies outside, 0 too, becomes NaN. A
negative number is unspecified: its size counts. * float4 saturates always; NaN, which it lacks,
becomes -0 (as ml_dtypes has it). * int4 and int2 keep the low bits of the whole number, as ONNX's
own tests have it; a floating number is one of 32 bits first, so NaN becomes 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from stitch.ops.definition import Thunk
from stitch.program import Array, DataType

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLOAT32 = np.dtype(np.float32)
_E8M0 = DataType.FLOAT8_E8M0.dtype
#: The exponent of float8_e8m0's least number is -127; code 255 is NaN.
_BIAS, _LARGEST_CODE, _NAN_CODE = 127, 254, 255


def _wider(kind: DataType) -> np.dtype[Any]:
    if kind.is_floating:
        return _FLOAT32
    return np.dtype(np.int8 if kind.limits[0] else np.uint8)


#: The type of NumPy that holds every number of a narrow type.
WIDER = {t.dtype: _wider(t) for t in DataType if not t.is_block and t.is_narrow}


def _largest(kind: DataType) -> Any:
    numbers = np.arange(1 << kind.bits, dtype=np.uint8).view(kind.dtype).astype(np.float32)
    return numbers[np.isfinite(numbers)].max()


_LARGEST = {t.dtype: _largest(t) for t in DataType if t.is_floating and t.is_narrow}


@dataclass(frozen=True, slots=True)
class Rounding:
    """The attributes of Cast that concern narrow types."""

    saturate: bool = True
    mode: str = "up"


DEFAULT = Rounding()


def stops(source: np.dtype[Any], target: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """The types on the way between two types, of which one at least is narrow."""
    path = [WIDER[source]] if source in WIDER else []
    if target in WIDER:
        current, wider = (path or [source])[-1], WIDER[target]
        if wider != _FLOAT32:
            # Negative numbers, too, keep their low bits.
            floating = current.kind == "f" or current == DataType.BFLOAT16.dtype
            path += [np.dtype(np.int32)] if floating else []
        elif current != _FLOAT32 or not path:
            path.append(_FLOAT32)
    return tuple(path)


def narrow_steps(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> Sequence[Thunk]:
    """Steps from float32 that may be changed, or whole numbers, to a narrow type.

    `workspace` has 8 bytes for each element.
    """
    if out.dtype == _E8M0:
        return _exponent_steps(source, out, workspace, rounding)
    if WIDER[out.dtype] != _FLOAT32:
        whole = workspace[: source.size]
        mask = np.uint8((1 << DataType.from_dtype(out.dtype).bits) - 1)
        return (
            partial(np.copyto, whole, source, "unsafe"),
            partial(np.bitwise_and, whole, mask, out.view(np.uint8)),
        )
    steps: list[Thunk] = []
    if rounding.saturate:
        most = _LARGEST[out.dtype]
        steps.append(partial(np.clip, source, -most, most, source))
    return (*steps, partial(np.copyto, out, source, "unsafe"))


def _exponent_steps(
    source: Array, out: Array, workspace: NDArray[np.uint8], rounding: Rounding
) -> list[Thunk]:
    """A number is fraction * 2**exponent, its fraction at least a half and less than one."""
    size, codes = source.size, out.view(np.uint8)
    fractions = workspace[: 4 * size].view(np.float32)
    exponents = workspace[4 * size : 8 * size].view(np.int32)
    # From this fraction on, the exponent is that of the next power.
    first = {"up": np.nextafter(np.float32(0.5), np.float32(1)), "down": np.float32(2)}.get(
        rounding.mode, np.float32(0.75)
    )
    infinite = _LARGEST_CODE if rounding.saturate else _NAN_CODE

    def run() -> None:
        np.frexp(source, fractions, exponents)
        np.abs(fractions, fractions)
        # The codes' own bytes hold truth values until the last step.
        mask = codes.view(np.bool_)
        np.greater_equal(fractions, first, mask)
        np.add(exponents, mask, exponents)
        np.add(exponents, _BIAS - 1, exponents)
        np.equal(fractions, 0, mask)
        np.copyto(exponents, -1, where=mask)
        if rounding.saturate:
            np.clip(exponents, 0, _LARGEST_CODE, exponents)
        else:
            np.less(exponents, 0, mask)
            np.copyto(exponents, _NAN_CODE, where=mask)
            np.minimum(exponents, _NAN_CODE, out=exponents)
        np.isinf(source, mask)
        np.copyto(exponents, infinite, where=mask)
        np.isnan(source, mask)
        np.copyto(exponents, _NAN_CODE, where=mask)
        np.copyto(codes, exponents, "unsafe")

    return [run]
