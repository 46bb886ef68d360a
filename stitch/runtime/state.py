"""The mutable records of a device: blocks (allocations) and values (what handles refer to)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from stitch.program import Array, Space, TensorDesc

if TYPE_CHECKING:
    from stitch.runtime.device import Device
    from stitch.runtime.program import InputPort


class Status(enum.IntEnum):
    """The life of a value. Up to READY it can be used."""

    PENDING = 0
    READY = 1
    FREED = 2
    DONATED = 3
    LOST = 4
    FAILED = 5


class BlockRecord:
    """One allocation: in a space at an address, or a host array outside the spaces (`array`)."""

    __slots__ = ("address", "array", "desc", "desc_key", "origin", "pins", "size_per_bank",
                 "space", "space_name", "users")  # fmt: skip

    def __init__(
        self,
        space: Space,
        address: int | None,
        size_per_bank: int,
        desc: TensorDesc,
        desc_key: int,
        origin: str,
        array: Array | None = None,
    ) -> None:
        self.space = space
        self.space_name = space.value
        self.address = address
        self.size_per_bank = size_per_bank
        self.desc = desc
        self.desc_key = desc_key
        self.origin = origin
        self.array = array
        self.pins = 0
        #: The values that lie in it, in the order in which they came.
        self.users: list[ValueRecord] = []


class InstanceRecord:
    """Where a value lies: block, byte offset into its footprint, descriptor without address."""

    __slots__ = ("block", "desc", "desc_key", "offset_nbytes")

    def __init__(
        self, block: BlockRecord, offset_nbytes: int, desc: TensorDesc, desc_key: int
    ) -> None:
        self.block = block
        self.offset_nbytes = offset_nbytes
        self.desc = desc
        self.desc_key = desc_key

    def signature(self) -> tuple[object, ...]:
        """What a plan depends on."""
        block = self.block
        return (
            block.space_name,
            block.address,
            block.size_per_bank,
            block.desc_key,
            block.pins > 0,
            self.offset_nbytes,
            self.desc_key,
        )


class ValueRecord:
    """One value: pending, ready or gone; every handle on it shares this record."""

    __slots__ = (
        "__weakref__",
        "by",
        "consumed",
        "desc",
        "desc_key",
        "device",
        "handles",
        "instances",
        "is_borrowed",
        "last_used",
        "number",
        "retain",
        "status",
        "version",
        "window",
    )  # fmt: skip

    def __init__(self, device: Device, desc: TensorDesc, desc_key: int) -> None:
        self.device = device
        self.desc = desc
        self.desc_key = desc_key
        self.status = Status.PENDING
        self.instances: list[InstanceRecord] = []
        self.handles = 0
        self.number = -1
        self.window = -1
        self.last_used = 0
        self.retain = False
        self.consumed = False
        self.by = ""
        self.version = 0
        #: Its bytes are somebody else's, who may write to them at any time.
        self.is_borrowed = False

    @property
    def kept(self) -> bool:
        """Whether somebody can still read it."""
        return self.handles > 0 and not self.consumed

    def signature(self) -> tuple[object, ...]:
        """What a plan that uses this value depends on."""
        found = self.instances
        if len(found) == 1:
            return found[0].signature()
        return tuple(instance.signature() for instance in found)

    def host_array(self) -> Array:
        """The host array outside the spaces in which it lies."""
        array = self.instances[0].block.array
        assert array is not None
        return array


class ArgumentRecord(ValueRecord):
    """A host array of one call, which no handle refers to.

    It has one instance, outside the spaces, whose record is made only where a plan is made.
    """

    __slots__ = ("_own", "array", "port")

    def __init__(self, device: Device, array: Array, port: InputPort) -> None:
        self._own: list[InstanceRecord] | None = None
        self.array = array
        self.port = port
        self.device = device
        self.desc = port.host_desc
        self.desc_key = port.host_key
        self.status = Status.READY
        self.handles = self.last_used = self.version = 0
        self.number = self.window = -1
        self.consumed = self.retain = self.is_borrowed = False
        self.by = port.origin

    @property
    def instances(self) -> list[InstanceRecord]:
        """Its instance, made when first asked for."""
        if self._own is None:
            port = self.port
            key, desc = port.host_key, port.host_desc
            block = BlockRecord(Space.HOST, None, 0, desc, key, port.origin, self.array)
            block.users.append(self)
            self._own = [InstanceRecord(block, 0, desc, key)]
        return self._own

    @instances.setter
    def instances(self, value: list[InstanceRecord]) -> None:
        self._own = value

    def signature(self) -> tuple[object, ...]:
        """The same for every array of a slot."""
        return self.port.signature

    def host_array(self) -> Array:
        """The array."""
        return self.array
