"""Placement options: constraints on the layout or role of one slot (`--set`, `placement=`)."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from stitch.errors import CompileError, LayoutError, UsageError, unknown
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
)

Side = Literal["input", "output"]
PlacementValue = Space | DataType | MemoryLayout | ShardSpec | InputKind | Ownership | str | int

_SIDES: tuple[Side, ...] = ("input", "output")
_SHARDS = "ROWSxCOLUMNS of cores, then of a shard, such as 8x1,32x64 or 8x1,32x64,col_major"
#: Fields with a fixed set of values.
_WORDS: Mapping[str, Mapping[str, PlacementValue]] = {
    "space": {m.value: m for m in Space},
    "data_type": {m.value: m for m in DataType},
    "memory_layout": {m.value: m for m in MemoryLayout},
    "kind": {m.value: m for m in InputKind},
    "ownership": {m.value: m for m in Ownership},
    "layout": {"row_major": "row_major", "tile": "tile"},
}
_EXPECTED: Mapping[str, str] = {
    **{field: ", ".join(words) for field, words in _WORDS.items()},
    "shard_spec": _SHARDS,
    "address": "bytes from the start of each bank, decimal or 0x...",
    "alias": "the name or index of the input whose buffer the output takes",
}
#: The fields that set a tensor's layout; the others set its role.
#: Fields that set the layout of a tensor; the others set its role.
LAYOUT_FIELDS = ("space", "data_type", "layout", "memory_layout", "shard_spec", "address")
#: All fields, by side.
PLACEMENT_FIELDS: Mapping[Side, tuple[str, ...]] = {
    "input": (*LAYOUT_FIELDS, "kind", "ownership"),
    "output": (*LAYOUT_FIELDS, "alias"),
}


class PlacementError(UsageError, CompileError, LayoutError):
    """A placement option that cannot be applied: unknown slot, or half of a pair (exit code 2)."""

    exit_code = UsageError.exit_code


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One placement option: side, slot (name or index), field and value.

    A value given as text is parsed. Types by field: space `Space`, data_type (of storage)
    `DataType`, layout `"row_major"` or `"tile"`, memory_layout `MemoryLayout`, shard_spec
    `ShardSpec`, address `int` (bytes per bank), kind `InputKind`, ownership `Ownership`, alias
    `str | int`.

    Raises:
        UsageError: An unknown side, field or value.
    >>> PlacementOption("input", "x", "space", "l1").value
    <Space.L1: 'l1'>
    """

    side: Side
    slot: str | int
    field: str
    value: PlacementValue

    def __post_init__(self) -> None:
        where = f"{self.side}.{self.slot}"
        _one_of("side", self.side, _SIDES, where)
        _one_of(f"field of an {self.side}", self.field, PLACEMENT_FIELDS[self.side], where)
        if isinstance(self.slot, int) and self.slot < 0:
            raise UsageError(
                "the index of a slot must not be negative", where=where, got=str(self.slot)
            )
        object.__setattr__(self, "value", _checked(self.field, self.value, f"{where}.{self.field}"))

    def text(self) -> str:
        """Return the text that `parse_placement` reads back."""
        return f"{self.side}.{self.slot}.{self.field}={_spelled(self.value, self.field)}"


def parse_placement(text: str) -> PlacementOption:
    """Parse a placement option such as `input.x.address=0x20000`; raise `UsageError`.

    >>> parse_placement("output.0.space=l1")
    PlacementOption(side='output', slot=0, field='space', value=<Space.L1: 'l1'>)
    """
    path, equals, value = text.partition("=")
    parts = path.strip().replace("-", "_").split(".")
    exact = path.strip().split(".")
    slot = ".".join(exact[1:-1])
    if not equals or len(parts) < 3 or not slot:
        raise UsageError(
            f"not a placement option: {text!r}",
            expected="SIDE.SLOT.FIELD=VALUE, such as input.x.space=l1 or output.0.layout=tile",
            remedy=f"sides: {', '.join(_SIDES)}; fields: {', '.join(_EXPECTED)}",
        )
    side: Side = "output" if parts[0] == "output" else "input"
    _one_of("side", parts[0], _SIDES, text)
    number = int(slot) if re.fullmatch(r"[0-9]{1,9}", slot) else None
    return PlacementOption(side, slot if number is None else number, parts[-1], value.strip())


def placement_of(side: Side, slot: str | int, desc: TensorDesc) -> tuple[PlacementOption, ...]:
    """Return the placement options in which `desc` differs from a row-major host layout."""
    plain = Layout(desc.layout.data_type.in_arrays)
    return placement_between(side, slot, plain, desc.layout)


def placement_between(
    side: Side, slot: str | int, have: Layout, want: Layout
) -> tuple[PlacementOption, ...]:
    """Return the placement options that change layout `have` into `want`.

    No option removes an address.

    >>> plain = Layout(DataType.FLOAT32)
    >>> [w.text() for w in placement_between("input", 0, plain, Layout(DataType.FLOAT32, Space.L1))]
    ['input.0.space=l1']
    """
    before = _fields(have)
    return tuple(
        PlacementOption(side, slot, field, value)
        for field, value in _fields(want).items()
        if value is not None and value != before[field]
    )


def _fields(layout: Layout) -> dict[str, PlacementValue | None]:
    return {
        "space": layout.space,
        "data_type": layout.data_type,
        "layout": "tile" if layout.is_tiled else "row_major",
        "memory_layout": layout.memory_layout,
        "shard_spec": layout.shard_spec,
        "address": layout.address,
    }


def requested_layout(default: Layout, placement: Iterable[PlacementOption]) -> Layout:
    """Apply the placement options of one slot to the default layout.

    A sharded `memory_layout` without a `shard_spec` is not handled here: `shard_layout` needs the
    machine.

    Raises:
        LayoutError: The options contradict each other.

    >>> from stitch.program import host_layout
    >>> asked = [parse_placement("input.x.space=l1")]
    >>> requested_layout(host_layout(DataType.FLOAT32), asked).text()
    'f32:l1:row_major:interleaved'
    """
    asked = {option.field: option.value for option in placement}
    changes: dict[str, object] = {}
    for field in ("space", "data_type", "memory_layout", "shard_spec", "address"):
        if field in asked:
            changes[field] = asked[field]
    if "layout" in asked:
        changes["tile_shape"] = TILE_SHAPE if asked["layout"] == "tile" else None
    elif asked.get("data_type") in (DataType.BFP8, DataType.BFP4):
        changes["tile_shape"] = TILE_SHAPE
    if asked.get("memory_layout") is MemoryLayout.INTERLEAVED and "shard_spec" not in asked:
        changes["shard_spec"] = None
    if not changes:
        return default
    layout: Layout = replace(default, **changes)  # type: ignore[arg-type]  # checked by PlacementOption
    return layout


def _one_of(what: str, name: str, allowed: Collection[str], where: str) -> None:
    if name not in allowed:
        raise unknown(f"unknown {what}: {name!r}", name, allowed, where=where)


def _checked(field: str, value: PlacementValue, where: str) -> PlacementValue:
    if field in _WORDS:
        return _meant(field, value, where)
    check: Mapping[str, Callable[[PlacementValue, str], PlacementValue]] = {
        "shard_spec": _shard_spec,
        "address": _address,
        "alias": _alias,
    }
    return check[field](value, where)


def _meant(field: str, value: PlacementValue, where: str) -> PlacementValue:
    words = _WORDS[field]
    if isinstance(value, str):
        spelled = value.replace("-", "_")
        short = {m.short: m for m in DataType} if field == "data_type" else {}
        if (meant := words.get(spelled, short.get(spelled))) is not None:
            return meant
    elif isinstance(value, enum.Enum) and value in words.values():
        return value
    raise unknown(f"unknown {field}: {value!r}", value, words, where=where)


def _address(value: PlacementValue, where: str) -> PlacementValue:
    if isinstance(value, str) and re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}|[0-9]{1,19}", value):
        value = int(value, 16 if value[:2].lower() == "0x" else 10)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise UsageError(f"not an address: {value!r}", where=where, expected=_EXPECTED["address"])
    return value


def _alias(value: PlacementValue, where: str) -> PlacementValue:
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or value in ("", -1):
        raise UsageError(f"not an input: {value!r}", where=where, expected=_EXPECTED["alias"])
    return value


def _shard_spec(value: PlacementValue, where: str) -> PlacementValue:
    if isinstance(value, ShardSpec):
        return value
    parts = re.fullmatch(
        r"(\d{1,9})x(\d{1,9}),(\d{1,9})x(\d{1,9})(?:,(row_major|col_major))?",
        value.replace(" ", "") if isinstance(value, str) else "",
    )
    if parts is None:
        raise UsageError(f"not a shard spec: {value!r}", where=where, expected=_SHARDS)
    rows, columns, high, wide = (int(parts[i]) for i in range(1, 5))
    try:
        return ShardSpec((rows, columns), (high, wide), Orientation(parts[5] or "row_major"))
    except LayoutError as error:
        raise UsageError(error.what, where=where, expected=_SHARDS, got=error.got) from error


def _spelled(value: PlacementValue, field: str) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, ShardSpec):
        order = "" if value.orientation is Orientation.ROW_MAJOR else ",col_major"
        grid, shape = value.core_grid, value.shape
        return f"{grid[0]}x{grid[1]},{shape[0]}x{shape[1]}{order}"
    if field == "address" and isinstance(value, int):
        return f"{value:#x}"
    return str(value)
