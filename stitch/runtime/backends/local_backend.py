"""`LocalBackend`: the memory spaces of a device, arrays over them, and plans bound to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import call, setitem
from typing import Any

import numpy as np

from stitch.budget import LARGE_NBYTES, claimed_array, copied
from stitch.machine import Machine
from stitch.memory import POISON_BYTE, CopyKernel, SpaceMemory, WriteCounter, prepare_copy
from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
    ArenaSlot,
    Buffer,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    Relocate,
    Step,
    ThreadAssignment,
    Transfer,
)
from stitch.program import Array, Program, Space, TensorDesc, host_layout
from stitch.runtime.backends.thread_pool import ThreadPool
from stitch.runtime.executors import (
    BoundProgram,
    Executor,
    PreparedProgram,
    Workspace,
    as_bytes,
)
from stitch.runtime.values import ConstantRecord, InstanceRecord

Thunk = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class BoundStep:
    """One step of a plan: its thunks and, for programs, data for hooks.

    `claim`: host memory reserved for binding it, if separate from the plan's.
    """

    thunks: tuple[Thunk, ...]
    program: Program | None = None
    bound: BoundProgram | None = None
    claim: object = None


@dataclass(frozen=True, slots=True, eq=False)
class OwnBytes:
    """The arenas of a plan's threads (`bases`), and the assignment of its buffers to them."""

    assignment: ThreadAssignment
    bases: tuple[Array, ...]

    def of(self, place: ArenaSlot) -> Array:
        """Return the bytes of an arena slot."""
        return self.bases[place.thread][place.offset : place.offset + place.nbytes]


@dataclass(slots=True, eq=False)
class BoundPlan:
    """A plan bound to memory.

    `thunks` run it; `arguments` receives the host arrays before a run, in the order of
    `argument_values` (numbers of host values). `positions`: buffer → argument position.
    `progress[0]`: lower bound of completed steps, in plans that change more than their results;
    `progress[1]`: state of overwriting (see `OverwritingRun`).
    """

    steps: tuple[BoundStep, ...]
    arguments: list[Any]
    positions: Mapping[int, int]
    argument_values: tuple[int, ...]
    staging_nbytes: int
    progress: list[int]
    own_bytes: OwnBytes
    _thunks: tuple[Thunk, ...] | None = None

    @property
    def thunks(self) -> tuple[Thunk, ...]:
        """The thunks of all steps in order."""
        if self._thunks is None:
            self._thunks = tuple([thunk for step in self.steps for thunk in step.thunks])
        return self._thunks

    def ends(self) -> tuple[int, ...]:
        """Return the number of thunks up to the end of each step."""
        return tuple(accumulate([len(step.thunks) for step in self.steps]))

    def with_steps(self, others: Mapping[int, BoundStep]) -> BoundPlan:
        """Return a copy with some steps replaced; it shares the list of arguments."""
        steps = list(self.steps)
        for index, step in others.items():
            steps[index] = step
        return BoundPlan(
            tuple(steps), self.arguments, self.positions, self.argument_values,
            self.staging_nbytes, self.progress, self.own_bytes,
        )  # fmt: skip


class LocalBackend:
    """The memory spaces of one simulated machine in this process, and its executor."""

    def __init__(self, machine: Machine, executor: Executor, *, debug: bool = False) -> None:
        self.machine = machine
        self.executor = executor
        self.debug = debug
        self.spaces = {
            space: SpaceMemory(
                space, (shape := machine.shape.space(space)), debug=debug,
                data=executor.space_bytes(space, shape),
            )
            for space in machine.shape.spaces
        }  # fmt: skip
        self.threads = ThreadPool()
        #: By thread: the workspace that its programs share, and its arena.
        self._workspaces = [(Workspace(), Workspace())]
        self._kernels: dict[tuple[TensorDesc, TensorDesc], CopyKernel] = {}

    def kernel(self, source: TensorDesc, target: TensorDesc) -> CopyKernel:
        """Return the prepared conversion between two descriptors."""
        kernel = self._kernels.get((source, target))
        if kernel is None:
            kernel = prepare_copy(source, target, self.machine.shape)
            self._kernels[source, target] = kernel
        return kernel

    def prepare(self, program: Program) -> PreparedProgram:
        """Return the executor's prepared program; raises `CompileError`."""
        return self.executor.prepare(program, self.machine.shape, self.workspace())

    @property
    def why_single_thread(self) -> str | None:
        """Why nothing may run in parallel, or None."""
        if self.debug:
            return "debug mode checks the addresses of a plan step by step"
        if not self.executor.supports_threads:
            return f"the executor {self.executor.name!r} cannot run programs in parallel"
        return None

    def workspace(self, thread: int = 0) -> Workspace:
        """Return the workspace that the programs of a thread share."""
        return self._workspaces_of(thread)[0]

    def _workspaces_of(self, thread: int) -> tuple[Workspace, Workspace]:
        while thread >= len(self._workspaces):
            self._workspaces.append((Workspace(), Workspace()))
        return self._workspaces[thread]

    def forget_workspaces(self) -> None:
        """Release all workspaces; no plan may be bound to them."""
        for workspaces in self._workspaces:
            for workspace in workspaces:
                workspace.forget()

    def region(self, space: Space, address: int, size_per_bank: int) -> Any:
        """Return the bytes of a footprint, writable: see `SpaceMemory.region`."""
        return self.spaces[space].region(address, size_per_bank)

    # -- instances ---------------------------------------------------------------------------------

    def address(self, instance: InstanceRecord) -> int | None:
        """Return the start address per bank; None for host arrays."""
        start = self.start(instance)
        return None if start is None else start // self.spaces[instance.buffer.space].shape.banks

    def start(self, instance: InstanceRecord) -> int | None:
        """Return the start offset in the bytes of its space; None for host arrays."""
        buffer = instance.buffer
        if buffer.address is None:
            return None
        return buffer.address * self.spaces[buffer.space].shape.banks + instance.offset_nbytes

    def _region_of(self, instance: InstanceRecord) -> Any:
        """Return the bytes of an instance, from its offset to the end of its buffer."""
        buffer = instance.buffer
        if buffer.array is not None:
            return as_bytes(np.ascontiguousarray(buffer.array))
        assert buffer.address is not None
        whole = self.region(buffer.space, buffer.address, buffer.size_per_bank)
        return whole[instance.offset_nbytes :]

    def _read(self, instance: InstanceRecord) -> Array:
        """Return the bytes of an instance as a host array: in place where the processor can read
        them."""
        region = self._region_of(instance)
        data, fill, _ = self.spaces[instance.buffer.space].data.staged(region)
        for call_ in fill:
            call_()
        return data

    def write(
        self, instance: InstanceRecord, array: Array, desc: TensorDesc,
        counter: WriteCounter | None = None,
    ) -> None:  # fmt: skip
        """Overwrite an instance with the elements of a dense array, whose descriptor is `desc`.

        `counter`: counts the write instead of the space's own.
        """
        memory = self.spaces[instance.buffer.space]
        into, fill, write_back = memory.data.staged(self._region_of(instance))
        # Bytes between and behind the elements stay as they are.
        convert = self.kernel(desc, instance.desc).bind(
            as_bytes(array), into, counter or memory.counter
        )  # fmt: skip
        for call_ in (*fill, convert, *write_back):
            call_()

    def fill_constants(self, constants: Iterable[ConstantRecord]) -> None:
        """Write the bytes of constants to their places; copies that plans make later have them."""
        for constant in constants:
            if not constant.is_filled:
                desc, array = (
                    constant.instances[0].desc,
                    np.ascontiguousarray(constant.host_array()),
                )
                for instance in constant.instances[1:]:
                    # Loading is no copy of a plan.
                    self.write(instance, array, desc, WriteCounter())
                constant.is_filled = True

    def constant_regions(self, constants: Iterable[ConstantRecord]) -> list[Any]:
        """Return the bytes of constants in their places; None for one without a place."""
        placed = [constant.placed for constant in constants]
        return [None if each is None else self._region_of(each) for each in placed]

    def dense(self, instance: InstanceRecord) -> Array | None:
        """Return an array over the instance's bytes; None if its layout is not dense, or the
        processor cannot read its space."""
        buffer = instance.buffer
        if buffer.array is not None:
            return buffer.array
        if instance.view is not None and instance.viewed_at == buffer.address:
            return instance.view
        layout = instance.desc.layout
        if not layout.is_dense or not self.spaces[buffer.space].is_host:
            return None
        view: Array = self.in_place(instance)
        # Atomic under the GIL: no call in between.
        instance.view = view
        instance.viewed_at = buffer.address
        return view

    def in_place(self, instance: InstanceRecord) -> Any:
        """Return a dense instance as an array over its bytes, or as a tensor of the library whose
        bytes they are."""
        memory = self.spaces[instance.buffer.space]
        return memory.data.dense(self._region_of(instance), instance.desc)

    def elements(self, instance: InstanceRecord, desc: TensorDesc, allowed: int) -> Array:
        """Return a copy of the elements, block formats as float32.

        `desc` is the value's descriptor.

        Raises:
            OutOfMemoryError: A large array exceeds `allowed` bytes.
        """
        view = instance.view
        if view is None or instance.viewed_at != instance.buffer.address:
            view = self.dense(instance)
        if view is not None:
            small = view.nbytes < LARGE_NBYTES
            return view.copy() if small else copied(view, f"reading {desc.text()}", allowed)
        target = instance.desc.layout.data_type.in_arrays
        what = f"reading {instance.desc.text()}"
        elements: Array = claimed_array(instance.desc.shape, target.dtype, what, allowed)
        host = TensorDesc(instance.desc.shape, host_layout(target))
        kernel = self.kernel(instance.desc, host)
        kernel.bind(self._read(instance), as_bytes(elements))()
        return elements

    # -- plans -------------------------------------------------------------------------------------

    def bind(
        self, plan: Plan, programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None], addresses: Mapping[int, int] | None = None,
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> BoundPlan:  # fmt: skip
        """Bind a plan to memory.

        Args:
            plan: The plan.
            programs: Prepared program per task (None for copies).
            bodies: Program per task (None for copies and host functions).
            addresses: Buffer addresses that differ from the plan's, for plans that change nothing
                but their results.
            assignment: Threads of the plan, for which the programs are prepared.
        """
        there = addresses or {}
        buffers = {b.number: b.where(there) for b in plan.request.buffers}
        bases = [
            self._workspaces_of(i)[1].region(nbytes) for i, nbytes in enumerate(assignment.nbytes)
        ]
        own_bytes = OwnBytes(assignment, tuple(bases))
        binding = _PlanBinding(self, programs, bodies, buffers, there, own_bytes)
        return binding.bound(plan, only_results=addresses is not None)

    def bind_step(
        self, step: Step, programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None], buffers: Iterable[Buffer], addresses: Mapping[int, int],
        rest: BoundPlan, claim: object,
    ) -> BoundStep:  # fmt: skip
        """Bind one step to other addresses, in a plan that moves nothing.

        `buffers`: those that the step touches; `rest`: the bound plan.
        """
        there = {buffer.number: buffer.where(addresses) for buffer in buffers}
        binding = _PlanBinding(self, programs, bodies, there, addresses, rest.own_bytes)
        binding.arguments, binding.positions = rest.arguments, dict(rest.positions)
        return binding.step(step, claim)

    def write_counts(self) -> tuple[int, int]:
        """Return the number of writes to the spaces, and their bytes."""
        counters = [space.counter for space in self.spaces.values()]
        return sum(c.writes for c in counters), sum(c.nbytes for c in counters)


@dataclass(slots=True, eq=False)
class _PlanBinding:
    """A binding under construction: tracks buffers through the steps."""

    backend: LocalBackend
    programs: Sequence[PreparedProgram | None]
    bodies: Sequence[Program | None]
    buffers: dict[int, Buffer]
    addresses: Mapping[int, int]
    own_bytes: OwnBytes
    #: Index of the step being bound.
    index: int = 0
    thunks: list[Thunk] = field(default_factory=list)
    progress: list[int] = field(default_factory=lambda: [0, 0])
    arguments: list[Any] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    argument_values: list[int] = field(default_factory=list)
    staging_nbytes: int = 0

    def bound(self, plan: Plan, *, only_results: bool) -> BoundPlan:
        """Bind all steps.

        In plans that change more than their results, each step first records how many are
        completed; a `Free` counts as completed when it begins, since its buffer may then be
        overwritten.
        """
        steps = []
        for self.index, step in enumerate(plan.steps):
            bound = self.step(step)
            if not (only_results or isinstance(step, Allocate)):
                done = self.index + isinstance(step, Free)
                mark = partial(setitem, self.progress, 0, done)
                bound = replace(bound, thunks=(mark, *bound.thunks))
            steps.append(bound)
        return BoundPlan(
            tuple(steps), self.arguments, self.positions, tuple(self.argument_values),
            self.staging_nbytes, self.progress, self.own_bytes,
        )  # fmt: skip

    def step(self, step: Step, claim: object = None) -> BoundStep:
        """Bind one step."""
        self.thunks = []
        program: Program | None = None
        bound: BoundProgram | None = None
        if isinstance(step, Execute):
            program = self.bodies[step.task]
            if self.backend.executor.computes:
                bound = self._execute(step)
        elif isinstance(step, Copy):
            if self.backend.executor.computes:
                self._copy(step)
        else:
            self._place(step)
        return BoundStep(tuple(self.thunks), program, bound, claim)

    def _place(self, step: Allocate | Free | Relocate) -> None:
        spaces = self.backend.spaces
        # Without data no bytes are moved: there is no padding to check.
        debug = self.backend.debug and self.backend.executor.computes
        if isinstance(step, Allocate):
            buffer = step.buffer.where(self.addresses)
            self.buffers[buffer.number] = buffer
            if debug and buffer.address is not None:
                memory = spaces[buffer.space]
                fill = partial(memory.fill_padding, buffer.desc, buffer.address)
                self.thunks.append(partial(fill, self.backend.machine.shape))
        elif isinstance(step, Free):
            buffer = self.buffers.pop(step.buffer)
            if debug and buffer.address is not None:
                memory = spaces[buffer.space]
                check = partial(memory.check_padding, buffer.desc, buffer.address)
                self.thunks.append(partial(check, self.backend.machine.shape, name=buffer.origin))
                self.thunks.append(partial(memory.release, buffer.address, buffer.size_per_bank))
        else:
            moves, back = list[Thunk](), list[Thunk]()
            if self.backend.executor.computes:
                for t in step.transfers:
                    own, undo = self._moves(t), self._moves(_returning(t))
                    moves += own
                    # Undone is a move as a whole, if all of its calls were made.
                    whole = undo[0] if len(undo) == 1 else partial(_call_all, undo)
                    back[:0] = [whole, *[tuple] * (len(own) - 1)]
                counter = spaces[step.space].counter
                self.thunks.append(counter.arrivals(step.count, step.nbytes))
            moves.append(partial(setitem, self.progress, 0, self.index + 1))
            self.thunks.append(partial(move_all, tuple(moves), tuple(back)))
            for number, address in step.targets:
                self.buffers[number] = self.buffers[number].where({number: address})

    def _moves(self, t: Transfer) -> list[Thunk]:
        source, target = self.backend.spaces[t.source_space], self.backend.spaces[t.target_space]
        return source.moves(t.source_address, target, t.target_address, t.nbytes)

    def _region(self, instance: Instance) -> Any:
        place = self.own_bytes.assignment.buffers.get(instance.buffer)
        if place is not None:
            return self.own_bytes.of(place)[instance.offset_nbytes :]
        buffer = self.buffers[instance.buffer]
        assert buffer.address is not None
        whole = self.backend.region(buffer.space, buffer.address, buffer.size_per_bank)
        return whole[instance.offset_nbytes :]

    def _copy(self, step: Copy) -> None:
        """Bind a copy; a host array is written directly to a dense target of its type if the
        processor can write there, otherwise staged."""
        target, before = self._region(step.target), self.buffers[step.source.buffer]
        memory = self.backend.spaces[step.target.desc.layout.space]
        if before.address is not None:
            source = self._region(step.source)
            self._convert(step, source, self.backend.spaces[before.space], target, memory)
            return
        position = self.positions.get(step.source.buffer)
        if position is None:
            position = self.positions[step.source.buffer] = len(self.arguments)
            self.arguments.append(None)
            self.argument_values.append(step.value)
        arguments, layout = self.arguments, step.target.desc.layout
        given, shape = step.source.desc.layout.data_type, step.source.desc.shape
        if layout.is_dense and layout.data_type is given:
            used = step.source.desc.elements * given.dtype.itemsize
            waits, into, copies = memory.data.entry(target[:used], given.dtype, shape)
            self.staging_nbytes += into.nbytes if copies else 0
            self.thunks += [*waits, partial(stage, into, arguments, position), *copies]
            self.thunks.append(memory.counter.arrivals(1, int(into.nbytes)))
            return
        into = np.zeros(shape, given.dtype)
        self.staging_nbytes += into.nbytes
        self.thunks.append(partial(stage, into, arguments, position))
        host = self.backend.spaces[Space.HOST]
        self._convert(step, as_bytes(into), host, target, memory)

    def _convert(
        self, step: Copy, source: Any, of: SpaceMemory, target: Any, memory: SpaceMemory
    ) -> None:
        """Bind a conversion between regions of two spaces: by way of host arrays if it changes
        bytes and the processor cannot reach both."""
        kernel = self.backend.kernel(step.source.desc, step.target.desc)
        if not (of.is_host and memory.is_host):
            device = of.data if memory.is_host else memory.data
            layouts = step.source.desc.layout, step.target.desc.layout
            if all(each.is_dense for each in layouts) and not kernel.changes_numbers:
                used = kernel.written_nbytes
                self.thunks += device.copied(target[:used], source[:used])
                self.thunks.append(memory.counter.arrivals(1, used))
                return
        given, fill, _ = of.data.staged(source)
        into, read, write_back = memory.data.staged(target)
        self.staging_nbytes += (not of.is_host) * given.nbytes + (not memory.is_host) * into.nbytes
        self.thunks += [*fill, *(read if self.backend.debug else ())]
        self.thunks += kernel.calls(given, into, memory.counter)
        self.thunks += write_back

    def _execute(self, step: Execute) -> BoundProgram:
        prepared, program = self.programs[step.task], self.bodies[step.task]
        assert prepared is not None
        takes = len(step.inputs) if program is None else len(program.inputs)
        scratch = None
        if step.scratch is not None:
            place = self.own_bytes.assignment.scratch.get(step.task)
            if place is None:
                scratch = self.backend.region(*step.scratch)
            else:
                scratch = self.own_bytes.of(place)
            if self.backend.debug:
                # Poison the scratch: a live value here must fail reliably.
                self.thunks.append(partial(setitem, scratch, slice(None), POISON_BYTE))
        inputs = [self._region(i) for i in step.inputs[:takes]]
        if prepared.reads_placed_constants:
            # A plan that may evict constants has them as inputs.
            placed = [self._region(i) for i in step.inputs[takes:]]
            inputs += placed or prepared.constant_regions()
        bound = prepared.bind(
            tuple(inputs),
            tuple(self._region(i) for i in step.outputs),
            scratch,
        )
        self.thunks += bound.steps
        self.staging_nbytes += bound.staging_nbytes
        return bound


def move_all(moves: Sequence[Thunk], back: Sequence[Thunk]) -> None:
    """Make all moves or none.

    They run no Python code, so no interrupt comes between them; if one fails, those before it are
    undone with `back`. The last call records completion.
    """
    left: Any = iter(moves)
    try:
        deque(map(call, left), 0)
    except BaseException:
        failed = len(moves) - left.__length_hint__() - 1
        # An interrupt comes before the first move or after the last.
        if 0 < failed < len(back):
            deque(map(call, back[-failed:]), 0)
        raise


def _call_all(calls: Iterable[Thunk]) -> None:
    for each in calls:
        each()


def _returning(t: Transfer) -> Transfer:
    """Return the transfer that undoes `t`: the bytes that it overwrote were saved before."""
    return Transfer(
        t.target_space, t.target_address, t.source_space, t.source_address, t.nbytes
    )  # fmt: skip


def stage(into: Array, arguments: list[Any], position: int) -> None:
    """Copy a host array of this run to a space or a staging array."""
    into[...] = arguments[position]
