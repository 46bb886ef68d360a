"""`RuntimeDevice`: a simulated machine with a task queue. Calls enqueue tasks; reading a result
runs them.

The queue collects a batch of tasks. To run it, the planner makes a plan, or a cached plan of the
same work is replayed; the backend executes it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any, Self

from stitch.argument_kinds import CALLABLE, INDEX_OR_NAME, LIST, instance_of, takes
from stitch.budget import parse_nbytes
from stitch.errors import TaskError, UsageError
from stitch.machine import Machine, load_machine
from stitch.option_values import DEFAULT_WINDOW
from stitch.planner import Plan
from stitch.program import Program, Space, TensorDesc
from stitch.runtime.arguments import check_donations
from stitch.runtime.backends import HostMemory, LocalBackend
from stitch.runtime.events import TIMES, EventStream
from stitch.runtime.execution import BatchPlanner, PlanCache
from stitch.runtime.executors import Executor, Prices, PriceTable, is_own, make_executor
from stitch.runtime.history import Account, History, Statistics
from stitch.runtime.hooks import Hooks
from stitch.runtime.host_calls import HostAgents, HostResult, QueuedCall
from stitch.runtime.loaded import LoadedProgram
from stitch.runtime.loading import load_program
from stitch.runtime.locks import quick
from stitch.runtime.queue import ConstantCache, Reclaimer, TaskQueue
from stitch.runtime.tensor import Tensor, handles_on
from stitch.runtime.tensor_access import TensorAccess
from stitch.runtime.values import (
    Records,
    SpaceUse,
    SpaceWatch,
    Status,
    ValueRecord,
)
from stitch.tasks import HostFunction, Transformation
from stitch.ttb import SOURCE, Binary, load

PROGRAM = instance_of("a loaded program (from device.load)", LoadedProgram)
#: Default number of tasks per batch.
#: Each is one thread; no machine has this many processors.
MAX_INTER_OP_THREADS = 256
#: Numbers the devices of the process, for their `repr`.
_NUMBERS = count(1)


class RuntimeDevice(TensorAccess):
    """An open machine. Use it as a context manager, or call `close`.

    Thread-safe: a thread may enqueue calls while another one computes; a read waits until the
    running plan has finished. Devices are independent of each other.
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
        inter_op_threads: int = 1,
        prices: Prices | None = None,
    ) -> None:
        if not isinstance(window, int) or window < 1:
            raise UsageError("window must be at least 1 task", got=repr(window))
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
        described = load_machine(machine)
        made = make_executor(executor, prices=prices)
        limit = None if max_memory is None else parse_nbytes(max_memory)
        self.machine = made.machine(described, limit)
        self.backend = LocalBackend(self.machine, made, debug=debug)
        #: Whether the executor is user code, whose kernels may call back into the device.
        self.kernels_call_back = not is_own(self.backend.executor)
        dram = self.backend.spaces.get(Space.DRAM)
        self.lends = dram is not None and not dram.is_host and dram.shape.banks == 1
        self.host_memory = HostMemory(self.backend, max_memory)
        self.constant_cache = ConstantCache()
        records, queue_lock = Records(self.backend.spaces), RLock()
        quick_lock = quick(queue_lock)
        deaths = Reclaimer(records, self.backend, self.constant_cache, quick_lock)
        tasks = TaskQueue(self, records, quick_lock, window)
        super().__init__(self.machine.name, records, deaths, tasks, queue_lock)
        if inter_op_threads > 1:
            self.keep_out(self.backend.threads.run_here)
        self.strict_types = strict_types
        #: Whether tensors may be evicted to host memory, and constants to their files.
        self.spills = spill
        self.history = History(self.backend.write_counts, records.forget_peaks)
        self.events = EventStream(self.history.count, self.look_again)
        self.hooks = Hooks(self.look_again)
        self.plan_cache = PlanCache(records)
        self.maker = BatchPlanner(self)
        self.host_agents = HostAgents(self)
        self.copies_forbidden = 0
        #: Bits of the active observers (`TIMES`, `Hooks.bits`): a plan is compiled once per
        #: combination.
        self.observers = 0
        self.code_written = 0
        #: Per-device state of higher layers, by name; cleared on close.
        self.kept: dict[str, object] = {}

    # -- life --------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        return f"<Device {self.number} {self.machine.name} executor={self.executor}{state}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a device belongs to its process and cannot be copied: open another one and load the "
            ".ttb files there"
        )

    def __enter__(self) -> Self:
        self.check_open()
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
        """Close the device unless it has live tensors or a thread is using it.

        For finalizers, which may run at any point.
        """
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
        """Yield the values in device memory and in the queue."""
        yield from self.tasks.queued.values
        for buffer in self.records.buffers.values():
            yield from buffer.users

    def _close(self) -> None:
        if self.is_closed:
            if not self.is_left_behind:
                self._let_go()  # Complete a `close` that was interrupted.
            return
        try:
            self.run_queue()
        finally:
            with self.queue_lock:
                self.is_closed = True
                # Another thread may have queued tasks since `run_queue`.
                self.tasks.cancel(f"device {self.machine.name!r} was closed")
            self._let_go()

    def _let_go(self) -> None:
        self.look_again()
        self.plan_cache.clear()
        self.view_programs.clear()
        self.constant_cache.clear()
        self.kept.clear()
        self.lent.clear()
        self.backend.threads.close()
        buffers = self.records.buffers.values()
        self.host_memory.close([buffer for buffer in buffers if buffer.pins])

    @property
    def executor(self) -> str:
        """The name of the executor."""
        return self.backend.executor.name

    @property
    def prices(self) -> PriceTable | None:
        """The price table from which the executor chooses kernels, or None if it has no choice."""
        return self.backend.executor.prices

    @property
    def why_single_thread(self) -> str | None:
        """Why plans run on the caller's thread only, or None if they may use all threads."""
        return self.backend.why_single_thread

    @property
    def computes(self) -> bool:
        """Whether the executor computes data that can be read."""
        return self.backend.executor.computes

    @property
    def reads_in_place(self) -> bool:
        """Whether host memory is the only space, so that lent buffers are read without a copy."""
        return len(self.backend.spaces) == 1

    @property
    def window(self) -> int:
        """The number of tasks that are queued before they run."""
        return self.tasks.size

    @property
    def allowed_nbytes(self) -> int:
        """The host memory limit of the process in bytes, as given to this device."""
        return self.host_memory.allowed

    @property
    def peak_nbytes(self) -> int:
        """The highest host memory use of this device so far, in bytes."""
        return self.host_memory.peak_nbytes

    def memory_use(self) -> dict[Space, SpaceUse]:
        """Return the current contents of each space; runs nothing.

        May be called during a plan, unless its bookkeeping is being changed at that moment.
        """
        if self.records.is_consistent and (self.holds_run_lock() or self.holds_queue_lock()):
            return self.records.use()
        with self.lock:
            self.drain()
            return self.records.use()

    def desc_key(self, desc: TensorDesc) -> int:
        """Return a small integer that identifies the descriptor."""
        return self.records.desc_key(desc)

    def watch_memory(self) -> SpaceWatch:
        """Return a `SpaceWatch`, which reports the contents of the spaces after each run."""
        return SpaceWatch(self.records)

    # -- loading -----------------------------------------------------------------------------------

    @takes(source=SOURCE, program=INDEX_OR_NAME)
    def load(self, source: Any, program: int | str = 0) -> LoadedProgram:
        """Load a program of a binary so that it can be called.

        Its constants are allocated, where memory is free, until the loaded program is dropped. All
        programs that read equal bytes with the same type and layout share one buffer. If other
        programs need the memory, constants are evicted and copied from the file again at the next
        run.

        Args:
            source: Path, bytes, `Binary` or compiled model.
            program: Index or name of the program in the binary.

        Raises:
            FormatError: The binary is invalid.
            IncompatibleError: It was compiled for another machine; lists every difference.
            OutOfMemoryError: The constants do not fit into an empty space or, with `spill=False`,
                into the free memory.
        """
        binary = getattr(source, "binary", source)
        where = str(binary) if isinstance(binary, str | Path) else None
        if not isinstance(binary, Binary):
            binary = load(binary)
        with self.lock:
            return self._load(binary, program, where)

    def _load(self, binary: Binary, program: int | str, where: str | None = None) -> LoadedProgram:
        """As `load`; the caller holds the run lock."""
        self.check_open()
        self.drain()
        return load_program(self, binary, program, where)

    def load_made(self, program: Program) -> LoadedProgram:
        """Load a program that the device generated.

        The caller holds the run lock, unless the program has no constants (which need allocation).
        """
        binary = Binary((program,), self.machine.shape, "made by the device")
        return load_program(self, binary, 0)

    # -- queueing ----------------------------------------------------------------------------------

    def submit(self, agent: LoadedProgram, arguments: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
        """Enqueue one run of a loaded program; see `LoadedProgram.__call__`."""
        PROGRAM.check("device.submit", "agent", agent)
        LIST.check("device.submit", "arguments", arguments)
        self.check_program(agent)
        if len(arguments) != agent.takes:
            raise UsageError(
                f"device.submit got the wrong number of arguments for {agent.name!r}",
                expected=f"{agent.takes}: {', '.join(port.name for port in agent.ports)}",
                got=str(len(arguments)),
            )
        results: Tensor | tuple[Tensor, ...] = agent(*arguments)
        return results

    def call(self, function: HostFunction, *arguments: Any, **named: Any) -> Any:
        """Enqueue one call of a host function (`stitch.task`).

        Args:
            function: The host function.
            arguments: Tensors, arrays, results of earlier calls, and any other objects.
            named: The same, by parameter name.

        Returns:
            The tensors that the function writes, returns and updates, or a `HostResult` for its
            return value if it declares none.

        Raises:
            UsageError: The function does not accept these arguments.
            TaskError: A tensor was freed, donated or lost.
        """
        holds_run_lock = self.holds_run_lock
        if self.is_closed or holds_run_lock() or self.holds_queue_lock():
            self.check_may_queue()
            self.check_open()
        agent, call, inputs = self.host_agents.link(function, arguments, named)
        if agent.transformation.donated:
            self.drain_for(agent.transformation, inputs)
        result = None if agent.outputs else HostResult(self, agent.name)
        tasks, queued = self.tasks, QueuedCall(agent, call, result)
        with self.queue_lock:
            if self.is_closed:
                self.check_open()
            if agent.transformation.donated:
                check_donations(agent.transformation, inputs)
            values = agent.enqueue(queued, inputs)
            handles = None if result else handles_on(values)
            is_full = (
                len(tasks.queued.agents) >= tasks.limit and not holds_run_lock() and tasks.is_full()
            )
        if is_full:
            self.flush()
        return result or handles

    def settle_result(self, result: HostResult) -> None:
        """Run the queue until a host function's result exists or its task failed."""
        with self.lock:
            self.check_open()
            self.run_queue()
        if result.is_pending and not self.computes:
            raise TaskError(
                f"host function {result.name!r} did not run: the null executor computes no data",
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

    def drain_for(self, what: Transformation, inputs: list[ValueRecord]) -> None:
        """Release unreferenced values that still share the buffer of a donated input.

        A dropped view, another thread's release, or a queued task that reads the value for the last
        time may otherwise make the donation fail.
        """
        given = [inputs[index] for index in what.donated]
        if any(map(_is_shared, given)) and not self.holds_run_lock():
            with self.lock:
                self.drain()
            if any(map(_is_shared, given)):
                self.flush()

    def remembered(
        self, agent: LoadedProgram, inputs: list[ValueRecord]
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the cached result of a constant-only program, or enqueue a run and cache its
        result."""
        key = self.constant_cache.key(agent, inputs)
        found = None if key is None else self.constant_cache.find(key)
        if found is not None:
            return handles_on(found)
        values = self.tasks.append(agent.transformation, agent, inputs, agent.outputs)
        handles = handles_on(values)
        if key is not None:
            self.constant_cache.remember(key, inputs, tuple(values), handles)
            self.tasks.queued.cached += [v for v in inputs if v.status is Status.PENDING]
        return handles

    # -- running -----------------------------------------------------------------------------------

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """Within the block, raise `TaskError` for work that needs a copy.

        Runs the queue before and after the block.
        """
        self.flush()
        # Enter `try` first: an interrupt must not leave the counter incremented.
        try:
            self.copies_forbidden += 1
            self.look_again()
            yield
            self.flush()
        finally:
            self.copies_forbidden -= 1
            self.look_again()

    def on_plan(self, callback: Callable[[Plan], object]) -> Callable[[], None]:
        """Call `callback` with each plan when it is bound, and again if a run of it fails.

        Returns a function that ends this.
        """
        CALLABLE.check("Device.on_plan", "callback", callback)
        callbacks = self.history.on_plan
        callbacks.append(callback)

        def end() -> None:
            if callback in callbacks:
                callbacks.remove(callback)

        return end

    def statistics(self) -> Statistics:
        """Return counts of expensive events since the device opened; see `Statistics`."""
        made, executor = self.plan_cache, self.backend.executor
        return Statistics(
            made.plans_made, made.made, made.bindings_made, self.history.replays,
            self.code_written, self.tasks.batches_run, self.records.revocations,
            executor.graphs_captured, executor.graphs_failed,
        )  # fmt: skip

    def account(self) -> Account:
        """Run the queue, then return a consistent summary of this period."""
        with self.at_rest():
            return self.history.account()

    def make_room(self) -> None:
        """Drop the cached plans and release the memory that only they used."""
        self.plan_cache.clear()
        gc.collect()
        buffers = self.records.buffers.values()
        self.host_memory.release_buffer([buffer for buffer in buffers if not buffer.is_spare])

    def look_again(self) -> None:
        """Invalidate cached assumptions of runs: an observer or the bookkeeping has changed."""
        self.records.generation += 1
        self.observers = self.hooks.bits | (TIMES if self.events.active else 0)

    def wait(self) -> None:
        """Run everything that is queued, and wait until it is done."""
        with self.lock:
            self.check_open()
            self.run_queue()
            try:
                self.backend.executor.finish()
            except Exception as error:
                self.check_lost(error)
                raise


def _is_shared(value: ValueRecord) -> bool:
    """Return whether a value shares its buffer with other values or an exported array."""
    return any(len(i.buffer.users) > 1 or i.buffer.pins for i in value.instances)
