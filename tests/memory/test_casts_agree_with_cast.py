"""A copy that changes the data type computes what the operator Cast computes, bit for bit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stitch.machine.shape import MachineShape, SpaceShape, footprint
from stitch.memory import prepare_copy
from stitch.ops import evaluate, onnx_code
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc, host_layout
from tests.support.dense_arrays import read_array

MACHINE = MachineShape("m", (1, 1), SpaceShape(1, 0, 1 << 30, 32), SpaceShape(1, 0, 1 << 20, 16))
TYPES = [t for t in DataType if not t.is_block]
#: Bits of precision, and the exponent of the least number that is not denormal.
PRECISION = {DataType.FLOAT16: (11, -14), DataType.BFLOAT16: (8, -126)}
NARROW = list(PRECISION)
WIDE = [DataType.FLOAT64, DataType.INT32, DataType.INT64, DataType.UINT32, DataType.UINT64]


def copied(values: NDArray[Any], kind: DataType) -> NDArray[Any]:
    before = DataType.from_dtype(values.dtype)
    target = np.zeros(values.shape, kind.dtype)
    there = TensorDesc(values.shape, host_layout(before))
    kernel = prepare_copy(there, TensorDesc(values.shape, host_layout(kind)), MACHINE)
    kernel.bind(np.ascontiguousarray(values).view(np.uint8), target.view(np.uint8))()
    return target


def midpoints(kind: DataType) -> NDArray[np.float64]:
    """Float64 halfway between neighbours of a narrow type, and next to halfway on both sides."""
    bits = np.arange(0, 1 << 15, 7, dtype=np.uint16)
    with np.errstate(all="ignore"):
        here, above = (b.view(kind.dtype).astype(float) for b in (bits, bits + np.uint16(1)))
        middle = (here + above) / 2
    middle = middle[np.isfinite(middle)]
    both = [np.nextafter(middle, 0.0), middle, np.nextafter(middle, np.inf)]
    # The last bit of float32, at which rounding by way of it goes wrong.
    both += [middle * (1 + 2.0**-k) for k in (24, 25, 30)]
    both += [middle * (1 - 2.0**-k) for k in (25, 26, 30)]
    found = np.concatenate(both)
    return np.concatenate([found, -found])


def integer_midpoints(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Integers halfway between neighbours of float16, bfloat16, float32 and float64, and beside."""
    limits = np.iinfo(dtype)
    found = {limits.min, limits.max, 0, 1}
    for precision in (8, 11, 24, 53):
        for length in range(precision + 1, 65):
            half = 1 << (length - precision - 1)
            for odd in (1, 3, 2 * (1 << (precision - 1)) - 1):
                middle = (1 << (length - 1)) + half * odd
                found |= {s * (middle + e) for s in (1, -1) for e in (-1, 0, 1)}
    inside = sorted(v for v in found if limits.min <= v <= limits.max)
    return np.array(inside, dtype)


def adversarial(kind: DataType) -> NDArray[Any]:
    """Every pattern of narrow types; random bits, ties and limits of the others."""
    random = np.random.default_rng(20)
    dtype = kind.dtype
    if dtype == np.bool_:
        return np.array([True, False])
    if kind.bits < 8:
        return np.arange(1 << kind.bits, dtype=np.uint8).view(dtype)
    if dtype.itemsize <= 2:
        return np.arange(1 << (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    chance = random.integers(0, 256, 4000 * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind in "iu":
        small = random.integers(0, 1 << 20, 1000).astype(dtype)
        return np.concatenate([chance, small, integer_midpoints(dtype)])
    limits = [float(s * (1 << p) + e) for p in (7, 8, 15, 16, 31, 32, 63, 64)
              for s in (1, -1) for e in (-1.5, -1, -0.5, 0, 0.5, 1, 1.5)]  # fmt: skip
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-320, 3.4028235677973366e38, 1e39]
    uniform = random.normal(0, 1e3, 2000)
    with np.errstate(all="ignore"):
        numbers = [midpoints(t).astype(dtype) for t in NARROW]
        numbers += [np.array(limits + special).astype(dtype), uniform.astype(dtype)]
    return np.concatenate([chance, *numbers])


@pytest.mark.parametrize("before", TYPES, ids=lambda t: t.value)
def test_a_copy_agrees_with_the_operator_cast_bit_for_bit(before: DataType) -> None:
    values = adversarial(before)
    # To its own type nothing is cast: a copy keeps the bits of every NaN.
    for after in [t for t in TYPES if t is not before]:
        found = copied(values, after)
        (wanted,) = evaluate("Cast", [values], attributes={"to": onnx_code(after)})
        raw = f"u{after.dtype.itemsize}"
        np.testing.assert_array_equal(found.view(raw), wanted.view(raw), err_msg=after.value)


def nearest(value: Fraction, kind: DataType) -> float:
    """The number of a narrow type nearest to a positive value, ties to even, by exact sums."""
    digits, least = PRECISION[kind]
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    while Fraction(2) ** exponent > value:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= value:
        exponent += 1
    step = Fraction(2) ** (max(exponent, least) - digits + 1)
    rounded = round(value / step) * step
    return float(rounded) if rounded < 2 ** (2 - least) else float("inf")


@pytest.mark.parametrize("after", NARROW, ids=lambda t: t.value)
@pytest.mark.parametrize("before", WIDE, ids=lambda t: t.value)
def test_a_wide_number_becomes_the_nearest_narrow_one(before: DataType, after: DataType) -> None:
    values = adversarial(before)
    values = values[np.isfinite(values) & (values > 0)][::5].copy()
    found = copied(values, after).astype(np.float64)
    wanted = [nearest(Fraction(v), after) for v in values.tolist()]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [DataType.BFP8, DataType.BFP4], ids=lambda t: t.value)
@pytest.mark.parametrize("before", WIDE, ids=lambda t: t.value)
def test_a_wide_number_is_rounded_once_to_a_block_format(before: DataType, kind: DataType) -> None:
    """Halfway between two magnitudes, and beside it by less than float32 can tell."""
    bits = kind.mantissa_bits - 1
    one = 1 << 30
    step = one >> (bits - 1)
    numbers = [one, step + step // 2, step // 2]
    if before is DataType.FLOAT64:
        values = np.array([*numbers, *(v * (1 + s * 2.0**-30) for v in numbers for s in (1, -1))])
    else:
        values = np.array([*numbers, *(v + s for v in numbers for s in (1, -1))], before.dtype)
    desc = TensorDesc(values.shape, Layout(kind, Space.L1, TILE_SHAPE))
    region = np.zeros(footprint(desc, MACHINE).nbytes, np.uint8)
    dense = TensorDesc(values.shape, host_layout(before))
    prepare_copy(dense, desc, MACHINE).bind(values.view(np.uint8), region)()
    found = read_array(desc, region, MACHINE)
    wanted = [float(round(Fraction(v) / step) * step) for v in values.tolist()]
    np.testing.assert_array_equal(found, wanted)
    assert found[3] != found[5] or found[5] != found[7]
