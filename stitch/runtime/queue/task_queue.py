"""The task queue of a device: the queued batch, the running batch, and their recovery.

Long batches that repeat are split into pieces that share one plan and its code, unless they may not
fit in free memory: a batch that is planned as a whole gets better evictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from stitch.errors import StitchError, TaskError
from stitch.machine import MachineShape, room_per_bank
from stitch.program import Space, TensorDesc
from stitch.runtime.backends import Agent
from stitch.runtime.execution import (
    Binding,
    TaskBatch,
    run_binding,
    said_of,
    tell_run,
    undo_donation,
)
from stitch.runtime.locks import Lock
from stitch.runtime.queue.reclaimer import invalidate_stale_copies
from stitch.runtime.values import Records, Status, ValueRecord
from stitch.tasks import (
    SHORTEST,
    Cut,
    NumberedTask,
    TaskSequence,
    Transformation,
    TransformationKind,
    cuts_of,
)

if TYPE_CHECKING:
    from stitch.runtime.device import RuntimeDevice


#: Size of the LRU cache of split decisions.
MAX_STRETCHES = 16
#: Split only if peak memory is at most this fraction of free memory (allows for fragmentation).
PART_OF_FREE = 0.5


class BatchSplitter:
    """Decides how the long batches of one device are split."""

    def __init__(self, records: Records, machine: MachineShape) -> None:
        """`records`: the device's memory records; `machine`: sizes of its spaces."""
        self._records, self._machine = records, machine
        self._cuts: dict[TaskSequence, tuple[Cut, ...]] = {}

    def cuts(self, batch: TaskBatch, kept: Sequence[bool]) -> tuple[Cut, ...]:
        """Return the pieces of a batch of at least `SHORTEST` tasks, or () to run it as a whole.

        Args:
            batch: The batch.
            kept: For each value of the batch, whether it is still referenced afterwards.
        """
        graph = batch.graph
        cuts = self._cuts.get(graph)
        if cuts is None:
            cuts = cuts_of(graph, batch.nothing)
            if cuts and not self._has_room(batch, kept):
                cuts = ()
            self._cuts[graph] = cuts
            while len(self._cuts) > MAX_STRETCHES:
                del self._cuts[next(iter(self._cuts))]
        return cuts

    def _has_room(self, batch: TaskBatch, kept: Sequence[bool]) -> bool:
        """Return whether the peak memory of a batch fits easily in free memory."""
        for space, nbytes in _most_at_once(batch.graph, kept, self._machine).items():
            allocator = self._records.allocators[space]
            if nbytes > allocator.free_nbytes * PART_OF_FREE:
                return False
        return True


def _most_at_once(
    graph: TaskSequence, kept: Sequence[bool], machine: MachineShape
) -> Mapping[Space, int]:
    """Return an upper bound of a sequence's peak memory, in bytes per bank of each space.

    Counts every value in every layout that a task reads or writes, from the first such task to the
    last (to the end if it is kept), and the largest scratch.
    """
    tasks = graph.tasks
    lives: dict[tuple[int, int], tuple[int, int]] = {}
    descs: dict[int, TensorDesc] = {}
    scratch: Counter[Space] = Counter()
    for at, (what, inputs, outputs) in enumerate(tasks):
        if what.scratch is not None:
            scratch |= Counter({what.scratch.space: what.scratch.size_per_bank})
        read, made = zip(inputs, what.inputs, strict=False), zip(outputs, what.outputs, strict=True)
        for number, desc in (*read, *made):
            descs[id(desc)] = desc
            first, _ = lives.get((number, id(desc)), (at, at))
            lives[number, id(desc)] = first, len(tasks) if kept[number] else at
    rooms = {key: room_per_bank(desc, machine) for key, desc in descs.items()}
    changes: list[Counter[Space]] = [Counter() for _ in range(len(tasks) + 2)]
    for (_, key), (first, last) in lives.items():
        changes[first][descs[key].layout.space] += rooms[key]
        changes[last + 1][descs[key].layout.space] -= rooms[key]
    most, now = scratch.copy(), scratch
    for change in changes:
        now.update(change)
        most |= now
    return most


# Module-level aliases: an enum attribute lookup costs 40 ns.
PENDING, READY = Status.PENDING, Status.READY


class TaskQueue:
    """The queued batch (`queued`) and the one being planned or run (`running`).

    `lock` is held only briefly; see `TensorAccess`.
    """

    def __init__(self, device: RuntimeDevice, records: Records, lock: Lock, size: int) -> None:
        """`size`: number of tasks per batch for work that does not repeat."""
        self._device, self.records, self.lock = device, records, lock
        self.size = self.limit = size
        self.queued = TaskBatch(device, 0, TaskSequence())
        self.running: TaskBatch | None = None
        #: Whether nothing is queued or running; calls check this flag.
        self.is_idle = True
        self.batches_run = 0
        self._cutting = BatchSplitter(records, device.machine.shape)

    # -- queueing; `lock` is held ------------------------------------------------------------------

    def append(
        self,
        what: Transformation,
        agent: Agent | None,
        inputs: Sequence[ValueRecord],
        outputs: Sequence[tuple[TensorDesc, int]],
    ) -> list[ValueRecord]:
        """Enqueue one run of a program; returns its pending outputs."""
        self.is_idle = False
        return self.queued.append(what, agent, inputs, outputs)

    def convert(self, value: ValueRecord, desc: TensorDesc) -> ValueRecord:
        """Enqueue a layout conversion; returns its pending output."""
        bare = desc.without_address()
        desc_key = self._device.desc_key
        what = Transformation(
            "to_layout", TransformationKind.COPY, (), (desc,),
            output_names=("tensor",), key=-1 - desc_key(desc),
        )  # fmt: skip
        (output,) = self.append(what, None, [value], [(bare, desc_key(bare))])
        output.retain = value.retain
        return output

    def is_full(self) -> bool:
        """Return whether to run the queue now.

        If the work repeats, the next batches contain whole periods of it.
        """
        tasks = len(self.queued.agents)
        if tasks < self.limit:
            return False
        period = self.queued.graph.period()
        self.limit = tasks - tasks % period if period else self.size
        return True

    def awaits(self, value: ValueRecord) -> bool:
        """Return whether a task that is queued or running computes or reads a value."""
        return value.batch >= (self.running or self.queued).number

    def give_up(self, value: ValueRecord, by: str) -> bool:
        """Mark a value for release after the batch that uses it; False if none does."""
        running = self.running
        if value.batch != self.queued.number:
            if running is None or value.batch != running.number:
                return False
            running.given_up.append(value)
        value.consumed = True
        value.by = by
        return True

    def start_anew(self) -> None:
        """Start an empty batch."""
        self.queued = self.queued.following()
        self.is_idle = self.running is None

    def cancel(self, why: str) -> None:
        """Cancel all queued tasks."""
        _cancel(self.queued, TaskError(why))
        self.start_anew()

    # -- running -----------------------------------------------------------------------------------

    def run(
        self, fill: Callable[[], object] | None = None, at_most: int | None = None
    ) -> Binding | None:
        """Run the queued tasks.

        Return what ran, or None if the queue was empty or ran as several plans. `fill` may
        queue more tasks first, atomically. With `at_most`, tasks run only if they change nothing
        but their results and their plan has at most so many copies; else they stay queued.
        """
        device = self._device
        with self.lock:
            if fill is not None:
                fill()
            batch = self.queued
            if not batch.agents:
                # A call that raised has cleared the flag.
                self.is_idle = self.running is None
                return None
            flags = []
            for value in batch.values:
                flags.append(value.handles > 0 and not value.consumed)  # noqa: PERF401 (a call less)
            kept = tuple(flags)
            following = TaskBatch(device, batch.end, batch.nothing)
            # From here on, calls enqueue into the next batch and may donate what this one reads.
            # Atomic under the GIL: no call in between.
            self.running = batch
            self.queued = following
        try:
            # With `fill`, the caller needs one plan, to replay it without the queue.
            is_one = fill is not None or device.inter_op_threads > 1
            is_short = is_one or len(batch.agents) < SHORTEST
            cuts = () if is_short else self._cutting.cuts(batch, kept)
            binding = None
            if cuts:
                self._run_in_pieces(batch, kept, cuts)
            else:
                binding = self._run_batch(batch, kept, at_most)
            # If it was not planned, it returns to the queue.
            batch.is_done = batch.is_planned
            return binding
        finally:
            if self.running is not None:
                # If interrupted, the next use of the device calls it again.
                self.end_run()

    def _run_batch(
        self, batch: TaskBatch, kept: tuple[bool, ...], at_most: int | None = None
    ) -> Binding | None:
        """Run a batch that has left the queue.

        Args:
            batch: The batch.
            kept: Which of its values were referenced when it left the queue.
            at_most: See `run`.

        Returns:
            What ran, or None if it did not run as one plan.
        """
        device = self._device
        for _, value in batch.sources if batch.reads_exposed else ():
            # The bytes may have been written from outside since the device copied them.
            if value.is_exposed and len(value.instances) > 1:
                invalidate_stale_copies(device.records, device.backend, value)
        if batch.reads_failed and _reads_what_failed(batch):
            self._begin(batch)
            # Tasks of the next batch may read outputs that are not computed.
            self.queued.reads_failed = True
            self._run_one_by_one(batch, kept)
            return None
        try:
            binding = device.maker.binding(batch, kept, at_most)
        except Exception as error:
            if "stitch_callback" in error.__dict__:
                # Of `Device.on_plan`: the batch returns to the queue.
                raise
            # On any error, out of memory included: only the tasks that cause it fail.
            self._begin(batch)
            self._run_one_by_one(batch, kept, error)
            return None
        if binding is None:
            return None
        self._begin(batch)
        try:
            ran = run_binding(device, binding, batch)
            if ran is not True:
                tell_run(device, binding, ran)
        except Exception as error:
            left = error.__dict__.pop("stitch_tasks_left", ())
            if left:
                # They do not depend on the one that failed. Outputs of those that fail say so.
                self._run_each(batch, kept, left)
            raise
        return binding

    def has_run(self, batch: TaskBatch) -> None:
        """End the running batch, whose results are in the records; the lock is held."""
        if self.running is not batch:
            return
        # Listeners may read its outputs.
        batch.is_done = True
        if batch.given_up or batch.cached:
            self._end(batch, self.queued)
        else:
            self.running = None
            self.is_idle = not self.queued.agents

    def _run_in_pieces(self, batch: TaskBatch, kept: Sequence[bool], cuts: Sequence[Cut]) -> None:
        """Run the pieces of a batch; raises the first error after the last piece."""
        first: Exception | None = None
        try:
            for cut in cuts:
                piece, wanted = batch.piece(cut, kept)
                piece.reads_failed = batch.reads_failed or first is not None
                try:
                    self._run_batch(piece, wanted)
                except Exception as problem:
                    if _says_more(problem, first):
                        first = problem
        except BaseException as problem:
            # Interrupted: cancel the rest, unless the whole batch returns to the queue.
            if batch.is_planned:
                _cancel(batch, problem)
                self._drop_dead(batch, kept)
            raise
        if first is not None:
            self._drop_dead(batch, kept)
            try:
                raise first
            finally:
                # Break the cycle: the traceback references this frame.
                del first

    # -- a batch that fails --------------------------------------------------------------------

    def _run_one_by_one(
        self, batch: TaskBatch, kept: Sequence[bool], error: Exception | None = None
    ) -> None:
        """Run each task of a batch that cannot be planned as a whole; raises the first error.

        Only tasks that fail by themselves fail, with the same error for any batch; the others run.
        `error`: why the batch could not be planned; None if one of its inputs failed.
        """
        tasks = batch.graph.tasks
        if error is not None and len(tasks) == 1:
            _cancel_task(batch, 0, tasks[0], error)
            self._drop_dead(batch, kept)
            first: Exception | None = error
        else:
            first = self._run_each(batch, kept, range(len(tasks)))
        if first is not None:
            try:
                raise first
            finally:
                # The traceback references this frame and the caller's: do not keep their objects
                # alive.
                del first, error

    def _run_each(
        self, batch: TaskBatch, kept: Sequence[bool], indices: Sequence[int]
    ) -> Exception | None:
        """Run some tasks of a batch one by one; returns the error to raise, if any failed."""
        tasks = batch.graph.tasks
        first: Exception | None = None
        last_use = {number: index for index in indices for number in tasks[index].inputs}
        later = set(last_use)
        for at, index in enumerate(indices):
            task = tasks[index]
            later.difference_update([v for v in task.inputs if last_use[v] == index])
            try:
                self._run_alone(batch, kept, index, task, later)
            except Exception as problem:
                if _says_more(problem, first):
                    first = problem
            except BaseException as problem:
                # Interrupted: cancel the rest.
                for late in indices[at:]:
                    _cancel_task(batch, late, tasks[late], problem)
                self._drop_dead(batch, kept)
                raise
        self._drop_dead(batch, kept)
        try:
            return first
        finally:
            # Its traceback references this frame.
            del first

    def _run_alone(
        self, batch: TaskBatch, kept: Sequence[bool], index: int, task: NumberedTask,
        later: Set[int],
    ) -> None:  # fmt: skip
        values = batch.values
        inputs = [values[number] for number in task.inputs]
        broken = next((v.by for v in inputs if v.status > Status.FREED), None)
        call = batch.call(index)
        if broken is None and call is not None:
            broken = call.is_cancelled
        if broken is not None:
            _mark(batch, index, task, f"task {task.transformation.name!r} was cancelled: {broken}")
            return
        # Keep values that later tasks read, even without a handle.
        alone, numbers = batch.alone(index, task)
        self._run_batch(alone, tuple([kept[n] or n in later or n in task.outputs for n in numbers]))

    def _drop_dead(self, batch: TaskBatch, kept: Sequence[bool]) -> None:
        """Free the values of a batch that are referenced neither by handles nor by the queue.

        `kept`: which were referenced when the batch left the queue.
        """
        with self.lock:
            for value, is_kept in zip(batch.values, kept, strict=True):
                wanted = is_kept or value.kept or value.batch == self.queued.number
                if value.status is READY and not wanted:
                    self.records.release(value)
                    value.status = Status.FREED
                elif value.status is Status.LOST and value.instances:
                    # Unreadable, and no task that still has to run overwrites its bytes.
                    self.records.release(value)

    # -- the end of a run ------------------------------------------------------------------------

    def _begin(self, batch: TaskBatch) -> None:
        """Mark the running batch as planned: it does not return to the queue from here on."""
        running = self.running or batch
        if not running.is_planned:
            self.batches_run += 1
            running.is_planned = True

    def end_run(self) -> None:
        """End the running batch, finished or interrupted; idempotent."""
        batch = self.running
        if batch is None:
            return
        with self.lock:
            following = self.queued
            if self.records.pending_recovery is not None:
                # Commit its completed outputs before cancelling the others.
                self.records.pending_recovery()
            if batch.is_planned and not batch.is_done:
                # Tasks queued after it may read outputs that are not computed.
                following.reads_failed = True
                _cancel(batch, TaskError("the thread that ran it was interrupted"))
            elif not batch.is_done:
                following = TaskBatch.of(following.number + 1, batch, following)
            self._end(batch, following)

    def _end(self, batch: TaskBatch, following: TaskBatch) -> None:
        """Clear the running batch; `following` becomes the queued one."""
        for value in batch.given_up:
            if value.status is READY and value.batch != following.number:
                self._device.deaths.free(value, value.by)
        for value in batch.cached:
            if value.status is not READY:
                self._device.constant_cache.forget(value)
        # Atomic under the GIL: no call in between.
        self.queued = following
        self.running = None
        self.is_idle = not following.agents


def _says_more(error: Exception, first: Exception | None) -> bool:
    """Return whether to raise `error` instead of the first error.

    Exceptions of user functions and hooks take precedence over Stitch's own, such as out of memory.
    """
    return first is None or (isinstance(first, StitchError) and not isinstance(error, StitchError))


def _reads_what_failed(batch: TaskBatch) -> bool:
    """Return whether an input of the batch has failed."""
    if any(value.status > READY for _, value in batch.sources):
        return True
    calls = [batch.call(index) for index in range(len(batch.agents))]
    return any(call is not None and call.is_cancelled for call in calls)


def _cancel(batch: TaskBatch, error: BaseException) -> None:
    """Mark all pending outputs of a batch as failed and undo its donations."""
    for index, task in enumerate(batch.graph.tasks):
        _cancel_task(batch, index, task, error)


def _cancel_task(batch: TaskBatch, index: int, task: NumberedTask, error: BaseException) -> None:
    """Mark the pending outputs of a task as failed; undo its donations unless it has run."""
    is_made = all(batch.values[number].status is not PENDING for number in task.outputs)
    said = f"{type(error).__name__}: {(said_of(error) or 'no message').splitlines()[0]}"
    _mark(batch, index, task, f"task {task.transformation.name!r}: {said}")
    for number in () if is_made else task.inputs:
        undo_donation(batch.values[number], task.transformation.name)


def _mark(batch: TaskBatch, index: int, task: NumberedTask, why: str) -> None:
    """Mark the pending outputs of a task as failed because of `why`."""
    call = batch.call(index)
    if call is not None:
        call.stop(why)
    for number in task.outputs:
        value = batch.values[number]
        if value.status is PENDING:
            value.status, value.by = Status.FAILED, why
