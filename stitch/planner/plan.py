"""The plan: a frozen list of steps, its certificates, copy costs, and the state it leaves behind.

A *buffer* is one allocation in a space; a *value* is what tasks read and write. A value has one or
more *instances*: (buffer, byte offset, descriptor). Several values may share a buffer (views).
Buffers and values are plain numbers, equal for every batch of equal tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal, TypeAlias

from stitch.machine import Machine, copy_counts, footprint
from stitch.program import Layout, Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

# Certificates

CertificateKind: TypeAlias = Literal["capacity", "packing", "undecided", "cycle", "no_path"]


@dataclass(frozen=True, slots=True)
class Branches:
    """The search that found no packing, branch by branch, so that it can be replayed.

    Pieces go in, largest first; a letter of `steps` is about those left over and what each gap can
    hold of them: the largest sum of such pieces, up to its room. `f`: the sums add up to less than
    the pieces. `k`: the same was refuted before. `b`: what follows refutes the next piece in each
    gap that holds it, one of every sum, smallest first; only there where the piece alone is the
    sum. Without `by_sums` a gap holds its room, or nothing where no piece fits.
    """

    steps: str
    by_sums: bool = True


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why bytes had to leave a space, or find no room in it. Sizes are bytes per bank.

    All evictions that one need takes are justified at once. For each, `pieces` are what would have
    to lie in the `gaps` if only it stayed, so none of them could have stayed.
    `capacity`: the pieces add up to more than the gaps.
    `packing`: they add up to less, but no assignment of pieces to gaps exists, as `branches` shows.
    `undecided`: the search ended before it found either.
    `cycle`: moves form a cycle and not a byte of the space was free; `pieces` are set aside, which
    takes less time than a smaller part would.
    `no_path`: the machine has no path inside the space (from L1 to L1); `pieces` are what moves.
    """

    kind: CertificateKind
    pieces: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    branches: Branches | None = None


@dataclass(frozen=True, slots=True)
class CostCertificate:
    """Why bytes left their space although a few bytes of it were free: it takes less time.

    `cyclic_size` bytes per bank move in cycles and `free_size` are free; `through_seconds` is what
    the moves take that were chosen, with `pieces` set aside. That moves inside the space take
    longer is no figure here: the checker searches for moves inside by itself and compares.
    """

    cyclic_size: int
    free_size: int
    through_seconds: float
    pieces: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return "cost"


#: Space, address and size in bytes per bank.
Region = tuple[Space, int, int]


@dataclass(frozen=True, slots=True)
class Instance:
    """Where a value lies: in a buffer, `offset_nbytes` into its footprint, as `desc` says.

    `desc` carries no address. The first instance of a value is its primary one.
    """

    buffer: int
    offset_nbytes: int
    desc: TensorDesc


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation. `address` is per bank; None means a host array outside the spaces.

    `desc` describes the whole buffer (to move it to another space); `origin` says which
    task or call made it. What is `pinned` stays where it is, and is not overwritten, unless it is
    `shared`: then an output may take the place of the donated value in it.
    """

    number: int
    space: Space
    address: int | None
    size_per_bank: int
    desc: TensorDesc
    origin: str
    pinned: bool = False
    shared: bool = False

    def where(self, addresses: Mapping[int, int]) -> Buffer:
        """It where it lies (number → address), if that is elsewhere than it says."""
        address = addresses.get(self.number)
        if address is None or address == self.address:
            return self
        return Buffer(
            self.number, self.space, address, self.size_per_bank, self.desc, self.origin,
            self.pinned, self.shared,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resident:
    """A value that exists when the plan starts, and how long ago it was last used (0: just now)."""

    value: int
    instances: tuple[Instance, ...]
    idle: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """All that a plan may depend on.

    `kept` are the values that a handle can still read afterwards. `later`: (value, task that reads
    it in L1 next), predicted, where no task here does; tasks to come are counted on from these.
    Raises nothing by itself.
    """

    machine: Machine
    tasks: tuple[NumberedTask, ...]
    buffers: tuple[Buffer, ...]
    residents: tuple[Resident, ...]
    kept: frozenset[int]
    later: tuple[tuple[int, int], ...] = ()

    def entering(self) -> set[int]:
        """The buffers outside the spaces that a call gives: all but the files of constants."""
        constants = {
            value
            for task in self.tasks
            for value in task.inputs[len(task.inputs) - task.transformation.constants :]
        }
        files = {r.instances[0].buffer for r in self.residents if r.value in constants}
        return {b.number for b in self.buffers if b.address is None} - files


@lru_cache(maxsize=4096)
def waiting_desc(desc: TensorDesc, space: Space = Space.DRAM) -> TensorDesc:
    """The form in which a tensor waits in a larger space: the same pages, interleaved."""
    layout = desc.layout
    return TensorDesc(desc.shape, Layout(layout.data_type, space, layout.tile_shape))


@dataclass(frozen=True, slots=True)
class Allocate:
    """Take `[address, address + size_per_bank)` in every bank of the buffer's space for it."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Free:
    """Give a buffer back: nothing in it is needed any more, or it lies elsewhere as well."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Write a value, from one instance, as another descriptor into another buffer.

    `kind` is `copy` (a task wants it so), `evict` (room is wanted; then `certificate` says why) or
    `return` (a task reads several values of a buffer that waits elsewhere). `value` is read; `made`
    gets the new instance (another value where `to_layout` was asked for). An eviction copies the
    whole buffer and all values in it follow; after a return they lie in both buffers.
    """

    kind: Literal["copy", "evict", "return"]
    value: int
    made: int
    source: Instance
    target: Instance
    nbytes: int
    seconds: float
    reason: str
    certificate: Certificate | None = None

    @property
    def count(self) -> int:
        """How many copies this is."""
        return 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """Raw bytes from one region to another; addresses per bank, `nbytes` over all banks."""

    source_space: Space
    source_address: int
    target_space: Space
    target_address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Relocate:
    """Bring buffers to new addresses of the same space by an ordered list of raw transfers.

    `nbytes` are the buffers' own (`Footprint.own_nbytes`); a transfer's are those of footprints.
    `targets` pairs buffers with addresses. Transfers that pass through DRAM are bounces; `stage` is
    the region (address, size per bank) of `stage_space` that they use, and `certificate` says why.
    What moves inside DRAM itself is staged on the host.
    """

    space: Space
    targets: tuple[tuple[int, int], ...]
    transfers: tuple[Transfer, ...]
    nbytes: int
    seconds: float
    reason: str
    stage: tuple[int, int] | None = None
    certificate: Certificate | CostCertificate | None = None
    stage_space: Space = Space.DRAM

    @property
    def count(self) -> int:
        """How many copies this is: the tensors' buffers that it moves."""
        return len(self.targets)

    @property
    def bounced_nbytes(self) -> int:
        """Bytes that left the space on their way, counted once on the way out."""
        return sum(t.nbytes for t in self.transfers if t.target_space is not self.space)


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a task on buffers. `scratch` is (space, address, size per bank) or None."""

    task: int
    inputs: tuple[Instance, ...]
    outputs: tuple[Instance, ...]
    scratch: tuple[Space, int, int] | None


Step: TypeAlias = Allocate | Free | Copy | Relocate | Execute


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps, and the state that they lead to.

    `final_buffers` are the buffers alive at the end with their places; `final_values` the values
    alive at the end with their instances. `free_regions` (space, address, size per bank) must be
    free at the start; `touched` are the resident buffers that the plan reads, moves or frees.
    `least_seconds`: what copies and moves take in any plan for the request that writes to DRAM only
    what lies nowhere else; 0 where none is known. `fewest_bytes`: the bytes between spaces and the
    seconds of a plan that carries fewer bytes than this one and takes clearly longer.
    """

    request: PlanRequest
    steps: tuple[Step, ...]
    final_buffers: tuple[Buffer, ...]
    final_values: tuple[Resident, ...]
    free_regions: tuple[Region, ...]
    touched: frozenset[int]
    least_seconds: float = 0.0
    fewest_bytes: tuple[int, float] | None = None

    @property
    def gap(self) -> float | None:
        """By which share more its copies and moves may take than the best plan's; None where that
        is not known: there is no bound, or predicted uses chose, which it may pay for early."""
        if self.is_by_prediction:
            return None
        if self.least_seconds > 0:
            return self.seconds / self.least_seconds - 1
        return None if self.seconds else 0.0

    @property
    def is_by_prediction(self) -> bool:
        """Whether predicted uses chose who leaves."""
        return bool(self.request.later) and self.chooses_who_leaves

    @property
    def seconds(self) -> float:
        """Simulated seconds of all copies and moves."""
        return sum(s.seconds for s in self.steps if isinstance(s, Copy | Relocate))

    @property
    def carried_nbytes(self) -> int:
        """Bytes that copies and bounces carry from one space to another, each way counted."""
        return sum(
            2 * s.bounced_nbytes
            if isinstance(s, Relocate)
            else s.nbytes * (s.source.desc.layout.space is not s.target.desc.layout.space)
            for s in self.copies
        )

    @property
    def program_seconds(self) -> float:
        """Simulated seconds of the programs that it runs."""
        tasks = self.request.tasks
        return sum(
            tasks[s.task].transformation.seconds for s in self.steps if isinstance(s, Execute)
        )

    @property
    def copies(self) -> tuple[Copy | Relocate, ...]:
        """The steps that carry bytes, in order."""
        return tuple(s for s in self.steps if isinstance(s, Copy | Relocate))

    @property
    def temporaries(self) -> tuple[Region, ...]:
        """The regions (space, address, size per bank) that it writes to and leaves free again."""
        results = {buffer.number for buffer in self.final_buffers}
        regions = []
        for step in self.steps:
            if isinstance(step, Allocate):
                buffer = step.buffer
                if buffer.number not in results and buffer.address is not None:
                    regions.append((buffer.space, buffer.address, buffer.size_per_bank))
            elif isinstance(step, Execute) and step.scratch is not None:
                regions.append(step.scratch)
            elif isinstance(step, Relocate) and step.stage is not None:
                regions.append((step.stage_space, *step.stage))
        return tuple(dict.fromkeys(regions))

    @property
    def fixed(self) -> dict[int, set[int]]:
        """The buffers that must lie somewhere, as programs or conversions say, and where."""
        tasks = self.request.tasks
        wanted = {
            task.outputs[0]: address
            for task in tasks
            if task.transformation.kind is TransformationKind.COPY
            and (address := task.transformation.outputs[0].layout.address) is not None
        }
        slots: dict[int, list[tuple[int, int]]] = {}
        fixed: dict[int, set[int]] = {}
        for step in self.steps:
            if isinstance(step, Execute):
                what = tasks[step.task].transformation
                at = slots.get(what.key)
                if at is None:
                    places = [d.layout.address for d in (*what.inputs, *what.outputs)]
                    at = slots[what.key] = [(i, a) for i, a in enumerate(places) if a is not None]
                if at:
                    lying = (*step.inputs, *step.outputs)
                    for i, address in at:
                        fixed.setdefault(lying[i].buffer, set()).add(address)
            elif isinstance(step, Copy) and step.made in wanted:
                fixed.setdefault(step.target.buffer, set()).add(wanted[step.made])
        return fixed

    @property
    def moves_nothing(self) -> bool:
        """Whether it only copies, runs and makes: what was there stays where it is."""
        before = {buffer.number for buffer in self.request.buffers}
        return not any(
            isinstance(step, Relocate)
            or (isinstance(step, Copy) and step.kind != "copy")
            or (isinstance(step, Free) and step.buffer in before)
            for step in self.steps
        )

    @property
    def overwrites(self) -> bool:
        """Whether tasks take over values that were there before, and may overwrite them."""
        there = {resident.value for resident in self.request.residents}
        return any(
            task.inputs[position] in there
            for task in self.request.tasks
            for position in task.transformation.donated
        )

    @property
    def is_pressed(self) -> bool:
        """Whether anything gives way in it: is evicted or dropped, comes back, or moves."""
        moves = any(not isinstance(s, Copy) or s.kind != "copy" for s in self.copies)
        return moves or self.chooses_who_leaves

    @property
    def gives_way_in(self) -> set[Space]:
        """The spaces from which something is evicted, or in which something moves."""
        return {
            s.space if isinstance(s, Relocate) else s.source.desc.layout.space
            for s in self.copies
            if isinstance(s, Relocate) or s.kind == "evict"
        }

    @property
    def leaving(self) -> set[tuple[Space, int]]:
        """The buffers that are evicted, or freed while others hold what lies in them, with their
        spaces."""
        made = {step.buffer.number for step in self.steps if isinstance(step, Allocate)}
        freed = [s.buffer for s in self.steps if isinstance(s, Free) and s.buffer not in made]
        leaving = {
            (step.source.desc.layout.space, step.source.buffer)
            for step in self.steps
            if isinstance(step, Copy) and step.kind == "evict"
        }
        if freed:
            living = {resident.value for resident in self.final_values}
            residents = self.request.residents
            held = {i.buffer for r in residents if r.value in living for i in r.instances}
            spaces = {buffer.number: buffer.space for buffer in self.request.buffers}
            leaving |= {(spaces[buffer], buffer) for buffer in freed if buffer in held}
        return leaving

    @property
    def chooses_who_leaves(self) -> bool:
        """Whether something that lives on is evicted, or a copy of it dropped."""
        return bool(self.leaving)

    def at(self, addresses: Mapping[int, int]) -> Plan:
        """The same plan with buffers (number → address per bank) elsewhere, for plans that move
        nothing; what it does not read is left out of its picture, unless all lie where they did."""
        request = self.request
        made = [step.buffer for step in self.steps if isinstance(step, Allocate)]
        if all(b.where(addresses) is b for b in (*request.buffers, *made)):
            return self
        used = {number for task in request.tasks for number in (*task.inputs, *task.outputs)}
        residents = tuple(r for r in request.residents if r.value in used)
        read = {i.buffer for r in residents for i in r.instances}
        gone = {b.number for b in request.buffers} - read
        regions = [*self.temporaries]
        final = tuple(b.where(addresses) for b in self.final_buffers if b.number not in gone)
        regions += [
            (b.space, b.address, b.size_per_bank)
            for b in final
            if b.number not in read and b.address is not None
        ]
        return Plan(
            request=replace(
                request,
                buffers=tuple(b.where(addresses) for b in request.buffers if b.number in read),
                residents=residents,
                kept=request.kept & used,
                later=tuple([(value, use) for value, use in request.later if value in used]),
            ),
            steps=tuple(
                replace(s, buffer=s.buffer.where(addresses)) if isinstance(s, Allocate) else s
                for s in self.steps
            ),
            final_buffers=final,
            final_values=tuple(r for r in self.final_values if r.value in used),
            free_regions=tuple(regions),
            touched=self.touched & read,
            least_seconds=self.least_seconds,
            fewest_bytes=self.fewest_bytes,
        )


# Copy costs


@lru_cache(maxsize=8192)
def copy_cost(machine: Machine, source: TensorDesc, target: TensorDesc) -> tuple[int, float]:
    """Bytes written (`Footprint.own_nbytes`) and simulated seconds of one copy.

    What is asked again, for the same machine and descriptors, is looked up.
    """
    bare = source.without_address(), target.without_address()
    if bare != (source, target):
        return copy_cost(machine, *bare)
    seconds = machine.copy_seconds(copy_counts(source, target, machine))
    return footprint(target, machine.shape).own_nbytes, seconds


def foreseen_cost(plan: Plan) -> tuple[float, int]:
    """Simulated seconds of a plan's copies and moves, and then of bringing back to L1 what has been
    there, is not when it is done, and is predicted to be read; then the bytes of both that pass
    from one space to another."""
    request = plan.request
    seen = {(r.value, i.desc) for r in request.residents for i in r.instances}
    seen |= {(step.made, step.target.desc) for step in plan.steps if isinstance(step, Copy)}
    left = {r.value: {i.desc for i in r.instances} for r in plan.final_values}
    predicted = {value for value, _ in request.later} & left.keys()
    back = [
        min((copy_cost(request.machine, other, desc) for other in left[value]), key=itemgetter(1))
        for value, desc in seen
        if value in predicted and desc.layout.space is Space.L1 and desc not in left[value]
    ]
    seconds = plan.seconds + sum(seconds for _, seconds in back)
    nbytes = plan.carried_nbytes + sum(nbytes for nbytes, _ in back)
    # To the femtosecond: the order of a sum is no difference.
    return round(seconds, 15), nbytes


# State after some steps

Values = dict[int, list[Instance]]


def after_steps(plan: Plan, steps_done: int) -> tuple[dict[int, Buffer], Values]:
    """The buffers, and the instances of each value, after the first `steps_done` steps.

    Values are listed while a buffer of theirs is alive; whether a handle can still read them is
    not looked at (a dead value that shares its buffer is listed).
    """
    buffers = {buffer.number: buffer for buffer in plan.request.buffers}
    values: Values = {r.value: list(r.instances) for r in plan.request.residents}
    for step in plan.steps[:steps_done]:
        if isinstance(step, Allocate):
            buffers[step.buffer.number] = step.buffer
        elif isinstance(step, Free):
            del buffers[step.buffer]
            _forget(values, step.buffer)
        elif isinstance(step, Copy):
            _copy(step, plan, buffers, values)
        elif isinstance(step, Relocate):
            for buffer, address in step.targets:
                buffers[buffer] = replace(buffers[buffer], address=address)
        else:
            _execute(step, plan, values)
    return buffers, values


def _forget(values: Values, buffer: int) -> None:
    for value in list(values):
        left = [i for i in values[value] if i.buffer != buffer]
        if left:
            values[value] = left
        else:
            del values[value]


def _copy(step: Copy, plan: Plan, buffers: dict[int, Buffer], values: Values) -> None:
    if step.kind == "copy":
        values.setdefault(step.made, []).append(step.target)
        return
    space = step.target.desc.layout.space
    for value, instances in values.items():
        kept = [] if step.kind == "evict" else instances
        carried = [
            replace(i, buffer=step.target.buffer, desc=waiting_desc(i.desc, space))
            if i.buffer == step.source.buffer
            else i
            for i in instances
        ]
        values[value] = [*kept, *(i for i in carried if i not in kept)]


def _execute(step: Execute, plan: Plan, values: Values) -> None:
    written = plan.request.tasks[step.task].outputs
    for instance in step.outputs:
        # A donated input whose buffer an output took is gone with this step.
        _forget(values, instance.buffer)
    for value, instance in zip(written, step.outputs, strict=True):
        values.setdefault(value, []).append(instance)
