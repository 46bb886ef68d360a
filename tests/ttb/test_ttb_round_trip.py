"""What is written comes back: every type, layout and attribute, the same bytes each time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from stitch.errors import CompileError, FormatError, StitchError
from stitch.machine.shape import MachineShape, SpaceShape
from stitch.program import (
    Array,
    AttributeValue,
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    Value,
    ValueType,
)
from stitch.ttb import Binary, encode, inspect_sizes, load, save
from tests.support.files.random_programs import binaries

ROOT = Path(__file__).resolve().parents[2]
MACHINE = MachineShape("box", (2, 3), SpaceShape(1, 0, 2**40, 64), SpaceShape(6, 64, 4096, 16))


def binary_of(*arrays: Array, attributes: dict[str, AttributeValue] | None = None) -> Binary:
    """A binary of one program with constants; its operation has the attributes."""
    kind = ValueType((2,), DataType.FLOAT32)
    held = [
        Value(f"c{i}", ValueType(a.shape, t), Layout(t))
        for i, (a, t) in enumerate((a, DataType.from_dtype(a.dtype)) for a in arrays)
    ]
    ends = Value("x", kind, Layout(DataType.FLOAT32)), Value("y", kind, Layout(DataType.FLOAT32))
    made = len(held) + 1
    program = Program(
        "main",
        (InputSlot("x", 0),),
        (OutputSlot("y", made),),
        (ends[0], *held, ends[1]),
        (Operation("Sum", tuple(range(made)), (made,), attributes or {}),),
        tuple(Constant(i + 1, a) for i, a in enumerate(arrays)),
        Scratch(Space.HOST, 0),
    )
    return Binary((program,), MACHINE, "test")


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(binaries())
def test_any_binary_comes_back_equal_and_encodes_to_the_same_bytes(binary: Binary) -> None:
    written = encode(binary)
    read = load(written, verify="full")
    assert read == binary
    assert encode(read) == written
    assert [p.text() for p in read.programs] == [p.text() for p in binary.programs]


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**63 - 1, -(2**63), 0.0, -0.0, 1e308, float("inf"), "", "text", (1, 2), (0.5,), ("a",),
     ("", "b"), (), tuple(range(1000))],
)  # fmt: skip
def test_an_attribute_keeps_its_value_and_its_type(value: AttributeValue) -> None:
    read = load(encode(binary_of(attributes={"a": value}))).programs[0].operations[0]
    assert repr(read.attributes["a"]) == repr(value)


@pytest.mark.parametrize(
    "value", [2**63, (1, 2**64), ("a", 1)], ids=["wide int", "wide int in tuple", "mixed"]
)
def test_an_attribute_that_the_format_cannot_hold_is_refused_by_name(value: object) -> None:
    binary = binary_of(attributes={"stride": value})  # type: ignore[dict-item]
    with pytest.raises(StitchError, match="'stride'"):
        encode(binary)


def test_a_name_that_is_too_long_is_refused_when_it_is_written() -> None:
    binary = binary_of()
    program = replace(binary.programs[0], name="n" * 1025)
    with pytest.raises(StitchError, match="name is too long"):
        encode(replace(binary, programs=(program,)))


def test_numbers_that_the_format_cannot_hold_are_refused_when_they_are_written() -> None:
    binary = binary_of()
    program = replace(binary.programs[0], scratch=Scratch(Space.L1, 2**64))
    with pytest.raises(StitchError, match="holds a number that"):
        encode(replace(binary, programs=(program,)))
    with pytest.raises(FormatError, match="banks is 0"):
        encode(replace(binary, machine=replace(MACHINE, host=SpaceShape(0, 0, 1, 1))))


def test_an_empty_buffer_of_any_shape_is_an_empty_file() -> None:
    for source in (b"", memoryview(b""), np.zeros((0, 3), np.float32).data):
        with pytest.raises(FormatError, match="an empty file"):
            load(source)


def test_a_buffer_that_is_not_contiguous_loads_as_well() -> None:
    written = np.frombuffer(encode(binary_of(np.ones(3, np.int32))), np.uint8)
    strided = np.stack([written, written], axis=1)[:, 0]
    assert load(strided.data, verify="full") == binary_of(np.ones(3, np.int32))


def test_text_that_is_not_unicode_is_refused_when_it_is_written() -> None:
    with pytest.raises(StitchError, match="not valid Unicode"):
        encode(binary_of(attributes={"a": "\ud800"}))


@pytest.mark.parametrize("data_type", [t for t in DataType if not t.is_block])
def test_constants_of_every_type_keep_their_bits(data_type: DataType) -> None:
    array = np.arange(6).reshape(2, 3).astype(data_type.dtype)
    read = load(encode(binary_of(array)), verify="full").programs[0].constants[0].data
    assert read.dtype == array.dtype
    assert read.tobytes() == array.tobytes()


def test_equal_constants_share_one_segment() -> None:
    array = np.arange(100, dtype=np.float32)
    sizes = inspect_sizes(encode(binary_of(array, array.copy(), array + 1)))
    assert sizes.segments == (400, 400)
    assert load(encode(binary_of(array, array.copy()))) == binary_of(array, array.copy())


def test_a_mapped_constant_is_read_only_and_lies_in_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "a.ttb"
    save(binary_of(np.arange(4, dtype=np.float32), np.ones(9, np.int8)), path)
    first, second = (c.data for c in load(path).programs[0].constants)
    assert not first.flags.writeable
    assert not first.flags.owndata
    assert second.ctypes.data - first.ctypes.data == 64
    assert first.ctypes.data % 64 == 0


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_load_from_every_kind_of_buffer(kind: type) -> None:
    written = encode(binary_of(np.ones(3, np.int32)))
    read = load(kind(written), verify="full")
    assert read == binary_of(np.ones(3, np.int32))
    assert not read.programs[0].constants[0].data.flags.writeable


def test_saving_over_the_mapped_file_leaves_the_loaded_binary_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.ttb"
    save(binary_of(np.arange(5000)), path)
    read = load(path)
    save(binary_of(np.zeros(3)), path)
    read.verify_segments()
    assert read == binary_of(np.arange(5000))


def test_two_processes_with_different_hash_seeds_write_the_same_bytes(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tests.ttb.test_ttb_round_trip import *;"
        "save(binary_of(np.arange(9), np.ones(4), attributes=dict(zip('zyxabc', 'abcdef'))),"
        "sys.argv[2])"
    )
    written = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.ttb"
        subprocess.run(
            [sys.executable, "-c", script, str(ROOT), str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        written.append(path.read_bytes())
    assert written[0] == written[1]


def test_programs_are_found_by_name_and_index_and_otherwise_listed() -> None:
    first = binary_of().programs[0]
    binary = Binary((first, replace(first, name="loss")), MACHINE, "test")
    assert binary.program("loss") is binary.program(1) is binary.programs[1]
    with pytest.raises(StitchError, match="0: main, 1: loss"):
        binary.program("backward")
    with pytest.raises(StitchError, match="no program 2"):
        binary.program(2)


def test_a_binary_has_programs_and_their_names_differ() -> None:
    first = binary_of().programs[0]
    with pytest.raises(CompileError, match="at least one"):
        Binary((), MACHINE, "test")
    with pytest.raises(CompileError, match="different names"):
        Binary((first, first), MACHINE, "test")


def test_neither_saving_nor_loading_copies_the_constants(tmp_path: Path) -> None:
    binary = binary_of(np.arange(4_000_000, dtype=np.float64))
    path = tmp_path / "large.ttb"
    tracemalloc.start()
    try:
        save(binary, path)
        read = load(path, verify="full")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read.programs[0].constants[0].data.nbytes == 32_000_000
    assert peak < 2_000_000


def test_an_interrupt_while_loading_leaves_the_collector_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disable = gc.disable

    def disable_and_stop() -> None:
        disable()
        raise KeyboardInterrupt

    file = encode(binary_of(np.ones(2, np.float32)))
    assert gc.isenabled()
    with monkeypatch.context() as patch:
        patch.setattr(gc, "disable", disable_and_stop)
        with pytest.raises(KeyboardInterrupt):
            load(file)
    assert gc.isenabled()
