"""`RuntimeDevice`: a simulated machine with its queue. Calls queue tasks; reading a result runs it.

The queue is a task graph. When the window closes the planner turns it into a plan, or a plan made
earlier for the same work is replayed; then the backend runs it.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from stitch.argument_kinds import INDEX_OR_NAME, takes
from stitch.errors import StitchError, TaskError, UsageError
from stitch.machine import Machine, load_machine
from stitch.program import Array, Layout, Space, TensorDesc
from stitch.runtime.arguments import check_inputs, check_submission, link_arguments
from stitch.runtime.backends import HostMemory, InstanceBytes, LocalBackend
from stitch.runtime.events import TIMES, EventStream, PlanRun
from stitch.runtime.executors import Executor, is_own, make_executor
from stitch.runtime.history import Account, History
from stitch.runtime.hooks import Hooks
from stitch.runtime.lifetime import Lifetime
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.loading import load_program
from stitch.runtime.queue import (
    ConstantCache,
    Window,
    expose,
    fail,
    forget_stale_copies,
    run_one_by_one,
    run_the_rest,
)
from stitch.runtime.recording import (
    PLAN_FILE,
    RUNNING,
    Binding,
    Ran,
    RecordingMaker,
    Recordings,
    run_binding,
)
from stitch.runtime.tensor import Tensor
from stitch.runtime.tensor_access import DESC, LAYOUT, TENSOR, TensorAccess, target_desc
from stitch.runtime.values import (
    BufferRecord,
    Notes,
    Records,
    SpaceUse,
    Status,
    ValueRecord,
    mend,
)
from stitch.tasks import TaskGraph, Transformation, TransformationKind
from stitch.ttb import SOURCE, Binary, load

READY = Status.READY
#: Tasks that a window holds unless said otherwise.
DEFAULT_WINDOW = 64
#: Notes of finalizers that are left to lie while nothing runs.
MANY_NOTES = 256
#: What tells devices of one machine apart where they are named.
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a device has done since it opened, counted; in the steady state only `replays` and
    `windows` grow, and what runs past the queue (pipelines, settled trainings) changes nothing.

    `recordings_made`: plans that are kept to run again; `bindings_made`: how often one was bound to
    places. `replays`: windows that needed no plan. `revocations`: leases that gave their memory up.
    """

    plans_made: int
    recordings_made: int
    bindings_made: int
    replays: int
    code_written: int
    windows: int
    revocations: int


class Resting(Protocol):
    """Who keeps values that nobody refers to, for whoever makes them again."""

    def give_back(self, dropped: deque[ValueRecord]) -> bool:
        """Leave a note of each."""


class RuntimeDevice(Lifetime):
    """A machine, opened. Use it as a context manager, or call `close`.

    It may be used from several threads, and takes calls while another one computes: what is queued
    waits for nobody, what is looked at waits for what runs. Two devices are independent of each
    other.
    """

    def __init__(
        self,
        machine: str | Machine,
        *,
        executor: str | Executor = "numpy",
        window: int = DEFAULT_WINDOW,
        debug: bool = False,
        strict_types: bool = False,
        max_memory: int | str | None = None,
    ) -> None:
        if not isinstance(window, int) or window < 1:
            raise UsageError("a window holds at least one task", got=repr(window))
        self.number = next(_NUMBERS)
        self.machine = load_machine(machine)
        self.backend = LocalBackend(self.machine, make_executor(executor), debug=debug)
        self.host_memory = HostMemory(self.backend, max_memory)
        self.records = Records(self.backend.spaces)
        self.window = window
        self.strict_types = strict_types
        self.history = History(self.backend.write_counts)
        self.events = EventStream(self.history.count, self.look_again)
        self.hooks = Hooks(self.look_again)
        self.constant_cache = ConstantCache()
        #: Values one of whose handles is gone, and notes of what else is.
        self.dropped: deque[ValueRecord] = deque()
        self.drop = self.dropped.append
        self.notes = Notes()
        self.gone = self.notes.left
        #: Who has values resting, which nobody refers to and whoever made them runs into again.
        self.resting: list[Resting] = []
        self.recordings = Recordings(self.records)
        self.maker = RecordingMaker(self)
        self.copies_forbidden = 0
        #: The bits of what observes it (`TIMES`, `Hooks.bits`): runs have another form for each.
        self.observers = 0
        self.code_written = self.windows_run = 0
        self.contents = InstanceBytes(self.backend)
        self.access = TensorAccess(
            self, self.backend, self.records, self.contents, self.host_memory, self.history,
            self.events, self.notes,
        )  # fmt: skip
        self.queued = Window(0, TaskGraph())
        #: What has begun and will be done, by whoever is next: once more does no harm.
        self.unfinished: Callable[[], object] | None = None
        self._limit = window
        #: Whether kernels are somebody else's, who may call back.
        self.kernels_call_back = not is_own(self.backend.executor)
        # Last of all: whoever forks finds it whole.
        super().__init__(self.machine.name)

    # -- life --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<Device {self.number} {self.machine.name} executor={self.executor}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a device belongs to its process: open one there, and load the .ttb files again"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with self.lock:
            with self.queue_lock:
                self._forget_queue("the device was closed after an error")
            self.close()

    def check_open(self) -> None:
        """Raise `TaskError` if it has been closed, belongs to another process, or a hook asks."""
        if self._closed:
            self.refuse()
        self.check_idle()

    def check_idle(self) -> None:
        """Raise `TaskError` if a hook, a kernel or who listens to a plan being made asks: a plan is
        half-way through, and this thread with it."""
        is_idle = not self.in_others_code and self.running is None and self.records.is_whole
        if is_idle or not self.is_mine():
            return
        if (self.in_others_code or self.running is not None) and self.is_within_run():
            raise TaskError(
                f"device {self.machine.name!r} is in the middle of a plan: a hook cannot use it, "
                "nor can a kernel, nor a listener that hears of a plan being made",
                remedy="look at what the hook or the listener is given, and act after the run",
            )
        self.in_others_code = False
        self.mend()

    def check_whole(self) -> None:
        """Nothing is half done from now on; the lock is held."""
        if not self.records.is_whole:
            self.check_idle()

    def mend(self) -> None:
        """Bring to an end, or take back, what an interrupt has left half done."""
        self._end_run()
        if self.unfinished is not None:
            self.unfinished()
        with self.queue_lock:
            self._mend_queue()
            for value in mend(self.records, self.queued.values):
                self.constant_cache.forget(value)
        self.records.is_whole = True

    def is_within_run(self) -> bool:
        """Whether this thread is in the middle of a plan; a look at its stack, so it takes time."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if code in RUNNING:
                return True
            if code is _RUN_QUEUE and frame.f_locals["self"] is self:
                # One that has just begun runs nothing yet.
                window = frame.f_locals.get("window")
                if window is not None and window is self.running:
                    return True
            if code.co_filename == PLAN_FILE:
                return True
            frame = frame.f_back
        return False

    def _mend_queue(self) -> None:
        """Its lock is held."""
        if not self.queued.is_whole:
            self.queued = Window.of(self.queued.number + 1, self.queued)

    def close(self) -> None:
        """Run what is queued and give all memory back; closing twice is allowed."""
        with self.lock:
            if self._closed:
                if not self.is_left_behind:
                    self._let_go()  # What an interrupt left of it the first time.
                return
            self.check_idle()
            try:
                self.flush()
            finally:
                with self.queue_lock:
                    self._closed = True
                    # What another thread has queued meanwhile.
                    self._forget_queue(f"device {self.machine.name!r} was closed")
                self._let_go()

    def _let_go(self) -> None:
        self.records.touch()
        self.look_again()
        self.recordings.clear()
        self.constant_cache.clear()
        self.host_memory.close(self.records.pinned())

    def leave_behind(self) -> None:
        """In the child of a fork: closed, with locks that no thread of the parent holds."""
        super().leave_behind()
        # Whoever runs past the queue looks closer now, and finds it closed.
        self.records.touch()

    @property
    def executor(self) -> str:
        """The name of the executor that computes."""
        return self.backend.executor.name

    @property
    def computes(self) -> bool:
        """Whether its executor computes data, so that there is something to read."""
        return self.backend.executor.computes

    @property
    def reads_in_place(self) -> bool:
        """Whether the host's memory is its only space: lent bytes are read where they lie."""
        return len(self.backend.spaces) == 1

    @property
    def allowed_nbytes(self) -> int:
        """What all devices of the process may take of the host's memory, as this one was told."""
        return self.host_memory.allowed

    @property
    def peak_nbytes(self) -> int:
        """The most that it took of the host's memory at any time."""
        return self.host_memory.peak_nbytes

    def memory_use(self) -> dict[Space, SpaceUse]:
        """What each space holds now; runs nothing."""
        with self.lock:
            if not self.in_others_code and self.running is None:
                self.drain()
            return self.records.use()

    def desc_key(self, desc: TensorDesc) -> int:
        """A small number for a descriptor."""
        return self.records.desc_key(desc)

    # -- loading -----------------------------------------------------------------------------------

    @takes(source=SOURCE, program=INDEX_OR_NAME)
    def load(self, source: Any, program: int | str = 0) -> LoadedProgram:
        """A program of a binary (path, bytes, `Binary` or compiled model), ready to be called.

        Its constants reserve their device addresses until the loaded program is dropped. Raises
        `FormatError`, `IncompatibleError` (it was compiled for another machine, with every
        difference), `OutOfMemoryError`.
        """
        binary = getattr(source, "binary", source)
        where = str(binary) if isinstance(binary, str | Path) else None
        if not isinstance(binary, Binary):
            binary = load(binary)
        with self.lock:
            self.check_open()
            self.drain()
            return load_program(self, self.machine, self.records, binary, program, where)

    def await_unloading(self, loaded: LoadedProgram) -> None:
        """Once nobody refers to a program, what it keeps is given back."""
        key, constants = loaded.transformation.key, loaded.constant_buffers
        self.notes.await_end(loaded, partial(self._unload, key, constants))

    def _unload(self, transformation: int, constants: list[BufferRecord]) -> None:
        self.recordings.forget(transformation)
        self.records.let_go(constants)

    # -- single tensors ----------------------------------------------------------------------------

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

    def check_device(self, tensor: Tensor, call: str) -> None:
        """Raise `UsageError` for what is no tensor, or one of another device, given to `call`."""
        if not isinstance(tensor, Tensor):
            TENSOR.check(call, "tensor", tensor)
        if tensor._record.device is not self:
            raise UsageError(
                "this tensor belongs to another device",
                where=call,
                expected=f"a tensor of {self!r}",
                got=f"{tensor!r} of {tensor.device!r}",
                remedy="bring it over: device.tensor(tensor.numpy())",
            )

    def layout_of(self, value: ValueRecord) -> Layout:
        """The layout of a value's primary instance, or, while pending, the promised one."""
        return self.access.layout_of(value)

    def has_layout(self, tensor: Tensor, layout: Layout | TensorDesc) -> bool:
        """Whether a tensor lies as described; an address counts only where one is given."""
        self.check_device(tensor, "Device.has_layout")
        LAYOUT.check("has_layout", "layout", layout)
        wanted = layout.layout if isinstance(layout, TensorDesc) else layout
        if isinstance(layout, TensorDesc) and layout.shape != tensor.shape:
            return False
        if wanted.address is None:
            return wanted == tensor.layout.without_address()
        self.settle(tensor._record)
        return wanted == tensor.layout

    def read(self, value: ValueRecord) -> Array:
        """A value's elements in an array of their own; see `Tensor.numpy`."""
        with self.lock:
            # What is ready, as a rule, needs no calls to say so.
            if (value.status is not READY or value.consumed or self._closed
                    or self.running is not None or self.in_others_code
                    or not self.records.is_whole):  # fmt: skip
                self.settle(value)
            return self.access.read(value)

    def memory(self, space: Space | str) -> Array:
        """All bytes of a space, live: what is written here, programs will read.

        A buffer at bank address `a` begins at byte `a * banks`; see `Tensor.address`.
        """
        with self.lock:
            self.check_open()
        return self.access.memory(space)

    def footprint_of(self, tensor: Tensor) -> slice:
        """Where in `memory(tensor.space)` a tensor's footprint lies; raises for host arrays."""
        self.check_device(tensor, "Device.footprint_of")
        self.settle(tensor._record)
        return self.access.footprint_of(tensor._record)

    def new_value(self, desc: TensorDesc) -> ValueRecord:
        """A ready value without an instance yet."""
        return self.access.new_value(desc)

    def tensor(self, array: Any, *, borrow: bool = False) -> Tensor:
        """A host tensor of an array: a copy, or, with `borrow=True`, the array itself.

        Raises `LayoutError` for arrays that are not numeric.
        """
        # It lies outside of all that runs work in: nobody else knows it before it is there.
        self.check_open()
        return self.access.tensor(array, borrow=borrow)

    def empty(self, desc: TensorDesc) -> Tensor:
        """A tensor with room but no defined contents; raises `OutOfMemoryError`."""
        DESC.check("Device.empty", "desc", desc)
        with self.lock:
            self.check_open()
            self.run_queue()
            self.drain()
            return self.access.empty(desc)

    def write(self, tensor: Tensor, array: Any) -> None:
        """Overwrite a tensor's elements; its other instances and remembered results are dropped.

        Raises `LinkError` where shape or kind of number differ.
        """
        with self.lock:
            self.check_device(tensor, "Device.write")
            value = tensor._record
            self.settle(value)
            self.run_queue()
            elements = self.access.checked_array(value, array)
            with self.queue_lock:
                for sharer in tuple(value.instances[0].buffer.users):
                    self.records.forget_copies(sharer)
                    self.constant_cache.forget(sharer)
                    sharer.version = 0
            self.access.write(value, elements)

    def view(self, value: ValueRecord, start: int, stop: int, *, keep: bool) -> Tensor:
        """Rows `[start, stop)` of the first dimension as a tensor on the same buffer."""
        with self.lock, self.queue_lock_of_ready(value):
            return self.access.view(value, start, stop, keep=keep)

    def export(
        self,
        value: ValueRecord,
        dtype: np.dtype[Any] | None = None,
        kept: object = None,
        ended: Callable[[], object] | None = None,
    ) -> Array:
        """The bytes of a dense tensor for others; its buffer is pinned while the array lives.

        `dtype`: as what they see the bytes; for the rest see `Notes.await_end`.
        """
        with self.lock:
            if (value.status is not READY or self._closed or self.running is not None
                    or self.in_others_code or not self.records.is_whole):  # fmt: skip
                self.settle(value)
            with self.queue_lock:
                if value.status is not READY or value.consumed:
                    value.check_usable()
                return self.access.export(value, dtype, kept, ended)

    def expose(self, value: ValueRecord) -> None:
        """Others hold the primary bytes of a value from now on."""
        with self.queue_lock:
            # The window may read it already.
            self.queued.reads_exposed = True
            expose(value, self.constant_cache)

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

    # -- queueing ----------------------------------------------------------------------------------

    def submit(self, agent: LoadedProgram, arguments: Sequence[Any],
               borrow: bool = False) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Queue one run of a loaded program; see `LoadedProgram.__call__`."""
        try:
            if (self._closed or self.in_others_code or self.running is not None
                    or agent.device is not self):  # fmt: skip
                self._look_closer(agent)
            inputs = link_arguments(self, agent, arguments, borrow)
            if len(self.dropped) > MANY_NOTES:
                self._drain_if_free()
            if agent.transformation.donated:
                self._drain_for(agent, inputs)
            return self._queue(agent, inputs)
        except (AttributeError, TypeError, ValueError, StitchError):
            check_submission(agent, arguments)
            raise

    def _look_closer(self, agent: LoadedProgram) -> None:
        self.check_open()
        if agent.device is not self:
            self.refuse_program(agent)

    def refuse_program(self, agent: LoadedProgram) -> NoReturn:
        """It is another device's: raise the `UsageError` that says so."""
        raise UsageError(
            f"program {agent.name!r} is loaded on another device",
            expected=f"a program of {self!r}",
            got=f"a program of {agent.device!r}",
            remedy="load its file here: device.load(file)",
        )

    def _drain_for(self, agent: LoadedProgram, inputs: list[ValueRecord]) -> None:
        """Let go of what seems to share a value that is donated, and was perhaps dropped, or is
        being let go of just now by another thread."""
        for index in agent.transformation.donated:
            for instance in inputs[index].instances:
                buffer = instance.buffer
                if len(buffer.users) > 1 or buffer.pins:
                    with self.lock:
                        self.drain()
                    return

    def _queue(
        self, agent: LoadedProgram, inputs: list[ValueRecord]
    ) -> Tensor | tuple[Tensor, ...]:
        is_full, key = False, None
        if agent.is_constant_evaluable:
            _ = agent.content_hash  # It takes its time, once.
        with self.queue_lock:
            if self._closed:
                self.check_open()
            if not self.queued.is_whole:
                self._mend_queue()
            check_inputs(self, agent, inputs)
            values: Sequence[ValueRecord] | None = None
            if agent.is_constant_evaluable:
                key = self.constant_cache.key(agent, inputs)
                values = None if key is None else self.constant_cache.find(key)
            is_new = values is None
            if values is None:
                values = self.append(agent, inputs)
            results: Tensor | tuple[Tensor, ...]
            if len(values) == 1:
                results = Tensor(values[0])
            else:
                results = tuple([Tensor(value) for value in values])
            if is_new:
                if key is not None:
                    handles = results if isinstance(results, tuple) else (results,)
                    self.constant_cache.remember(key, inputs, tuple(values), handles)
                if len(self.queued.agents) >= self._limit:
                    is_full = self._is_full()
        if is_full:
            self.flush()
        return results

    def append(self, agent: LoadedProgram, inputs: list[ValueRecord]) -> list[ValueRecord]:
        """Put one run of a program into the queue, whose lock is held; its outputs, pending."""
        return self.queued.append(self, agent.transformation, agent, inputs, agent.outputs)

    def queue_up(self, fill: Callable[[], object]) -> None:
        """Queue what `fill` puts into the queue; nobody else can in between."""
        with self.queue_lock:
            self._mend_queue()
            fill()
            is_full = self._is_full()
        if is_full:
            self.flush()

    def _is_full(self) -> bool:
        """Whether it is time to run; where the work repeats, the next windows hold whole periods of
        it."""
        tasks = len(self.queued.agents)
        if tasks < self._limit:
            return False
        period = self.queued.graph.period()
        self._limit = tasks - tasks % period if period else self.window
        return True

    def to_layout(
        self, tensor: Tensor, layout: Layout | TensorDesc, *, retain: bool | None = None
    ) -> Tensor:
        """Queue a conversion; see `stitch.to_layout`."""
        self.check_open()
        self.check_device(tensor, "to_layout")
        value = tensor._record
        value.check_usable()
        desc = target_desc(value.desc, layout, self.machine.shape)
        with self.queue_lock:
            self.check_open()
            self._mend_queue()
            value.check_usable()
            converted = self.convert(value, desc)
            result = Tensor(converted)
            if retain is False and not value.retain:
                value.consumed = True
                value.by = "to_layout(retain=False)"
            is_full = self._is_full()
        if is_full:
            self.flush()
        return result

    def convert(self, value: ValueRecord, desc: TensorDesc) -> ValueRecord:
        """Put a conversion into the queue, whose lock is held; its output, pending."""
        bare = TensorDesc(desc.shape, desc.layout.without_address())
        what = Transformation(
            "to_layout", TransformationKind.COPY, (), (desc,),
            output_names=("tensor",), key=-1 - self.desc_key(desc),
        )  # fmt: skip
        outputs = [(bare, self.desc_key(bare))]
        (output,) = self.queued.append(self, what, None, [value], outputs)
        output.retain = value.retain
        return output

    # -- running -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Run everything that is queued.

        A failure while planning changes nothing but the tensors that could not be made; after a
        failure while running, finished outputs stay and what depended on the rest is failed.
        """
        with self.lock:
            if self._closed:
                self.check_process()
            self.run_queue()

    def run_queue(
        self, fill: Callable[[], object] | None = None, at_most: int | None = None
    ) -> Binding | None:
        """`flush`, for those who hold the lock; what ran, if it was one plan.

        `fill` may queue more just before: nobody else can in between. With `at_most` only what
        changes nothing but its results runs, by a plan of so many copies; else it stays queued.
        """
        if self.in_others_code or self.running is not None:
            self.check_idle()
        is_empty = fill is None and not self.queued.agents
        self.drain(resting=not is_empty)
        if is_empty:
            return None
        with self.queue_lock:
            if not self.queued.is_whole:
                self._mend_queue()
            if fill is not None:
                fill()
            window = self.queued
            if not window.agents:
                return None  # All there was has been half a task.
            kept, following = window.kept(), window.following()
            # From here on others queue in the next, and may give away what this one reads. Both at
            # once: nothing can come in between these.
            self.running = window
            self.queued = following
        try:
            binding = self.run_window(window, kept, at_most)
            # Else it goes back to where it came from.
            window.is_done = window.is_planned
            return binding
        finally:
            # Where an interrupt comes before it or into it, whoever is next does it.
            self._end_run()

    def run_window(
        self, window: Window, kept: tuple[bool, ...], at_most: int | None = None
    ) -> Binding | None:
        """Run a window that has left the queue; what ran, if it was one plan.

        `kept`: which of its values were wanted when it left; `at_most`: see `run_queue`.
        """
        if window.reads_exposed:
            window.forget_stale_copies(self)
        if window.reads_failed and any(v.status > READY for _, v in window.sources):
            window.is_planned = True
            # What its tasks do not make, those of the next may have asked for already.
            self.queued.reads_failed = True
            run_one_by_one(self, window, kept)
            return None
        try:
            binding = self.maker.binding(window, kept, at_most)
            if binding is None:
                return None
        except StitchError as error:
            window.is_planned = True
            run_one_by_one(self, window, kept, error)
            return None
        window.is_planned = True
        try:
            self.run(binding, window, kept)
        except Exception as error:
            run_the_rest(self, window, kept, error.__dict__.pop("stitch_tasks_left", ()))
            raise
        return binding

    def _end_run(self) -> None:
        """What left the queue does not run any more, be it at its end; twice does no harm."""
        window = self.running
        if window is None:
            return
        with self.queue_lock:
            following = self.queued
            if window.is_planned and not window.is_done:
                # What was queued behind it may miss results of it.
                following.reads_failed = True
                for value in window.values:
                    if value.status is Status.PENDING:
                        fail(value, TaskError("its run was interrupted"))
            elif not window.is_done:
                following = Window.of(following.number + 1, window, following)
            for value in window.given_up:
                if value.status is READY and value.window != following.number:
                    self._free(value, value.by)
            # Both at once: nothing can come in between these.
            self.queued = following
            self.running = None

    def run(self, binding: Binding, window: Window, kept: tuple[bool, ...]) -> None:
        """Run a binding on the values of a window, and bring the records up to date."""
        self.windows_run += 1
        ran = run_binding(self, binding, window.values, kept, window.number + 1)
        self.history.repeated(binding.index, binding.tally)
        if ran is not True:
            if self.running is window:
                # Who listens may look at what it made.
                window.is_done = True
                self._end_run()
            self.tell_run(binding, ran)

    def tell_run(self, binding: Binding, ran: Ran) -> None:
        """Tell who listens that a plan ran, from when to when."""
        assert isinstance(ran, tuple)
        began, ended = ran
        self.events.tell(PlanRun(binding.index, binding.plan, began, ended - began))

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Within the block, work that would need a copy raises `TaskError`; runs the queue before
        and after."""
        self.flush()
        # Nothing can come in between these two.
        try:
            self.copies_forbidden += 1
            self.look_again()
            yield
            self.flush()
        finally:
            self.copies_forbidden -= 1
            self.look_again()

    def statistics(self) -> Statistics:
        """How often what costs time happened since the device opened; see `Statistics`."""
        recordings = self.recordings
        return Statistics(
            recordings.plans_made, recordings.made, recordings.bindings_made,
            self.windows_run - recordings.plans_made, self.code_written, self.windows_run,
            self.records.revocations,
        )  # fmt: skip

    def account(self) -> Account:
        """What it has done in this period, all of one moment; runs the queue first."""
        with self.lock:
            self.flush()
            return self.history.account()

    def make_room(self) -> None:
        """Drop the recordings, and give back what only they wrote to."""
        self.recordings.clear()
        gc.collect()
        self.host_memory.give_back(self.records.buffers.values())

    def look_again(self) -> None:
        """Something has changed that every run must know of."""
        self.records.touch()
        self.observers = self.hooks.bits | (TIMES if self.events.active else 0)

    def start_window(self) -> None:
        """Begin an empty queue; its lock is held."""
        self.queued = self.queued.following()

    def _forget_queue(self, why: str) -> None:
        for value in self.queued.values:
            if value.status is Status.PENDING:
                fail(value, TaskError(why))
        self.start_window()

    def _drain_if_free(self) -> None:
        """Read the notes of finalizers, unless somebody runs; who does reads them himself."""
        if self.is_mine():
            return
        try:
            if self.lock.acquire(blocking=False):
                self.drain()
        finally:
            # An interrupt may come just after it was acquired.
            if self.is_mine():
                self.lock.release()

    def drain(self, *, resting: bool = True) -> None:
        """Read the notes that finalizers left: drop values without handles, unpin exports; with
        those of what rests for the stages of a loop."""
        records = self.records
        if not records.is_whole or self.running is not None:
            # What reads a value may have left the queue, and come back to it.
            self.check_idle()
        if not self.queued.is_whole:
            # What only half a task reads is not queued.
            with self.queue_lock:
                self._mend_queue()
        for held in self.resting if resting else ():
            held.give_back(self.dropped)
        # Before the handles: what is pinned no more goes back to its lease with its last handle.
        if self.gone:
            self._read_notes()
        dropped, now = self.dropped, self.queued.number
        while dropped:
            # A note goes when it has taken effect; taking effect twice does no harm.
            value = dropped[0]
            if value.handles == 1 and value.window < now and value.status is READY:
                lease = value.lease
                records.is_whole = False
                is_back = lease is not None and lease.put_back(value)
                records.is_whole = True
                if not is_back:
                    self._free(value, "its last handle was dropped")
            value.handles -= 1
            del dropped[0]

    def _read_notes(self) -> None:
        gone, records = self.gone, self.records
        while gone:
            note = self.notes.first()
            if note.act is not None:
                note.act()
            buffer = note.pinned
            if buffer is None:
                del gone[0]
                continue
            for user in buffer.users if buffer.pins == 1 else ():
                # What was pinned could not be evicted. Now it can, and then a copy is all that is
                # left.
                if user.is_exposed and len(user.instances) > 1:
                    forget_stale_copies(self, user)
            # Until what nobody pins any more is free.
            records.is_whole = False
            buffer.pins -= 1
            del gone[0]
            if not buffer.pins:
                if not buffer.users:
                    records.unused(buffer)
                elif buffer.lease is not None and len(buffer.users) == 1:
                    with self.queue_lock:
                        buffer.lease.welcome(buffer.users[0])
            records.is_whole = True

    def _free(self, value: ValueRecord, by: str) -> None:
        self.records.release(value)
        value.status = Status.FREED
        value.by = by
        self.forget_results(value)

    def deallocate(self, value: ValueRecord, by: str) -> None:
        """Free a value now, or, if tasks that are queued or run still read it, after them."""
        self.check_idle()
        with self.queue_lock:
            value.check_usable()
            if self._is_given_up(value, by):
                return
        with self.lock, self.queue_lock:
            value.check_usable()
            if not self._is_given_up(value, by):
                self._free(value, by)

    def _is_given_up(self, value: ValueRecord, by: str) -> bool:
        """Leave a value to the window that uses it, if one does."""
        running = self.running
        if value.window != self.queued.number:
            if running is None or value.window != running.number:
                return False
            running.given_up.append(value)
        value.consumed = True
        value.by = by
        return True

    def wait(self) -> None:
        """Run everything that is queued."""
        with self.lock:
            self.check_open()
            self.run_queue()


_RUN_QUEUE = RuntimeDevice.run_queue.__code__
