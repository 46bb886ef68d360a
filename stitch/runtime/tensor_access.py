"""What a device does with single tensors: reading, viewing, exporting, describing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from stitch.argument_kinds import TEXT, either, instance_of
from stitch.budget import copied
from stitch.errors import LayoutError, OutOfMemoryError, TaskError, UsageError
from stitch.linker import check_link
from stitch.machine import MachineShape, footprint
from stitch.planner import copy_cost
from stitch.program import Array, DataType, Layout, Space, TensorDesc, host_layout
from stitch.runtime.backends import HostMemory, InstanceBytes, LocalBackend
from stitch.runtime.events import EventStream, ReadBack, Written
from stitch.runtime.executors import as_bytes
from stitch.runtime.history import History
from stitch.runtime.lifetime import Lifetime
from stitch.runtime.queue import ConstantCache, Window, expose, forget_stale_copies
from stitch.runtime.tensor import Tensor
from stitch.runtime.values import (
    BufferRecord,
    Exports,
    InstanceRecord,
    Status,
    Store,
    ValueRecord,
    as_array,
    view_offset,
)

TENSOR = instance_of("a tensor of a device (device.tensor(array) makes one)", Tensor)
LAYOUT = instance_of("a Layout or a TensorDesc", Layout, TensorDesc)
DESC = instance_of("a TensorDesc", TensorDesc)


class TensorAccess(Lifetime):
    """The part of a device that looks after single values; `Device` adds the queue."""

    backend: LocalBackend
    host_memory: HostMemory
    history: History
    events: EventStream
    constant_cache: ConstantCache
    exports: Exports
    copies_forbidden: int
    queued: Window
    running: Window | None
    bytes: InstanceBytes

    def run_queue(self) -> object:
        """Run what is queued, with the lock held."""
        raise AssertionError("Device defines it")

    def settle(self, value: ValueRecord) -> None:
        """Make sure that a value is ready: run the queue if it is pending, raise if it is gone."""
        with self.lock:
            self.check_open()
            if value.status is Status.PENDING and not value.consumed:
                self.run_queue()
            value.check_usable()

    @contextmanager
    def queue_lock_of_ready(self, value: ValueRecord) -> Iterator[None]:
        """Within, a value is ready, and nobody gives it away; the run lock is held."""
        self.settle(value)
        with self.queue_lock:
            value.check_usable()
            yield

    # -- looking -----------------------------------------------------------------------------------

    def layout_of(self, value: ValueRecord) -> Layout:
        """The layout of a value's primary instance, or, while pending, the promised one."""
        # Another thread may free it meanwhile: the list itself stays as it is then.
        found = value.instances
        if value.status is not Status.READY or not found:
            return value.desc.layout
        instance = found[0]
        address = self.bytes.address(instance)
        layout = instance.desc.layout
        return layout if address is None else replace(layout, address=address)

    def region_of(self, instance: InstanceRecord) -> Array:
        """The bytes of an instance, from its offset to the end of its buffer."""
        return self.bytes.region(instance)

    def dense(self, instance: InstanceRecord) -> Array | None:
        """An instance as an array over its own bytes, None where its layout is not dense."""
        return self.bytes.dense(instance)

    def read(self, value: ValueRecord) -> Array:
        """A value's elements in an array of their own; see `Tensor.numpy`."""
        with self.lock:
            self.settle(value)
            if not self.backend.executor.computes:
                raise TaskError(
                    "the null executor computes no data, so there is nothing to read",
                    remedy="open the device with executor='numpy'",
                )
            instance = value.instances[0]
            made = self.bytes.elements(instance, value.desc, self.host_memory.allowed)
            if instance.buffer.address is not None:
                self.history.read(value.desc_key, value.desc, made.nbytes)
                if self.events.active:
                    self.events.tell(ReadBack(value.desc, made.nbytes))
            return made

    def memory(self, space: Space | str) -> Array:
        """All bytes of a space, live: what is written here, programs will read.

        A buffer at bank address `a` begins at byte `a * banks`; see `Tensor.address`.
        """
        with self.lock:
            self.check_open()
        names = [s.value for s in self.backend.spaces]
        either(TEXT, instance_of("a Space", Space)).check("Device.memory", "space", space)
        if not isinstance(space, Space) and space not in names:
            raise UsageError(f"there is no space {space!r}", expected=" or ".join(names))
        found = self.backend.spaces.get(Space(space))
        if found is None:
            self.machine.shape.space(Space(space))
            raise AssertionError("a machine's spaces and the backend's differ")
        memory: Array = found.bytes
        return memory

    def footprint_of(self, tensor: Tensor) -> slice:
        """Where in `memory(tensor.space)` a tensor's footprint lies; raises for host arrays."""
        self.check_device(tensor)
        value = tensor._record
        self.settle(value)
        instance = value.instances[0]
        start = self.bytes.start(instance)
        if start is None:
            raise LayoutError("this tensor is a host array outside the device's memory")
        return slice(start, start + footprint(instance.desc, self.machine.shape).nbytes)

    # -- layouts -----------------------------------------------------------------------------------

    def has_layout(self, tensor: Tensor, layout: Layout | TensorDesc) -> bool:
        """Whether a tensor lies as described; an address counts only where one is given."""
        self.check_device(tensor)
        LAYOUT.check("has_layout", "layout", layout)
        wanted = layout.layout if isinstance(layout, TensorDesc) else layout
        if isinstance(layout, TensorDesc) and layout.shape != tensor.shape:
            return False
        if wanted.address is not None:
            self.settle(tensor._record)
        mine = self.layout_of(tensor._record)
        return wanted == (mine if wanted.address is not None else mine.without_address())

    # -- making ------------------------------------------------------------------------------------

    def new_value(self, desc: TensorDesc) -> ValueRecord:
        """A ready value without an instance yet."""
        value = ValueRecord(self._self(), desc, self.records.desc_key(desc))
        value.status = Status.READY
        return value

    def _self(self) -> Store:
        raise AssertionError("Device defines it")

    def tensor(self, array: Any, *, borrow: bool = False) -> Tensor:
        """A host tensor of an array: a copy, or, with `borrow=True`, the array itself.

        Raises `LayoutError` for arrays that are not numeric.
        """
        # It lies outside of all that runs work in: nobody else knows it before it is there.
        self.check_open()
        found = as_array(array, "the array")
        kind = DataType.from_dtype(found.dtype)
        allowed = self.host_memory.allowed
        host = found if borrow else copied(found, "device.tensor()", allowed)
        desc = TensorDesc(host.shape, host_layout(kind))
        value = self.new_value(desc)
        value.by = "tensor()"
        value.is_exposed = borrow
        buffer = self.records.outside(desc, value.desc_key, host, "a host array")
        self.records.attach(value, buffer, 0, desc, value.desc_key)
        return Tensor(value)

    def empty(self, desc: TensorDesc) -> Tensor:
        """A tensor with room but no defined contents; raises `OutOfMemoryError`."""
        DESC.check("Device.empty", "desc", desc)
        with self.lock:
            self.check_open()
            self.run_queue()
            size = footprint(desc, self.machine.shape).size_per_bank
            bare = TensorDesc(desc.shape, desc.layout.without_address())
            buffer = self.records.reserve(bare, size, desc.layout.address, "empty()")
            assert buffer.address is not None
            try:
                self.host_memory.take_region(buffer.space, buffer.address, bare, "device.empty()")
            except OutOfMemoryError:
                self.records.free(buffer)
                raise
            memory = self.backend.spaces[buffer.space]
            memory.fill_padding(bare, buffer.address, self.machine.shape)
            value = self.new_value(bare)
            value.by = "empty()"
            self.records.attach(value, buffer, 0, bare, value.desc_key)
            return Tensor(value)

    def write(self, tensor: Tensor, array: Any) -> None:
        """Overwrite a tensor's elements; its other instances and remembered results are dropped.

        Raises `LinkError` where shape or kind of number differ.
        """
        with self.lock:
            self.check_device(tensor)
            value = tensor._record
            self.settle(value)
            self.run_queue()
            found = as_array(array, "the array")
            source = TensorDesc(found.shape, host_layout(DataType.from_dtype(found.dtype)))
            check_link(source, value.desc, output="the array", input="the tensor")
            first = value.instances[0]
            if first.buffer.array is not None and not first.buffer.array.flags.writeable:
                raise LayoutError(
                    "this tensor borrows an array that is read-only",
                    remedy="make a tensor of your own: device.tensor(array)",
                )
            with self.queue_lock:
                for sharer in tuple(first.buffer.users):
                    self.records.forget_copies(sharer)
                    self.constant_cache.forget(sharer)
                    sharer.version = 0
            if first.buffer.array is not None:
                np.copyto(first.buffer.array, found, casting="same_kind")
                return
            kernel = self.backend.kernel(source, first.desc)
            counter = self.backend.spaces[first.buffer.space].counter
            dense = np.ascontiguousarray(found)
            kernel.bind(as_bytes(dense), self.bytes.region(first), counter)()
            nbytes, seconds = copy_cost(self.machine, source, first.desc)
            self.events.report(Written(first.desc, nbytes, seconds))

    def view(self, value: ValueRecord, start: int, stop: int, *, keep: bool) -> Tensor:
        """Rows `[start, stop)` of the first dimension as a tensor on the same buffer."""
        with self.lock, self.queue_lock_of_ready(value):
            instance = value.instances[0]
            shape = (stop - start, *value.desc.shape[1:]) if keep else value.desc.shape[1:]
            desc = TensorDesc(shape, instance.desc.layout)
            buffer, offset = instance.buffer, instance.offset_nbytes
            if buffer.array is not None:
                part = buffer.array[start:stop] if keep else buffer.array[start]
                key = self.records.desc_key(desc)
                buffer = self.records.outside(desc, key, np.asarray(part), buffer.origin)
                # To the records these are two arrays: neither hears of writes to the other.
                self.expose(value)
            else:
                offset += view_offset(instance.desc, (start, stop), keep, self.machine.shape)
            made = self.new_value(desc)
            made.by = value.by
            made.is_exposed = value.is_exposed
            self.records.attach(made, buffer, offset, desc, made.desc_key)
            return Tensor(made)

    # -- leaving -----------------------------------------------------------------------------------

    def export(
        self,
        value: ValueRecord,
        dtype: np.dtype[Any] | None = None,
        kept: object = None,
        ended: Callable[[], object] | None = None,
    ) -> Array:
        """The bytes of a dense tensor for others; its buffer is pinned while the array lives.

        `dtype`: as what they see the bytes; for the rest see `Exports.add`.
        """
        with self.lock, self.queue_lock_of_ready(value):
            instance = value.instances[0]
            found = self.bytes.dense(instance)
            if found is None:
                raise BufferError(
                    f"{value.desc.text()} is not dense: exporting it would need a copy; "
                    "use .numpy(), or to_layout with a row-major layout"
                )
            view = found.view(found.dtype if dtype is None else dtype)
            self.expose(value)
            buffer = instance.buffer
            if buffer.address is not None:
                self.exports.add(view, buffer, kept, ended)
                self.records.epoch += 1
            return view

    def expose(self, value: ValueRecord) -> None:
        """Others hold the primary bytes of a value from now on."""
        with self.queue_lock:
            # The window may read it already.
            self.queued.reads_exposed = True
            expose(value, self.constant_cache)

    def release_pin(self, buffer: BufferRecord) -> None:
        """An export, or whoever reserved the buffer, has let go."""
        if buffer.pins:
            buffer.pins -= 1
        if buffer.pins:
            return
        for user in buffer.users:
            # What was pinned could not be evicted. Now it can, and then a copy is all that is left.
            if user.is_exposed and len(user.instances) > 1:
                forget_stale_copies(self, user)
        if not buffer.users:
            self.records.unused(buffer)
        elif buffer.lease is not None:
            with self.queue_lock:
                buffer.lease.welcome(buffer.users)

    def note_gone(self, value: ValueRecord) -> None:
        """A value lost its last instance in a plan."""
        if value.status is Status.READY:
            value.status = Status.LOST if value.kept else Status.FREED
        self.forget_results(value)

    def forget_results(self, value: ValueRecord) -> None:
        """A value is gone: what is remembered of it goes too."""
        if value.version:
            with self.queue_lock:
                self.constant_cache.forget(value)

    def check_device(self, tensor: Tensor) -> None:
        """Raise `UsageError` for what is no tensor, or one of another device."""
        if not isinstance(tensor, Tensor):
            TENSOR.check("Device", "tensor", tensor)
        if tensor._record.device is not self._self():
            raise UsageError("this tensor belongs to another device")


def target_desc(desc: TensorDesc, layout: Layout | TensorDesc, machine: MachineShape) -> TensorDesc:
    """The descriptor that a conversion is to reach; raises `LayoutError` for another shape."""
    LAYOUT.check("to_layout", "layout", layout)
    if isinstance(layout, TensorDesc):
        if layout.shape != desc.shape:
            raise LayoutError(
                "to_layout keeps the shape",
                expected=str(list(desc.shape)),
                got=str(list(layout.shape)),
            )
        layout = layout.layout
    wanted = TensorDesc(desc.shape, layout)
    footprint(wanted, machine)
    return wanted
