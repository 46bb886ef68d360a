"""`LocalBackend`: turns a plan into steps bound to bytes, and runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import call, setitem
from typing import Any

import numpy as np

from stitch.machine import Machine
from stitch.memory import POISON_BYTE, CopyKernel, SpaceMemory, prepare_copy
from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
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
from stitch.program import Array, Program, Space, TensorDesc
from stitch.runtime.backends.bound_plan import BoundPlan, BoundStep, OwnBytes, Thunk
from stitch.runtime.backends.thread_pool import ThreadPool
from stitch.runtime.executors import (
    BoundProgram,
    Executor,
    PreparedProgram,
    Workspace,
    as_bytes,
)


class LocalBackend:
    """The spaces of one simulated machine in this process, and the executor that computes."""

    def __init__(self, machine: Machine, executor: Executor, *, debug: bool = False) -> None:
        self.machine = machine
        self.executor = executor
        self.debug = debug
        self.spaces = {
            space: SpaceMemory(space, machine.shape.space(space), debug=debug)
            for space in machine.shape.spaces
        }
        self.threads = ThreadPool()
        #: By thread: what its programs share, and the bytes of what passes in its forks.
        self._workspaces = [(Workspace(), Workspace())]
        self._kernels: dict[tuple[TensorDesc, TensorDesc], CopyKernel] = {}

    def kernel(self, source: TensorDesc, target: TensorDesc) -> CopyKernel:
        """The prepared conversion between two descriptors."""
        kernel = self._kernels.get((source, target))
        if kernel is None:
            kernel = prepare_copy(source, target, self.machine.shape)
            self._kernels[source, target] = kernel
        return kernel

    def prepare(self, program: Program) -> PreparedProgram:
        """The executor's form of a program; raises `CompileError`."""
        return self.executor.prepare(program, self.machine.shape, self.workspace())

    @property
    def why_single_thread(self) -> str | None:
        """Why nothing may run beside anything here, if so."""
        if self.debug:
            return "debug mode looks at the addresses of a plan, one step after the other"
        if not self.executor.supports_threads:
            return f"the executor {self.executor.name!r} runs no programs beside each other"
        return None

    def workspace(self, thread: int = 0) -> Workspace:
        """What the programs of a thread share."""
        return self._workspaces_of(thread)[0]

    def _workspaces_of(self, thread: int) -> tuple[Workspace, Workspace]:
        while thread >= len(self._workspaces):
            self._workspaces.append((Workspace(), Workspace()))
        return self._workspaces[thread]

    def forget_workspaces(self) -> None:
        """Begin anew, where nothing is bound to what programs share."""
        for workspaces in self._workspaces:
            for workspace in workspaces:
                workspace.forget()

    def region(self, space: Space, address: int, size_per_bank: int) -> Array:
        """The bytes of a footprint, writable."""
        region: Array = self.spaces[space].region(address, size_per_bank)
        return region

    def bind(
        self, plan: Plan, programs: Sequence[PreparedProgram | None],
        bodies: Sequence[Program | None], addresses: Mapping[int, int] | None = None,
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> BoundPlan:  # fmt: skip
        """Bind a plan to bytes; `programs[i]`, `bodies[i]` belong to task i (None for copies;
        host functions have no body).

        `addresses`: of buffers that lie elsewhere than the plan says, for plans that change nothing
        but their results. `assignment`: its threads; the programs are prepared for them already.
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
        """Bind one step of a plan that moves nothing to other places; `buffers` are those that it
        touches, `rest` is the plan's."""
        there = {buffer.number: buffer.where(addresses) for buffer in buffers}
        binding = _PlanBinding(self, programs, bodies, there, addresses, rest.own_bytes)
        binding.arguments, binding.positions = rest.arguments, dict(rest.positions)
        return binding.step(step, claim)

    def write_counts(self) -> tuple[int, int]:
        """How many writes the spaces have seen, and how many bytes."""
        counters = [space.counter for space in self.spaces.values()]
        return sum(c.writes for c in counters), sum(c.nbytes for c in counters)


@dataclass(slots=True, eq=False)
class _PlanBinding:
    """One binding under construction: follows the buffers through the steps."""

    backend: LocalBackend
    programs: Sequence[PreparedProgram | None]
    bodies: Sequence[Program | None]
    buffers: dict[int, Buffer]
    addresses: Mapping[int, int]
    own_bytes: OwnBytes
    #: Of the step that is being bound.
    index: int = 0
    thunks: list[Thunk] = field(default_factory=list)
    progress: list[int] = field(default_factory=lambda: [0, 0])
    arguments: list[Any] = field(default_factory=list)
    positions: dict[int, int] = field(default_factory=dict)
    argument_values: list[int] = field(default_factory=list)
    staging_nbytes: int = 0

    def bound(self, plan: Plan, *, only_results: bool) -> BoundPlan:
        """All steps; where more changes than its results each says at its begin how many are done,
        but freeing, after which others may lie there, says that it is."""
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
        """One step."""
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
        # Where nothing is computed no bytes are moved either: there is no padding to guard.
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
                moves = [self._mover(t) for t in step.transfers]
                back = [self._mover(_returning(t)) for t in reversed(step.transfers)]
                counter = spaces[step.space].counter
                self.thunks.append(counter.arrivals(step.count, step.nbytes))
            moves.append(partial(setitem, self.progress, 0, self.index + 1))
            self.thunks.append(partial(move_all, tuple(moves), tuple(back)))
            for number, address in step.targets:
                self.buffers[number] = self.buffers[number].where({number: address})

    def _mover(self, t: Transfer) -> Thunk:
        source, target = self.backend.spaces[t.source_space], self.backend.spaces[t.target_space]
        return source.mover(t.source_address, target, t.target_address, t.nbytes)

    def _region(self, instance: Instance) -> Array:
        place = self.own_bytes.assignment.buffers.get(instance.buffer)
        if place is not None:
            return self.own_bytes.of(place)[instance.offset_nbytes :]
        buffer = self.buffers[instance.buffer]
        assert buffer.address is not None
        whole = self.backend.region(buffer.space, buffer.address, buffer.size_per_bank)
        return whole[instance.offset_nbytes :]

    def _copy(self, step: Copy) -> None:
        """A host array enters a dense target of its type at once, any other by way of staging."""
        target = self._region(step.target)
        memory = self.backend.spaces[step.target.desc.layout.space]
        kernel = self.backend.kernel(step.source.desc, step.target.desc)
        if self.buffers[step.source.buffer].address is not None:
            self.thunks += kernel.calls(self._region(step.source), target, memory.counter)
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
            into = target[:used].view(given.dtype).reshape(shape)
            self.thunks.append(partial(stage, into, arguments, position))
            self.thunks.append(memory.counter.arrivals(1, int(into.nbytes)))
            return
        into = np.zeros(shape, given.dtype)
        self.staging_nbytes += into.nbytes
        self.thunks.append(partial(stage, into, arguments, position))
        self.thunks += kernel.calls(as_bytes(into), target, memory.counter)

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
                # Nothing alive may lie here: what does, is destroyed now rather than by chance.
                self.thunks.append(partial(scratch.fill, POISON_BYTE))
        bound = prepared.bind(
            # Constants may follow, which are read from the file.
            tuple(self._region(i) for i in step.inputs[:takes]),
            tuple(self._region(i) for i in step.outputs),
            scratch,
        )
        self.thunks += bound.steps
        self.staging_nbytes += bound.staging_nbytes
        return bound


def move_all(moves: Sequence[Thunk], back: Sequence[Thunk]) -> None:
    """Make all moves, the last call of which says so, or none: they run no line of Python, so no
    interrupt comes in between, and where one fails those before it are taken back, in the order
    of `back`."""
    left: Any = iter(moves)
    try:
        deque(map(call, left), 0)
    except BaseException:
        failed = len(moves) - left.__length_hint__() - 1
        # An interrupt comes before the first or after the last.
        if 0 < failed < len(back):
            deque(map(call, back[-failed:]), 0)
        raise


def _returning(t: Transfer) -> Transfer:
    """What takes a transfer back: the bytes that it overwrote had gone elsewhere before."""
    return Transfer(
        t.target_space, t.target_address, t.source_space, t.source_address, t.nbytes
    )  # fmt: skip


def stage(into: Array, arguments: list[Any], position: int) -> None:
    """A host array of this run goes into the bytes of a space, or to where it is converted."""
    into[...] = arguments[position]
