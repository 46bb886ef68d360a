"""Block formats bfp8 and bfp4: sixteen elements of a face row share one exponent.

A packed tile is 64 exponent bytes (one per face row, faces in tile order), then 1024 elements of
1 sign bit and 7 (bfp8) or 3 (bfp4) magnitude bits; bfp4 packs two elements in a byte, the first
in the low half (tt-metal data formats; sizes in its tile table: 1088 and 576 bytes). The exponent
byte E is the largest float32 exponent among the sixteen. With b magnitude bits an element is
magnitude x 2^(E - 126 - b): there is no hidden bit, the largest element's leading one is stored.

* Rounding is to nearest, ties to even, of the exact value; a magnitude that rounds up to 2^b
  becomes 2^b - 1, as in tt-metal. Zeros have no sign.
* E = 0 holds zeros only: blocks of denormal numbers become zero.
* E = 255 marks a block with an infinity or NaN: the magnitude 2^(b-1) is infinity, 2^b - 1 is NaN,
  and finite elements are rounded to at most 2^(b-1) - 1.
* Encoding decoded numbers gives the same bits again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from stitch.memory.cells import Bytes
from stitch.memory.stages import Call, Stage, typed
from stitch.program import BLOCK_ELEMENTS, TILE_SHAPE, Array, DataType

_TILE_ELEMENTS = TILE_SHAPE[0] * TILE_SHAPE[1]
_EXPONENTS = _TILE_ELEMENTS // BLOCK_ELEMENTS
_FLOAT32 = np.dtype(np.float32)
_INT16 = np.dtype(np.int16)
_INTP = np.dtype(np.intp)
_UINT8 = np.dtype(np.uint8)
_UINT16 = np.dtype(np.uint16)
#: Sixteen float32 as one item, which a lookup copies at once.
_ROW = np.dtype((np.void, 4 * BLOCK_ELEMENTS))
_SPECIAL = 255


@dataclass(frozen=True, slots=True)
class _Format:
    """The tables of a block format, by exponent E and sixteen times each.

    Attributes:
        rounders: 1.5 x 2^k; adding it leaves the rounded, signed magnitude in the sum's low bits.
        steps: The value of one magnitude step, 2^(E - 126 - b).
        first_huge: The exponent from which on the rounder would overflow.
    """

    magnitude_bits: int
    rounders: Array
    steps: Array
    first_huge: int

    @property
    def largest(self) -> int:
        return (1 << self.magnitude_bits) - 1


def _format(magnitude_bits: int) -> _Format:
    exponents = np.arange(256)
    # ulp(1.5 * 2^k) = 2^(k - 23) must equal one step, 2^(E - 126 - b).
    biased = exponents - 126 - magnitude_bits + 23 + 127
    usable = (biased < 255) & (exponents > 0)
    # Exponent 0: the rounder absorbs every denormal.
    bits = np.where(usable, biased, 254).astype(np.uint32) << 23 | 0x400000
    rounders = bits.astype(np.uint32).view(np.float32)
    steps = np.ldexp(np.float32(1), exponents - 126 - magnitude_bits).astype(np.float32)
    steps[0] = 0.0
    first_huge = int(np.flatnonzero(biased >= 255)[0])
    return _Format(magnitude_bits, _rows(rounders), _rows(steps), first_huge)


def _rows(values: Array) -> Array:
    return np.repeat(values[:, None], BLOCK_ELEMENTS, axis=1).reshape(-1).view(_ROW)


_FORMATS = {DataType.BFP8: _format(7), DataType.BFP4: _format(3)}


def encode_stage(data_type: DataType, tiles: int) -> Stage:
    """Encode float32 in tile order to packed tiles; allocates only if E >= 234 occurs."""
    packed_nbytes = data_type.nbytes(_TILE_ELEMENTS)
    format_, count = _FORMATS[data_type], tiles * _TILE_ELEMENTS
    blocks = count // BLOCK_ELEMENTS

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        numbers = typed(source, _FLOAT32, count)
        pages = target[: tiles * packed_nbytes].reshape(tiles, packed_nbytes)
        sums, rest = typed(scratch, _FLOAT32, count), scratch[count * 4 :]
        exponents, rest = typed(rest, _INTP, blocks), rest[blocks * 8 :]
        magnitudes, rest = typed(rest, _INT16, count), rest[count * 2 :]
        signs = typed(rest, _INT16, count)
        mantissas = typed(rest, _UINT8, count)
        finding, largest = _largest_exponents(
            numbers, sums, magnitudes.view(np.uint8).reshape(2, count)
        )
        return [
            *finding,
            partial(np.copyto, exponents, largest),
            partial(np.copyto, pages[:, :_EXPONENTS], largest.reshape(tiles, -1)),
            partial(format_.rounders.take, exponents, None, sums.view(_ROW), "clip"),
            partial(np.add, numbers, sums, out=sums),
            # The low half of 0x400000 + q is q, as a signed 16-bit number.
            partial(np.copyto, magnitudes, sums.view(np.int32), casting="unsafe"),
            partial(_fix_huge, numbers, exponents, magnitudes, format_),
            partial(np.clip, magnitudes, -format_.largest, format_.largest, out=magnitudes),
            partial(np.right_shift, magnitudes, 15, out=signs),
            partial(np.bitwise_and, signs, format_.largest + 1, out=signs),
            partial(np.absolute, magnitudes, out=magnitudes),
            partial(np.bitwise_or, magnitudes, signs, out=magnitudes),
            partial(np.copyto, mantissas, magnitudes, casting="unsafe"),
            *_pack(mantissas, pages[:, _EXPONENTS:], typed(scratch, _UINT16, count // 2), format_),
        ]

    return Stage(tiles * packed_nbytes, calls, scratch_nbytes=count * 8 + blocks * 8)


def decode_stage(data_type: DataType, tiles: int) -> Stage:
    """Decode packed tiles to float32 in tile order; allocates only if E = 255 occurs."""
    packed_nbytes = data_type.nbytes(_TILE_ELEMENTS)
    format_, count = _FORMATS[data_type], tiles * _TILE_ELEMENTS
    blocks = count // BLOCK_ELEMENTS

    def calls(source: Bytes, target: Bytes, scratch: Bytes) -> list[Call]:
        pages = source[: tiles * packed_nbytes].reshape(tiles, packed_nbytes)
        numbers = typed(target, _FLOAT32, count)
        steps, rest = typed(scratch, _FLOAT32, count), scratch[count * 4 :]
        exponents, rest = typed(rest, _INTP, blocks), rest[blocks * 8 :]
        signed, rest = typed(rest, np.dtype(np.int8), count), rest[count:]
        signs = typed(rest, np.dtype(np.int8), count)
        return [
            partial(np.copyto, exponents.reshape(tiles, -1), pages[:, :_EXPONENTS]),
            *_unpack(pages[:, _EXPONENTS:], signed.view(np.uint8), signs.view(np.uint8), format_),
            # Sign-magnitude to two's complement: (m ^ s) - s, where s is 0 or -1.
            *_spread_signs(signed, signs, format_),
            partial(np.bitwise_and, signed, format_.largest, out=signed),
            partial(np.bitwise_xor, signed, signs, out=signed),
            partial(np.subtract, signed, signs, out=signed),
            partial(np.copyto, numbers, signed),
            partial(format_.steps.take, exponents, None, steps.view(_ROW), "clip"),
            partial(np.multiply, numbers, steps, out=numbers),
            partial(_fix_specials, numbers, exponents, signed, format_),
        ]

    return Stage(count * 4, calls, scratch_nbytes=count * 6 + blocks * 8)


def _largest_exponents(numbers: Array, sums: Array, halves: Array) -> tuple[list[Call], Array]:
    """Find the largest of each sixteen exponents by pairwise maxima.

    Returns the calls, and the result, in one of the two scratch rows `halves`.
    """
    words, area = sums.view(np.uint32), sums.view(np.uint8)
    current, spare = halves
    calls: list[Call] = [
        partial(np.right_shift, numbers.view(np.uint32), 23, out=words),
        # The cast drops the sign, which is the ninth bit.
        partial(np.copyto, current, words, casting="unsafe"),
    ]
    for _ in range(BLOCK_ELEMENTS.bit_length() - 1):
        half = current.size // 2
        pairs = current.view(np.uint16)
        high, low = typed(area, _UINT16, half), typed(area[half * 2 :], _UINT16, half)
        calls += [
            partial(np.right_shift, pairs, 8, out=high),
            partial(np.bitwise_and, pairs, 255, out=low),
            partial(np.maximum, high, low, out=high),
            partial(np.copyto, spare[:half], high, casting="unsafe"),
        ]
        current, spare = spare[:half], current
    return calls, current


def _pack(mantissas: Array, target: Array, shifted: Array, format_: _Format) -> list[Call]:
    tiles = target.shape[0]
    if format_.magnitude_bits == 7:
        return [partial(np.copyto, target, mantissas.reshape(tiles, -1))]
    pairs = mantissas.view(np.uint16)
    return [
        partial(np.right_shift, pairs, 4, out=shifted),
        partial(np.bitwise_or, pairs, shifted, out=shifted),
        partial(np.copyto, target, shifted.reshape(tiles, -1), casting="unsafe"),
    ]


def _unpack(source: Array, elements: Array, spare: Array, format_: _Format) -> list[Call]:
    tiles = source.shape[0]
    if format_.magnitude_bits == 7:
        return [partial(np.copyto, elements.reshape(tiles, -1), source)]
    pairs, shifted = elements.view(np.uint16), spare.view(np.uint16)
    return [
        partial(np.copyto, pairs.reshape(tiles, -1), source),
        partial(np.left_shift, pairs, 4, out=shifted),
        partial(np.bitwise_or, pairs, shifted, out=pairs),
        partial(np.bitwise_and, pairs, 0x0F0F, out=pairs),
    ]


def _spread_signs(elements: Array, signs: Array, format_: _Format) -> list[Call]:
    """-1 where the sign bit is set, else 0."""
    if format_.magnitude_bits == 7:
        return [partial(np.right_shift, elements, 7, out=signs)]
    # Two elements at once: 16-bit shifts are fast, 8-bit shifts are not.
    pairs, shifted = elements.view(np.uint16), signs.view(np.uint16)
    return [
        partial(np.left_shift, pairs, 7 - format_.magnitude_bits, out=shifted),
        partial(np.right_shift, signs, 7, out=signs),
    ]


def _fix_huge(numbers: Array, exponents: Array, magnitudes: Array, format_: _Format) -> None:
    """Round the rare blocks near or beyond overflow in float64."""
    if exponents.max(initial=0) < format_.first_huge:
        return
    blocks = np.flatnonzero(exponents >= format_.first_huge)
    shared = exponents[blocks, None]
    values = numbers.reshape(-1, BLOCK_ELEMENTS)[blocks].astype(np.float64)
    infinite, nan = np.isinf(values), np.isnan(values)
    values[infinite | nan] = 0.0
    signed = np.rint(np.ldexp(values, 126 + format_.magnitude_bits - shared))
    infinity = (format_.largest + 1) // 2
    most = np.where(shared == _SPECIAL, infinity - 1, format_.largest)
    signed = np.clip(signed, -most, most)
    original = numbers.reshape(-1, BLOCK_ELEMENTS)[blocks]
    signed = np.where(infinite, np.copysign(float(infinity), original), signed)
    signed = np.where(nan, float(format_.largest), signed)
    magnitudes.reshape(-1, BLOCK_ELEMENTS)[blocks] = signed.astype(np.int16)


def _fix_specials(numbers: Array, exponents: Array, signed: Array, format_: _Format) -> None:
    """Write NaN; infinity already results from the multiplication."""
    if exponents.max(initial=0) < _SPECIAL:
        return
    blocks = np.flatnonzero(exponents == _SPECIAL)
    infinity = (format_.largest + 1) // 2
    rows = numbers.reshape(-1, BLOCK_ELEMENTS)
    nan = np.abs(signed.reshape(-1, BLOCK_ELEMENTS)[blocks].astype(np.int16)) > infinity
    rows[blocks] = np.where(nan, np.float32(np.nan), rows[blocks])
