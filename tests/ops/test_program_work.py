"""What a program computes and carries, counted by hand beside."""

from __future__ import annotations

import numpy as np

import stitch
from stitch import ComputationGraphBuilder, DataType, Space
from stitch.ops import program_work
from stitch.program import Program


def compiled(builder: ComputationGraphBuilder, wishes: tuple[str, ...] = ()) -> Program:
    return stitch.compile(builder.build(), target="tiny", wishes=wishes).binary.program(0)


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
    program = compiled(builder, wishes=("input.x.space=l1", "output.y.space=dram"))
    work = program_work(program)
    assert work.nbytes == {Space.L1: 128, Space.DRAM: 128}
