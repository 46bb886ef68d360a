"""The plan: an immutable list of steps with certificates, copy costs, and the resulting state.

A *buffer* is one allocation in a space; a *value* is what tasks read and write. A value has one or
more *instances*: (buffer, byte offset, descriptor). Several values may share a buffer (views).
Buffers and values are numbered alike for equal task batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Literal, TypeAlias

from stitch.html_table import html_table
from stitch.machine import Machine, copy_counts, footprint
from stitch.program import Layout, Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

CertificateKind: TypeAlias = Literal["capacity", "packing", "undecided", "cycle", "no_path"]


@dataclass(frozen=True, slots=True)
class Branches:
    """A replayable search tree which shows that no packing exists.

    Pieces are placed in descending order of size. The capacity of a gap is the largest sum of
    remaining pieces that fits into it (with `by_sums`), else its size, or 0 if no piece fits. Each
    letter of `steps` closes or opens a node: `f`, the capacities sum to less than the remaining
    pieces; `k`, the node equals one refuted before; `b`, branch on the next piece: one child per
    distinct gap that holds it, the smallest first, or only the gap whose capacity equals the piece.
    """

    steps: str
    by_sums: bool = True


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why bytes left a space, or did not fit into it. Sizes are bytes per bank.

    All evictions for one demand share a proof: `pieces` are what would have to fit into `gaps` if
    only this buffer stayed.

    * `capacity`: the pieces are larger than the gaps in total.
    * `packing`: they are not, but no assignment of pieces to gaps exists, as `branches` shows.
    * `undecided`: the search reached its limit.
    * `cycle`: moves form a cycle and the space has no free byte; `pieces` are staged outside.
    * `no_path`: the machine has no path inside the space (L1 to L1); `pieces` are what moves.
    """

    kind: CertificateKind
    pieces: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    branches: Branches | None = None


@dataclass(frozen=True, slots=True)
class CostCertificate:
    """Bytes left their space although some of it was free, because that is cheaper.

    `cyclic_size` bytes per bank move in cycles, `free_size` are free, and the chosen transfers,
    which stage `pieces` outside, take `through_seconds`. The checker searches for cheaper moves
    inside the space itself, so their cost is not stated.
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
    """The location of a value: `offset_nbytes` into the footprint of a buffer, in layout `desc`.

    `desc` has no address. The first instance of a value is its primary one.
    """

    buffer: int
    offset_nbytes: int
    desc: TensorDesc


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation. `address` is per bank; None is a host array outside the spaces.

    `desc` describes the whole buffer; `origin` names the task or call that made it. A `pinned`
    buffer is not moved, and overwritten only if it is `shared` and its value is donated.
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
        """Return this buffer at its address in `addresses` (by buffer number), if listed."""
        address = addresses.get(self.number)
        if address is None or address == self.address:
            return self
        return replace(self, address=address)


@dataclass(frozen=True, slots=True)
class Resident:
    """A value at the start of a plan. `idle`: runs since its last use (0: the latest)."""

    value: int
    instances: tuple[Instance, ...]
    idle: int = 0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Everything a plan depends on.

    `kept` values are still referenced after the tasks. `later` holds predictions (value, task that
    reads it in L1 next) for values that no task here reads; task numbers continue those of `tasks`.
    """

    machine: Machine
    tasks: tuple[NumberedTask, ...]
    buffers: tuple[Buffer, ...]
    residents: tuple[Resident, ...]
    kept: frozenset[int]
    later: tuple[tuple[int, int], ...] = ()

    def entering(self) -> set[int]:
        """Return the buffers outside the spaces, except the files of constants."""
        constants = {
            value
            for task in self.tasks
            for value in task.inputs[len(task.inputs) - task.transformation.constants :]
        }
        files = {r.instances[0].buffer for r in self.residents if r.value in constants}
        return {b.number for b in self.buffers if b.address is None} - files


@lru_cache(maxsize=4096)
def evicted_desc(desc: TensorDesc, space: Space = Space.DRAM) -> TensorDesc:
    """Return the interleaved layout of the same pages in which evicted tensors are stored."""
    layout = desc.layout
    return TensorDesc(desc.shape, Layout(layout.data_type, space, layout.tile_shape))


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate the buffer at its address."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Free:
    """Release a buffer."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Write an instance of `value` in another layout into another buffer.

    `kind`: `copy` (a task needs it), `evict` (to free memory; `certificate` says why) or `return`
    (a task reads several values of an evicted buffer). `made` gets the new instance; it differs
    from `value` for `to_layout`. An eviction moves the whole buffer with all values in it; after a
    return they are stored in both buffers.
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
        return 1


@dataclass(frozen=True, slots=True)
class Transfer:
    """Raw bytes between two regions; addresses per bank, `nbytes` over all banks."""

    source_space: Space
    source_address: int
    target_space: Space
    target_address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Relocate:
    """Move buffers to new addresses in their space by an ordered list of raw transfers.

    `nbytes` counts the tensors (`Footprint.own_nbytes`), transfers count footprints. `targets` are
    (buffer, address). Transfers through DRAM (for DRAM itself: the host) are bounces; `stage` is
    the region (address, size per bank) of `stage_space` that they use.
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
        """Number of copies: the buffers that move."""
        return len(self.targets)

    @property
    def bounced_nbytes(self) -> int:
        """Bytes that left the space, counted once."""
        return sum(t.nbytes for t in self.transfers if t.target_space is not self.space)


@dataclass(frozen=True, slots=True)
class Execute:
    """Run a task. `scratch` is (space, address, size per bank)."""

    task: int
    inputs: tuple[Instance, ...]
    outputs: tuple[Instance, ...]
    scratch: tuple[Space, int, int] | None


Step: TypeAlias = Allocate | Free | Copy | Relocate | Execute


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps and the state after them.

    `free_regions` must be free at the start; `touched` are the resident buffers that the plan
    reads, moves or frees. `least_seconds` is a lower bound on copies and moves of any plan for the
    request that writes to DRAM only tensors without another instance; 0 if unknown.
    """

    request: PlanRequest
    steps: tuple[Step, ...]
    final_buffers: tuple[Buffer, ...]
    final_values: tuple[Resident, ...]
    free_regions: tuple[Region, ...]
    touched: frozenset[int]
    least_seconds: float = 0.0

    @property
    def gap(self) -> float | None:
        """Relative distance to the lower bound; None without one, or if predicted uses decided."""
        if self.is_by_prediction:
            return None
        if self.least_seconds > 0:
            return self.seconds / self.least_seconds - 1
        return None if self.seconds else 0.0

    @property
    def is_by_prediction(self) -> bool:
        """Whether predicted uses decided which buffers were evicted."""
        return bool(self.request.later and self.leaving)

    @property
    def seconds(self) -> float:
        """Simulated seconds of all copies and moves."""
        return sum(s.seconds for s in self.steps if isinstance(s, Copy | Relocate))

    @property
    def carried_nbytes(self) -> int:
        """Bytes that copies and bounces carry between spaces, in each direction."""
        return sum(
            2 * s.bounced_nbytes
            if isinstance(s, Relocate)
            else s.nbytes * (s.source.desc.layout.space is not s.target.desc.layout.space)
            for s in self.copies
        )

    @property
    def program_seconds(self) -> float:
        """Simulated seconds of the programs."""
        tasks = self.request.tasks
        return sum(
            tasks[s.task].transformation.seconds for s in self.steps if isinstance(s, Execute)
        )

    @property
    def copies(self) -> tuple[Copy | Relocate, ...]:
        """The steps that carry bytes, in order."""
        return tuple(s for s in self.steps if isinstance(s, Copy | Relocate))

    def _repr_html_(self) -> str:
        names = [t.transformation.name for t in self.request.tasks]
        steps = self.copies
        rows = [
            (s.kind if isinstance(s, Copy) else "move" if s.stage is None else "bounce",
             f"{s.nbytes:,} B", f"{s.seconds * 1e6:.2f} us", s.reason)
            for s in steps
        ]  # fmt: skip
        return html_table(
            f"plan of {', '.join(names)}: {sum(s.count for s in steps)} copies, "
            f"{sum(s.nbytes for s in steps):,} B, {self.seconds * 1e6:.2f} us simulated",
            ("copy", "bytes", "simulated", "why"), rows,
        )  # fmt: skip

    @property
    def temporaries(self) -> tuple[Region, ...]:
        """The regions that the plan writes and releases again."""
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
        """The addresses required by programs or conversions, by buffer."""
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
        """Whether all resident buffers keep their address and none is freed."""
        before = {buffer.number for buffer in self.request.buffers}
        return not any(
            isinstance(step, Relocate)
            or (isinstance(step, Copy) and step.kind != "copy")
            or (isinstance(step, Free) and step.buffer in before)
            for step in self.steps
        )

    @property
    def overwrites(self) -> bool:
        """Whether tasks take donated values that existed before."""
        there = {resident.value for resident in self.request.residents}
        return any(
            task.inputs[position] in there
            for task in self.request.tasks
            for position in task.transformation.donated
        )

    @property
    def is_pressed(self) -> bool:
        """Whether anything is evicted, dropped, brought back, or moved."""
        moves = any(not isinstance(s, Copy) or s.kind != "copy" for s in self.copies)
        return moves or bool(self.leaving)

    @property
    def pressured_spaces(self) -> set[Space]:
        """The spaces in which something is evicted or moved."""
        return {
            s.space if isinstance(s, Relocate) else s.source.desc.layout.space
            for s in self.copies
            if isinstance(s, Relocate) or s.kind == "evict"
        }

    @property
    def leaving(self) -> set[tuple[Space, int]]:
        """(space, buffer) of live tensors whose buffers are evicted or freed."""
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

    def at(self, addresses: Mapping[int, int]) -> Plan:
        """Return this plan, which must move nothing, with buffers at other addresses (by number).

        Unless no address changes, buffers that no task reads are removed from the request.
        """
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
        )


def memory_rise(plan: Plan) -> Counter[Space]:
    """Return the most bytes per bank that a plan needs at one time beyond those in use when it
    starts, by space (scratch included)."""
    placed = {b.number: b for b in plan.request.buffers if b.address is not None}
    used: Counter[Space] = Counter()
    rise: Counter[Space] = Counter()
    for step in plan.steps:
        if isinstance(step, Allocate) and step.buffer.address is not None:
            placed[step.buffer.number] = step.buffer
            space = step.buffer.space
            used[space] += step.buffer.size_per_bank
            rise[space] = max(rise[space], used[space])
        elif isinstance(step, Free) and step.buffer in placed:
            freed = placed.pop(step.buffer)
            used[freed.space] -= freed.size_per_bank
        elif isinstance(step, Execute) and step.scratch is not None:
            space, _, size = step.scratch
            rise[space] = max(rise[space], used[space] + size)
    return rise


@lru_cache(maxsize=8192)
def copy_cost(machine: Machine, source: TensorDesc, target: TensorDesc) -> tuple[int, float]:
    """Return the bytes written (`Footprint.own_nbytes`) and the simulated seconds of a copy."""
    bare = source.without_address(), target.without_address()
    if bare != (source, target):
        return copy_cost(machine, *bare)
    seconds = machine.copy_seconds(copy_counts(source, target, machine))
    return footprint(target, machine.shape).own_nbytes, seconds


def predicted_cost(plan: Plan) -> tuple[float, int]:
    """Return the predicted seconds and bytes between spaces of a plan and of the next uses.

    The next uses are the copies back to L1 of values that were in L1, are not at the end, and are
    predicted to be read.
    """
    request = plan.request
    if not request.later:
        return round(plan.seconds, 15), plan.carried_nbytes
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
    # Rounded to femtoseconds: the order of summation must not matter.
    return round(seconds, 15), nbytes


Values = dict[int, list[Instance]]


def after_steps(plan: Plan, steps_done: int) -> tuple[dict[int, Buffer], Values]:
    """Return the buffers, and the instances of each value, after the first `steps_done` steps.

    Values are listed while a buffer of theirs is alive, whether or not a handle can read them.
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
            _copy(step, values)
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


def _copy(step: Copy, values: Values) -> None:
    if step.kind == "copy":
        values.setdefault(step.made, []).append(step.target)
        return
    space = step.target.desc.layout.space
    for value, instances in values.items():
        kept = [] if step.kind == "evict" else instances
        carried = [
            replace(i, buffer=step.target.buffer, desc=evicted_desc(i.desc, space))
            if i.buffer == step.source.buffer
            else i
            for i in instances
        ]
        values[value] = [*kept, *(i for i in carried if i not in kept)]


def _execute(step: Execute, plan: Plan, values: Values) -> None:
    written = plan.request.tasks[step.task].outputs
    for instance in step.outputs:
        # An output that reuses the buffer of a donated input ends the input.
        _forget(values, instance.buffer)
    for value, instance in zip(written, step.outputs, strict=True):
        values.setdefault(value, []).append(instance)
