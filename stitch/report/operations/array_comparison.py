"""Comparing arrays with what they should be: tolerances by type, differences in words,
correlation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stitch.program import Array, DataType

#: |actual - expected| <= atol + rtol * |expected|, by the type that a result is stored in.
DEFAULT_ATOL = {
    DataType.FLOAT64: 1e-4,
    DataType.FLOAT32: 1e-4,
    DataType.FLOAT16: 1e-3,
    DataType.BFLOAT16: 1e-2,
    DataType.BFP8: 5e-2,
    DataType.BFP4: 5e-1,
}
DEFAULT_RTOL = 1e-5


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What the user asked for; None: the default. `pcc` alone replaces the elementwise rule."""

    atol: float | None = None
    rtol: float | None = None
    pcc: float | None = None


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """What is compared: `stored` is the type that it is stored in, which decides how exact it can
    be."""

    name: str
    data_type: DataType
    stored: DataType


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a result is as expected; `detail` says how it is not."""

    name: str
    passed: bool
    detail: str
    max_abs_difference: float | None = None
    pcc: float | None = None
    atol: float | None = None
    rtol: float | None = None


def compare(
    result: ComparedResult, actual: Array, expected: Array, how: Tolerances, *,
    default_rtol: float = DEFAULT_RTOL, correlate: bool = False,
) -> Verdict:  # fmt: skip
    """Compare a result. NaN equals NaN, an infinity itself; integers and bits are exact.

    `correlate`: find the correlation where it decides nothing as well.
    """
    name, is_floating = result.name, result.data_type.is_floating
    if actual.shape != expected.shape:
        got = f"its shape is {list(actual.shape)}, expected {list(expected.shape)}"
        return Verdict(name, False, got)
    expected_type = DataType.from_dtype(expected.dtype)
    if is_floating is not expected_type.is_floating:
        got = f"its type is {result.data_type.value}, expected {expected_type.value}"
        return Verdict(name, False, got)
    atol = how.atol
    if atol is None:
        atol = DEFAULT_ATOL.get(result.stored, 1e-4) if is_floating else 0.0
    rtol = how.rtol
    if rtol is None:
        rtol = default_rtol if is_floating else 0.0
    is_wanted = correlate or how.pcc is not None
    correlated = correlation(actual, expected) if is_wanted else None
    problems: list[str] = []
    if how.pcc is not None and correlated is not None and not correlated >= how.pcc:
        problems.append(f"PCC is {correlated:.6g}, at least {how.pcc:g} was asked for")
    elementwise = how.pcc is None or how.atol is not None or how.rtol is not None
    wrong, largest = differences(actual, expected, atol, rtol)
    if elementwise and wrong is not None:
        problems.append(f"{wrong} (allowed: {atol:g} + {rtol:g} * |expected|)")
    return Verdict(name, not problems, "; ".join(problems), largest, correlated, atol, rtol)


def differences(
    actual: Array, expected: Array, atol: float, rtol: float
) -> tuple[str | None, float]:
    """What differs in words (None: nothing does), and the largest finite difference."""
    if actual.size == 0:
        return None, 0.0
    with np.errstate(all="ignore"):
        one, two = _widened(actual), _widened(expected)
        same = (one == two) | ((one != one) & (two != two))
        # Without a width of its own, the difference of the extremes of int64 would wrap.
        gap = np.where(same, 0.0, np.abs(one.astype(np.float64) - two.astype(np.float64)))
        near = gap <= atol + rtol * np.abs(two.astype(np.float64))
        if atol == 0 and rtol == 0:
            near = same
        bad = ~(same | (near & np.isfinite(gap)))
    finite = gap[np.isfinite(gap)]
    largest = float(finite.max()) if finite.size else 0.0
    count = int(bad.sum())
    if not count:
        return None, largest
    # Where a difference is no number at all, that is the place to look.
    weight = np.where(bad, np.where(np.isfinite(gap), gap, np.inf), -1.0)
    at = np.unravel_index(int(weight.argmax()), actual.shape)
    place = f"[{', '.join(str(int(i)) for i in at)}]"
    share = f"{count} of {actual.size} elements differ"
    worst = float(gap[at])
    return (
        f"{share}; largest difference {worst:.6g} at {place}: "
        f"{_number(one[at])}, expected {_number(two[at])}"
    ), largest


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _widened(array: Array) -> Array:
    """Floats as float64, the rest as they are: comparisons must not round."""
    return array.astype(np.float64) if DataType.from_dtype(array.dtype).is_floating else array


def correlation(actual: Array, expected: Array) -> float:
    """Pearson's correlation; 1 for equal arrays, 0 where it is not defined otherwise."""
    one, two = (a.astype(np.float64).reshape(-1) for a in (actual, expected))
    if np.array_equal(one, two, equal_nan=True):
        return 1.0
    if not (np.isfinite(one) == np.isfinite(two)).all():
        return 0.0
    keep = np.isfinite(one)
    one, two = one[keep], two[keep]
    if one.size < 2:
        return 0.0
    one, two = one - one.mean(), two - two.mean()
    norm = float(np.sqrt((one * one).sum() * (two * two).sum()))
    return float((one * two).sum()) / norm if norm else 0.0
