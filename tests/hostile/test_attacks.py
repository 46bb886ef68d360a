"""One file per defect, one error each: every attack is refused, and the error says where."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from zlib import crc32

import flatbuffers
import numpy as np
import pytest

from stitch.errors import FormatError, IncompatibleError
from stitch.ttb import CURRENT, Version, encode, load
from tests.support.files.specimens import rich_binary
from tests.support.files.surgery import Surgery
from tests.support.flatc.peer import add_table

FILE = encode(rich_binary())
PROGRAM = ("programs", 0)
OPERATION = ("programs", 0, "operations", 0)
VALUE = ("programs", 0, "values", 0)
SEAM = ("programs", 1, "seams", 1)
BODY = ("programs", 1, "bodies", 1)
CARRIER = ("programs", 1, "operations", 1)


def put(path: tuple[str | int, ...], code: str, value: float) -> Callable[[Surgery], None]:
    """Overwrite a scalar or offset field."""
    return lambda s: s.put(s.place(path), code, value)


def put_behind(
    path: tuple[str | int, ...], at: int, code: str, value: float
) -> Callable[..., None]:
    """Overwrite bytes behind the start of what an offset field points at."""
    return lambda s: s.put(s.follow(s.place(path)) + at, code, value)


def drop(path: tuple[str | int, ...], slot: int) -> Callable[[Surgery], None]:
    """Clear a slot in the vtable of the table at a path."""
    return lambda s: s.put(s.entry(s.table(path), slot), "H", 0)


def share_operations(s: Surgery) -> None:
    """Point every operation at the first one."""
    vector = s.follow(s.place((*PROGRAM, "operations")))
    for i in range(1, s.u32(vector)):
        s.put(vector + 4 + 4 * i, "I", (s.follow(vector + 4) - (vector + 4 + 4 * i)) % 2**32)


def duplicate_program(s: Surgery) -> None:
    name = s.follow(s.place(("programs", 1, "name")))
    s.put(name, "I", 4)
    s.bytes[name + 4 : name + 11] = b"main\0\0\0"


ATTACKS: dict[str, tuple[Callable[[Surgery], None], str]] = {
    "root outside": (lambda s: s.put(4, "I", 2**31), "bounds"),
    "root misaligned": (lambda s: s.put(4, "I", s.u32(4) + 1), "bounds"),
    "root is the root offset": (lambda s: s.put(4, "I", 0), "bounds"),
    "vtable before the file": (lambda s: s.put(s.table(PROGRAM), "i", 2**31 - 1), "bounds"),
    "vtable behind the metadata": (lambda s: s.put(s.table(PROGRAM), "i", -(2**31)), "bounds"),
    "vtable misaligned": (lambda s: s.put(s.table(()), "i", 5), "bounds"),
    "vtable too short": (lambda s: s.put(s.vtable(s.table(())), "H", 2), "bounds"),
    "vtable too long": (lambda s: s.put(s.vtable(s.table(())), "H", 0xFFFE), "bounds"),
    "table too small": (lambda s: s.put(s.vtable(s.table(())) + 2, "H", 4), "bounds"),
    "field overlaps field": (
        lambda s: s.put(s.entry(s.table(PROGRAM), 2), "H", 4), "overlap"),
    "field misaligned": (lambda s: s.put(s.entry(s.table(()), 3), "H", 5), "alignment"),
    "required field missing": (drop((), 3), "missing"),
    "union without a type": (
        drop((*OPERATION, "attributes", 0), 1), "union"),
    "union of an unknown type": (
        put((*OPERATION, "attributes", 0, "value"), "B", 99), "union"),
    "offset of zero": (put((*PROGRAM, "operations"), "I", 0), "offset"),
    "offset beyond the file": (put((*PROGRAM, "operations"), "I", 2**31), "bounds"),
    "offset loop to the root": (
        lambda s: s.put(
            s.follow(s.place(("programs",))) + 4, "I",
            (s.table(()) - s.follow(s.place(("programs",))) - 4) % 2**32), "bounds"),
    "huge vector": (put_behind((*PROGRAM, "operations"), 0, "I", 2**32 - 1), "bounds"),
    "vector a little too long": (put_behind((*PROGRAM, "values"), 0, "I", 2000), "bounds"),
    "huge string": (put_behind((*PROGRAM, "name"), 0, "I", 2**32 - 1), "bounds"),
    "string without an end": (put_behind((*PROGRAM, "name"), 0, "I", 3), "string"),
    "string is not UTF-8": (put_behind((*PROGRAM, "name"), 4, "B", 0xFF), "utf8"),
    "bad role": (put((*PROGRAM, "role"), "B", 200), "enum"),
    "bad data type": (put(("programs", 0, "values", 2, "layout", "data_type"), "B", 25), "enum"),
    "negative dimension": (put_behind((*VALUE, "type", "shape"), 4, "q", -4), "range"),
    "negative operand": (put_behind((*OPERATION, "inputs"), 4, "i", -2), "range"),
    "no banks": (put(("machine", "l1", "banks"), "I", 0), "range"),
    "alignment is no power of two": (put(("machine", "l1", "alignment"), "Q", 48), "range"),
    "granule is no multiple": (put(("machine", "l1", "granule"), "Q", 24), "range"),
    "space ends before it begins": (put(("machine", "l1", "limit"), "Q", 1), "range"),
    "segment misaligned": (put(("segments", 1, "offset"), "Q", 65), "alignment"),
    "segments overlap": (put(("segments", 2, "offset"), "Q", 64), "overlap"),
    "segment beyond the file": (put(("segments", 2, "offset"), "Q", 2**62), "bounds"),
    "segment beyond any file": (put(("segments", 2, "length"), "Q", 2**64 - 1), "bounds"),
    "constant shorter than its shape": (put(("segments", 1, "length"), "Q", 8), "constant_length"),
    "constant of a huge shape": (
        put_behind(("programs", 0, "values", 3, "type", "shape"), 4, "q", 2**62),
        "constant_length"),
    "constant without a segment": (put((*PROGRAM, "constants", 0, "segment"), "I", 4), "bad_index"),
    "constant without a value": (put((*PROGRAM, "constants", 0, "value"), "I", 900), "bad_index"),
    "illegal layout": (put(("programs", 0, "values", 2, "layout", "tile_rows"), "I", 7), "layout"),
    "operand that does not exist": (put_behind((*OPERATION, "inputs"), 4, "i", 77), "undefined"),
    "operand used before it is made": (put_behind((*OPERATION, "inputs"), 4, "i", 8), "undefined"),
    "input of a value that does not exist": (
        put((*PROGRAM, "inputs", 1, "value"), "I", 2**32 - 1), "bad_index"),
    "output of a value that does not exist": (
        put((*PROGRAM, "outputs", 0, "value"), "I", 2**32 - 1), "undefined"),
    "alias of an input that does not exist": (
        put((*PROGRAM, "outputs", 0, "aliases_input"), "i", 2**31 - 1), "bad_alias"),
    "seam behind the operations": (put((*SEAM, "first"), "I", 3), "bad_seam"),
    "seam where another begins": (put((*SEAM, "first"), "I", 0), "bad_seam"),
    "seam that holds what another part makes": (
        put_behind(("programs", 1, "seams", 0, "held"), 4, "I", 8), "bad_seam"),
    "seam that holds no value": (
        put_behind(("programs", 1, "seams", 0, "held"), 4, "I", 2**32 - 1), "bad_seam"),
    "body that does not exist": (put((*CARRIER, "body"), "i", 2), "bad_body"),
    "body with other operands": (put((*CARRIER, "body"), "i", 0), "bad_body"),
    "body below any": (put((*CARRIER, "body"), "i", -2), "range"),
    "body inside itself": (put((*BODY, "operations", 0, "body"), "i", 1), "bad_body"),
    "body of a value that does not exist": (
        put_behind((*BODY, "inputs"), 4, "i", 900), "bad_index"),
    "body that gives what it is given": (
        put_behind((*BODY, "outputs"), 4, "I", 1), "output_value"),
    "body that gives no value": (
        put_behind((*BODY, "outputs"), 4, "I", 2**32 - 1), "output_value"),
    "body that makes nothing": (drop(BODY, 1), "bad_body"),
    "body that reads what it does not make": (
        put_behind((*BODY, "operations", 1, "inputs"), 8, "i", 4), "undefined"),
    "body with a constant without a segment": (
        put(("programs", 1, "bodies", 0, "constants", 0, "segment"), "I", 4), "bad_index"),
    "body with a value without a type": (drop((*BODY, "values", 0), 1), "missing"),
    "equal program names": (duplicate_program, "binary"),
    "shared operations": (share_operations, "defined_twice"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_attack_is_refused_with_its_own_kind_of_defect(attack: str) -> None:
    damage, kind = ATTACKS[attack]
    surgery = Surgery(FILE)
    damage(surgery)
    with pytest.raises(FormatError) as caught:
        load(surgery.file())
    kinds = [problem.kind for problem in caught.value.problems]
    assert kind in kinds, str(caught.value)
    assert all(problem.where and problem.detail for problem in caught.value.problems)


def test_the_specimen_itself_is_sound() -> None:
    assert load(Surgery(FILE).file(), verify="full") == rich_binary()


def test_all_defects_are_reported_together_with_their_places() -> None:
    surgery = Surgery(FILE)
    for path in (("programs", 0, "role"), ("programs", 1, "role")):
        surgery.put(surgery.place(path), "B", 200)
    surgery.put(surgery.follow(surgery.place((*OPERATION, "inputs"))) + 4, "i", -9)
    with pytest.raises(FormatError) as caught:
        load(surgery.file())
    assert [p.where for p in caught.value.problems] == [
        "programs[0]", "programs[0].operations[0]", "programs[1]"
    ]  # fmt: skip


def test_a_flipped_bit_of_the_metadata_is_a_checksum_error() -> None:
    damaged = bytearray(FILE)
    damaged[100] ^= 4
    with pytest.raises(FormatError, match="checksum does not match"):
        load(bytes(damaged))


@pytest.mark.parametrize(
    ("at", "segment", "name", "program"),
    [(-96, 2, "bias", 0), (-1, 3, "half", 1)],
    ids=["of a program", "of a body"],
)
def test_a_flipped_bit_of_a_constant_is_found_by_full_verification_and_on_first_use(
    at: int, segment: int, name: str, program: int
) -> None:
    damaged = bytearray(FILE)
    damaged[at] ^= 1
    binary = load(bytes(damaged))
    owner = binary.programs[program]
    place = rf"segment {segment} \(constant '{name}' of program '{owner.name}'\)"
    with pytest.raises(FormatError, match=place):
        binary.verify_segments(owner)
    with pytest.raises(FormatError, match=f"segment {segment}"):
        load(bytes(damaged), verify="full")


def test_a_bool_that_is_neither_0_nor_1_is_refused() -> None:
    surgery = Surgery(FILE)
    start = -(-(surgery.metadata_nbytes + 4) // 64) * 64
    offset = struct.unpack_from("<Q", surgery.bytes, surgery.place(("segments", 1, "offset")))[0]
    at = start + offset
    surgery.bytes[at] = 7
    surgery.put(surgery.place(("segments", 1, "crc32")), "I", crc32(surgery.bytes[at : at + 32]))
    with pytest.raises(FormatError, match="neither 0 nor 1"):
        load(surgery.file(), verify="full")


def test_padding_that_is_not_zero_is_refused() -> None:
    surgery = Surgery(FILE)
    surgery.bytes[surgery.metadata_nbytes + 4] = 1
    with pytest.raises(FormatError, match="padding"):
        load(surgery.file())


def test_bytes_behind_the_last_segment_are_refused() -> None:
    with pytest.raises(FormatError, match="5 bytes follow the last segment"):
        load(FILE + b"extra")


@pytest.mark.parametrize(
    ("major", "minor", "remedy"),
    [(2, 0, "newer Stitch"), (0, 9, "compile the module again"), (1, 2, "newer Stitch")],
)
def test_another_version_is_incompatible_and_both_versions_are_named(
    major: int, minor: int, remedy: str
) -> None:
    other = replace(rich_binary(), version=Version(major, minor), producer="future")
    with pytest.raises(IncompatibleError) as caught:
        load(encode(other))
    text = str(caught.value)
    assert f"{major}.{minor}" in text
    assert str(CURRENT) in text
    assert remedy in text
    assert "future" in text


def test_an_unknown_feature_is_refused_by_name() -> None:
    other = replace(rich_binary(), requires=("sparse_weights", "time_travel"))
    with pytest.raises(IncompatibleError, match="sparse_weights, time_travel"):
        load(encode(other))


def test_a_table_with_fields_that_the_schema_lacks_is_refused() -> None:
    b = flatbuffers.Builder()
    b.StartObject(9)
    b.PrependUint32Slot(8, 7, 0)
    assert "unknown_field" in kinds_of(finished(b, b.EndObject()))


def finished(b: Any, root: int) -> bytes:
    """A whole file without segments around a flatbuffer."""
    b.FinishSizePrefixed(root, file_identifier=b"STCH")
    metadata = bytes(b.Output())
    return (metadata + crc32(metadata).to_bytes(4, "little")).ljust(
        -(-(len(metadata) + 4) // 64) * 64, b"\0"
    )


def kinds_of(file: bytes) -> list[str]:
    with pytest.raises(FormatError) as caught:
        load(file)
    return [problem.kind for problem in caught.value.problems]


def vector(b: Any, offsets: list[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    return int(b.EndVector())


def program_of(b: Any, **parts: int) -> int:
    """A file's bytes up to the root around one program made of the given vectors."""
    name = b.CreateString("bomb")
    program = add_table(b, "Program", name=name, scratch=add_table(b, "Scratch"), **parts)
    programs = vector(b, [program])
    machine = add_table(b, "Machine", name=name, host=add_table(b, "SpaceShape"))
    version = add_table(b, "Version", major=1)
    return add_table(b, "Binary", version=version, machine=machine, programs=programs)


def shared_attributes_bomb(b: Any) -> int:
    """4,000 operations that share one vector of 4,000 attributes: 16 million if expanded."""
    op, member = b.CreateString("Add"), add_table(b, "IntAttribute")
    shared = vector(b, [
        add_table(b, "Attribute", name=b.CreateString(f"{i:05}"), value_type=1, value=member)
        for i in range(4000)
    ])  # fmt: skip
    operations = [add_table(b, "Operation", op=op, attributes=shared) for _ in range(4000)]
    return program_of(b, operations=vector(b, operations))


def shared_operands_bomb(b: Any) -> int:
    """One operation of 100,000 operands, 100,000 times: ten thousand million if expanded."""
    inputs = b.CreateNumpyVector(np.zeros(100_000, "<i4"))
    operation = add_table(b, "Operation", op=b.CreateString("Add"), inputs=inputs)
    return program_of(b, operations=vector(b, [operation] * 100_000))


def overlapping_vectors_bomb(b: Any) -> int:
    """20,000 operand vectors, each starting four bytes behind the last, each 60,000 long."""
    op = b.CreateString("Add")
    field = b.CreateNumpyVector(np.full(100_000, 60_000, "<i4"))
    operations = [add_table(b, "Operation", op=op, inputs=field - 4 * i) for i in range(20_000)]
    return program_of(b, operations=vector(b, operations))


def long_shared_name_bomb(b: Any) -> int:
    """50,000 values that share one name of a megabyte."""
    name = b.CreateString("n" * 1_000_000)
    parts = {"name": name, "type": add_table(b, "ValueType"), "layout": add_table(b, "Layout")}
    return program_of(b, values=vector(b, [add_table(b, "Value", **parts) for _ in range(50_000)]))


def rank_bomb(b: Any) -> int:
    """One value of 33 dimensions."""
    kind = add_table(b, "ValueType", shape=b.CreateNumpyVector(np.ones(33, "<i8")))
    value = add_table(b, "Value", type=kind, layout=add_table(b, "Layout"))
    return program_of(b, values=vector(b, [value]))


def deep_nesting_bomb(b: Any) -> int:
    """Tables that point at tables, 50,000 deep, in a field where the schema has a machine."""
    b.StartObject(1)
    below = b.EndObject()
    for _ in range(50_000):
        b.StartObject(7)
        b.PrependUOffsetTRelativeSlot(3, below, 0)
        below = b.EndObject()
    return int(below)


BOMBS: dict[str, tuple[Callable[[Any], int], str]] = {
    "shared attributes": (shared_attributes_bomb, "overlap"),
    "shared operands": (shared_operands_bomb, "overlap"),
    "overlapping vectors": (overlapping_vectors_bomb, "overlap"),
    "long shared name": (long_shared_name_bomb, "limit"),
    "rank of 33": (rank_bomb, "limit"),
    "deep nesting": (deep_nesting_bomb, "missing"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_in_memory_that_the_file_justifies(bomb: str) -> None:
    build, kind = BOMBS[bomb]
    b = flatbuffers.Builder(1 << 20)
    file = finished(b, build(b))
    tracemalloc.start()
    try:
        kinds = kinds_of(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert kind in kinds
    assert peak < 40 * len(file) + (1 << 20)
    assert len(kinds) <= 65
