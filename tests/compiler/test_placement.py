"""Placement: where slots, constants and scratch go by default, by placement option, and when they
cannot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stitch.compiler import Compilation, CompileOptions, compile_graph
from stitch.errors import CompileError, LayoutError, OutOfMemoryError, StitchError
from stitch.graph import ComputationGraph, ComputationGraphBuilder
from stitch.graph.placement import parse_placement
from stitch.machine import load_machine
from stitch.program import (
    DataType,
    InputKind,
    InputSlot,
    Layout,
    MemoryLayout,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Space,
    Value,
    ValueType,
)

F32, BF16 = DataType.FLOAT32, DataType.BFLOAT16
N150, TINY, HOST = (load_machine(name) for name in ("wormhole_n150", "tiny", "host"))


def chain(
    *shape: int,
    length: int = 3,
    data_type: DataType = F32,
    kinds: dict[str, InputKind] | None = None,
    donate: bool = False,
) -> ComputationGraph:
    """x and w are multiplied, then an elementwise chain, then y."""
    kind = ValueType(shape, data_type)
    values = [Value("x", kind), Value("w", kind), *(Value(f"t{i}", kind) for i in range(length))]
    operations = [Operation("Mul", (0, 1), (2,))]
    operations += [Operation("Softmax", (i + 1,), (i + 2,)) for i in range(1, length)]
    ownership = Ownership.DONATE if donate else Ownership.BORROW
    kinds = kinds or {"w": InputKind.PARAMETER}
    inputs = tuple(
        InputSlot(n, i, kinds.get(n, InputKind.ACTIVATION), ownership) for i, n in enumerate("xw")
    )
    return ComputationGraph(
        "chain", inputs, (OutputSlot("y", length + 1),), tuple(values), tuple(operations)
    )


def compiled(
    graph: ComputationGraph, *placement: str, machine: Any = N150, **options: Any
) -> Compilation:
    asked = tuple(parse_placement(option) for option in placement)
    return compile_graph(graph, machine, CompileOptions(placement=asked, **options))


def layout_of(program: Program, slot: str) -> Layout:
    for slots in (program.inputs, program.outputs):
        for found in slots:
            if found.name == slot:
                return program.values[found.value].desc.layout
    raise KeyError(slot)


def test_activations_lie_in_l1_and_parameters_in_dram() -> None:
    program = compiled(chain(32, 64)).program
    assert layout_of(program, "x").text() == "f32:l1:row_major:interleaved"
    assert layout_of(program, "y").text() == "f32:l1:row_major:interleaved"
    assert layout_of(program, "w").text() == "f32:dram:row_major:interleaved"
    assert program.scratch.space is Space.L1


@pytest.mark.parametrize("kind", [k for k in InputKind if k is not InputKind.ACTIVATION])
def test_inputs_of_every_other_kind_lie_in_dram(kind: InputKind) -> None:
    program = compiled(chain(32, 64), f"input.w.kind={kind.value}").program
    assert program.inputs[1].kind is kind
    assert layout_of(program, "w").space is Space.DRAM


def test_a_machine_without_device_memory_keeps_everything_on_the_host() -> None:
    program = compiled(chain(32, 64), machine=HOST).program
    assert {v.desc.layout.space for v in program.values} == {Space.HOST}
    assert program.scratch.space is Space.HOST


def test_what_is_too_large_for_l1_goes_to_dram_the_largest_first() -> None:
    # tiny: 15,360 B of L1 a bank, of which slots and scratch may take 11,520.
    graph = ComputationGraph(
        "sizes",
        (InputSlot("small", 0), InputSlot("large", 1)),
        (OutputSlot("y", 2), OutputSlot("z", 3)),
        tuple(
            Value(n, ValueType(s, F32))
            for n, s in (("small", (8, 64)), ("large", (40, 256)), ("y", (8, 64)), ("z", (40, 256)))
        ),
        (Operation("Relu", (0,), (2,)), Operation("Relu", (1,), (3,))),
    )
    program = compiled(graph, machine=TINY).program
    homes = {n: layout_of(program, n).space for n in ("small", "large", "y", "z")}
    assert homes == {"small": Space.L1, "large": Space.L1, "y": Space.L1, "z": Space.DRAM}


PLACEMENTS = {
    "input.x.space=dram": "f32:dram:row_major:interleaved",
    "input.0.space=host": "f32:host:row_major:interleaved",
    "input.x.data_type=bf16": "bf16:l1:row_major:interleaved",
    "input.x.data_type=bfp8": "bfp8:l1:tile:interleaved",
    "input.x.layout=tile": "f32:l1:tile:interleaved",
    "input.x.address=0x80000": "f32:l1:row_major:interleaved@0x80000",
    "input.x.memory_layout=height_sharded": "f32:l1:row_major:height_sharded(8x8 cores,1x64)",
    "input.x.memory_layout=interleaved": "f32:l1:row_major:interleaved",
}


@pytest.mark.parametrize("option", PLACEMENTS)
def test_every_layout_option_is_met(option: str) -> None:
    assert layout_of(compiled(chain(32, 64), option).program, "x").text() == PLACEMENTS[option]
    text = option.replace("input.x", "output.y").replace("input.0", "output.0")
    assert layout_of(compiled(chain(32, 64), text).program, "y").text() == PLACEMENTS[option]


def test_shards_and_tiles_can_be_requested_together() -> None:
    placement = (
        "input.x.memory_layout=block_sharded",
        "input.x.layout=tile",
        "input.x.data_type=bf16",
    )
    layout = layout_of(compiled(chain(256, 256), *placement).program, "x")
    assert layout.memory_layout is MemoryLayout.BLOCK_SHARDED
    assert layout.text() == "bf16:l1:tile:block_sharded(8x8 cores,32x32)"


def test_a_shard_spec_is_taken_as_it_is_requested() -> None:
    placement = ("input.x.memory_layout=height_sharded", "input.x.shard_spec=2x1,16x64")
    text = layout_of(compiled(chain(32, 64), *placement).program, "x").text()
    assert text == "f32:l1:row_major:height_sharded(2x1 cores,16x64)"


def test_kind_and_ownership_can_be_requested() -> None:
    program = compiled(chain(32, 64), "input.x.kind=state", "input.x.ownership=donate").program
    assert program.inputs[0].kind is InputKind.STATE
    assert program.inputs[0].ownership is Ownership.DONATE
    assert layout_of(program, "x").space is Space.DRAM


def test_placement_of_the_options_replace_those_of_the_graph() -> None:
    graph = chain(32, 64).with_placement(parse_placement("input.0.space=host"))
    assert layout_of(compiled(graph).program, "x").space is Space.HOST
    assert layout_of(compiled(graph, "input.x.space=dram").program, "x").space is Space.DRAM


REFUSED: dict[str, tuple[tuple[str, ...], type[StitchError], tuple[str, ...]]] = {
    "no such slot": (
        ("input.ww.space=l1",), CompileError, ("no input 'ww'", "inputs: x, w", "did you mean 'w'")
    ),
    "misaligned": (("input.x.address=0x80001",), CompileError, ("not aligned", "multiples of 32")),
    "below the base": (
        ("input.x.address=16",), CompileError, ("out of range", "l1 is usable at [0x")
    ),
    "above the limit": (("input.x.address=0x200000",), CompileError, ("out of range",)),
    "overlap": (
        ("input.x.address=0x80000", "output.y.address=0x80010"),
        CompileError,
        ("input 'x' at [0x80000, 0x80100) and output 'y' at [0x80010, 0x80110) overlap in l1",),
    ),
    "host address": (
        ("input.x.space=host", "input.x.address=64"), LayoutError, ("cannot have a fixed address",)
    ),
    "host shards": (
        ("input.x.space=host", "input.x.memory_layout=height_sharded"),
        LayoutError,
        ("the host is never sharded",),
    ),
    "float to integer": (
        ("input.x.data_type=int32",), CompileError, ("only a floating type", "Add a Cast")
    ),
    "row-major blocks": (
        ("input.x.data_type=bfp8", "input.x.layout=row_major"), LayoutError, ("only in tiles",)
    ),
    "shards that do not fit": (
        ("input.x.memory_layout=height_sharded", "input.x.shard_spec=2x1,8x64"),
        LayoutError,
        ("input 'x'", "4 shards do not fit 2 cores"),
    ),
    "shards without a sharding": (
        ("input.x.shard_spec=2x1,16x64",),
        LayoutError,
        ("a sharded memory layout", "x.memory_layout=height_sharded", "input.x.shard_spec="),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_option_is_refused_with_the_facts(case: str) -> None:
    placement, error, facts = REFUSED[case]
    with pytest.raises(error) as caught:
        compiled(chain(32, 64), *placement)
    for fact in facts:
        assert fact in str(caught.value)


def test_an_address_inside_the_scratch_region_is_refused_and_says_what_is_free() -> None:
    base = N150.shape.l1.base if N150.shape.l1 else 0
    program = compiled(chain(32, 64)).program
    free = base + program.scratch.size_per_bank
    with pytest.raises(CompileError) as caught:
        compiled(chain(32, 64), f"input.x.address={base:#x}")
    assert "and the scratch region at" in str(caught.value)
    assert f"L1 is free for slots at [{free:#x}" in str(caught.value)
    assert compiled(chain(32, 64), f"input.x.address={free:#x}").program.scratch.space is Space.L1


def test_a_space_that_the_machine_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(LayoutError, match="machine 'host' has no l1"):
        compiled(chain(4, 4), "input.x.space=l1", machine=HOST)


def test_slots_that_placement_hold_in_l1_must_fit_between_its_fixed_addresses() -> None:
    # tiny: [1024, 16384); an output fixed in the middle leaves two gaps that are too small.
    graph = chain(112, 64, length=1)  # 28 rows of 256 B in each bank
    placement = ("input.x.address=6144", "input.w.space=l1", "output.y.space=dram")
    with pytest.raises(OutOfMemoryError) as caught:
        compiled(graph, *placement, machine=TINY)
    assert "input 'w' (7168 B per bank)" in str(caught.value)
    assert "5120 B at 0x400, 3072 B at 0x3400" in str(caught.value)
    fits = compiled(graph, "input.x.address=8192", *placement[1:], machine=TINY).program
    assert layout_of(fits, "w").space is Space.L1


def test_free_slots_leave_l1_where_fixed_ones_cut_it_to_pieces() -> None:
    graph = chain(56, 64, length=1)  # 14 rows, 3584 B in each bank of [1024, 16384)
    placement = ("input.w.space=l1", "input.x.address=4096")
    roomy = compiled(graph, *placement, "input.w.address=7680", machine=TINY).program
    assert layout_of(roomy, "y").space is Space.L1
    crowded = compiled(graph, *placement, "input.w.address=10240", machine=TINY).program
    assert layout_of(crowded, "y").space is Space.DRAM


def test_a_program_larger_than_the_device_is_out_of_memory_with_bytes_and_remedy() -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        compiled(chain(1024, 256), "input.x.kind=parameter", machine=TINY)
    text = str(caught.value)
    assert "does not fit dram of machine 'tiny'" in text
    assert "1048576 B per bank" in text
    assert "524288 B per bank)" in text
    assert "choose a larger machine" in text


def test_slots_too_large_for_dram_may_lie_on_the_host_as_the_error_says() -> None:
    graph = chain(1024, 1024, length=1)
    with pytest.raises(
        OutOfMemoryError, match=r"--set SIDE\.SLOT\.space=host; in Python placement="
    ):
        compiled(graph, machine=TINY)
    placement = [f"{slot}.space=host" for slot in ("input.x", "input.w", "output.0")]
    fits = compiled(graph, *placement, machine=TINY).program
    assert layout_of(fits, "x").space is Space.HOST
    with pytest.raises(OutOfMemoryError, match="try: split the module"):  # its scratch alone is
        compiled(chain(1024, 1024, length=4), *placement, machine=TINY)


def test_too_much_requested_into_l1_is_out_of_memory_in_l1() -> None:
    with pytest.raises(OutOfMemoryError, match=r"does not fit l1"):
        compiled(chain(64, 256), "input.x.space=l1", "output.y.space=l1", machine=TINY)


def test_a_tiled_column_of_single_elements_is_a_warning() -> None:
    result = compiled(chain(1000, 512, 1, 1, length=1), "input.x.layout=tile", "input.x.space=dram")
    warning = result.warnings[0]
    assert (warning.kind, warning.where) == ("padding", "input 'x'")
    assert "takes 2097" in warning.detail
    assert "for 2048000 B of data" in warning.detail
    assert "--set input.x.layout=row_major" in warning.remedy
    assert compiled(chain(1000, 512, length=1), "input.x.layout=tile").warnings == ()


def test_an_output_stored_rounded_is_not_what_other_operations_read() -> None:
    kind = ValueType((4, 4), F32)
    graph = ComputationGraph(
        "g",
        (InputSlot("x", 0),),
        (OutputSlot("hidden", 1), OutputSlot("y", 2)),
        (Value("x", kind), Value("h", kind), Value("y", kind)),
        (Operation("Tanh", (0,), (1,)), Operation("Exp", (1,), (2,))),
    )
    assert len(compiled(graph).program.operations) == 2
    program = compiled(graph, "output.hidden.data_type=bf16").program
    assert [o.op for o in program.operations] == ["Tanh", "Exp", "Identity"]
    read = {v for operation in program.operations for v in operation.inputs}
    assert program.outputs[0].value not in read


def test_a_program_numbers_values_without_a_name_and_keeps_the_others() -> None:
    def numbered(*, is_longer: bool) -> Program:
        builder = ComputationGraphBuilder("numbered")
        x = builder.input("x", (2, 4), data_type="float32")
        one, table = builder.op("Add", x, 2.0), builder.constant(np.arange(4, dtype=np.float32))
        if is_longer:  # What passes remove shows in no name and in no order of constants.
            builder.op("Add", one, 5.0)
            one, table = builder.op("Expand", one, [2, 4]), builder.op("Expand", table, [4])
        # A name like those of numbers.
        (named,) = builder.apply("Add", (one, builder.constant(np.float32(3))), ["add_2"], {})
        total = builder.op("Add", builder.op("Add", named, table), named)
        builder.output("y", builder.op("Expand", builder.op("Slice", total, [0], [1]), [2, 4]))
        return compile_graph(builder.build(), N150).program

    short, longer = numbered(is_longer=False), numbered(is_longer=True)
    assert short.text() == longer.text()
    assert [short.values[o.outputs[0]].name for o in short.operations] == [
        "add", "add_2", "add_1", "add_3", "slice", "expand",
    ]  # fmt: skip
    assert [short.values[c.value].name for c in short.constants] == [
        "constant", *(f"constant_{number}" for number in range(1, 6)),
    ]  # fmt: skip


def test_a_result_in_the_memory_of_an_input_is_numbered_too() -> None:
    builder = ComputationGraphBuilder("numbered")
    x = builder.input("x", (4,), data_type="float32")
    builder.op("Add", x, 5.0)  # Dead.
    builder.output("y", builder.op("Add", x, 1.0))
    program = compiled(builder.build(), "input.x.ownership=donate", "output.y.alias=x").program
    assert program.values[program.outputs[0].value].name == "add"


def test_values_of_a_graph_file_without_a_usable_number_have_names() -> None:
    value = Value("", ValueType((4,), DataType.FLOAT32), is_numbered=True)
    values = (value, replace(value, name="_3"), value)
    graph = ComputationGraph(
        "hostile", (InputSlot("x", 0),), (OutputSlot("y", 2),), values,
        (Operation("Tanh", (0,), (1,)), Operation("Neg", (1,), (2,))),
    )  # fmt: skip
    names = [one.name for one in compile_graph(graph, N150).program.values]
    assert all(names) and len(set(names)) == 3
