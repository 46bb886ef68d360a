"""Placement options: their spellings, what they do to a layout, and every wrong spelling."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import CompileError, LayoutError, UsageError
from stitch.graph import PlacementOption, parse_placement, placement_of, requested_layout, trace
from stitch.program import (
    TILE_SHAPE,
    DataType,
    InputKind,
    Layout,
    MemoryLayout,
    Orientation,
    Ownership,
    ShardSpec,
    Space,
    TensorDesc,
    ValueType,
    host_layout,
)

X = ValueType((64, 64), DataType.FLOAT32)

SPELLED = {
    "input.x.space=l1": PlacementOption("input", "x", "space", Space.L1),
    "output.0.space=dram": PlacementOption("output", 0, "space", Space.DRAM),
    "input.x.address=0x20000": PlacementOption("input", "x", "address", 0x20000),
    "input.layer.0.weight.layout=tile": PlacementOption(
        "input", "layer.0.weight", "layout", "tile"
    ),
    "input.x.data_type=bfp8": PlacementOption("input", "x", "data_type", DataType.BFP8),
    "input.x.memory_layout=height_sharded": PlacementOption(
        "input", "x", "memory_layout", MemoryLayout.HEIGHT_SHARDED
    ),
    "input.x.shard_spec=8x1,32x64,col_major": PlacementOption(
        "input", "x", "shard_spec", ShardSpec((8, 1), (32, 64), Orientation.COL_MAJOR)
    ),
    "input.x.kind=parameter": PlacementOption("input", "x", "kind", InputKind.PARAMETER),
    "input.x.ownership=donate": PlacementOption("input", "x", "ownership", Ownership.DONATE),
    "output.y.alias=x": PlacementOption("output", "y", "alias", "x"),
    "output.y.alias=1": PlacementOption("output", "y", "alias", 1),
}


@pytest.mark.parametrize("text", SPELLED)
def test_a_spelling_is_read_and_written_back(text: str) -> None:
    assert parse_placement(text) == SPELLED[text]
    assert SPELLED[text].text() == text


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("input.x.data-type=bf16", PlacementOption("input", "x", "data_type", DataType.BFLOAT16)),
        ("input.x.layout=row-major", PlacementOption("input", "x", "layout", "row_major")),
        ("input.my-x.address=131072", PlacementOption("input", "my-x", "address", 0x20000)),
        (" input.x.space = l1 ", PlacementOption("input", "x", "space", Space.L1)),
    ],
)
def test_hyphens_short_names_and_decimal_addresses_are_understood(
    text: str, option: PlacementOption
) -> None:
    assert parse_placement(text) == option


WRONG = {
    "x": "SIDE.SLOT.FIELD=VALUE",
    "input.x.space": "SIDE.SLOT.FIELD=VALUE",
    "input.space=l1": "SIDE.SLOT.FIELD=VALUE",
    "input..space=l1": "SIDE.SLOT.FIELD=VALUE",
    "inptu.x.space=l1": "did you mean 'input'",
    "input.x.spcae=l1": "did you mean 'space'",
    "input.x.alias=y": "unknown field of an input",
    "output.y.ownership=donate": "unknown field of an output",
    "input.x.space=l2": "host, dram, l1",
    "input.x.layout=tiled": "did you mean 'tile'",
    "input.x.data_type=float23": "did you mean",
    "input.x.memory_layout=sharded": "height_sharded",
    "input.x.shard_spec=8,32": "8x1,32x64",
    "input.x.shard_spec=0x1,32x64": "positive",
    "input.x.address=-1": "not an address",
    "input.x.address=0xzz": "not an address",
    "input.x.address=99999999999999999999": "not an address",
    "input.x.kind=weight": "parameter",
    "input.x.ownership=lend": "borrow, donate",
    "output.y.alias=": "not an input",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_spelling_is_a_usage_error_that_lists_what_is_allowed(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_placement(text)
    assert WRONG[text] in str(caught.value)
    assert caught.value.exit_code == 2


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_option_or_a_usage_error(text: str) -> None:
    for candidate in (text, f"input.x.{text}", f"output.{text}=l1", f"input.x.address={text}"):
        try:
            option = parse_placement(candidate)
        except UsageError:
            continue
        assert parse_placement(option.text()) == option


def test_a_desc_becomes_placement_that_give_the_layout_back() -> None:
    spec = ShardSpec((2, 1), (32, 64))
    for layout in (
        host_layout(DataType.FLOAT32),
        Layout(DataType.BFP4, Space.DRAM, TILE_SHAPE),
        Layout(DataType.FLOAT32, Space.L1, None, MemoryLayout.HEIGHT_SHARDED, spec, 0x40000),
    ):
        placement = placement_of("input", "x", TensorDesc((64, 64), layout))
        assert requested_layout(host_layout(DataType.FLOAT32), placement) == layout


def test_placement_change_a_default_layout_and_contradictions_are_layout_errors() -> None:
    spec = ShardSpec((2, 1), (32, 64))
    default = Layout(DataType.FLOAT32, Space.L1, None, MemoryLayout.HEIGHT_SHARDED, spec)
    interleaved = requested_layout(default, [parse_placement("input.x.memory_layout=interleaved")])
    assert interleaved == Layout(DataType.FLOAT32, Space.L1)
    stored = requested_layout(interleaved, [parse_placement("input.x.data_type=bfp8")])
    assert stored.is_tiled
    with pytest.raises(LayoutError, match="the host is never sharded"):
        requested_layout(default, [parse_placement("input.x.space=host")])


def test_a_later_option_replaces_an_earlier_one_however_the_slot_is_called() -> None:
    graph = trace(lambda x: x + 1, X).with_placement(
        parse_placement("input.x.space=l1"), parse_placement("output.output.space=l1")
    )
    changed = graph.with_placement(parse_placement("input.0.space=dram"))
    assert [option.text() for option in changed.placement_by_slot("input")[0]] == [
        "input.0.space=dram"
    ]
    assert [option.text() for option in changed.placement_by_slot("output")[0]] == [
        "output.output.space=l1"
    ]


def test_a_option_about_no_slot_is_a_compile_error_with_the_closest_name() -> None:
    graph = trace(lambda hidden: hidden + 1, X)
    with pytest.raises(CompileError, match="did you mean 'hidden'"):
        graph.with_placement(parse_placement("input.hiden.space=l1"))
    with pytest.raises(CompileError, match="there is no output 1 of 1"):
        graph.with_placement(parse_placement("output.1.space=l1"))
    with pytest.raises(CompileError, match="there is no input 'y'"):
        graph.with_placement(parse_placement("output.0.alias=y"))
    with pytest.raises(CompileError, match="take the buffer of that input: there is no input 9"):
        graph.with_placement(parse_placement("output.0.alias=9"))
