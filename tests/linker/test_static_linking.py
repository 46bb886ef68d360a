"""Static linking: one program does, to the last bit, what the programs do one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch import ops
from stitch.errors import LinkError, OutOfMemoryError
from stitch.linker import Wire, link_programs
from stitch.machine import load_machine
from stitch.program import (
    ABSENT,
    TILE_SHAPE,
    Array,
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Ownership,
    Program,
    Role,
    Scratch,
    Space,
    Value,
    ValueType,
)

F16, BF16, F32, F64 = DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT32, DataType.FLOAT64
TINY = load_machine("tiny").shape
HOST = load_machine("host").shape


class Sketch:
    """Builds small programs by hand: values in DRAM, scratch on the host, never packed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[Value] = []
        self.inputs: list[InputSlot] = []
        self.outputs: list[OutputSlot] = []
        self.operations: list[Operation] = []
        self.constants: list[Constant] = []

    def _value(self, name: str, kind: ValueType, layout: Layout) -> int:
        self.values.append(Value(name, kind, layout))
        return len(self.values) - 1

    def input(
        self,
        name: str,
        data_type: DataType = F32,
        stored: DataType | None = None,
        shape: tuple[int, ...] = (4, 4),
        **layout: Any,
    ) -> int:
        home = Layout(stored or data_type, **{"space": Space.DRAM, **layout})
        value = self._value(name, ValueType(shape, data_type), home)
        self.inputs.append(InputSlot(name, value))
        return value

    def donated(self, name: str) -> int:
        value = self.input(name)
        self.inputs[-1] = replace(self.inputs[-1], ownership=Ownership.DONATE)
        return value

    def constant(self, name: str, data: Array) -> int:
        data_type = DataType.from_dtype(data.dtype)
        value = self._value(name, ValueType(data.shape, data_type), Layout(data_type, Space.DRAM))
        self.constants.append(Constant(value, data))
        return value

    def op(self, op: str, *inputs: int, **attributes: Any) -> int:
        kinds = [self.values[v].type for v in inputs]
        (kind,) = ops.infer_types(op, kinds, attributes=attributes)
        layout = Layout(kind.data_type, Space.HOST, address=0)
        made = self._value(f"{op}{len(self.values)}", kind, layout)
        self.operations.append(Operation(op, inputs, (made,), attributes))
        return made

    def output(self, name: str, value: int, stored: DataType | None = None, **layout: Any) -> None:
        found = self.values[value]
        aliases = layout.pop("aliases", None)
        home = Layout(stored or found.type.data_type, **{"space": Space.DRAM, **layout})
        self.values[value] = replace(found, layout=home)
        self.outputs.append(OutputSlot(name, value, aliases))

    def program(self, role: Role = Role.FORWARD) -> Program:
        return Program(
            self.name,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.values),
            tuple(self.operations),
            tuple(self.constants),
            Scratch(Space.HOST, 1 << 20),
            role,
        )


def run(program: Program, inputs: Sequence[Array]) -> list[Array]:
    """Interprets a program: every value is rounded to its type, slots to their storage as well."""
    known: dict[int, Array] = program.constant_data()
    for slot, array in zip(program.inputs, inputs, strict=True):
        known[slot.value] = _stored(array, program.values[slot.value])
    for operation in program.operations:
        results = ops.evaluate(
            operation.op,
            [None if v == ABSENT else known[v] for v in operation.inputs],
            domain=operation.domain,
            attributes=operation.attributes,
            outputs=len(operation.outputs),
        )
        for v, array in zip(operation.outputs, results, strict=True):
            if v != ABSENT:
                known[v] = _stored(array, program.values[v])
    return [
        _cast(known[slot.value], program.values[slot.value].desc.layout.data_type)
        for slot in program.outputs
    ]


def _stored(array: Array, value: Value) -> Array:
    return _cast(_cast(array, value.desc.layout.data_type), value.type.data_type)


def _cast(array: Array, data_type: DataType) -> Array:
    with np.errstate(all="ignore"):
        (made,) = ops.evaluate("Cast", [array], attributes={"to": ops.onnx_code(data_type)})
    return made


def run_in_turn(
    programs: Sequence[Program], wires: Sequence[Wire], outside: Mapping[tuple[int, int], Array]
) -> dict[tuple[int, int], Array]:
    """Runs programs one after the other, tensors passing in the storage types of the slots."""
    made: dict[tuple[int, int], Array] = {}
    for p, program in enumerate(programs):
        sources = {w.input: (w.producer, w.output) for w in wires if w.consumer == p}
        inputs = [
            _cast(made[sources[i]], program.input_desc(i).layout.data_type)
            if i in sources
            else outside[p, i]
            for i in range(len(program.inputs))
        ]
        made.update({(p, o): array for o, array in enumerate(run(program, inputs))})
    return made


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _scale(name: str, factor: float, data_type: DataType = F32, **stored: DataType) -> Program:
    sketch = Sketch(name)
    x = sketch.input("x", data_type, stored.get("x"))
    by = sketch.constant("factor", np.array(factor, data_type.dtype))
    sketch.output("y", sketch.op("Tanh", sketch.op("Mul", x, by)), stored.get("y"))
    return sketch.program()


def _array(seed: int, data_type: DataType = F32) -> Array:
    values = np.random.default_rng(seed).standard_normal((4, 4)) * 3
    return values.astype(data_type.dtype)


FLOATS = st.sampled_from([F16, BF16, F32, F64])


@given(st.lists(st.tuples(FLOATS, FLOATS, FLOATS), min_size=2, max_size=4), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_a_chain_is_bit_equal_whatever_its_storage_types_are(
    kinds: list[tuple[DataType, DataType, DataType]], seed: int
) -> None:
    programs = [_scale(f"p{i}", 0.7 + i, kind, x=x, y=y) for i, (kind, x, y) in enumerate(kinds)]
    wires = [Wire(i, 0, i + 1, 0) for i in range(len(programs) - 1)]
    x = _array(seed, kinds[0][1])
    linked = link_programs(programs, wires, machine=TINY, name="chain")
    expected = run_in_turn(programs, wires, {(0, 0): x})
    assert same_bits(run(linked, [x])[0], expected[len(programs) - 1, 0])


@given(FLOATS, FLOATS, FLOATS, st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_an_output_that_others_keep_is_bit_equal_too(
    kind: DataType, stored: DataType, wanted: DataType, seed: int
) -> None:
    programs = [_scale("a", 0.7, kind, y=stored), _scale("b", 1.3, F32, x=wanted)]
    wires = [Wire(0, 0, 1, 0)]
    x = _array(seed, kind)
    keep = {(0, 0), (1, 0)}
    linked = link_programs(programs, wires, machine=TINY, name="ab", keep=keep)
    expected = run_in_turn(programs, wires, {(0, 0): x})
    made = run(linked, [x])
    assert [slot.name for slot in linked.outputs] == ["y", "b.y"]
    assert same_bits(made[0], expected[0, 0])
    assert same_bits(made[1], expected[1, 0])


def test_names_stay_unique_and_say_where_they_come_from() -> None:
    programs = [_scale("a", 2.0), _scale("b", 3.0), _scale("b", 4.0)]
    linked = link_programs(programs, [], machine=TINY, name="all")
    assert [s.name for s in linked.inputs] == ["x", "b.x", "b.x.2"]
    assert [s.name for s in linked.outputs] == ["y", "b.y", "b.y.2"]
    names = [value.name for value in linked.values]
    assert len(set(names)) == len(names)


def test_an_output_that_nobody_keeps_takes_its_operations_and_constants_with_it() -> None:
    programs = [_scale("a", 2.0), _scale("b", 3.0)]
    linked = link_programs(programs, [], machine=TINY, name="only_b", keep={(1, 0)})
    assert len(linked.operations) == 2
    assert len(linked.constants) == 1
    assert len(linked.inputs) == 2  # the signature stays
    x = _array(1)
    assert same_bits(run(linked, [x, x])[0], run(programs[1], [x])[0])


def test_block_formats_on_a_wire_are_refused_with_both_sides() -> None:
    sketch = Sketch("a")
    result = sketch.op("Tanh", sketch.input("x"))
    sketch.output("y", result, DataType.BFP8, tile_shape=TILE_SHAPE)
    programs = [sketch.program(), _scale("b", 3.0)]
    with pytest.raises(LinkError) as caught:
        link_programs(programs, [Wire(0, 0, 1, 0)], machine=TINY, name="ab")
    assert "program 'a' output 'y' feeds program 'b' input 'x'" in str(caught.value)
    assert "4x4xbfp8:dram:tile" in str(caught.value)
    assert "stitch them at run time" in str(caught.value)


def test_all_unsound_wires_are_listed_at_once() -> None:
    programs = [_scale("a", 2.0), _scale("b", 3.0)]
    wires = [Wire(0, 0, 1, 0), Wire(0, 0, 1, 0), Wire(1, 0, 0, 0), Wire(0, 3, 1, 0)]
    with pytest.raises(LinkError) as caught:
        link_programs(programs, wires, machine=TINY, name="ab")
    text = str(caught.value)
    assert "input 'x' is fed twice" in text
    assert "which runs before it" in text
    assert "refers to a slot that does not exist" in text


def test_fixed_addresses_that_collide_in_the_whole_are_an_error() -> None:
    programs = []
    for name in ("a", "b"):
        sketch = Sketch(name)
        x = sketch.input("x", space=Space.L1, address=8192)
        sketch.output("y", sketch.op("Tanh", x))
        programs.append(sketch.program())
    with pytest.raises(LinkError) as caught:
        link_programs(programs, [], machine=TINY, name="ab")
    assert "input 'b.x' at [0x2000, 0x2010) and input 'x'" in str(caught.value) or (
        "input 'x' at [0x2000, 0x2010)" in str(caught.value)
    )
    linked = link_programs(programs, [Wire(0, 0, 1, 0)], machine=TINY, name="ab")
    assert linked.input_desc(0).layout.address == 8192


def test_a_whole_that_does_not_fit_is_out_of_memory_and_says_by_how_much() -> None:
    programs = []
    for name in ("a", "b"):
        sketch = Sketch(name)
        x = sketch.input("x", shape=(256, 512))
        sketch.output("y", sketch.op("Tanh", x))
        programs.append(sketch.program())
    with pytest.raises(OutOfMemoryError) as caught:
        link_programs([*programs, *programs, *programs], [], machine=TINY, name="six")
    text = str(caught.value)
    assert "does not fit dram of machine 'tiny'" in text
    assert "3145728 B per bank (6291456 B)" in text
    assert "output 'y' (262144 B per bank)" in text or "input" in text


def _update(name: str) -> Program:
    sketch = Sketch(name)
    state, step = sketch.donated("state"), sketch.input("step")
    sketch.output("new_state", sketch.op("Add", state, step), aliases=0)
    return sketch.program(Role.UPDATE)


def test_an_alias_that_still_holds_is_kept_and_one_to_an_inner_tensor_goes() -> None:
    first, second = _update("a"), _update("b")
    linked = link_programs([first, second], [Wire(0, 0, 1, 1)], machine=TINY, name="ab")
    assert [s.aliases_input for s in linked.outputs] == [2]
    assert linked.inputs[2].name == "b.state"
    inner = link_programs([first, second], [Wire(0, 0, 1, 0)], machine=TINY, name="ab")
    assert [s.aliases_input for s in inner.outputs] == [None]
    assert linked.role is Role.UPDATE


def _table(name: str, data: Array, **layout: Any) -> Program:
    sketch = Sketch(name)
    x, table = sketch.input("x"), sketch.constant(f"of_{name}", data)
    held = sketch.values[table]
    sketch.values[table] = replace(held, layout=replace(held.desc.layout, **layout))
    sketch.output("y", sketch.op("Add", x, table))
    return sketch.program()


def test_constants_of_equal_bytes_and_form_become_one() -> None:
    ones = np.ones((4, 4), np.float32)
    programs = [
        _table("a", ones), _table("b", ones.copy()), _table("c", -ones), _table("a", ones),
        _table("l1", ones, space=Space.L1), _table("tile", ones, tile_shape=TILE_SHAPE),
    ]  # fmt: skip
    wires = [Wire(i, 0, i + 1, 0) for i in range(len(programs) - 1)]
    linked = link_programs(programs, wires, machine=TINY, name="all")
    names = [linked.values[c.value].name for c in linked.constants]
    assert names == ["of_a", "of_c", "of_l1", "of_tile"]
    expected = run_in_turn(programs, wires, {(0, 0): _array(3)})
    assert same_bits(run(linked, [_array(3)])[0], expected[len(programs) - 1, 0])


def test_an_output_read_inside_its_own_program_is_read_as_it_is_stored() -> None:
    sketch = Sketch("a")
    hidden = sketch.op("Tanh", sketch.input("x"))
    sketch.output("hidden", hidden, BF16)
    sketch.output("late", sketch.op("Mul", hidden, hidden))
    programs = [sketch.program(), _scale("b", 1.3), _scale("c", 0.4)]
    wires = [Wire(0, 0, 1, 0), Wire(0, 1, 2, 0)]
    x = _array(5)
    expected = run_in_turn(programs, wires, {(0, 0): x})
    for keep in (None, {(0, 0), (1, 0), (2, 0)}):
        linked = link_programs(programs, wires, machine=TINY, name="abc", keep=keep)
        assert same_bits(run(linked, [x])[-1], expected[2, 0])


def test_strict_types_holds_on_wires() -> None:
    programs = [_scale("a", 2.0), _scale("b", 3.0, BF16)]
    wires = [Wire(0, 0, 1, 0)]
    with pytest.raises(LinkError, match="strict_types"):
        link_programs(programs, wires, machine=TINY, name="ab", strict_types=True)


def test_keeping_an_output_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LinkError, match=r"outputs \[\(0, 7\)\] to keep do not exist"):
        link_programs([_scale("a", 2.0)], [], machine=TINY, name="a", keep={(0, 7)})
