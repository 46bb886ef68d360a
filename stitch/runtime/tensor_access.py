"""Operations of a device on single tensors, and the locks and checks under which they run.

A thread is inside a device while it holds one of its locks. Python may run other code meanwhile:
hooks, kernels, signal handlers, finalizers. If such code uses the device, it gets a `TaskError`,
since the device is in the middle of an operation.

A fork copies a device without its threads, possibly in the middle of a run and with held locks.
Therefore a device belongs to the process that opened it and is closed in the child.

Each use of an open device first completes what an interrupt left incomplete and processes the notes
of finalizers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from stitch.argument_kinds import TEXT, either, instance_of
from stitch.budget import LARGE_NBYTES, copied
from stitch.errors import (
    LayoutError,
    LinkError,
    OutOfMemoryError,
    StitchError,
    TaskError,
    UsageError,
)
from stitch.linker import check_link
from stitch.live_objects import LiveObjects
from stitch.machine import Machine, MachineShape, footprint, room_per_bank
from stitch.planner import copy_cost
from stitch.program import Array, DataType, Layout, Space, TensorDesc, host_layout
from stitch.runtime.backends import HostMemory, LocalBackend
from stitch.runtime.events import EventStream, ReadBack, Written
from stitch.runtime.execution import Binding, said_of
from stitch.runtime.history import History
from stitch.runtime.lending import lent_tensor
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.locks import Lock, held_here, quick
from stitch.runtime.queue import ConstantCache, Reclaimer, TaskQueue
from stitch.runtime.tensor import Tensor, handle_on
from stitch.runtime.values import BufferRecord, Records, Status, ValueRecord, as_array
from stitch.runtime.views import queued_view, view_offset

TENSOR = instance_of("a tensor of a device (device.tensor(array) makes one)", Tensor)
LAYOUT = instance_of("a Layout or a TensorDesc", Layout, TensorDesc)
DESC = instance_of("a TensorDesc", TensorDesc)
# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY

#: Names of lost values in an error.
MAX_NAMES = 8

_alive: LiveObjects[TensorAccess] = LiveObjects()


class TensorAccess:
    """The part of a device that works on single values, under its locks.

    It checks whether the device may be used, and makes its records consistent first.

    `lock` (the run lock) protects planning, running, and changes of memory contents. `queue_lock`
    is held only briefly, to enqueue tasks and to change what a call checks: which values are
    queued, donated, ready or shared. Acquire `lock` before `queue_lock`.
    """

    machine: Machine
    backend: LocalBackend
    constant_cache: ConstantCache
    host_memory: HostMemory
    history: History
    events: EventStream
    #: Whether tensors of PyTorch are used in place: DRAM lies in its memory.
    lends: bool
    #: Nesting depth of `without_copies` blocks.
    copies_forbidden: int

    def __init__(
        self,
        name: str,
        records: Records,
        deaths: Reclaimer,
        tasks: TaskQueue,
        queue_lock: threading.RLock,
    ) -> None:
        """Initialize for this process; `name` is the machine's, `queue_lock` that of `tasks`."""
        self._name = name
        self.records, self.deaths, self.tasks = records, deaths, tasks
        self.drop, self.lost_all = deaths.dropped.append, deaths.lost_all
        #: Device tensors on tensors of PyTorch, by address, shape and type: see `lent_tensor`.
        self.lent: dict[tuple[Any, ...], Tensor] = {}
        self._locks = (threading.RLock(), queue_lock)
        #: `quick_lock` skips the re-entry check: use it after calling `holds_run_lock`.
        self.quick_lock, self.queue_lock = quick(self._locks[0]), tasks.lock
        #: Whether this thread holds the run lock, or the queue lock.
        self.holds_run_lock, self.holds_queue_lock = (
            held_here(self._locks[0]),
            held_here(queue_lock),
        )
        #: Programs that compute views of pending tensors, by descriptor key and length (-1: one row
        #: without its dimension); None if no program exists.
        self.view_programs: dict[tuple[int, int], LoadedProgram | None] = {}
        #: Number of running host functions, and whether one of them has enqueued a task.
        self.calls_host = 0
        self.was_queued_inside = False
        #: Whether the device cannot be used any more (set here in the child of a fork).
        self.is_closed = False
        #: Once all of the device's memory is lost: how, and what lay there.
        self.lost: tuple[str, str] | None = None
        #: The process that opened it.
        self._process = os.getpid()
        _alive.add(self)

    @property
    def is_left_behind(self) -> bool:
        """Whether this process is a forked child of the one that opened the device."""
        return self._process != os.getpid()

    def check_open(self) -> None:
        """Raise `TaskError` if the device is closed or belongs to another process."""
        if not self.is_closed:
            return
        if self.is_left_behind:
            raise TaskError(
                f"device {self._name!r} belongs to process {self._process}, which opened it",
                where=f"process {os.getpid()}, forked from it",
                remedy="open a device in this process, or start processes by multiprocessing's "
                "'spawn' instead of 'fork'",
            )
        if self.lost is not None:
            raise TaskError(
                f"device {self._name!r} lost all of its memory: {self.lost[0]}",
                got=f"lost: {self.lost[1]}",
                remedy="close the device; after such an error a card takes no more work of this "
                "process: start another one, and set CUDA_LAUNCH_BLOCKING=1 to find the kernel",
            )
        raise TaskError(
            f"device {self._name!r} is closed",
            remedy="use it and read results before close() or the end of its `with` block, or open "
            "another device",
        )

    def check_lost(self, error: Exception) -> None:
        """Raise `TaskError` if the device lost all of its memory by an error: names the values that
        lay there. Values on the host can still be read. The caller holds the run lock."""
        if isinstance(error, StitchError) or not self.backend.executor.is_lost():
            return
        if self.lost is None:
            self._lose(said_of(error).partition("\n")[0])
        try:
            self.check_open()
        except TaskError as lost:
            raise lost from error

    def _lose(self, why: str) -> None:
        with self.queue_lock:
            names: dict[str, None] = {}
            for memory in self.backend.spaces.values():
                # Debug mode would write there.
                memory.debug = memory.debug and memory.is_host
            for buffer in self.records.buffers.values():
                if self.backend.spaces[buffer.space].is_host:
                    continue
                for value in buffer.users:
                    value.instances = [i for i in value.instances if i.buffer is not buffer]
                    if value.kept or value.is_constant:
                        names[buffer.origin] = None
                    if not value.instances:
                        value.status = Status.LOST
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            self.lost = why, ", ".join([*names][:MAX_NAMES]) + more or "no values"
            self.is_closed = True
            self.tasks.cancel(f"device {self._name!r} lost all of its memory")
            self.records.rebuild(())
            self.records.pending_recovery, self.records.is_consistent = None, True

    # -- access ------------------------------------------------------------------------------------

    @property
    def lock(self) -> Lock:
        """The run lock, for a `with` statement.

        Raises TaskError on re-entry, except from an event listener after the plan has finished.
        """
        if self.holds_run_lock() or self.holds_queue_lock():
            self.check_outside()
            return self._once_more()
        return self.quick_lock

    def check_may_queue(self) -> None:
        """Raise `TaskError` if this thread is inside; a host function may enqueue later tasks."""
        if self.holds_run_lock() and self.calls_host and not self.holds_queue_lock():
            self.was_queued_inside = True
        else:
            self.check_outside()

    def check_outside(self) -> None:
        """Raise `TaskError` if this thread is inside, in the middle of a plan or call."""
        if not (self.holds_run_lock() or self.holds_queue_lock()):
            return
        if self.calls_host and not self.holds_queue_lock():
            raise TaskError(
                "cannot read a tensor or wait inside a host function running on device "
                f"{self._name!r}: this would deadlock",
                remedy="pass the tensor to the function as an argument; tasks that it queues run "
                "after it has returned",
            )
        if (not self.events.is_over or self.holds_queue_lock() or self.tasks.running is not None
                or not self.records.is_consistent):  # fmt: skip
            raise _inside(self._name)

    def keep_out(self, is_out: Callable[[], bool]) -> None:
        """Make the run lock refuse worker threads, on which its holder waits.

        Args:
            is_out: Returns whether the current thread is such a worker.
        """
        self.quick_lock = quick(self._locks[0], partial(_check_out, is_out, self._name))

    @contextmanager
    def _once_more(self) -> Iterator[bool]:
        """Let an event listener use the device, whose run lock its thread holds."""
        self.events.is_over = False
        try:
            yield True
        finally:
            self.events.is_over = True

    def check_consistent(self) -> None:
        """Complete or roll back what an interrupt left incomplete; the run lock is held."""
        records = self.records
        if records.is_consistent and self.tasks.running is None:
            return
        # Worker threads of an interrupted run still use the memory of its plan: wait for them
        # first.
        self.backend.threads.rest()
        self.tasks.end_run()
        if records.pending_recovery is not None:
            records.pending_recovery()
        with self.queue_lock:
            for value in records.rebuild(self.tasks.queued.values):
                self.constant_cache.forget(value)
            records.is_consistent = True

    def drain(self) -> None:
        """Process the notes of finalizers: see `Reclaimer.read`."""
        # An interrupted batch may have to return to the queue: values that it reads must stay.
        self.check_consistent()
        self.deaths.read(self.tasks.queued.number)

    def drain_if_free(self) -> None:
        """As `drain`, unless another thread runs, which processes the notes itself."""
        lock = self._locks[0]
        if self.holds_run_lock():
            return
        try:
            if lock.acquire(blocking=False):
                self.drain()
        finally:
            # An interrupt may come just after it was acquired.
            if self.holds_run_lock():
                lock.release()

    # -- ready -------------------------------------------------------------------------------------

    def run_queue(
        self, fill: Callable[[], object] | None = None, at_most: int | None = None
    ) -> Binding | None:
        """As `TaskQueue.run`, after recovery and notes; the caller holds the run lock."""
        if self.is_closed and self.is_left_behind:
            self.check_open()
        tasks, deaths = self.tasks, self.deaths
        if not self.records.is_consistent or tasks.running is not None:
            self.check_consistent()
        is_empty = fill is None and tasks.is_idle
        if deaths.dropped or deaths.ended:
            deaths.read(tasks.queued.number)
        if is_empty:
            return None
        try:
            ran = tasks.run(fill, at_most)
            while self.was_queued_inside:
                # Run the tasks that host functions enqueued meanwhile.
                self.was_queued_inside = False
                tasks.run()
        except Exception as error:
            self.check_lost(error)
            raise
        return ran

    def flush(self) -> None:
        """Run everything that is queued.

        If planning fails, only the tensors that could not be computed fail. If running fails,
        completed outputs stay valid and tasks that depend on the others fail.
        """
        with self.lock:
            self.run_queue()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Run the queue, and hold the run lock within the block."""
        with self.lock:
            self.run_queue()
            yield

    def settle(self, value: ValueRecord) -> None:
        """Run the queue if a value is pending; raise `TaskError` if it was freed or failed."""
        if (value.status is not READY or value.consumed or self.is_closed
                or self.tasks.running is not None or not self.records.is_consistent):  # fmt: skip
            with self.lock:
                self.settle_now(value)

    def settle_now(self, value: ValueRecord) -> None:
        """As `settle`; the caller holds the run lock."""
        if self.lost is None or value.status is not READY:
            self.check_open()
        if value.status is PENDING and not value.consumed:
            self.run_queue()
        else:
            self.check_consistent()
        value.check_usable()

    # -- left behind -------------------------------------------------------------------------------

    def invalidate_after_fork(self) -> None:
        """Close the device in the child of a fork and release locks of the parent's threads."""
        self.is_closed = True
        # Cached runs check the generation, and then find the device closed.
        self.records.generation += 1
        self.backend.threads.forget()
        for lock in self._locks:
            if not held_here(lock)():
                lock._at_fork_reinit()  # type: ignore[attr-defined]

    @contextmanager
    def ready(self, value: ValueRecord) -> Iterator[None]:
        """Make a value ready; within the block the queue lock is held, so that it stays usable."""
        self.settle_now(value)
        with self.queue_lock:
            value.check_usable()
            yield

    def check_device(self, tensor: Tensor, call: str) -> None:
        """Raise `UsageError` if the argument of `call` is no tensor or one of another device."""
        if not isinstance(tensor, Tensor):
            TENSOR.check(call, "tensor", tensor)
        if tensor._record.device is not self:
            raise UsageError(
                "this tensor belongs to another device",
                where=call,
                expected=f"a tensor of {self!r}",
                got=f"{tensor.desc.text()} of {tensor.device!r}",
                remedy="copy it to this device: device.tensor(tensor.numpy())",
            )

    # -- looking -----------------------------------------------------------------------------------

    def layout_of(self, value: ValueRecord) -> Layout:
        """Return the layout of a value's primary instance, or the declared one if pending."""
        # Another thread may free the value: take the list once.
        instances = value.instances
        if value.status is not READY or not instances:
            return value.desc.layout
        instance = instances[0]
        address = self.backend.address(instance)
        layout = instance.desc.layout
        return layout if address is None else replace(layout, address=address)

    def has_layout(self, tensor: Tensor, layout: Layout | TensorDesc) -> bool:
        """Return whether a tensor has this layout; an address is compared only if given."""
        self.check_device(tensor, "Device.has_layout")
        LAYOUT.check("has_layout", "layout", layout)
        wanted = layout.layout if isinstance(layout, TensorDesc) else layout
        if isinstance(layout, TensorDesc) and layout.shape != tensor.shape:
            return False
        if wanted.address is None:
            return wanted == tensor.layout.without_address()
        self.settle(tensor._record)
        return wanted == tensor.layout

    def read(self, value: ValueRecord, *, is_inside: bool = False) -> Array:
        """Return a copy of a value's elements; see `Tensor.numpy`.

        `is_inside`: whether the caller holds the run lock.
        """
        is_timed = self.events.active
        asked = perf_counter() if is_timed else 0.0
        lock = self.quick_lock
        if not is_inside and (self.holds_run_lock() or self.holds_queue_lock()):
            lock = self.lock
        with lock:
            if value.status is PENDING and not value.consumed and not self.is_closed:
                self.run_queue()
            elif self.is_closed or self.tasks.running is not None or not self.records.is_consistent:
                self.settle_now(value)
            if value.status is not READY or value.consumed:
                value.check_usable()
            instance = value.instances[0]
            reads, view = instance.reads, instance.view
            if (reads is not None and view is not None and not is_timed
                    and instance.viewed_at == instance.buffer.address):  # fmt: skip
                # It was read from there before.
                reads[0] += 1
                return view.copy()
            ready = perf_counter() if is_timed else 0.0
            if not self.backend.executor.computes:
                raise TaskError(
                    "cannot read this tensor: the null executor computes no data",
                    remedy="open the device with executor='numpy'",
                )
            try:
                elements = self.backend.elements(instance, value.desc, self.host_memory.allowed)
            except Exception as error:
                self.check_lost(error)
                raise
            if instance.buffer.address is not None:
                reads = self.history.reads_of(value.desc_key, value.desc, elements.nbytes)
                reads[0] += 1
                if instance.view is not None and elements.nbytes < LARGE_NBYTES:
                    instance.reads = reads
                if is_timed and self.events.active:
                    moments = (asked, ready, perf_counter())
                    self.events.tell(ReadBack(value.desc, elements.nbytes, moments))
            return elements

    def memory(self, space: Space | str) -> Array:
        """Return all bytes of a space as a live array: programs read what is written to it.

        A buffer at bank address `a` begins at byte `a * banks`; see `Tensor.address`.

        Raises:
            UsageError: The machine has no such space.
        """
        with self.lock:
            self.check_open()
        names = [s.value for s in self.backend.spaces]
        either(TEXT, instance_of("a Space", Space)).check("Device.memory", "space", space)
        if not isinstance(space, Space) and space not in names:
            raise UsageError(
                f"this machine has no memory space {space!r}", expected=" or ".join(names)
            )
        wanted = Space(space)
        # Raises for an unknown space; machine and backend have the same spaces.
        self.machine.shape.space(wanted)
        memory = self.backend.spaces[wanted]
        if not memory.is_host:
            raise UsageError(
                f"the processor cannot read the bytes of {wanted.value} in place: they lie on "
                f"{self.backend.executor.place}",
                remedy="read the tensors in it: tensor.numpy()",
            )
        array: Array = memory.data.region(0, memory.shape.banks * memory.shape.limit)
        return array

    def footprint_of(self, tensor: Tensor) -> slice:
        """Return the bytes of a tensor within `memory(tensor.space)`; raises for host arrays."""
        self.check_device(tensor, "Device.footprint_of")
        self.settle(tensor._record)
        instance = tensor._record.instances[0]
        start = self.backend.start(instance)
        if start is None:
            raise LayoutError("this tensor is a host array and has no footprint in device memory")
        return slice(start, start + footprint(instance.desc, self.machine.shape).nbytes)

    # -- making ------------------------------------------------------------------------------------

    def tensor_at(
        self, buffer: BufferRecord, offset: int, desc: TensorDesc, by: str, *, is_exposed: bool
    ) -> Tensor:
        """Return a handle on a new value in a buffer, at an offset in bytes."""
        value = ValueRecord(self, desc, self.records.desc_key(desc), by)
        value.is_exposed = is_exposed
        self.records.attach(value, buffer, offset)
        return handle_on(value)

    def tensor(self, array: Any, *, borrow: bool = False) -> Tensor:
        """Return a host tensor of an array: a copy, or, with `borrow=True`, the array itself.

        A tensor of PyTorch that lies where the device's DRAM does becomes a tensor in DRAM, by a
        copy there, or in place: `borrow=True` takes only one without strides there.

        Raises:
            LayoutError: The array is not numeric.
            UsageError: The tensor of PyTorch cannot be read in place.
        """
        # No lock: the buffer is outside device memory and not shared yet.
        self.check_outside()
        self.check_open()
        if self.lends:
            device: Any = self
            with self.lock:
                lent = lent_tensor(device, array, copy=not borrow, owned=True)
            if lent is not None:
                return lent
        elements = as_array(array, "the array")
        kind = DataType.from_dtype(elements.dtype)
        allowed = self.host_memory.allowed
        host = elements if borrow else copied(elements, "device.tensor()", allowed)
        desc = TensorDesc(host.shape, host_layout(kind))
        buffer = self.records.outside(desc, host, "a host array")
        return self.tensor_at(buffer, 0, desc, "tensor()", is_exposed=borrow)

    def empty(self, desc: TensorDesc) -> Tensor:
        """Allocate a tensor with undefined contents.

        Raises:
            OutOfMemoryError: No free range is large enough.
        """
        DESC.check("Device.empty", "desc", desc)
        with self.lock:
            self.check_open()
            self.run_queue()
            self.drain()
            return self._empty(desc)

    def _empty(self, desc: TensorDesc) -> Tensor:
        size = room_per_bank(desc, self.machine.shape)
        bare = desc.without_address()
        buffer = self.records.reserve(bare, size, desc.layout.address, "empty()")
        assert buffer.address is not None
        try:
            self.host_memory.take_region(buffer.space, buffer.address, bare, "device.empty()")
        except OutOfMemoryError:
            self.records.free(buffer)
            self.records.is_consistent = True
            raise
        memory = self.backend.spaces[buffer.space]
        memory.fill_padding(bare, buffer.address, self.machine.shape)
        handle = self.tensor_at(buffer, 0, bare, "empty()", is_exposed=False)
        self.records.is_consistent = True
        return handle

    def write(self, tensor: Tensor, array: Any) -> None:
        """Overwrite a tensor's elements; drops its copies and cached results.

        Raises:
            LinkError: Shape or kind of number differ.
        """
        self.check_device(tensor, "Device.write")
        value = tensor._record
        self.settle(value)
        # Converting a list may run user code; do not hold the lock.
        elements = as_array(array, "the array")
        with self.lock:
            self.settle_now(value)
            self.run_queue()
            self._check_array(value, elements)
            with self.queue_lock:
                for sharer in tuple(value.instances[0].buffer.users):
                    self.records.forget_copies(sharer)
                    self.constant_cache.forget(sharer)
            self._write(value, elements)

    def _check_array(self, value: ValueRecord, elements: Array) -> None:
        """Raise `LinkError` for an array that does not match a value, or `LayoutError` if the value
        is a read-only array."""
        try:
            check_link(_dense(elements), value.desc, output="the array", input="the tensor")
        except LinkError as error:
            raise LinkError(
                error.what, where=error.where, expected=error.expected, got=error.got,
                remedy="pass an array of the tensor's shape and type: .reshape(...), .astype(...)",
            ) from error  # fmt: skip
        target = value.instances[0].buffer.array
        if target is not None and not target.flags.writeable:
            raise LayoutError(
                "cannot write this tensor: it borrows a read-only array",
                remedy="copy it instead of borrowing: device.tensor(array)",
            )

    def _write(self, value: ValueRecord, elements: Array) -> None:
        """Overwrite a value that has no other copies."""
        first = value.instances[0]
        if first.buffer.array is not None:
            np.copyto(first.buffer.array, elements, casting="same_kind")
            return
        source = _dense(elements)
        try:
            self.backend.write(first, np.ascontiguousarray(elements), source)
        except Exception as error:
            self.check_lost(error)
            raise
        nbytes, seconds = copy_cost(self.machine, source, first.desc)
        self.events.report(Written(first.desc, nbytes, seconds))

    def view(self, tensor: Tensor, start: int, stop: int, *, keep: bool) -> Tensor:
        """Return rows `[start, stop)` of the first dimension of a tensor.

        A ready tensor's view shares its buffer. A pending tensor's view is a queued task with a
        separate buffer. With `keep` false, the result has no first dimension.
        """
        value = tensor._record
        if value.status is PENDING and not self.copies_forbidden:
            if self.holds_run_lock() or self.holds_queue_lock():
                self.check_may_queue()
            value.check_usable()
            queued = queued_view(tensor, start, stop, keep=keep)
            if queued is not None:
                return queued
        with self.lock, self.ready(value):
            instance = value.instances[0]
            shape = (stop - start, *value.desc.shape[1:]) if keep else value.desc.shape[1:]
            desc = TensorDesc(shape, instance.desc.layout)
            buffer, offset = instance.buffer, instance.offset_nbytes
            if buffer.array is not None:
                part = buffer.array[start:stop] if keep else buffer.array[start]
                buffer = self.records.outside(desc, np.asarray(part), buffer.origin)
                # The records see two separate arrays and would miss writes through the other one.
                self._expose(value)
            else:
                part_offset = view_offset(instance.desc, (start, stop), keep, self.machine.shape)
                # An empty part may begin behind the last byte, where no buffer is: use the start.
                offset += part_offset if desc.elements else 0
            return self.tensor_at(buffer, offset, desc, value.by, is_exposed=value.is_exposed)

    # -- leaving -----------------------------------------------------------------------------------

    def export(
        self,
        value: ValueRecord,
        dtype: np.dtype[Any] | None = None,
        kept: object = None,
        ended: Callable[[], object] | None = None,
    ) -> Array:
        """Return a dense tensor's bytes in place; its buffer is pinned while the array lives.

        The caller holds the run lock.

        Args:
            value: The value to export.
            dtype: Type of the returned view; None for the tensor's own.
            kept: Object to keep alive as long as the array.
            ended: Called when the array is gone; see `Reclaimer.await_end`.
        """
        self.settle_now(value)
        with self.queue_lock:
            if value.status is not READY or value.consumed:
                value.check_usable()
            instance = value.instances[0]
            dense: Any = self.backend.dense(instance)
            if dense is None and instance.desc.layout.is_dense:
                dense = self.backend.in_place(instance)
            if dense is None:
                raise BufferError(
                    f"{value.desc.text()} is not dense: exporting it would need a copy; "
                    "use .numpy(), or to_layout with a row-major layout"
                )
            view: Array = dense[...] if dtype is None else dense.view(dtype)
            self._expose(value)
            if instance.buffer.address is not None:
                self.deaths.await_end(view, ended, instance.buffer, kept)
            return view

    def _expose(self, value: ValueRecord) -> None:
        """Mark a value's primary buffer as writable from outside; both locks are held."""
        # The queued batch may read it already.
        self.tasks.queued.reads_exposed = True
        for sharer in value.instances[0].buffer.users:
            sharer.is_exposed = True
            sharer.slots = None
            self.constant_cache.forget(sharer)

    def deallocate(self, value: ValueRecord, by: str) -> None:
        """Free a value now, or after the queued or running tasks that read it."""
        self.check_outside()
        with self.queue_lock:
            value.check_usable()
            if self.tasks.give_up(value, by):
                return
        with self.lock:
            self.check_consistent()
            self.give_up(value, by)

    def give_up(self, value: ValueRecord, by: str) -> None:
        """As `deallocate`; the caller holds the run lock."""
        with self.queue_lock:
            value.check_usable()
            if not self.tasks.give_up(value, by):
                self.deaths.free(value, by)

    # -- queueing ----------------------------------------------------------------------------------

    def queue_up(self, fill: Callable[[], object]) -> bool:
        """Enqueue the tasks that `fill` adds, atomically.

        Returns:
            Whether the batch is full and should run now.
        """
        with self.queue_lock:
            fill()
            return self.tasks.is_full()

    def to_layout(
        self, tensor: Tensor, layout: Layout | TensorDesc, *, retain: bool | None = None,
        copy: bool = False,
    ) -> Tensor:  # fmt: skip
        """Enqueue a conversion, unless the tensor has this layout; see `stitch.to_layout`."""
        self.check_outside()
        self.check_open()
        self.check_device(tensor, "to_layout")
        value = tensor._record
        value.check_usable()
        desc = target_desc(value.desc, layout, self.machine.shape)
        has_address, present = desc.layout.address is not None, tensor.layout
        # A pending tensor has no address yet.
        if not copy and desc.layout == (present if has_address else present.without_address()):
            return tensor
        results = []

        def fill() -> None:
            self.check_open()
            value.check_usable()
            results.append(handle_on(self.tasks.convert(value, desc)))
            if retain is False and not value.retain:
                value.consumed = True
                value.by = "to_layout(retain=False)"

        if self.queue_up(fill):
            self.flush()
        return results[0]


def target_desc(desc: TensorDesc, layout: Layout | TensorDesc, machine: MachineShape) -> TensorDesc:
    """Return the descriptor after a conversion; raises `LayoutError` if the shape differs."""
    LAYOUT.check("to_layout", "layout", layout)
    if isinstance(layout, TensorDesc):
        if layout.shape != desc.shape:
            raise LayoutError(
                "to_layout cannot change the shape",
                expected=str(list(desc.shape)),
                got=str(list(layout.shape)),
            )
        layout = layout.layout
    wanted = TensorDesc(desc.shape, layout)
    footprint(wanted, machine)
    return wanted


def _dense(array: Array) -> TensorDesc:
    return TensorDesc(array.shape, host_layout(DataType.from_dtype(array.dtype)))


def _inside(name: str) -> TaskError:
    return TaskError(
        f"device {name!r} is in the middle of a plan, or of a call, of this thread: it cannot be "
        "used by a hook, kernel, signal handler or finalizer, nor by an event listener that "
        "handles PlanMade",
        remedy="use only the arguments of the hook or listener, record the event, and use the "
        "device after the call",
    )


def _check_out(is_out: Callable[[], bool], name: str) -> None:
    if is_out():
        raise _inside(name)


def _in_child() -> None:
    for device in tuple(_alive):
        device.invalidate_after_fork()


os.register_at_fork(after_in_child=_in_child)
