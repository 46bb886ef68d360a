"""The mutable records of a device: buffers (allocations) and values (what handles refer to)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stitch.errors import TaskError
from stitch.program import Array, Layout, Space, TensorDesc
from stitch.runtime.values.ports import InputPort

#: Where the sources of some work lie in the device's memory: numbers of values, and addresses of
#: all instances.
Places = tuple[tuple[int, tuple[int | None, ...]], ...]
#: What a plan depends on in the sources of some work, but for their places; see `signature`.
Forms = tuple[tuple[object, ...], ...]
#: What tells bytes apart without comparing them: of what kind it is, and which of that kind.
Mark = tuple[str, int | bytes]


class Status(enum.IntEnum):
    """The life of a value. Up to READY it can be used."""

    PENDING = 0
    READY = 1
    FREED = 2
    LOST = 3
    FAILED = 4


# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY


class Store(Protocol):
    """A device, as values and the handles on them know it."""

    #: Leaves a note that a value lost a handle: finalizers run anywhere, so they do no more.
    drop: Callable[[ValueRecord], None]

    def settle(self, value: ValueRecord) -> None:
        """Make sure that a value is ready."""

    def layout_of(self, value: ValueRecord) -> Layout:
        """Where it lies, or will lie, and how."""

    def read(self, value: ValueRecord) -> Array:
        """Its elements in an array of their own."""

    def export(self, value: ValueRecord) -> Array:
        """Its very bytes."""

    def deallocate(self, value: ValueRecord, by: str) -> None:
        """Free it now."""

    def view(self, tensor: Any, value: ValueRecord, start: int, stop: int, *, keep: bool) -> Any:
        """A tensor on a part of it."""

    def has_layout(self, tensor: Any, layout: Layout | TensorDesc) -> bool:
        """Whether it lies so."""

    def to_layout(
        self,
        tensor: Any,
        layout: Layout | TensorDesc,
        *,
        retain: bool | None = None,
        copy: bool = ...,
    ) -> Any:
        """A tensor of the same elements in another layout."""


class PlaceOwner(Protocol):
    """A lease, as buffers and values know it: whose places they lie in, and who gets these back."""

    #: What whoever ran it last remembers.
    again: Any
    #: Whether another has, or had, one of its buffers too.
    shares: bool

    @property
    def holder(self) -> object:
        """Whose lease it is."""

    @property
    def buffers(self) -> tuple[BufferRecord, ...]:
        """All that are its own."""

    def dispose(self) -> None:
        """They are its own no more."""

    def release_value(self, value: ValueRecord) -> bool:
        """A value without handles gives its place back, for the next run; False where it cannot."""

    def readmit(self, value: ValueRecord) -> None:
        """The last export of a value's bytes has ended, and no other value lies in them."""

    def release_buffer(self, buffer: BufferRecord) -> None:
        """One of its buffers has lost its last user."""

    def inherit(self, buffer: BufferRecord) -> None:
        """What it shares with one that has ended is given back to it."""


class BufferRecord:
    """One allocation: in a space at an address, or a host array outside the spaces (`array`)."""

    __slots__ = (
        "address", "array", "desc", "desc_key", "lease", "origin", "pins", "shared_pins",
        "sharers", "size_per_bank", "space", "users",
    )  # fmt: skip

    def __init__(
        self,
        space: Space,
        address: int | None,
        size_per_bank: int,
        desc: TensorDesc,
        desc_key: int,
        origin: str,
    ) -> None:
        self.space = space
        self.address = address
        self.size_per_bank = size_per_bank
        self.desc = desc
        self.desc_key = desc_key
        self.origin = origin
        self.array: Array | None = None
        self.pins = 0
        #: Those of them that expect to see it overwritten.
        self.shared_pins = 0
        #: The lease whose place this is, the last to take it where several share it: what lies here
        #: is given back to it, not to the allocator.
        self.lease: PlaceOwner | None = None
        #: All of them in order, once there was more than one.
        self.sharers: dict[PlaceOwner, None] = {}
        #: The values that lie in it, in the order in which they came.
        self.users: list[ValueRecord] = []

    @property
    def is_spare(self) -> bool:
        """Whether it is a lease's and nothing lies in it: memory that others may have."""
        return self.lease is not None and not self.users and not self.pins

    @property
    def leases(self) -> tuple[PlaceOwner, ...]:
        """All leases that it is a place of."""
        return tuple(self.sharers) or (() if self.lease is None else (self.lease,))

    @property
    def holds_constant(self) -> bool:
        """Whether a constant of a loaded program lies in it; then nothing else does."""
        return bool(self.users) and self.users[0].is_constant

    @property
    def is_open(self) -> bool:
        """Whether what takes a donated value's place may be written over it."""
        return self.pins <= self.shared_pins

    @property
    def is_shared(self) -> bool:
        """Whether others have its bytes, and all of them expect to see them overwritten."""
        return 0 < self.shared_pins >= self.pins

    @property
    def is_unused(self) -> bool:
        """Whether nothing lies in it and nobody keeps it."""
        return not (self.users or self.pins)


class InstanceRecord:
    """Where a value lies: buffer, byte offset into its footprint, descriptor without address."""

    __slots__ = ("buffer", "desc", "desc_key", "offset_nbytes", "signature", "view", "viewed_at")

    def __init__(
        self, buffer: BufferRecord, offset_nbytes: int, desc: TensorDesc, desc_key: int
    ) -> None:
        self.buffer = buffer
        self.offset_nbytes = offset_nbytes
        self.desc = desc
        self.desc_key = desc_key

        #: What a plan depends on, but for the address, and for what is pinned.
        self.signature = (buffer.space, buffer.size_per_bank, buffer.desc_key, offset_nbytes,
                          desc_key)  # fmt: skip
        #: A dense array over its bytes, once it was read, and the address that this is for.
        self.view: Array | None = None
        self.viewed_at: int | None = None


class ValueRecord:
    """One value: pending, ready or gone; every handle on it shares this record."""

    # Attributes of the class would be found more slowly than those of the object.
    __slots__ = (
        "by", "comparison", "consumed", "desc", "desc_key", "device", "handles", "instances",
        "is_exposed", "last_used", "lease", "number", "retain", "status", "version", "window",
    )  # fmt: skip

    #: Whether it is an array of one call, which no handle ever refers to.
    is_array = False
    #: Whether it is a constant of a loaded program.
    is_constant = False

    def __init__(self, device: Store, desc: TensorDesc, desc_key: int, by: str = "") -> None:
        self.device = device
        self.desc = desc
        self.desc_key = desc_key
        self.by = by
        self.status = PENDING
        self.handles = self.last_used = self.version = 0
        #: Its number in the window that last used it.
        self.number = self.window = -1
        #: Others hold its bytes too, and may write to them at any time without anyone's being told.
        self.retain = self.consumed = self.is_exposed = False
        #: The lease in whose place it was made, while nothing but reading was done with it: then
        #: that lease may hand it out again when it has no handles.
        self.lease: PlaceOwner | None = None
        #: Tells whether its copies have the bytes of the first, once they have been compared; None
        #: where it was made for other instances, or these lie elsewhere by now (see `exposure`).
        self.comparison: Callable[[Sequence[InstanceRecord]], bool | None] | None = None
        #: Where it lies, the primary one first.
        self.instances: Sequence[InstanceRecord] = ()

    @property
    def kept(self) -> bool:
        """Whether somebody can still read it."""
        return self.handles > 0 and not self.consumed

    @property
    def is_usable(self) -> bool:
        """Whether it is pending or ready, not freed, donated, lost or failed."""
        return self.status <= Status.READY and not self.consumed

    def check_usable(self) -> None:
        """Raise `TaskError` saying who freed, donated or failed to make it."""
        if self.status <= READY and not self.consumed:
            return
        words = {
            Status.FREED: "was freed",
            Status.LOST: "was lost in a failure while it was being overwritten",
            Status.FAILED: "was never made",
        }
        state = words.get(self.status, "was given away or freed")
        remedy = (
            "copy what is used again before it is given away: copy.deepcopy(tensor); from submit "
            "and to_layout(retain=False) tensor.retain = True keeps it"
        )
        if self.status in (Status.FAILED, Status.LOST):
            remedy = "look at the error that was raised when the queue ran"
        if self.status is Status.LOST:
            remedy += (
                "; write it anew, or make it again: a training goes on from a checkpoint "
                "(load_state_dict), or is started again"
            )
        raise TaskError(
            f"this tensor ({self.desc.text()}) {state}", where=self.by or None, remedy=remedy
        )

    def signature(self) -> tuple[object, ...]:
        """What a plan that uses this value depends on, but for addresses."""
        instances = self.instances
        if len(instances) == 1 and not instances[0].buffer.pins:
            return instances[0].signature
        return tuple([(i.signature, i.buffer.pins > 0, i.buffer.is_shared) for i in instances])

    def places(self) -> tuple[int | None, ...]:
        """The addresses of its instances."""
        instances = self.instances
        if len(instances) == 1:
            return (instances[0].buffer.address,)
        return tuple([instance.buffer.address for instance in instances])

    def place(self) -> None:
        """Say where it lies, unless that is known."""

    def host_array(self) -> Array:
        """The host array outside the spaces in which it lies."""
        array = self.instances[0].buffer.array
        assert array is not None
        return array


class ArgumentRecord(ValueRecord):
    """A host array of one call, which no handle refers to.

    Its first instance, outside the spaces, has a record only where a plan is made, or changes it:
    see `place`. It has others only where a run failed half-way and left it copies.
    """

    __slots__ = ("array", "port")

    is_array = True

    def __init__(self, device: Store, array: Array, port: InputPort) -> None:
        # `super()` takes as long as the call.
        ValueRecord.__init__(self, device, port.host_desc, port.host_key, port.origin)
        self.array, self.port, self.status = array, port, READY

    def place(self) -> None:
        """Say where it lies."""
        if self.status is READY and not self.instances:
            key, desc = self.desc_key, self.desc
            buffer = BufferRecord(Space.HOST, None, 0, desc, key, self.by)
            buffer.array = self.array
            buffer.users.append(self)
            self.instances = (InstanceRecord(buffer, 0, desc, key),)

    def host_array(self) -> Array:
        """The array."""
        return self.array


@dataclass(frozen=True, slots=True)
class Reader:
    """A loaded program, as the constants that it reads know it: the key of its transformation, and
    its name."""

    key: int
    name: str

    def constant(self, name: str) -> str:
        """How a constant of it is called."""
        return f"constant {name!r} of {self.name!r}"


class ConstantRecord(ValueRecord):
    """A constant of loaded programs, which keep it: it lies in their files, and while there is room
    in the space that it was compiled for. Each program reads its own file's."""

    __slots__ = ("address", "form", "mark", "readers")

    is_constant = True

    def __init__(
        self, device: Store, desc: TensorDesc, desc_key: int, home: BufferRecord, form: object,
        mark: Mark,
    ) -> None:  # fmt: skip
        """`home`: the bytes of a file; `form`: only what has the same may be the same constant;
        `mark`: what tells most of these apart."""
        ValueRecord.__init__(self, device, desc.without_address(), desc_key, home.origin)
        #: Where in its space it must lie, if the program says so.
        self.address = desc.layout.address
        self.form, self.mark = form, mark
        #: The programs that read it: what each of its constants is found by, its bytes, its name.
        self.readers: dict[Reader, list[tuple[object, Array, str]]] = {}
        self.handles, self.status = 1, READY
        home.users.append(self)
        self.instances = (InstanceRecord(home, 0, home.desc, home.desc_key),)

    @property
    def is_placed(self) -> bool:
        """Whether it lies where it was compiled for."""
        return any(
            instance.desc_key == self.desc_key and self.address in (None, instance.buffer.address)
            for instance in self.instances[1:]
        )

    def take_name(self) -> None:
        """It is called after the first of the programs that read it."""
        first, held = next(iter(self.readers.items()))
        self.by = first.constant(held[0][2])
        for instance in self.instances:
            instance.buffer.origin = self.by

    def name_and_readers(self) -> str:
        """Its name, and who else reads it."""
        others = ", ".join(repr(reader.name) for reader in list(self.readers)[1:])
        return f"{self.by}, shared by {others}" if others else self.by
