"""Descriptors as JSON, in both directions."""

from __future__ import annotations

from typing import Any, TypeVar

from stitch.errors import LayoutError
from stitch.graph import JsonObject
from stitch.program import (
    DataType,
    Layout,
    MemoryLayout,
    Orientation,
    ShardSpec,
    Space,
    TensorDesc,
)

_ALWAYS = ("shape", "data_type", "space")
_SOMETIMES = ("tile_shape", "memory_layout", "shard_spec", "address")
_SHARD = ("core_grid", "shape", "orientation")
_Word = TypeVar("_Word", DataType, Space, MemoryLayout, Orientation)


def desc_out(desc: TensorDesc) -> dict[str, Any]:
    """A descriptor as JSON data."""
    layout, spec = desc.layout, desc.layout.shard_spec
    form: dict[str, Any] = {
        "shape": list(desc.shape),
        "data_type": layout.data_type.value,
        "space": layout.space.value,
    }
    if layout.tile_shape is not None:
        form["tile_shape"] = list(layout.tile_shape)
    if layout.memory_layout is not MemoryLayout.INTERLEAVED:
        form["memory_layout"] = layout.memory_layout.value
    if spec is not None:
        form["shard_spec"] = {
            "core_grid": list(spec.core_grid),
            "shape": list(spec.shape),
            "orientation": spec.orientation.value,
        }
    if layout.address is not None:
        form["address"] = layout.address
    return form


def desc_in(record: JsonObject) -> TensorDesc | None:
    """What `desc_out` gave; None, and a problem, for anything else."""
    record.refuse_other_keys((*_ALWAYS, *_SOMETIMES))
    shape = record.integers("shape")
    data_type = _word(record, "data_type", DataType.FLOAT32)
    space = _word(record, "space", Space.HOST)
    memory_layout = MemoryLayout.INTERLEAVED
    if record.get("memory_layout") is not None:
        memory_layout = _word(record, "memory_layout", memory_layout)
    tile = None if record.get("tile_shape") is None else _pair(record, "tile_shape")
    address = None if record.get("address") is None else record.integer("address")
    try:
        spec = _spec_in(record) if record.get("shard_spec") is not None else None
        return TensorDesc(shape, Layout(data_type, space, tile, memory_layout, spec, address))
    except LayoutError as error:
        record.problem("bad_layout", "layout", error.sentence())
        return None


def _spec_in(record: JsonObject) -> ShardSpec:
    spec = record.record("shard_spec")
    spec.refuse_other_keys(_SHARD)
    grid, shape = _pair(spec, "core_grid"), _pair(spec, "shape")
    return ShardSpec(grid, shape, _word(spec, "orientation", Orientation.ROW_MAJOR))


def _word(record: JsonObject, key: str, otherwise: _Word) -> _Word:
    return record.choice(key, {member.value: member for member in type(otherwise)}, otherwise)


def _pair(record: JsonObject, key: str) -> tuple[int, int]:
    numbers = record.integers(key)
    if len(numbers) != 2:
        record.problem("bad_value", key, f"two whole numbers are needed, not {len(numbers)}")
        return 1, 1
    return numbers[0], numbers[1]
