"""`RuntimeDevice`: a simulated machine with its queue. Calls queue tasks; reading a result runs it.

The queue is a stretch of tasks. When the window closes the planner turns it into a plan, or a plan
made earlier for the same work is replayed; then the backend runs it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, Self

from stitch.argument_kinds import INDEX_OR_NAME, instance_of, takes
from stitch.errors import StitchError, TaskError, UsageError
from stitch.machine import Machine, load_machine
from stitch.program import Program, Space, TensorDesc
from stitch.runtime.aggregation import AGGREGATE, Aggregation
from stitch.runtime.arguments import Taking, check_inputs, check_submission, link_arguments
from stitch.runtime.backends import HostMemory, InstanceBytes, LocalBackend
from stitch.runtime.events import TIMES, EventStream
from stitch.runtime.executors import Executor, Prices, PriceTable, is_own, make_executor
from stitch.runtime.functions import HostAgents, HostResult, QueuedCall, queue_call
from stitch.runtime.history import Account, History, Statistics
from stitch.runtime.hooks import Hooks
from stitch.runtime.loaded import MANY_NOTES, LoadedProgram
from stitch.runtime.loading import load_program
from stitch.runtime.locks import quick
from stitch.runtime.queue import ConstantCache, Reclaimer, TaskQueue
from stitch.runtime.queued_views import QueuedViews
from stitch.runtime.recording import RecordingMaker, Recordings, TaskBatch
from stitch.runtime.tensor import Tensor, handle_on, handles_on
from stitch.runtime.tensor_access import TensorAccess
from stitch.runtime.values import (
    ConstantRecord,
    Reader,
    Records,
    SpaceUse,
    SpaceWatch,
    ValueRecord,
    dispose,
)
from stitch.tasks import HostFunction
from stitch.ttb import SOURCE, Binary, load

HOST_FUNCTION = instance_of("a host function (stitch.task makes one)", HostFunction)
#: Tasks that a window holds unless said otherwise.
DEFAULT_WINDOW = 64
#: Each is a thread: more than any machine has processors for.
MAX_INTER_OP_THREADS = 256
#: What tells devices of one machine apart where they are named.
_NUMBERS = count(1)


class RuntimeDevice(TensorAccess):
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
        spill: bool = True,
        aggregate: str = "auto",
        inter_op_threads: int = 1,
        prices: Prices | None = None,
    ) -> None:
        if not isinstance(window, int) or window < 1:
            raise UsageError("a window holds at least one task", got=repr(window))
        AGGREGATE.check("open_device", "aggregate", aggregate)
        if (
            not isinstance(inter_op_threads, int)
            or isinstance(inter_op_threads, bool)
            or not 1 <= inter_op_threads <= MAX_INTER_OP_THREADS
        ):
            raise UsageError(
                f"inter_op_threads must be 1 to {MAX_INTER_OP_THREADS}",
                expected="inter_op_threads=1, 2, ...",
                got=repr(inter_op_threads),
            )
        #: Number of threads for independent sections of a plan.
        self.inter_op_threads = inter_op_threads
        self.number = next(_NUMBERS)
        self.machine = load_machine(machine)
        self.backend = LocalBackend(
            self.machine,
            make_executor(executor, fuse_across_seams=aggregate == "always", prices=prices),
            debug=debug,
        )
        #: Whether kernels are of an executor that is not ours, and may call back.
        self.kernels_call_back = not is_own(self.backend.executor)
        self.host_memory = HostMemory(self.backend, max_memory)
        self.contents = InstanceBytes(self.backend)
        self.constant_cache = ConstantCache()
        records, queue_lock = Records(self.backend.spaces), RLock()
        quick_lock = quick(queue_lock)
        deaths = Reclaimer(records, self.contents, self.constant_cache, quick_lock)
        tasks = TaskQueue(self, records, quick_lock, window)
        super().__init__(self.machine.name, records, deaths, tasks, queue_lock)
        if inter_op_threads > 1:
            self.keep_out(self.backend.threads.run_here)
        self.strict_types = strict_types
        #: Whether tensors may wait on the host, and constants in their files.
        self.spills = spill
        self.history = History(self.backend.write_counts)
        self.events = EventStream(self.history.count, self.look_again)
        self.hooks = Hooks(self.look_again)
        self.recordings = Recordings(records)
        self.maker = RecordingMaker(self)
        self.host_agents = HostAgents(self)
        #: Whether programs that feed each other are linked, as it was told.
        self.aggregate = aggregate
        #: Who links them; None where they stay apart.
        self.linking: Aggregation | None = None
        if aggregate != "never":
            executor_in_use = self.backend.executor
            self.linking = Aggregation(self, executor_in_use, is_always=aggregate == "always")
        self.copies_forbidden = 0
        self.queued_views = QueuedViews(self)
        #: The bits of what observes it (`TIMES`, `Hooks.bits`): runs have another form for each.
        self.observers = 0
        self.code_written = 0
        #: What rooms above keep for it as long as it is open, by a name of theirs.
        self.kept: dict[str, object] = {}

    # -- life --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
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
                self.tasks.cancel("the device was closed after an error")
            self._close()

    def close(self) -> None:
        """Run the queued tasks and release all memory; closing twice is allowed."""
        with self.lock:
            self._close()

    def close_unless_held(self) -> None:
        """Close it, unless a tensor of it is referred to, or a thread is using it; for finalizers,
        which run anywhere."""
        if self.is_closed or self.holds_run_lock() or self.holds_queue_lock():
            return
        if not self._locks[0].acquire(blocking=False):
            return
        try:
            self.drain()
            if not any(v.handles and not v.is_constant for v in self._values()):
                self._close()
        finally:
            self._locks[0].release()

    def _values(self) -> Iterator[ValueRecord]:
        """The values in the spaces and in the queue."""
        yield from self.tasks.queued.values
        for buffer in self.records.all_buffers().values():
            yield from buffer.users

    def _close(self) -> None:
        if self.is_closed:
            if not self.is_left_behind:
                self._let_go()  # What an interrupt left of it the first time.
            return
        try:
            self.run_queue()
        finally:
            with self.queue_lock:
                self.is_closed = True
                # What another thread has queued meanwhile.
                self.tasks.cancel(f"device {self.machine.name!r} was closed")
            self._let_go()

    def _let_go(self) -> None:
        self.look_again()
        if self.linking is not None:
            self.linking.clear()
        self.recordings.clear()
        self.queued_views.clear()
        self.constant_cache.clear()
        self.kept.clear()
        self.backend.threads.close()
        self.host_memory.close(self.records.pinned())

    def rebuild_bookkeeping(self) -> None:
        """Bring to an end, or take back, what an interrupt has left half done."""
        # What an interrupted run has given to inter_op_threads works in bytes of its plan.
        self.backend.threads.rest()
        super().rebuild_bookkeeping()

    def invalidate_after_fork(self) -> None:
        """In the child of a fork: closed, with locks and inter_op_threads that no thread has."""
        super().invalidate_after_fork()
        self.backend.threads.forget()

    @property
    def executor(self) -> str:
        """The name of the executor that computes."""
        return self.backend.executor.name

    @property
    def prices(self) -> PriceTable | None:
        """The table by which its executor chooses kernels; None where it has no choice."""
        return self.backend.executor.prices

    @property
    def why_single_thread(self) -> str | None:
        """Why plans run on the caller's thread only, or None if they may use all threads."""
        return self.backend.why_single_thread

    @property
    def computes(self) -> bool:
        """Whether its executor computes data, so that there is something to read."""
        return self.backend.executor.computes

    @property
    def reads_in_place(self) -> bool:
        """Whether the host's memory is its only space: lent bytes are read where they lie."""
        return len(self.backend.spaces) == 1

    @property
    def window(self) -> int:
        """How many tasks are queued before they run."""
        return self.tasks.size

    @property
    def allowed_nbytes(self) -> int:
        """What all devices of the process may take of the host's memory, as this one was told."""
        return self.host_memory.allowed

    @property
    def peak_nbytes(self) -> int:
        """The most that it took of the host's memory at any time."""
        return self.host_memory.peak_nbytes

    def memory_use(self) -> dict[Space, SpaceUse]:
        """What each space holds now; runs nothing. It may be asked in the middle of a plan, but not
        while what it tells of changes."""
        if self.records.is_consistent and (self.holds_run_lock() or self.holds_queue_lock()):
            return self.records.use()
        with self.lock:
            self.drain()
            return self.records.use()

    def desc_key(self, desc: TensorDesc) -> int:
        """A small number for a descriptor."""
        return self.records.desc_key(desc)

    def watch_memory(self) -> SpaceWatch:
        """For those who want to know after every run what lies in the spaces."""
        return SpaceWatch(self.records)

    # -- loading -----------------------------------------------------------------------------------

    @takes(source=SOURCE, program=INDEX_OR_NAME)
    def load(self, source: Any, program: int | str = 0) -> LoadedProgram:
        """A program of a binary (path, bytes, `Binary` or compiled model), ready to be called.

        Its constants have places, where there is room, until the loaded program is dropped: one
        for all programs that read equal bytes in the same form, from one binary or several. Where
        others need the room, they
        come from the file again when it runs. Raises
        `FormatError`, `IncompatibleError` (it was compiled for another machine, with every
        difference), `OutOfMemoryError` (its constants fit no empty space or, with `spill=False`,
        not beside what lies there).
        """
        binary = getattr(source, "binary", source)
        where = str(binary) if isinstance(binary, str | Path) else None
        if not isinstance(binary, Binary):
            binary = load(binary)
        with self.lock:
            return self._load(binary, program, where)

    def _load(self, binary: Binary, program: int | str, where: str | None = None) -> LoadedProgram:
        """For those who hold the lock."""
        self.check_open()
        self.drain()
        return load_program(self, self.machine, self.records, binary, program, where)

    def runs_on_threads(self, window: TaskBatch, kept: tuple[bool, ...]) -> bool:
        """Whether stretches of a window ran beside each other, as it is."""
        if self.inter_op_threads == 1:
            return False
        known = self.recordings.of(window.graph, kept, window.forms()[0])
        return any(recording.assignment.forks for recording in known)

    def load_made(self, program: Program) -> LoadedProgram:
        """A program that the device has made, ready to be run; for those who hold the lock, unless
        it has no constants, which would take places."""
        binary = Binary((program,), self.machine.shape, "made by the device")
        return load_program(self, self.machine, self.records, binary, 0)

    def await_unloading(self, loaded: LoadedProgram) -> None:
        """Release the memory of a program once it is unreferenced."""
        reader = Reader(loaded.transformation.key, loaded.name)
        self.deaths.notes.await_end(loaded, partial(self._unload, reader, loaded.constants))

    def _unload(self, reader: Reader, constants: Sequence[ConstantRecord]) -> None:
        if self.linking is not None:
            self.linking.forget(reader.key)
        self.recordings.forget(reader.key)
        dispose(self.records, constants, reader)

    # -- queueing ----------------------------------------------------------------------------------

    def submit(self, agent: LoadedProgram, arguments: Sequence[Any],
               borrow: bool = False) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Queue one run of a loaded program; see `LoadedProgram.__call__`."""
        try:
            holds_run_lock, holds_queue_lock = self.holds_run_lock, self.holds_queue_lock
            if self.is_closed or holds_run_lock() or holds_queue_lock() or agent.device is not self:
                self.check_may_queue()
                self.check_open()
                self.check_program(agent)
            inputs = link_arguments(self, agent, arguments, borrow)
            if len(self.deaths.dropped) > MANY_NOTES:
                self.drain_if_free()
            if agent.transformation.donated:
                self._drain_for(agent, inputs)
            elif agent.is_constant_evaluable:
                _ = agent.content_hash  # It takes its time, once.
            tasks = self.tasks
            with self.queue_lock:
                if self.is_closed:
                    self.check_open()
                if not tasks.queued.is_whole:
                    tasks.rebuild_bookkeeping()
                check_inputs(agent, inputs)
                if agent.is_constant_evaluable:
                    results = self._remembered(agent, inputs)
                else:
                    values = tasks.append(agent.transformation, agent, inputs, agent.outputs)
                    results = handle_on(values[0]) if len(values) == 1 else handles_on(values)
                is_full = (
                    tasks.queued.graph.length >= tasks.limit
                    and not holds_run_lock()
                    and tasks.is_full()
                )
            if is_full:
                self.flush()
            return results
        except (AttributeError, TypeError, ValueError, StitchError):
            check_submission(agent, arguments)
            raise

    def call(self, function: HostFunction, *arguments: Any, **named: Any) -> Any:
        """Queue one call of a host function (`stitch.task`) with tensors, arrays, results of
        earlier calls, and any other objects.

        Gives its results as tensors: what it writes, what it returns, what it updates; where it
        describes none, a `HostResult` for what it returns. Raises `UsageError` for arguments that
        the function does not take, `TaskError` for tensors that are gone.
        """
        holds_run_lock = self.holds_run_lock
        if self.is_closed or holds_run_lock() or self.holds_queue_lock():
            self.check_may_queue()
            self.check_open()
        quick = None if named else self.host_agents.call_on_objects(function, arguments)
        if quick is not None:
            inputs: list[ValueRecord] = []
            agent, call = quick
        else:
            HOST_FUNCTION.check("device.call", "function", function)
            agent, call, inputs = self.host_agents.call(function, arguments, named)
            if agent.transformation.donated:
                self._drain_for(agent, inputs)
        result = None if agent.outputs else HostResult(self, agent.name)
        tasks, queued = self.tasks, QueuedCall(agent, call, result)
        with self.queue_lock:
            if self.is_closed:
                self.check_open()
            window = tasks.queued
            following = window.graph.following
            if (
                quick is not None
                and following is not None
                and following.transformation is agent.transformation
                and window.is_whole
            ):
                # The same task as after the same work before: it has no values.
                tasks.is_idle = False
                window.take(following, queued, (), ())
                handles: Tensor | tuple[Tensor, ...] = ()
            else:
                if not window.is_whole:
                    tasks.rebuild_bookkeeping()
                check_inputs(agent, inputs)
                handles = handles_on(queue_call(tasks, agent, queued, inputs))
            is_full = (
                tasks.queued.graph.length >= tasks.limit
                and not holds_run_lock()
                and tasks.is_full()
            )
        if is_full:
            self.flush()
        return handles if result is None else result

    def settle_result(self, result: HostResult) -> None:
        """Run the queue until a host function's result exists or its task failed."""
        with self.lock:
            self.check_open()
            self.run_queue()
        if result.is_pending and not self.computes:
            raise TaskError(
                f"the null executor computes nothing, so host function {result.name!r} did not run",
                remedy="open the device with executor='numpy'",
            )

    def check_program(self, agent: LoadedProgram) -> None:
        """Raise `UsageError` for a program of another device."""
        if agent.device is not self:
            raise UsageError(
                f"program {agent.name!r} is loaded on another device",
                expected=f"a program of {self!r}",
                got=f"a program of {agent.device!r}",
                remedy="load its file here: device.load(file)",
            )

    def _drain_for(self, agent: Taking, inputs: list[ValueRecord]) -> None:
        """Let go of what seems to share a value that is donated, and was perhaps dropped, is being
        let go of just now by another thread, or is read for the last time by a queued task."""
        given = [inputs[index] for index in agent.transformation.donated]
        if any(map(_is_shared, given)) and not self.holds_run_lock():
            with self.lock:
                self.drain()
            if any(map(_is_shared, given)):
                self.flush()

    def _remembered(
        self, agent: LoadedProgram, inputs: list[ValueRecord]
    ) -> Tensor | tuple[Tensor, ...]:
        """An earlier result on these parameters, or a new one, to be remembered."""
        key = self.constant_cache.key(agent, inputs)
        found = None if key is None else self.constant_cache.find(key)
        if found is not None:
            return handles_on(found)
        values = self.tasks.append(agent.transformation, agent, inputs, agent.outputs)
        handles = handles_on(values)
        if key is not None:
            self.constant_cache.remember(key, inputs, tuple(values), handles)
        return handles

    # -- running -----------------------------------------------------------------------------------

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
        made = self.recordings
        return Statistics(
            made.plans_made, made.made, made.bindings_made, self.history.replays,
            self.code_written, self.tasks.windows_run, self.records.revocations,
        )  # fmt: skip

    def account(self) -> Account:
        """What it has done in this period, all of one moment; runs the queue first."""
        with self.at_rest():
            return self.history.account()

    def make_room(self) -> None:
        """Drop the recordings, and give back what only they wrote to."""
        self.recordings.clear()
        gc.collect()
        self.host_memory.release_buffer(self.records.buffers.values())

    def look_again(self) -> None:
        """Something has changed that every run must know of."""
        self.records.touch()
        self.observers = self.hooks.bits | (TIMES if self.events.active else 0)

    def wait(self) -> None:
        """Run everything that is queued."""
        with self.lock:
            self.check_open()
            self.run_queue()


def _is_shared(value: ValueRecord) -> bool:
    """Whether others lie in the bytes of a value, or have them."""
    return any(len(i.buffer.users) > 1 or i.buffer.pins for i in value.instances)
