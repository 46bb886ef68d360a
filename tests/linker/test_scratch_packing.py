"""Scratch: intermediate values lie apart while they live, and elementwise chains run in place."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import CompileError
from stitch.linker import ScratchPacker, choose_scratch, pack_scratch, place_intermediates
from stitch.machine import load_machine
from stitch.program import DataType, Operation, Scratch, Space, Value, ValueType

F32 = DataType.FLOAT32


def _value(name: str, elements: int, data_type: DataType = F32) -> Value:
    return Value(name, ValueType((elements,), data_type))


def _chain(op: str, length: int) -> tuple[list[Value], list[Operation]]:
    values = [_value(f"v{i}", 100) for i in range(length + 1)]
    return values, [Operation(op, (i,), (i + 1,)) for i in range(length)]


def test_an_input_that_is_read_later_keeps_its_place() -> None:
    values = [_value(f"v{i}", 16) for i in range(4)]
    operations = [
        Operation("Relu", (0,), (1,)),
        Operation("Neg", (1,), (2,)),
        Operation("Add", (1, 2), (3,)),
    ]
    plan = pack_scratch(values, operations, placed={0, 3})
    assert plan.offsets[1] != plan.offsets[2]


def test_a_change_of_type_never_runs_in_place() -> None:
    values = [_value("a", 16), _value("b", 16), _value("c", 16, DataType.INT32), _value("d", 16)]
    operations = [
        Operation("Relu", (0,), (1,)),
        Operation("Cast", (1,), (2,), {"to": 6}),
        Operation("Cast", (2,), (3,), {"to": 1}),
    ]
    plan = pack_scratch(values, operations, placed={0, 3})
    assert plan.offsets[1] != plan.offsets[2]


def test_an_intermediate_value_in_a_block_format_is_refused_by_name() -> None:
    values = [_value("a", 16), _value("soft", 16, DataType.BFP8), _value("c", 16)]
    operations = [Operation("Relu", (0,), (1,)), Operation("Relu", (1,), (2,))]
    with pytest.raises(CompileError, match="'soft' has the block format bfp8"):
        pack_scratch(values, operations, placed={0, 2})


@st.composite
def _programs(draw: st.DrawFn) -> tuple[list[Value], list[Operation]]:
    values = [_value("x", 8), _value("y", 40)]
    operations: list[Operation] = []
    for i in range(draw(st.integers(1, 20))):
        op = draw(st.sampled_from(["Relu", "Softmax", "Neg"]))
        source = draw(st.integers(0, len(values) - 1))
        # A type of its own now and then: in place only between equals.
        size = values[source].type.shape[0] if op != "Softmax" else draw(st.integers(0, 90))
        values.append(_value(f"v{i}", size))
        operations.append(Operation(op, (source,), (len(values) - 1,)))
    return values, operations


@given(_programs())
@settings(max_examples=50, deadline=None)
def test_no_operation_writes_over_what_a_later_one_reads(
    program: tuple[list[Value], list[Operation]],
) -> None:
    values, operations = program
    plan = pack_scratch(values, operations, placed={0, 1})
    holder: dict[int, int] = {}  # which value's data each 64-byte granule holds
    for operation in operations:
        (source,), (made,) = operation.inputs, operation.outputs
        if source in plan.offsets:
            assert all(holder[g] == source for g in _granules(plan.offsets[source], values[source]))
            overlap = set(_granules(plan.offsets[source], values[source])) & set(
                _granules(plan.offsets[made], values[made])
            )
            in_place = plan.offsets[source] == plan.offsets[made]
            assert not overlap or (in_place and operation.op != "Softmax")
        holder.update(dict.fromkeys(_granules(plan.offsets[made], values[made]), made))
    sizes = [len(_granules(0, values[v])) * 64 for v in plan.offsets]
    assert max(sizes) <= plan.nbytes <= sum(sizes)
    assert all(offset % 64 == 0 for offset in plan.offsets.values())


@given(_programs(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_packer_packs_other_shapes_as_a_new_one_does(
    program: tuple[list[Value], list[Operation]], data: st.DataObject
) -> None:
    values, operations = program
    packer = ScratchPacker(operations, placed={0, 1})
    for _ in range(4):
        values = [_value(v.name, data.draw(st.sampled_from([1, 20, 90]))) for v in values]
        assert packer.pack(values) == pack_scratch(values, operations, placed={0, 1})


def _granules(offset: int, value: Value) -> range:
    return range(offset // 64, -(-(offset + 4 * value.type.shape[0]) // 64))


def test_a_small_scratch_goes_to_l1_and_a_large_one_to_dram() -> None:
    tiny = load_machine("tiny").shape  # 4 banks of 15 KiB, 2 banks of DRAM
    assert choose_scratch(4096, tiny, l1_slots_per_bank=0) == Scratch(Space.L1, 1024)
    assert choose_scratch(4 * 7681, tiny, l1_slots_per_bank=0).space is Space.DRAM
    assert choose_scratch(4096, tiny, l1_slots_per_bank=15_000) == Scratch(Space.DRAM, 2048)


def test_a_machine_without_device_memory_keeps_its_scratch_on_the_host() -> None:
    host = load_machine("host").shape
    assert choose_scratch(100, host, l1_slots_per_bank=0) == Scratch(Space.HOST, 128)


def test_intermediate_values_are_dense_at_their_offset() -> None:
    values, operations = _chain("Softmax", 3)
    plan = pack_scratch(values, operations, placed={0, 3})
    placed = place_intermediates(values, plan, Scratch(Space.L1, 1024))
    layout = placed[2].layout
    assert layout is not None
    assert layout.is_dense
    assert layout.address == plan.offsets[2]
    assert dataclasses.replace(placed[0], layout=None) == values[0]
