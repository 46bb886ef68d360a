"""Host memory of a device, reserved before it is allocated.

Replaying a plan reserves nothing: the memory that it writes stays reserved while it can run.
Counted are the pages of the spaces that plans write, the memory of executors (`ProgramBytes`), and
host arrays of calls. Not counted: file mappings, Python objects, libraries.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from stitch.budget import BUDGET, LARGE_NBYTES, Claim, allowed_nbytes, parse_nbytes
from stitch.machine import footprint
from stitch.memory import LENT_ADDRESSES, ByteRanges
from stitch.planner import (
    SINGLE_THREAD,
    Allocate,
    Buffer,
    Copy,
    Execute,
    Plan,
    Relocate,
    ThreadAssignment,
)
from stitch.program import Program, Space, TensorDesc
from stitch.runtime.backends.local_backend import LocalBackend
from stitch.runtime.executors import PreparedProgram, ProgramBytes, committed_nbytes
from stitch.runtime.values import BufferRecord, ConstantRecord
from stitch.tasks import Transformation

#: Number of program names listed in an error.
_LISTED = 3
#: A range of a space's bytes.
Region = tuple[Space, int, int]


class Agent(Protocol):
    """A loaded program or a host function call, as planning and memory reservations use it."""

    #: Its reservation, once prepared.
    host_claim: Claim | None

    @property
    def name(self) -> str:
        """The name of the program or function."""

    @property
    def program(self) -> Program | None:
        """The program; None for a host function."""

    @property
    def constants(self) -> Sequence[ConstantRecord]:
        """Its constants."""

    @property
    def with_constants(self) -> Transformation:
        """The transformation with the constants as additional inputs."""

    @property
    def content_hash(self) -> bytes:
        """Equal for programs that compute the same."""

    @property
    def least_microseconds(self) -> float | None:
        """A lower bound of a run's host time; None for a host function, which runs alone."""

    @property
    def host_bytes(self) -> ProgramBytes:
        """Its host memory needs outside the spaces."""

    def prepared(self) -> PreparedProgram:
        """Return the executor's prepared program."""


class HostMemory:
    """The reservations of a device: for spaces, shared workspaces, plans and programs."""

    def __init__(self, backend: LocalBackend, allowed: int | str | None) -> None:
        self.backend = backend
        self.machine = backend.machine
        self.allowed = allowed_nbytes() if allowed is None else parse_nbytes(allowed)
        #: Without data nothing is written, except padding in debug mode.
        self._writes = backend.executor.computes or backend.debug
        self._spaces = backend.spaces
        self._written = {space: ByteRanges() for space in backend.spaces}
        self._in_spaces: list[Claim] = []
        #: Shared memory of programs by thread: values, kernel workspaces, arenas. Larger ones are
        #: allocated in addition to those that earlier bindings use.
        self._common: dict[int, tuple[int, int, int]] = {}
        self._shared: list[Claim] = []
        #: Regions that live plans write.
        self._regions: weakref.WeakKeyDictionary[Claim, tuple[Region, ...]] = (
            weakref.WeakKeyDictionary()
        )
        #: Highest reservation so far.
        self.peak_nbytes = 0

    @property
    def nbytes(self) -> int:
        """The current reservation, without that of single programs and plans."""
        return sum(c.nbytes for c in (*self._in_spaces, *self._shared))

    def take(
        self,
        plan: Plan,
        agents: Sequence[Agent | None],
        make_room: Callable[[], object],
        assignment: ThreadAssignment = SINGLE_THREAD,
    ) -> Claim | None:
        """Reserve the memory of a plan before it is bound; the plan keeps the claim.

        Args:
            plan: The plan.
            agents: Agent per task.
            make_room: Releases memory that the device can do without.
            assignment: Threads of the plan.

        Raises:
            OutOfMemoryError: The limit is exceeded; nothing has changed.
        """
        if not self._writes:
            return None
        runs = [agents[step.task] for step in plan.steps if isinstance(step, Execute)]
        programs = [agent for agent in runs if agent is not None]
        fresh = list(
            {id(p): p for p in programs if p.host_bytes.kept and not p.host_claim}.values()
        )
        regions = tuple(self._regions_of(plan))
        own = sum(p.host_bytes.bound for p in programs) + self._entering(plan)
        values = max((p.host_bytes.values for p in programs), default=0)
        kernels = max((p.host_bytes.kernels for p in programs), default=0)
        own += _staged(plan, agents, assignment)
        name = _naming(programs, plan)
        most = max((p.host_bytes for p in programs), key=lambda b: b.kernels, default=None)
        what = f"running {name}"
        if most is not None and most.largest:
            what += f" (its {most.largest} alone takes up to {most.kernels} B while it runs)"

        def parts() -> tuple[tuple[int, str], ...]:
            # Recomputed after `make_room`, which may reduce the written pages.
            shared = self._more_in_common(values, kernels, assignment)
            device = f"device {self.machine.name!r}"
            return (
                (self._added(regions), f"in the spaces of {device}"),
                (shared, f"while programs of {device} run"),
                (own, f"for plans of {name}"),
                *((p.host_bytes.kept, f"for program {p.name!r}") for p in fresh),
            )

        claims = BUDGET.claim_parts(parts, what, allowed=self.allowed, make_room=make_room)
        in_spaces, shared, mine, *others = claims
        self._keep(in_spaces, regions)
        self._shared += [shared] if shared.nbytes else []
        for thread, passing in enumerate(assignment.nbytes):
            v, k, p = map(max, self._common.get(thread, (0, 0, 0)), (values, kernels, passing))
            self._common[thread] = v, k, p
            self.backend.workspace(thread).kernels.reserve(k)
        for program, claimed in zip(fresh, others, strict=True):
            program.host_claim = claimed
        self._regions[mine] = regions
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes + sum(c.nbytes for c in self._regions))
        return mine

    def reuse(
        self, plan: Plan, places: Iterable[tuple[Buffer, Sequence[int]]], nbytes: int = 0
    ) -> Claim | None:
        """Reserve memory for a known plan to write its buffers at more addresses.

        `nbytes`: memory for binding steps again.

        Raises:
            OutOfMemoryError: The limit is exceeded.
        """
        if not self._writes:
            return None
        regions = []
        for buffer, addresses in places:
            # Equal for all addresses.
            _, first, last = self._region(buffer.space, 0, buffer.desc)
            banks = self._spaces[buffer.space].shape.banks
            regions += [(buffer.space, first + at * banks, last + at * banks) for at in addresses]
        added = self._added(regions)
        if not added and not nbytes:
            # Existing reservations persist while any plan can run.
            return None
        name = plan.request.tasks[0].transformation.name
        parts = ((added, f"in the spaces of device {self.machine.name!r}"),
                 (nbytes, f"for plans of {name!r}"))  # fmt: skip
        in_spaces, mine = BUDGET.claim_parts(
            lambda: parts, f"running {name!r}", allowed=self.allowed, make_room=gc.collect
        )
        self._keep(in_spaces, regions)
        self._regions[mine] = tuple(regions)
        return mine

    def take_region(self, space: Space, address: int, desc: TensorDesc, what: str) -> None:
        """Reserve the memory of a tensor outside any plan; raises `OutOfMemoryError`."""
        if not self._writes:
            return
        region = self._region(space, address, desc)
        if not self._written[space].covers(*region[1:]):
            nbytes = self._added([region])
            self._keep(BUDGET.claim(nbytes, what, allowed=self.allowed), [region])

    def _keep(self, claimed: Claim, regions: Iterable[Region]) -> None:
        # Drop empty claims: a long-lived device makes many plans.
        self._in_spaces += [claimed] if claimed.nbytes else []
        # After the claim is stored: no page may count as written without a claim.
        for space, start, stop in regions:
            self._written[space].update([(start, stop)])

    def release_buffer(self, live: Iterable[BufferRecord]) -> None:
        """Return memory to the system that neither live buffers nor live plans use."""
        if not self._regions:
            # No plan is bound to the shared workspaces.
            self.backend.forget_workspaces()
            self._shared.clear()
            self._common.clear()
        kept = [region for regions in list(self._regions.values()) for region in regions]
        for buffer in live:
            if buffer.address is not None:
                kept += [self._region(buffer.space, buffer.address, buffer.desc)]
        self._in_spaces.clear()
        try:
            for space, memory in self._spaces.items():
                left = ByteRanges((a, b) for where, a, b in kept if where is space)
                memory.release_all_but(left, self._written[space])
                self._written[space] = left
        finally:
            nbytes = sum(written.nbytes for written in self._written.values())
            what = f"in the spaces of device {self.machine.name!r}"
            # This was reserved before, so it always fits.
            self._in_spaces.append(BUDGET.claim(nbytes, what, allowed=1 << 62))

    def close(self, pinned: Iterable[BufferRecord]) -> None:
        """Release everything except pinned buffers."""
        try:
            self.release_buffer(pinned)
        finally:
            for claimed in (*self._in_spaces, *self._shared, *list(self._regions)):
                claimed.dispose()
            self._in_spaces.clear()
            self._shared.clear()

    # -- what programs share -----------------------------------------------------------------------

    def _more_in_common(self, values: int, kernels: int, assignment: ThreadAssignment) -> int:
        """Return the additional shared memory that a plan's threads need."""
        more = 0
        for thread, passing in enumerate(assignment.nbytes):
            v, k, p = self._common.get(thread, (0, 0, 0))
            more += values if values > v else 0
            more += 2 * kernels - k if kernels > k else 0
            more += passing if passing > p else 0
        return more

    # -- what a plan writes to ---------------------------------------------------------------------

    def _added(self, regions: Iterable[Region]) -> int:
        by_space: dict[Space, list[tuple[int, int]]] = {}
        for space, start, stop in regions:
            by_space.setdefault(space, []).append((start, stop))
        return sum(self._written[space].added(ranges) for space, ranges in by_space.items())

    def _region(self, space: Space, address: int, desc: TensorDesc) -> Region:
        if address >= LENT_ADDRESSES or not self._spaces[space].is_in_host_memory:
            # Bytes of others: of the caller, or of a card.
            return space, 0, 0
        shape, start = self.machine.shape, address * self._spaces[space].shape.banks
        # Debug mode writes the padding too.
        whole = self.backend.debug
        nbytes = footprint(desc, shape).nbytes if whole else committed_nbytes(desc, shape)
        return space, start, start + nbytes

    def _regions_of(self, plan: Plan) -> Iterable[Region]:
        buffers = {b.number: b for b in plan.request.buffers}
        for step in plan.steps:
            if isinstance(step, Allocate):
                buffer = step.buffer
                buffers[buffer.number] = buffer
                if buffer.address is not None:
                    yield self._region(buffer.space, buffer.address, buffer.desc)
            elif isinstance(step, Relocate):
                for number, address in step.targets:
                    buffer = buffers[number]
                    yield self._region(buffer.space, address, buffer.desc)
            elif isinstance(step, Execute) and step.scratch is not None:
                space, address, size = step.scratch
                if not self._spaces[space].is_in_host_memory:
                    continue
                banks = self._spaces[space].shape.banks
                yield space, address * banks, (address + size) * banks

    def _entering(self, plan: Plan) -> int:
        """Return the memory of host arrays: captured at the call, staged if layouts differ."""
        outside = {b.number for b in plan.request.buffers if b.address is None}
        total = 0
        for step in plan.steps:
            if isinstance(step, Copy) and step.source.buffer in outside:
                layout = step.source.desc.layout
                same = step.target.desc.layout.is_dense and (
                    step.target.desc.layout.data_type is layout.data_type
                )
                nbytes = layout.data_type.nbytes(step.source.desc.elements)
                # Large copies were reserved when they were created.
                captured = nbytes if nbytes < LARGE_NBYTES else 0
                total += captured if same else captured + nbytes
        return total


def _staged(plan: Plan, agents: Sequence[Agent | None], assignment: ThreadAssignment) -> int:
    """Return the memory that programs need for each further thread that runs them."""
    pairs = {(thread, id(agent)): agent for task, thread in assignment.of_tasks(plan).items()
             if (agent := agents[task]) is not None}  # fmt: skip
    return sum(agent.host_bytes.staged for agent in pairs.values())


def _naming(programs: Sequence[Agent], plan: Plan) -> str:
    if not programs:
        return plan.request.tasks[0].transformation.name
    names = list(dict.fromkeys(repr(p.name) for p in programs))
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
