"""Link checks: what fits is reported, what does not is named on both sides, all of it at once."""

from __future__ import annotations

import pytest

from stitch.errors import LinkError
from stitch.linker import check_link, wire
from stitch.program import (
    TILE_SHAPE,
    DataType,
    InputKind,
    InputSlot,
    Layout,
    MemoryLayout,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    ShardSpec,
    Space,
    TensorDesc,
    Value,
    ValueType,
)

F32, BF16, I32, I64 = DataType.FLOAT32, DataType.BFLOAT16, DataType.INT32, DataType.INT64


def _desc(data_type: DataType, *shape: int, space: Space = Space.L1) -> TensorDesc:
    return TensorDesc(shape or (32, 32), Layout(data_type, space))


def _program(
    name: str, inputs: dict[str, TensorDesc], outputs: dict[str, TensorDesc], parameter: str = ""
) -> Program:
    values = [
        Value(n, ValueType(d.shape, d.layout.data_type), d.layout)
        for n, d in {**inputs, **outputs}.items()
    ]
    operations = tuple(Operation("Identity", (0,), (len(inputs) + i,)) for i in range(len(outputs)))
    kinds = [InputKind.PARAMETER if n == parameter else InputKind.ACTIVATION for n in inputs]
    return Program(
        name,
        tuple(InputSlot(n, i, kinds[i]) for i, n in enumerate(inputs)),
        tuple(OutputSlot(n, len(inputs) + i) for i, n in enumerate(outputs)),
        tuple(values),
        operations,
        (),
        Scratch(Space.HOST, 0),
    )


def test_equal_descriptors_need_no_conversion() -> None:
    report = check_link(_desc(F32), _desc(F32), output="a.y", input="b.x")
    assert report.conversions == ()
    assert not report.changes_type
    assert report.text() == "a.y -> b.x: as it is"


def test_every_difference_becomes_a_word_in_the_order_in_which_it_is_done() -> None:
    sharded = Layout(
        BF16, Space.L1, TILE_SHAPE, MemoryLayout.HEIGHT_SHARDED, ShardSpec((1, 1), (32, 32)), 4096
    )
    source = _desc(F32, space=Space.DRAM)
    report = check_link(source, TensorDesc((32, 32), sharded), output="a.y", input="b.x")
    assert report.changes_type
    assert report.conversions == (
        "cast f32 to bf16",
        "tilize",
        "reshard interleaved to height_sharded",
        "move dram to l1",
        "relocate to 0x1000",
    )


@pytest.mark.parametrize(("made", "wanted"), [(F32, I32), (I32, F32), (I32, I64)])
def test_integers_never_change_their_type_on_a_link(made: DataType, wanted: DataType) -> None:
    with pytest.raises(LinkError, match="never turns into"):
        check_link(_desc(made), _desc(wanted), output="a.y", input="b.x")


def test_all_problems_of_a_pair_of_programs_are_listed_at_once() -> None:
    a = _program("left", {"x": _desc(F32)}, {"hidden": _desc(F32, 4, 4), "spare": _desc(I32)})
    b = _program("right", {"p": _desc(F32, 2, 2), "q": _desc(F32)}, {"out": _desc(F32)})
    with pytest.raises(LinkError) as caught:
        wire(a, b)
    text = str(caught.value)
    for fact in ("shape [4, 4] is not [2, 2]", "int32 never turns into float32"):
        assert fact in text


def test_slots_without_a_partner_are_errors_unless_the_fed_inputs_are_named() -> None:
    a = _program("a", {"x": _desc(F32)}, {"y": _desc(F32), "z": _desc(F32)})
    b = _program("b", {"p": _desc(F32)}, {"out": _desc(F32)})
    with pytest.raises(LinkError, match="output 'z' has no input to feed"):
        wire(a, b)
    c = _program("c", {"p": _desc(F32), "q": _desc(F32), "r": _desc(F32)}, {"out": _desc(F32)})
    with pytest.raises(LinkError, match="input 'r' has no output to feed it"):
        wire(a, c)
    assert wire(a, c, fed=[0, 2]) == ((0, 0), (1, 2))
