"""What a program computes and carries, counted by hand beside."""

from __future__ import annotations

import numpy as np

import stitch
from stitch import ComputationGraphBuilder, DataType, Space
from stitch.ops import program_work, work_of
from stitch.program import Layout, MemoryLayout, Operation, Program, ShardSpec, Value, ValueType


def compiled(builder: ComputationGraphBuilder, placement: tuple[str, ...] = ()) -> Program:
    return stitch.compile(builder.build(), target="tiny", placement=placement).binary.program(0)


def test_a_product_is_two_flops_for_each_multiply_add() -> None:
    builder = ComputationGraphBuilder("m")
    x = builder.input("x", (4, 8), DataType.FLOAT32)
    w = builder.parameter("w", np.ones((8, 16), np.float32))
    builder.output("y", builder.op("MatMul", x, w))
    work = program_work(compiled(builder))
    assert work.products == {DataType.FLOAT32: 2 * 4 * 8 * 16}
    assert work.other_flops == 0
    assert sum(work.nbytes.values()) == 4 * (4 * 8 + 8 * 16 + 4 * 16)


def test_products_count_by_the_type_that_operands_are_stored_in() -> None:
    builder = ComputationGraphBuilder("m")
    x = builder.input("x", (4, 8), DataType.BFLOAT16)
    y = builder.input("y", (8, 2), DataType.BFLOAT16)
    builder.output("z", builder.op("MatMul", x, y))
    assert program_work(compiled(builder)).products == {DataType.BFLOAT16: 2 * 4 * 8 * 2}


def test_other_operators_count_an_element_once_and_moves_nothing() -> None:
    builder = ComputationGraphBuilder("m")
    x = builder.input("x", (4, 8), DataType.FLOAT32)
    total = builder.op("ReduceSum", builder.op("Relu", builder.op("Transpose", x)))
    builder.output("y", total)
    work = program_work(compiled(builder))
    assert work.products == {}
    # Relu makes 32 elements, the sum reads 32; the transpose computes nothing.
    assert work.other_flops == 64


def test_bytes_are_those_of_the_spaces_that_values_lie_in() -> None:
    builder = ComputationGraphBuilder("m")
    x = builder.input("x", (4, 8), DataType.FLOAT32)
    builder.output("y", builder.op("Relu", x))
    program = compiled(builder, placement=("input.x.space=l1", "output.y.space=dram"))
    work = program_work(program)
    assert work.nbytes == {Space.L1: 128, Space.DRAM: 128}


def placed(shape: tuple[int, ...], layout: Layout) -> Value:
    return Value("v", ValueType(shape, DataType.FLOAT32), layout)


def test_a_products_work_is_divided_by_the_padded_tiles_of_its_result() -> None:
    dram = Layout(DataType.BFLOAT16, Space.DRAM)
    values = [placed(shape, dram) for shape in ((3, 1, 70), (3, 70, 33), (3, 1, 33))]
    work = work_of(Operation("MatMul", (0, 1), (2,)), values)
    # Each of three matrices of one row takes two tiles.
    assert (work.tiles, work.depth, work.multiply_adds) == (6, 70, 3 * 33 * 70)
    assert (work.operands, work.shards, work.elements) == ((DataType.BFLOAT16,), 0, 0)


def test_a_sharded_result_says_how_many_cores_make_it() -> None:
    shards = Layout(
        DataType.BFLOAT16, Space.L1, (32, 32), MemoryLayout.BLOCK_SHARDED,
        ShardSpec((2, 4), (32, 32)),
    )  # fmt: skip
    dram = Layout(DataType.BFLOAT16, Space.DRAM)
    values = [placed((64, 128), dram), placed((64, 128), shards)]
    assert work_of(Operation("Relu", (0,), (1,)), values).shards == 8
    assert work_of(Operation("Relu", (1,), (0,)), values).shards == 0


def test_operands_are_the_stored_types_of_both_factors_the_widest_first() -> None:
    dram = [Layout(kind, Space.DRAM, (32, 32)) for kind in (DataType.BFP8, DataType.BFLOAT16)]
    x, w, y = (placed((64, 64), dram[at]) for at in (0, 1, 0))
    work = work_of(Operation("MatMul", (0, 1), (2,)), (x, w, y))
    assert work.operands == (DataType.BFLOAT16, DataType.BFP8)
    # A bias is added, not multiplied.
    biased = work_of(Operation("Gemm", (0, 0, 1), (2,)), (x, w, y))
    assert biased.operands == (DataType.BFP8,)


def test_bytes_are_counted_beside_those_of_whole_tiles() -> None:
    kinds = DataType.BFLOAT16, DataType.BFP8
    values = [placed((5, 300), Layout(kind, Space.DRAM, (32, 32))) for kind in kinds]
    work = work_of(Operation("Relu", (0,), (1,)), values)
    assert dict(work.nbytes) == {Space.DRAM: 2 * 1500 + 1500 * 17 // 16}
    assert dict(work.padded_nbytes) == {Space.DRAM: 2 * 2048 + 2 * 1088}


def test_a_shard_has_the_tiles_of_its_shape() -> None:
    def spread(shape: tuple[int, int], tile: tuple[int, int] | None) -> Layout:
        spec = ShardSpec((2, 2), shape)
        return Layout(DataType.BFLOAT16, Space.L1, tile, MemoryLayout.BLOCK_SHARDED, spec)

    five = placed((160, 160), spread((96, 96), (32, 32)))
    values = [placed((160, 160), Layout(DataType.BFLOAT16, Space.DRAM)), five]
    work = work_of(Operation("MatMul", (0, 0), (1,)), values)
    assert (work.tiles, work.shards, work.shard_tiles) == (25, 4, 9)
    rows = placed((16, 128), spread((8, 64), None))
    assert work_of(Operation("Relu", (0,), (0,)), [rows]).shard_tiles == 1


def test_a_sum_is_divided_by_what_it_reads() -> None:
    dram = Layout(DataType.FLOAT32, Space.DRAM)
    values = [placed((256, 256), dram), placed((1, 1), dram)]
    work = work_of(Operation("ReduceSum", (0,), (1,)), values)
    assert (work.tiles, work.elements) == (64, 256 * 256)
