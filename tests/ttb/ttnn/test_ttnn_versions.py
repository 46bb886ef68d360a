"""Which TTNN binaries are read: those of versions whose order of fields is known; others are named
and refused."""

from __future__ import annotations

import struct

import pytest

from stitch.errors import FormatError, IncompatibleError
from stitch.flatbuffer import Release
from stitch.machine import load_machine
from stitch.program import MemoryLayout, Space
from stitch.ttb import load
from stitch.ttb.ttnn.field_history import known_versions, schema_of
from tests.support.files.ttnn_files import ALL, FOLDER, LAYER, REAL, RELEASE_OF_REAL
from tests.support.grids import every

FIRST, LAST = known_versions()


def of_release(release: int) -> bytes:
    """The real binary, as if another version had written it."""
    data = bytearray(REAL.read_bytes())
    assert struct.unpack_from("<I", data, RELEASE_OF_REAL) == (249,)
    struct.pack_into("<I", data, RELEASE_OF_REAL, release)
    return bytes(data)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_file_of_a_known_version_loads(path: object) -> None:
    assert load(str(path)).programs


@pytest.mark.parametrize("release", [0, 4014])
def test_an_unknown_version_is_refused_and_the_known_ones_are_named(release: int) -> None:
    with pytest.raises(IncompatibleError) as refused:
        load(of_release(release))
    assert f"of version 0.0.{release}" in refused.value.what
    assert f"version {FIRST} to {LAST}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "version", "operations", "slots"),
    [
        (
            "real_multiply_65",
            "0.0.65",
            "OpenDeviceOp FullOp ToMemoryConfigOp FullOp ToMemoryConfigOp FullOp EltwiseOp FullOp "
            "ToMemoryConfigOp CloseDeviceOp",
            ["64x128xf32", "64x128xf32", "64x128xf32"],
        ),
        (
            "real_matmul_131",
            "0.0.131",
            "OpenDeviceOp EmptyOp ToMemoryConfigOp EmptyOp ToMemoryConfigOp EmptyOp MatmulOp "
            "EmptyOp ToMemoryConfigOp CloseDeviceOp",
            ["64x128xbf16", "128x96xbf16", "64x96xbf16"],
        ),
    ],
)
def test_files_from_before_0_0_172_are_read_with_their_operations_and_slots(
    name: str, version: str, operations: str, slots: list[str]
) -> None:
    binary = load(FOLDER / f"{name}.ttnn")
    assert binary.origin is not None
    assert binary.origin.version == version
    (program,) = binary.programs
    assert " ".join(o.op for o in program.operations) == operations
    numbers = [s.value for s in program.inputs] + [s.value for s in program.outputs]
    assert [program.values[number].type.text() for number in numbers] == slots
    # These versions state no memory layout: all that is on the device is interleaved.
    layouts = {(v.desc.layout.space, v.desc.layout.memory_layout) for v in program.values}
    assert layouts == {(space, MemoryLayout.INTERLEAVED) for space in (Space.HOST, Space.L1)}


def test_what_an_old_descriptor_does_not_state_is_the_shipped_machines() -> None:
    origin = load(FOLDER / "real_matmul_131.ttnn").origin
    assert origin is not None
    shipped, read = load_machine("wormhole_n150"), origin.machine
    sources = dict(read.sources)
    # Alignments stand in files since 0.0.20, reserved regions since 0.0.144 and 0.0.169.
    assert sources["l1.alignment"].endswith("noc_l1_address_align_bytes")
    assert (read.shape.l1, read.shape.dram) == (shipped.shape.l1, shipped.shape.dram)
    assert sources["l1.base"].startswith("as wormhole_n150: ")


@pytest.mark.parametrize("release", every(5, range(1, 172)))
def test_every_version_before_0_0_172_has_tables(release: int) -> None:
    schema = schema_of(Release(0, 0, release), "")
    assert schema is not None
    assert set(schema.codes["OpType"]) <= set(schema.schema.tables)
    layout = {field.name for field in schema.schema.tables["LayoutDesc"].fields}
    assert layout == {"grid" if release < 62 else "core_range_set", "memory_desc"}
    chip = {field.name for field in schema.schema.tables["ChipDesc"].fields}
    assert ("noc_l1_address_align_bytes" in chip) == (release >= 20)
    assert ("l1_unreserved_base" in chip) == (release >= 144)
    assert ("dram_unreserved_end" in chip) == (release >= 169)


def test_versions_with_the_same_order_of_fields_read_the_same() -> None:
    assert load(of_release(251)).programs == load(REAL).programs


def test_a_schema_of_no_known_hash_is_refused() -> None:
    data = LAYER.read_bytes()
    at = data.index(b"f36068002aa895e8")
    with pytest.raises(IncompatibleError, match="schema 0000000000000000"):
        load(data[:at] + b"0" * 16 + data[at + 16 :])


def test_the_hash_of_the_schema_says_more_than_the_number() -> None:
    data = bytearray(LAYER.read_bytes())
    at = data.index(struct.pack("<HHI", 0, 0, 4013))
    struct.pack_into("<I", data, at + 4, 5000)
    binary = load(bytes(data))
    assert binary.origin is not None
    assert binary.origin.version == "0.0.5000"
    assert binary.programs == load(LAYER).programs


def test_a_file_that_is_cut_off_is_refused_at_every_place() -> None:
    data = LAYER.read_bytes()
    for end in range(12, len(data)):
        with pytest.raises(FormatError):
            load(data[:end])


def test_bytes_behind_a_file_are_refused() -> None:
    with pytest.raises(FormatError, match="bytes follow"):
        load(REAL.read_bytes() + b"\0")


@pytest.mark.parametrize(
    ("figure", "code", "instead"),
    [
        ("an L1 base above its size", "<I", (103_840, 2_000_000)),
        ("a grid of no rows", "<ii", ((8, 8), (0, 8))),
        ("an alignment that is no power of two", "<I", (16, 24)),
    ],
)
def test_a_descriptor_that_is_not_sound_is_refused(
    figure: str, code: str, instead: tuple[object, object]
) -> None:
    data = LAYER.read_bytes()
    old, new = (struct.pack(code, *(v if isinstance(v, tuple) else (v,))) for v in instead)
    assert old in data, figure
    with pytest.raises(FormatError) as refused:
        load(data.replace(old, new))
    assert refused.value.where
