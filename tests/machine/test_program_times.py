"""What programs take: a launch, and their operations one after the other, rounds included."""

from __future__ import annotations

from typing import Any

import pytest

import stitch
from stitch import ComputationGraphBuilder, DataType
from stitch.graph import SymbolicTensor, scan
from stitch.machine import load_machine, operation_seconds, program_seconds
from stitch.ops import work_of
from stitch.program import Body, Layout, Operation, OperationList, Program, Space, Value, ValueType

TINY = load_machine("tiny")
F32 = DataType.FLOAT32


def compiled(builder: ComputationGraphBuilder, **how: str) -> Program:
    options: dict[str, Any] = dict(how)
    model: stitch.CompiledModel = stitch.compile(builder.build(), target="tiny", **options)
    return model.program


def test_a_program_takes_one_launch_and_the_sum_of_its_operations() -> None:
    builder = ComputationGraphBuilder("m")
    x = builder.input("x", (64, 64), F32)
    builder.output("y", builder.op("Relu", builder.op("Tanh", x)))
    program = compiled(builder)
    assert TINY.compute is not None
    parts = [operation_seconds(work_of(o, program.values), TINY) for o in program.operations]
    assert len(parts) == 2 and min(parts) > 0
    assert program_seconds(program, TINY) == pytest.approx(TINY.compute.launch_seconds + sum(parts))


def rounds(count: int) -> float:
    builder = ComputationGraphBuilder("m")
    state, rows = builder.input("s", (32, 32), F32), builder.input("r", (count, 32, 32), F32)

    def step(
        states: list[SymbolicTensor], elements: list[SymbolicTensor]
    ) -> tuple[list[SymbolicTensor], list[SymbolicTensor]]:
        return [builder.op("Tanh", builder.op("Add", states[0], elements[0]))], []

    (last,), _ = scan(builder, step, [state], [rows])  # type: ignore[arg-type]
    builder.output("y", last)
    return program_seconds(compiled(builder, schedule="rounds"), TINY)


def test_a_scan_takes_all_its_rounds() -> None:
    assert TINY.compute is not None
    launch = TINY.compute.launch_seconds
    assert rounds(12) - launch == pytest.approx(3 * (rounds(4) - launch))


def test_what_is_between_rounds_lies_where_the_results_of_each_scan_do() -> None:
    kind = ValueType((64, 64), F32)
    body = Body((0,), (1,), (Value("s", kind), Value("t", kind)), (Operation("Tanh", (0,), (1,)),))

    def inner(*spaces: Space) -> float:
        values = tuple(Value("v", kind, Layout(F32, space)) for space in spaces for _ in range(2))
        scans = tuple(
            Operation("Scan", (at,), (at + 1,), {"count": 3, "num_states": 1, "num_scan_inputs": 0},
                      "stitch", body=0)
            for at in range(0, len(values), 2)
        )  # fmt: skip
        program = OperationList("p", (), (), values, scans, (), bodies=(body,))
        assert TINY.compute is not None
        return program_seconds(program, TINY) - TINY.compute.launch_seconds

    near, far = inner(Space.L1), inner(Space.DRAM)
    assert near < far
    assert inner(Space.L1, Space.DRAM) == pytest.approx(near + far)
    plain = OperationList(
        "p", (), (), tuple(Value("v", kind, Layout(F32, Space.DRAM)) for _ in range(2)),
        (Operation("Tanh", (0,), (1,)),), (),
    )  # fmt: skip
    assert TINY.compute is not None
    alone = program_seconds(plain, TINY) - TINY.compute.launch_seconds
    assert far == pytest.approx(3 * alone)


def test_a_machine_without_rates_takes_no_time() -> None:
    builder = ComputationGraphBuilder("m")
    x = builder.input("x", (64, 64), F32)
    builder.output("y", builder.op("Relu", x))
    assert program_seconds(compiled(builder), load_machine("host")) == 0.0
