"""Slot layouts: the layout that one slot gets in a given space, by default and by its wishes.

Comes in: a type, wishes by field, a machine. Goes out: a `Layout`, or a `LayoutError` that names
the slot. Whether all slots fit together is `placement`'s question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stitch.compiler.options import CompileWarning
from stitch.compiler.slot_wishes import ByField
from stitch.errors import LayoutError
from stitch.graph import Wish, WishError, wished_layout
from stitch.machine import MachineShape, footprint, round_up, shard_layout
from stitch.program import (
    BLOCK_ELEMENTS,
    TILE_SHAPE,
    InputKind,
    Layout,
    MemoryLayout,
    ShardSpec,
    Space,
    TensorDesc,
    ValueType,
)

#: A footprint is worth a warning from this many times the bytes of its elements on ...
TRAP_FACTOR = 4
#: ... if it also wastes at least this many bytes.
TRAP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """A slot to place: its name for messages, its type, its kind (None: output), its wishes."""

    side: str
    name: str
    type: ValueType
    kind: InputKind | None
    wishes: ByField

    @property
    def label(self) -> str:
        return f"{self.side} {self.name!r}"


def default_space(request: SlotRequest, machine: MachineShape) -> Space:
    """Where a slot goes if it fits: activations and outputs to L1, all else to DRAM.

    On a machine without device memory everything is on the host.
    """
    if "space" in request.wishes:
        wished = request.wishes["space"].value
        assert isinstance(wished, Space)
        return wished
    sharded = "memory_layout" in request.wishes or "shard_spec" in request.wishes
    local = request.kind in (None, InputKind.ACTIVATION) or sharded
    if local and machine.l1 is not None:
        return Space.L1
    return Space.HOST if machine.dram is None else Space.DRAM


def is_pinned(request: SlotRequest) -> bool:
    """Whether the wishes settle the space: a space, an address, or shards."""
    return not {"space", "address", "memory_layout", "shard_spec"}.isdisjoint(request.wishes)


def slot_layout(request: SlotRequest, space: Space, machine: MachineShape) -> Layout:
    """Row-major interleaved in `space`, changed by the slot's wishes.

    Sharding without a shard spec becomes the machine's even one. Raises `LayoutError` where the
    wishes contradict each other, or the machine cannot do it; `WishError`, which is one, for a
    shard spec without a sharded memory layout.
    """
    try:
        layout = _wished(request, space, machine)
        if layout.address is not None and layout.space is Space.HOST:
            raise LayoutError(
                "a host address is never fixed", got=f"address {layout.address:#x} on the host"
            )
        footprint(TensorDesc(request.type.shape, layout), machine)
    except LayoutError as error:
        asked = ", ".join(wish.text() for wish in request.wishes.values())
        kind = WishError if isinstance(error, WishError) else LayoutError
        raise kind(
            f"{request.label} ({request.type.text()}) cannot be placed: {error.what}",
            where=f"machine {machine.name!r}" + (f", wishes: {asked}" if asked else ""),
            expected=error.expected,
            got=error.got,
            remedy=error.remedy or "change the wishes of this slot",
        ) from error
    return layout


def _wished(request: SlotRequest, space: Space, machine: MachineShape) -> Layout:
    wishes: list[Wish] = list(request.wishes.values())
    default = Layout(request.type.data_type, space)
    asked = request.wishes.get("memory_layout")
    spec = request.wishes.get("shard_spec")
    if spec is not None and (asked is None or asked.value is MemoryLayout.INTERLEAVED):
        raise _without_shards(request, spec)
    if asked is None or spec is not None:
        return wished_layout(default, wishes)
    kind = asked.value
    assert isinstance(kind, MemoryLayout)
    if kind is MemoryLayout.INTERLEAVED:
        return wished_layout(default, wishes)
    plain = wished_layout(default, [w for w in wishes if w.field != "memory_layout"])
    sharded = shard_layout(
        request.type.shape,
        kind,
        machine,
        data_type=plain.data_type,
        space=space,
        tile_shape=plain.tile_shape,
    )
    assert sharded.shard_spec is not None
    return wished_layout(default, [*wishes, Wish("input", 0, "shard_spec", sharded.shard_spec)])


def _without_shards(request: SlotRequest, wish: Wish) -> WishError:
    """The error for a shard spec whose memory layout is not sharded, naming the one that fits."""
    spec = wish.value
    assert isinstance(spec, ShardSpec)
    rows, columns = TensorDesc(
        request.type.shape, Layout(request.type.data_type, Space.L1)
    ).rows_and_columns
    if spec.shape[1] >= columns:
        fitting = MemoryLayout.HEIGHT_SHARDED
    elif spec.shape[0] >= rows:
        fitting = MemoryLayout.WIDTH_SHARDED
    else:
        fitting = MemoryLayout.BLOCK_SHARDED
    return WishError(
        "a shard spec needs a sharded memory layout",
        expected=f"{wish.side}.{wish.slot}.memory_layout={fitting.value} beside it",
        remedy=f"add --set {wish.side}.{wish.slot}.memory_layout={fitting.value}",
    )


def size_traps(
    request: SlotRequest, layout: Layout, machine: MachineShape
) -> Iterator[CompileWarning]:
    """A warning where padding multiplies the bytes of a tensor (1000x512x1x1 in tiles: 1024 times).

    Source: ttnn pads the last two dimensions to 32, and rows to the alignment of a page.
    """
    desc = TensorDesc(request.type.shape, layout)
    taken = footprint(desc, machine).nbytes
    elements = desc.elements
    if layout.data_type.is_block:
        elements = round_up(elements, BLOCK_ELEMENTS)
    data = layout.data_type.nbytes(elements)
    if taken < TRAP_FACTOR * data or taken - data < TRAP_NBYTES:
        return
    remedy = "reshape it in the module so that its last two dimensions are the large ones"
    if layout.tile_shape == TILE_SHAPE and not layout.data_type.is_block:
        remedy = f"--set {request.side}.{request.name}.layout=row_major, or " + remedy
    yield CompileWarning(
        "padding",
        request.label,
        f"{desc.text()} takes {taken} B in {layout.space.value} for {data} B of data",
        remedy,
    )
