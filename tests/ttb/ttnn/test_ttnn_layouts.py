"""Layouts of TTNN binaries as ours, in the words of every time; what has no form here is named."""

from __future__ import annotations

import math
import re

import pytest

from stitch.machine import footprint
from stitch.program import Orientation, Space
from stitch.ttb import load
from tests.support.files.ttnn_files import FOLDER, HEAD, LAYER, REAL, STRANGERS, lacking, program_of

#: Of a tensor's type in MLIR: its shape, the grid, what a core of it holds, in tiles or elements.
_TENSOR = re.compile(
    r"tensor<([\dx]+)xbf16, #tt.layout<\(d0, d1\) -> \(d0, d1\), undef, <(\d+)x(\d+)>, "
    r"memref<(\d+)x(\d+)x(!tt.tile<32x32, )?bf16>?, #tt.memory_space<(\w+)>"
)
_SPACES = {"system": Space.HOST, "dram": Space.DRAM}


def test_the_layouts_of_a_real_binary_take_the_bytes_that_its_memrefs_say() -> None:
    program, machine = program_of(REAL), load(REAL).machine
    seen = 0
    for operation in program.operations:
        if not operation.outputs:
            continue
        made = str(operation.attributes["text"]).rpartition("-> tensor<")[2]
        found = _TENSOR.match(f"tensor<{made}")
        assert found is not None, made
        shape = tuple(map(int, found[1].split("x")))
        grid, held = (int(found[2]), int(found[3])), (int(found[4]), int(found[5]))
        desc = program.values[operation.outputs[0]].desc
        side, item = (32, 32 * 32 * 2) if found[6] else (1, 2)
        assert (desc.shape, desc.layout.space) == (shape, _SPACES[found[7]])
        assert desc.layout.is_tiled == bool(found[6])
        assert held == tuple(-(-d // side // g) or 1 for d, g in zip(shape, grid, strict=True))
        if grid == (1, 1):
            assert footprint(desc, machine).own_nbytes == math.prod(held) * item
        seen += 1
    assert seen == 8


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("memrefs_249", "bf16:l1:tile:height_sharded(1x8 cores,32x64)"),
        ("shards_800", "bf16:l1:tile:height_sharded(1x8 cores,32x64)"),
        ("shards_1330", "bf16:l1:tile:height_sharded(1x8 cores,32x64)"),
        ("layer_4013", "bf16:l1:tile:height_sharded(2x8 cores,32x128)"),
        ("head_4013", "bf16:l1:tile:block_sharded(5x2 cores,64x64)"),
    ],
)
def test_shards_are_read_in_the_words_of_every_time(name: str, layout: str) -> None:
    assert program_of(FOLDER / f"{name}.ttnn").input_desc(0).layout.text() == layout


def test_a_core_holds_what_its_memref_says() -> None:
    path = FOLDER / "memrefs_249.ttnn"
    program, machine = program_of(path), load(path).machine
    sharded = [v.desc for v in program.values if v.desc.layout.is_sharded]
    assert [footprint(desc, machine).size_per_bank for desc in sharded] == [4096, 4096]


def test_block_formats_are_computed_in_float32() -> None:
    program = program_of(LAYER)
    weights = program.values[program.inputs[1].value]
    assert (weights.type.text(), weights.desc.text()) == (
        "128x128xf32", "128x128xbfp8:dram:tile:interleaved"
    )  # fmt: skip


def test_columns_of_cores_and_the_begin_of_one_are_a_grid_dealt_by_columns() -> None:
    (turned,) = [v.desc.layout for v in program_of(HEAD).values if v.name == "t3"]
    spec = turned.shard_spec
    assert spec is not None
    assert (spec.core_grid, spec.orientation) == ((8, 2), Orientation.COL_MAJOR)


@pytest.mark.parametrize(
    "line",
    [
        "a program for a mesh of 1x2 chips is shown for one: strangers",
        "ND shards of 1x32x32 are shown as interleaved: strangers: arg0",
        "a tensor over a mesh of 1x2 is shown whole, on one chip: strangers: arg1",
        "elements of BFP_Float8 are shown as bfp8: strangers: arg2",
        "a set of 2 ranges of cores is shown from the corner on: bytes per core hold: strangers",
        "cores from (2, 1) on are shown from the corner on: bytes per core hold: strangers: arg3",
        "the region L1Small is shown as l1: strangers: arg4",
        "tiled shards of 48x64 are shown in whole tiles: strangers: arg5",
        "tiles of 16x16 are shown as tiles of 32x32: strangers: arg6",
    ],
)
def test_what_has_no_counterpart_is_named(line: str) -> None:
    assert line in lacking(load(STRANGERS))


def test_shards_on_scattered_cores_take_the_same_bytes_per_core() -> None:
    program, machine = program_of(STRANGERS), load(STRANGERS).machine
    assert footprint(program.input_desc(2), machine).size_per_bank == 2 * 1088
