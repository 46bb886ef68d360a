"""Every legal layout to every legal layout, against addresses computed element by element.

The reference below shares no code with `stitch.memory`: it is the specification, written out.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import struct
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stitch.errors import LayoutError
from stitch.machine.shape import MachineShape, SpaceShape, footprint, shard_layout
from stitch.memory import prepare_copy
from stitch.program import (
    TILE_SHAPE,
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
)
from tests.support.grids import every

MACHINE = MachineShape(
    "small",
    (2, 3),
    SpaceShape(1, 0, 1 << 30, 64),
    SpaceShape(6, 1024, 1 << 20, 16),
    SpaceShape(4, 0, 1 << 26, 32),
)
#: Alignments that no tile or row divides: every page is padded.
ODD_MACHINE = MachineShape(
    "odd",
    (2, 3),
    SpaceShape(1, 0, 1 << 30, 96),
    SpaceShape(6, 0, 1 << 20, 80),
    SpaceShape(4, 0, 1 << 26, 48),
)
UNTOUCHED = 0x5A


def round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def bank_of(spec: ShardSpec, kind: MemoryLayout, i: int, j: int) -> int:
    rows, columns = spec.core_grid
    if kind is MemoryLayout.BLOCK_SHARDED:
        if spec.orientation is Orientation.ROW_MAJOR:
            return i * columns + j
        return j * rows + i
    order = [(r, c) for r in range(rows) for c in range(columns)]
    if spec.orientation is Orientation.COL_MAJOR:
        order = [(r, c) for c in range(columns) for r in range(rows)]
    row, column = order[i + j]
    return row * columns + column


def slot_of(
    desc: TensorDesc, machine: MachineShape, bank_nbytes: int, index: tuple[int, ...]
) -> tuple[int, int]:
    """(byte offset of the element's page, the element's number inside its page).

    `bank_nbytes` is what the tensor takes of each bank.
    """
    layout, space = desc.layout, machine.space(desc.layout.space)
    shape = desc.shape
    x = index[-1] if index else 0
    y = index[-2] if len(index) > 1 else 0
    outer = 0
    for place, size in zip(index[:-2], shape[:-2], strict=True):
        outer = outer * size + place
    height = shape[-2] if len(shape) > 1 else 1
    width = shape[-1] if shape else 1
    tiled = layout.tile_shape is not None
    if tiled:
        height, width = round_up(height, 32), round_up(width, 32)
    row, column = outer * height + y, x
    spec = layout.shard_spec
    base, region_width = 0, width
    if spec is not None:
        i, row = divmod(row, spec.shape[0])
        j, column = divmod(column, spec.shape[1])
        base = bank_of(spec, layout.memory_layout, i, j) * bank_nbytes
        region_width = spec.shape[1]
    if not tiled:
        item = layout.data_type.itemsize
        if spec is None:
            return (row * width + column) * item, 0
        return base + row * round_up(region_width * item, space.alignment) + column * item, 0
    page = (row // 32) * (region_width // 32) + column // 32
    y, x = row % 32, column % 32
    face = (y // 16) * 2 + x // 16
    page_nbytes = {DataType.BFP8: 1088, DataType.BFP4: 576}.get(layout.data_type)
    if page_nbytes is None:
        page_nbytes = 1024 * layout.data_type.itemsize
    offset = base + page * round_up(page_nbytes, space.alignment)
    return offset, face * 256 + (y % 16) * 16 + x % 16


def slots_of(desc: TensorDesc, machine: MachineShape) -> NDArray[np.int64]:
    """`slot_of` of every element, in row-major order: the same for all types of one size."""
    kind = desc.layout.data_type
    if not kind.is_block:
        kind = next(k for k in DataType if not k.is_block and k.itemsize == kind.itemsize)
    return _slots_of(TensorDesc(desc.shape, replace(desc.layout, data_type=kind)), machine)


@functools.cache
def _slots_of(desc: TensorDesc, machine: MachineShape) -> NDArray[np.int64]:
    bank_nbytes = footprint(desc, machine).size_per_bank
    slots = [slot_of(desc, machine, bank_nbytes, index) for index in np.ndindex(desc.shape)]
    return np.array(slots, np.int64).reshape(-1, 2)


def slow_read(desc: TensorDesc, region: NDArray[np.uint8], machine: MachineShape) -> NDArray[Any]:
    kind, slots = desc.layout.data_type, slots_of(desc, machine)
    if kind.is_block:
        raw = region.tobytes()
        values = [slow_block_value(kind, raw, int(page), int(k)) for page, k in slots]
        return np.array(values, np.float32).reshape(desc.shape)
    at = slots[:, :1] + slots[:, 1:] * kind.itemsize + np.arange(kind.itemsize)
    return np.ascontiguousarray(region[at]).view(kind.dtype).reshape(desc.shape)


def slow_block_value(kind: DataType, raw: bytes, page: int, element: int) -> float:
    exponent = raw[page + element // 16]
    if kind is DataType.BFP8:
        byte = raw[page + 64 + element]
        sign, magnitude, bits = byte >> 7, byte & 127, 7
    else:
        byte = raw[page + 64 + element // 2]
        nibble = byte >> 4 if element % 2 else byte & 15
        sign, magnitude, bits = nibble >> 3, nibble & 7, 3
    assert exponent < 255
    value = magnitude * 2.0 ** (exponent - 126 - bits) if exponent else 0.0
    return -value if sign else value


def slow_block_round(kind: DataType, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a block format keeps of an array: sixteen neighbours of a row share an exponent."""
    bits = 7 if kind is DataType.BFP8 else 3
    result = np.zeros_like(array)
    for index in np.ndindex(array.shape[:-1]):
        row = array[index]
        for start in range(0, row.size, 16):
            block = [float(v) for v in row[start : start + 16]]
            raised = [struct.unpack("<I", struct.pack("<f", v))[0] >> 23 & 255 for v in block]
            step = 2.0 ** (max(raised) - 126 - bits)
            for k, v in enumerate(block):
                # Python's round is to nearest even, and the quotient is exact.
                magnitude = max(-(2**bits) + 1, min(2**bits - 1, round(v / step)))
                result[(*index, start + k)] = magnitude * step if max(raised) else 0.0
    return result


@functools.cache
def finite_codes(kind: DataType) -> tuple[tuple[float, int], ...]:
    """Every finite number that is not negative, with its code: neighbours stand side by side."""
    codes = np.arange(1 << (kind.bits - 1), dtype=np.uint8)
    numbers = codes.view(kind.dtype).astype(np.float64)
    return tuple(
        (float(v), int(c)) for v, c in zip(numbers, codes, strict=True) if math.isfinite(v)
    )


def slow_narrow(value: float, before: DataType, kind: DataType) -> int:
    """The code of a number in a type of eight bits or fewer."""
    if not kind.is_floating:
        whole = 0 if math.isnan(value) else max(-(2**31), min(2**31 - 1, value))
        return (math.trunc(whole) if before.is_floating else int(value)) % (1 << kind.bits)
    if kind is DataType.FLOAT8_E8M0:
        if math.isnan(value):
            return 255
        return bisect_left(range(254), abs(value), key=lambda c: 2.0 ** (c - 127))
    sign = 1 << (kind.bits - 1) if math.copysign(1, value) < 0 else 0
    if math.isnan(value):
        number = np.array([value], np.float32).astype(kind.dtype)
        return int(number.view(np.uint8)[0])
    table = finite_codes(kind)
    size = abs(value)
    at = bisect_left(table, size, key=lambda known: known[0])
    code = table[min(at, len(table) - 1)][1]
    if code and size < table[code][0]:
        below, above = table[code - 1][0], table[code][0]
        closer = (size - below) - (above - size)
        code -= closer < 0 or (closer == 0 and code % 2 == 1)
    # Types without a negative zero have NaN there.
    return code if code == 0 and kind.value.endswith("fnuz") else code | sign


def slow_cast(array: NDArray[Any], before: DataType, after: DataType) -> NDArray[Any]:
    if after.is_block:
        flat = array.astype(np.float32).reshape(array.shape or (1,))
        return slow_block_round(after, flat).reshape(array.shape)
    if before is after or (before.is_block and after is DataType.FLOAT32):
        return array
    if after.is_narrow:
        # Bool and whole numbers stay as they are; wider floats are exact in float64.
        exact = array.astype(np.float64) if before.is_floating else array.astype(object)
        codes = [slow_narrow(v, before, after) for v in exact.reshape(-1).tolist()]
        return np.array(codes, np.uint8).view(after.dtype).reshape(array.shape)
    if before.is_narrow:
        array = array.astype(np.float32 if before.is_floating else np.int8)
    if not before.is_floating or after.is_floating or after is DataType.BOOL:
        return array.astype(after.dtype)
    limits = np.iinfo(after.dtype)
    values = [
        0 if math.isnan(v) else limits.max if v > limits.max else max(limits.min, math.trunc(v))
        for v in (float(v) for v in array.reshape(-1))
    ]
    return np.array(values, after.dtype).reshape(array.shape)


def layouts_of(shape: tuple[int, ...], kind: DataType, machine: MachineShape) -> list[Layout]:
    """Every kind of legal layout of a shape: uneven and even shards, both orientations."""
    found = []
    for tile in (None, TILE_SHAPE):
        if kind.is_block and tile is None:
            continue
        found += [Layout(kind, space, tile) for space in Space]
        for space, memory_layout in itertools.product((Space.L1, Space.DRAM), MemoryLayout):
            if memory_layout is MemoryLayout.INTERLEAVED:
                continue
            for orientation in Orientation:
                turned = memory_layout is MemoryLayout.BLOCK_SHARDED
                turned &= orientation is Orientation.COL_MAJOR
                # What is down in the tensor is then across in the grid of cores.
                grid = machine.core_grid[::-1] if turned else machine.core_grid
                try:
                    even = shard_layout(
                        shape, memory_layout, replace(machine, core_grid=grid), data_type=kind,
                        space=space, tile_shape=tile,
                    )  # fmt: skip
                    assert even.shard_spec is not None
                    spec = replace(even.shard_spec, orientation=orientation)
                    layout = Layout(kind, space, tile, memory_layout, spec)
                    footprint(TensorDesc(shape, layout), machine)
                except LayoutError:
                    continue
                found.append(layout)
    return found


def numbers(shape: tuple[int, ...], kind: DataType, seed: int) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    dense = DataType.FLOAT32 if kind.is_block else kind
    if dense is DataType.BOOL:
        return random.integers(0, 2, shape).astype(np.bool_)
    if dense.is_floating:
        found = np.asarray(random.standard_normal(shape) * 50)
        # Powers of two have no sign.
        return (np.abs(found) if dense is DataType.FLOAT8_E8M0 else found).astype(dense.dtype)
    if dense.is_narrow:
        codes = random.integers(0, 1 << dense.bits, shape, np.uint8)
        return codes.reshape(-1).view(dense.dtype).reshape(shape)
    limits = np.iinfo(dense.dtype)
    return random.integers(limits.min, limits.max, shape, dense.dtype, endpoint=True)


def region_for(desc: TensorDesc, machine: MachineShape) -> NDArray[np.uint8]:
    return np.full(footprint(desc, machine).nbytes, UNTOUCHED, np.uint8)


def convert(
    source: TensorDesc, target: TensorDesc, region: NDArray[np.uint8], machine: MachineShape
) -> NDArray[np.uint8]:
    goal = region_for(target, machine)
    prepare_copy(source, target, machine).bind(region, goal)()
    return goal


def comparable(array: NDArray[Any]) -> NDArray[Any]:
    """The codes of narrow types, and bfloat16 as float32: NumPy does not know their NaN."""
    kind = DataType.from_dtype(array.dtype)
    if kind is DataType.BFLOAT16:
        return array.astype(np.float32)
    return array.view(np.uint8) if kind.is_narrow else array


def check_pair(source: TensorDesc, target: TensorDesc, machine: MachineShape, seed: int) -> None:
    before, after = source.layout.data_type, target.layout.data_type
    array = numbers(source.shape, before, seed)
    host = TensorDesc(
        source.shape, Layout(DataType.FLOAT32 if before.is_block else before, Space.HOST)
    )
    given = convert(host, source, np.ascontiguousarray(array).reshape(-1).view(np.uint8), machine)
    stored = slow_cast(array, host.layout.data_type, before) if before.is_block else array
    np.testing.assert_array_equal(comparable(slow_read(source, given, machine)), comparable(stored))
    with np.errstate(all="ignore"):
        expected = slow_cast(stored, before, after)
    found = slow_read(target, convert(source, target, given, machine), machine)
    np.testing.assert_array_equal(
        comparable(found), comparable(expected), err_msg=f"{source.text()} -> {target.text()}"
    )


SHAPES = [
    (), (1,), (7,), (70,), (0,), (3, 0), (0, 4), (2, 0, 5), (4, 4), (33, 65), (64, 96),
    (2, 3, 5, 7), (3, 1, 40, 17),
]  # fmt: skip


@pytest.mark.parametrize("step", [51, pytest.param(2, marks=pytest.mark.campaign("memory"))])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("machine", [MACHINE, ODD_MACHINE], ids=lambda m: m.name)
def test_every_layout_converts_to_every_layout(
    shape: tuple[int, ...], machine: MachineShape, step: int
) -> None:
    """Every 51st pair of layouts of float32 (of large ones fewer), and a second type in
    turn; the campaign checks every second."""
    others = itertools.cycle(DataType)
    ours = layouts_of(shape, DataType.FLOAT32, machine)
    for seed, (a, b) in enumerate(itertools.product(ours, ours)):
        # Another start in each row of the pairs, so that no layout is left out of a column.
        if (seed + seed // len(ours)) % (4 * step + 1 if math.prod(shape) > 1000 else step):
            continue
        check_pair(TensorDesc(shape, a), TensorDesc(shape, b), machine, seed)
        theirs = layouts_of(shape, next(others), machine)
        c = theirs[seed % len(theirs)]
        check_pair(TensorDesc(shape, a), TensorDesc(shape, c), machine, seed)
        check_pair(TensorDesc(shape, c), TensorDesc(shape, b), machine, seed)


@pytest.mark.parametrize("before", every(2, list(DataType)), ids=lambda t: t.value)
def test_every_type_converts_to_every_type(before: DataType) -> None:
    shape = (2, 5, 37)
    for seed, after in enumerate(DataType):
        for a, b in ((None, None), (None, TILE_SHAPE), (TILE_SHAPE, None), (TILE_SHAPE,) * 2):
            if (before.is_block and a is None) or (after.is_block and b is None):
                continue
            source = TensorDesc(shape, Layout(before, Space.DRAM, a))
            target = TensorDesc(shape, Layout(after, Space.L1, b))
            check_pair(source, target, MACHINE, seed)


@pytest.mark.campaign("memory")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("before", list(DataType), ids=lambda t: t.value)
def test_layouts_of_every_type_convert_to_those_of_every_other(
    shape: tuple[int, ...], before: DataType
) -> None:
    """A sample of the pairs of layouts of each pair of types: many where checking one is quick."""
    dice = random.Random(f"{shape} {before.value}")
    most = max(3, 150 // (1 + math.prod(shape) // 30))
    for after in DataType:
        ours, theirs = (layouts_of(shape, kind, MACHINE) for kind in (before, after))
        pairs = list(itertools.product(ours, theirs))
        for seed, (a, b) in enumerate(dice.sample(pairs, min(most, len(pairs)))):
            check_pair(TensorDesc(shape, a), TensorDesc(shape, b), MACHINE, seed)


@pytest.mark.parametrize("shape", every(2, SHAPES), ids=str)
def test_a_copy_writes_only_the_bytes_of_its_tensor(shape: tuple[int, ...]) -> None:
    for kind in (DataType.FLOAT32, DataType.UINT8):
        host = TensorDesc(shape, Layout(kind))
        given = numbers(shape, kind, 3)
        for layout in layouts_of(shape, kind, ODD_MACHINE):
            target = TensorDesc(shape, layout)
            raw = given.reshape(-1).view(np.uint8)
            region = convert(host, target, raw, ODD_MACHINE)
            mine = np.zeros(region.size, np.bool_)
            for page, element in slots_of(target, ODD_MACHINE):
                start = page if layout.is_tiled else page + element * kind.itemsize
                mine[start : start + (1024 if layout.is_tiled else 1) * kind.itemsize] = True
            assert np.all(region[~mine] == UNTOUCHED), target.text()


@pytest.mark.parametrize("shape", [(7,), (33, 65), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("kind", [DataType.FLOAT32, DataType.BFLOAT16, DataType.BOOL])
def test_padding_elements_of_tiles_are_zeros(shape: tuple[int, ...], kind: DataType) -> None:
    target = TensorDesc(shape, Layout(kind, Space.L1, TILE_SHAPE))
    ones = np.ones(shape, kind.dtype).reshape(-1).view(np.uint8)
    region = convert(TensorDesc(shape, Layout(kind)), target, ones, MACHINE)
    elements = region[: footprint(target, MACHINE).pages * 1024 * kind.itemsize].view(kind.dtype)
    assert np.count_nonzero(elements) == target.elements
    assert np.count_nonzero(elements == 0) == elements.size - target.elements
