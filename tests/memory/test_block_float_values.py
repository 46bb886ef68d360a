"""bfp8 and bfp4 by hand: bytes, rounding, saturation, special numbers, idempotence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stitch.machine.shape import MachineShape, SpaceShape, footprint
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc
from tests.support.dense_arrays import read_array, write_array

MACHINE = MachineShape("m", (1, 1), SpaceShape(1, 0, 1 << 30, 32), SpaceShape(1, 0, 1 << 20, 16))
BLOCKS = [DataType.BFP8, DataType.BFP4]


def encode(values: list[float], kind: DataType) -> tuple[TensorDesc, NDArray[np.uint8]]:
    desc = TensorDesc((len(values),), Layout(kind, Space.L1, TILE_SHAPE))
    region = np.zeros(footprint(desc, MACHINE).nbytes, np.uint8)
    write_array(np.array(values, np.float32), desc, region, MACHINE)
    return desc, region


def decoded(values: list[float], kind: DataType) -> list[float]:
    desc, region = encode(values, kind)
    return [float(v) for v in read_array(desc, region, MACHINE)]


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        (DataType.FLOAT32, 4096), (DataType.INT32, 4096), (DataType.UINT32, 4096),
        (DataType.BFLOAT16, 2048), (DataType.FLOAT16, 2048), (DataType.UINT16, 2048),
        (DataType.UINT8, 1024), (DataType.BFP8, 1088), (DataType.BFP4, 576),
    ],
)  # fmt: skip
def test_a_tile_has_the_bytes_of_the_hardware(kind: DataType, nbytes: int) -> None:
    desc = TensorDesc((32, 32), Layout(kind, Space.L1, TILE_SHAPE))
    assert footprint(desc, MACHINE).page_nbytes == nbytes


def test_bfp8_stores_exponent_then_sign_and_seven_bits() -> None:
    _, region = encode([1.0, -0.5, 1.5, 0.0, 1.984375], DataType.BFP8)
    assert region[0] == 127
    assert list(region[64:69]) == [0x40, 0x80 | 0x20, 0x60, 0, 0x7F]
    assert not region[1:64].any()


def test_bfp4_packs_two_elements_in_a_byte_the_first_low() -> None:
    _, region = encode([1.0, -0.5, 1.5, 1.75], DataType.BFP4)
    assert region[0] == 127
    # 1.0 = 4 quarters, -0.5 = sign and 2, 1.5 = 6, 1.75 = 7.
    assert list(region[64:66]) == [0xA4, 0x76]


def test_each_face_row_has_its_own_exponent_byte() -> None:
    """Column 16 lies in the top-right face: its first row is exponent byte 16."""
    _, region = encode([1.0] * 16 + [8.0] + [0.0] * 15, DataType.BFP8)
    assert (region[0], region[16]) == (127, 130)
    assert region[64 + 256] == 0x40


def test_rounding_is_to_nearest_even() -> None:
    # Steps of 1/64 beside 1.0: 0.5 and 1.5 steps are ties.
    assert decoded([1.0, 0.5 / 64, 1.5 / 64, 2.5 / 64, 0.51 / 64], DataType.BFP8) == [
        1.0, 0.0, 2 / 64, 2 / 64, 1 / 64,
    ]  # fmt: skip


def test_a_tie_that_hangs_on_the_last_bit_is_no_tie() -> None:
    just_above = float(np.nextafter(np.float32(0.5 / 64), np.float32(1)))
    assert decoded([1.0, just_above], DataType.BFP8) == [1.0, 1 / 64]


@pytest.mark.parametrize(("kind", "most"), [(DataType.BFP8, 127 / 64), (DataType.BFP4, 7 / 4)])
def test_a_magnitude_that_rounds_up_too_far_saturates(kind: DataType, most: float) -> None:
    assert decoded([1.9999, -1.9999], kind) == [most, -most]


def test_zero_has_no_sign_and_small_numbers_vanish_unsigned() -> None:
    _, region = encode([1.0, -0.0, -1e-9], DataType.BFP8)
    assert list(region[64:67]) == [0x40, 0, 0]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_of_denormals_is_zero(kind: DataType) -> None:
    _, region = encode([1e-40, -1e-45], kind)
    assert not region.any()


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("exponent", [-126, -120, -1, 0, 1, 105, 107, 110, 111, 126, 127])
def test_powers_of_two_survive_at_every_exponent(kind: DataType, exponent: int) -> None:
    value = 2.0**exponent
    assert decoded([value, -value, 0.0], kind) == [value, -value, 0.0]


@pytest.mark.parametrize("kind", BLOCKS)
def test_infinity_and_nan_survive_and_mark_their_block(kind: DataType) -> None:
    infinity = float("inf")
    found = decoded([infinity, -infinity, float("nan"), 2.0**127, 1.0], kind)
    assert found[:2] == [infinity, -infinity]
    assert np.isnan(found[2])
    assert found[3:] == [2.0**127, 0.0]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_finite_number_beside_infinity_stays_finite(kind: DataType) -> None:
    largest = float(np.finfo(np.float32).max)
    found = decoded([float("inf"), largest, -largest], kind)
    assert np.isfinite(found[1:]).all()
    assert found[1] == -found[2] > 2.0**126


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("kind", BLOCKS)
@given(values=st.lists(numbers, min_size=1, max_size=40))
def test_encoding_what_was_decoded_is_exact(kind: DataType, values: list[float]) -> None:
    once = decoded(values, kind)
    np.testing.assert_array_equal(decoded(once, kind), once)


@pytest.mark.parametrize(("kind", "bits"), [(DataType.BFP8, 7), (DataType.BFP4, 3)])
@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=16))
def test_the_error_is_at_most_one_step(kind: DataType, bits: int, values: list[float]) -> None:
    largest = max(abs(v) for v in values)
    if largest < 2.0**-126:
        return
    step = 2.0 ** (int(np.frexp(largest)[1]) - bits)
    found = decoded(values, kind)
    assert all(abs(a - b) <= step for a, b in zip(values, found, strict=True))
