"""The plan checker: runs a plan symbolically and reports everything that is wrong with it.

It shares no code with what makes plans (residency, eviction, mover, planner): it follows
contents byte range by byte range instead.

Kinds of problems: `address` (out of range, misaligned, taken), `buffer` (unknown, or made twice),
`room` (does not fit its buffer), `content` (bytes are not what the step takes them for), `order`
(tasks left out, repeated or out of order), `layout`, `pinned`, `overlap`, `lossy`, `transfer`,
`stage`, `scratch`, `alias`, `bytes`, `seconds`, `certificate`, `final`, `kept`, `free_region`,
`later` (no use that can be predicted for the request), `bound`, `touched`; and two warnings:
`uncertified`, bytes left a space and the plan does not say why; `undecided`, it does not prove that
they had to, and neither does the checker, within its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from stitch.errors import Problem
from stitch.machine import copy_counts, footprint
from stitch.planner.checker.proof import certificate_defect
from stitch.planner.checker.relocations import bytes_of, check_relocation
from stitch.planner.checker.symbolic_memory import ByteMap, Inspection, SymbolicMemory, waiting_form
from stitch.planner.plan import (
    Allocate,
    Buffer,
    Certificate,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    PlanRequest,
    Relocate,
)
from stitch.program import Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

# --------------------------------------------------------------------------------------------------
# The end of a plan's check: what it leaves behind, and what it says that it rests on.

Found = tuple[str, str]
Region = tuple[Space, int, int]


def end_problems(
    plan: Plan, symbolic_memory: SymbolicMemory, read: frozenset[int], used: Sequence[Region]
) -> Iterator[Found]:
    """(kind, detail) of every disagreement between a plan's claims and its steps.

    `read`: resident buffers that steps read, moved or freed. `used`: regions (space, start, end)
    that steps took, in bytes per bank.
    """
    yield from _final_buffers(plan, symbolic_memory)
    yield from _final_values(plan, symbolic_memory)
    yield from _kept(plan, symbolic_memory)
    yield from _free_regions(plan, used)
    yield from _later(plan.request)
    if not 0 <= plan.least_seconds <= plan.seconds * (1 + 1e-9):
        least, taken = plan.least_seconds * 1e6, plan.seconds * 1e6
        yield "bound", f"{least:g} us are claimed to be the least, and this plan takes {taken:g} us"
    if plan.fewest_bytes is not None:
        nbytes, seconds = plan.fewest_bytes
        if not (0 <= nbytes < plan.carried_nbytes and seconds >= plan.seconds):
            yield (
                "bound",
                (
                    f"a plan of {nbytes} B in {seconds * 1e6:g} us is no trade for this one's "
                    f"{plan.carried_nbytes} B in {plan.seconds * 1e6:g} us"
                ),
            )
    for number in sorted(read - plan.touched):
        yield "touched", f"resident buffer {number} is used and not listed"
    for number in sorted(plan.touched - {b.number for b in plan.request.buffers}):
        yield "touched", f"buffer {number} is listed and no resident"


def _final_buffers(plan: Plan, symbolic_memory: SymbolicMemory) -> Iterator[Found]:
    said = {b.number: b for b in plan.final_buffers}
    in_spaces = {n: b for n, b in symbolic_memory.buffers.items() if b.address is not None}
    for number in sorted({n for n, b in said.items() if b.address is not None} | set(in_spaces)):
        ends, wanted = in_spaces.get(number), said.get(number)
        if ends is not wanted and _nameless(ends) != _nameless(wanted):
            yield "final", f"buffer {number} ends as {_nameless(ends)}, not {_nameless(wanted)}"
    held = {i.buffer for r in plan.final_values for i in r.instances}
    held |= {b.number for b in plan.request.buffers if b.pinned}
    # What no value used when the plan began is not the plan's to explain.
    began = {i.buffer for r in plan.request.residents for i in r.instances}
    held |= {b.number for b in plan.request.buffers} - began
    for number in sorted(set(said) - held):
        yield "final", f"buffer {number} stays alive and holds no value"


def _nameless(buffer: Buffer | None) -> Buffer | None:
    return None if buffer is None else replace(buffer, origin="")


def _final_values(plan: Plan, symbolic_memory: SymbolicMemory) -> Iterator[Found]:
    for resident in plan.final_values:
        if not resident.instances:
            yield "final", f"value {resident.value} is said to be alive and lies nowhere"
            continue
        for instance in resident.instances:
            if not symbolic_memory.holds(instance, resident.value):
                where = f"buffer {instance.buffer} as {instance.desc.text()}"
                yield "final", f"value {resident.value} does not lie in {where}"
        primary = resident.instances[0].desc.layout.data_type
        if primary is not symbolic_memory.made_in.get(resident.value):
            yield "lossy", f"the primary instance of value {resident.value} lost precision"


def _kept(plan: Plan, symbolic_memory: SymbolicMemory) -> Iterator[Found]:
    request = plan.request
    known = {r.value for r in request.residents if r.instances}
    known |= {v for task in request.tasks for v in task.outputs}
    final = {r.value: r.instances for r in plan.final_values}
    for value in sorted(request.kept & known):
        whole = [
            i
            for i in final.get(value, ())
            if i.desc.layout.data_type is symbolic_memory.made_in[value]
            and symbolic_memory.holds(i, value)
        ]
        if not whole:
            yield "kept", f"value {value} must survive and does not"


def _later(request: PlanRequest) -> Iterator[Found]:
    """The first prediction that cannot be one for this request; whether it comes true, nobody
    knows."""
    known = {r.value for r in request.residents}.union(*(task.outputs for task in request.tasks))
    end, before = len(request.tasks), -1
    for value, use in request.later:
        if value not in request.kept or value not in known:
            yield "later", f"value {value} is predicted to be read, and no such value lives on"
        elif value <= before:
            yield "later", f"a use of value {value} is predicted behind one of value {before}"
        elif use < end:
            yield "later", f"value {value} is predicted to be read by task {use}, before task {end}"
        else:
            before = value
            continue
        return


def _free_regions(plan: Plan, used: Sequence[Region]) -> Iterator[Found]:
    starts = [b for b in plan.request.buffers if b.address is not None]
    declared: dict[Space, ByteMap] = {}
    for space, address, size in plan.free_regions:
        declared.setdefault(space, ByteMap()).write(address, address + size, 0)
        for buffer in starts:
            at = buffer.address or 0
            if (
                buffer.space is space
                and at < address + size
                and address < at + buffer.size_per_bank
            ):
                yield "free_region", f"{buffer.origin} lies where the plan wants nothing"
    taken: dict[Space, ByteMap] = {}
    for space, start, end in used:
        taken.setdefault(space, ByteMap()).write(start, end, 0)
    for space in plan.request.machine.shape.spaces:
        yield from _compare(plan, space, declared.get(space), taken.get(space))


def _compare(
    plan: Plan, space: Space, declared: ByteMap | None, taken: ByteMap | None
) -> Iterator[Found]:
    limit = plan.request.machine.shape.space(space).limit
    needed, said = ByteMap(), declared or ByteMap()
    for piece in (taken or ByteMap()).read(0, limit):
        needed.write(piece.start, piece.end, 0)
    for buffer in plan.request.buffers:
        if buffer.space is space and buffer.address is not None and buffer.number in plan.touched:
            needed.erase(buffer.address, buffer.address + buffer.size_per_bank)
    for piece in said.read(0, limit):
        needed_here = sum(p.end - p.start for p in needed.read(piece.start, piece.end))
        if needed_here != piece.end - piece.start:
            yield "free_region", f"{space.value} [{piece.start:#x}, {piece.end:#x}) is not needed"
    for piece in needed.read(0, limit):
        if sum(p.end - p.start for p in said.read(piece.start, piece.end)) != piece.end - (
            piece.start
        ):
            yield "free_region", f"{space.value} [{piece.start:#x}, {piece.end:#x}) is not declared"


# --------------------------------------------------------------------------------------------------
# What an eviction must be justified by: everything that had to lie in the space at that moment.


def eviction_defect(
    run: Inspection, buffer: Buffer, certificate: Certificate
) -> tuple[str, str] | None:
    """What is wrong with the certificate of an eviction that is due; None where it is confirmed.

    All that leave a space for one need are justified at once: with this one in its place, and the
    others gone, there must be no room.
    """
    pieces, gaps = _wanted_in(run, buffer.space)
    others = _leaving_with(run, buffer)
    before = sorted(pieces)
    for other in others:
        pieces.remove(other)
    if others and sorted(certificate.pieces) == before:
        # So it was said of old: one of them had to go.
        return "undecided", f"{len(others) + 1} leave {buffer.space.value}; whether all had to"
    return certificate_defect(certificate, pieces, gaps)


def _leaving_with(run: Inspection, buffer: Buffer) -> list[int]:
    """The sizes of what leaves a space after this buffer, before anything else happens there."""
    there = {
        n: b.size_per_bank
        for n, b in run.symbolic_memory.buffers.items()
        if b.space is buffer.space and not b.pinned and b is not buffer
    }
    sizes: list[int] = []
    for step in islice(run.plan.steps, run.index + 1, None):
        if isinstance(step, Free) and step.buffer in there:
            sizes.append(there.pop(step.buffer))
        elif (
            isinstance(step, Execute)
            or (isinstance(step, Allocate) and step.buffer.space is buffer.space)
            or (isinstance(step, Relocate) and buffer.space in (step.space, step.stage_space))
            or (isinstance(step, Copy) and step.made != step.value)
        ):
            break
    return sizes


def _wanted_in(run: Inspection, space: Space) -> tuple[list[int], list[int]]:
    """The pieces that are wanted in a space beside what is there, and the gaps.

    Wanted is what comes next: what comes into the space whole, or bounces through it, or else all
    that the coming task is given there.
    """
    shape = run.machine.shape.space(space)
    buffers = [b for b in run.symbolic_memory.buffers.values() if b.space is space]
    pieces: list[int] = []
    fixed: dict[int, int] = {}
    stuck: list[tuple[int, int]] = []
    passing = _passing(run, space)
    if passing is None:
        allocated, fixed, stuck = _given(run, space)
        buffers += [step.buffer for step in allocated]
    else:
        pieces.append(passing)
    pieces += [b.size_per_bank for b in buffers if not b.pinned and b.number not in fixed]
    stuck += [
        (fixed.get(b.number, b.address or 0), b.size_per_bank)
        for b in buffers
        if b.number in fixed or b.pinned
    ]
    taken = ByteMap()
    for address, size in stuck:
        taken.write(address, address + size, 0)
    edges = [shape.base, *(x for p in taken.read(shape.base, shape.limit) for x in p[:2]),
             shape.limit]  # fmt: skip
    return pieces, [b - a for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def _passing(run: Inspection, space: Space) -> int | None:
    """Bytes per bank of what comes from another space next, None where a task is next."""
    for step, after in pairwise(islice(run.plan.steps, run.index + 1, None)):
        if isinstance(step, Allocate) and step.buffer.space is space:
            is_carried = isinstance(after, Copy) and after.kind == "evict"
            return step.buffer.size_per_bank if is_carried else None
        if isinstance(step, Relocate) and step.space is not space and step.stage is not None:
            return step.stage[1] if step.stage_space is space else None
        if isinstance(step, Execute):
            return None
    return None


def _given(
    run: Inspection, space: Space
) -> tuple[list[Allocate], dict[int, int], list[tuple[int, int]]]:
    """What the coming task is given in a space: new buffers, addresses that it asks for, scratch
    at a promised place."""
    allocated: list[Allocate] = []
    tasks = run.plan.request.tasks
    fixed: dict[int, int] = {}
    stuck: list[tuple[int, int]] = []
    for step in islice(run.plan.steps, run.index + 1, None):
        if isinstance(step, Allocate) and step.buffer.space is space:
            allocated.append(step)
        elif isinstance(step, Copy) and step.made != step.value:
            for task in tasks[run.next_task : run.next_task + 1]:
                address = task.transformation.outputs[0].layout.address
                if address is not None:
                    fixed[step.target.buffer] = address
            break
        elif isinstance(step, Execute) and step.task < len(tasks):
            asked = tasks[step.task].transformation
            for instance, desc in (
                *zip(step.inputs, asked.inputs, strict=False),
                *zip(step.outputs, asked.outputs, strict=False),
            ):
                if desc.layout.address is not None:
                    fixed[instance.buffer] = desc.layout.address
            if step.scratch is not None and step.scratch[0] is space is Space.L1:
                stuck.append(step.scratch[1:])
            break
    return allocated, fixed, stuck


#: Kinds that do not make a plan wrong.
WARNINGS = frozenset({"uncertified", "undecided"})
#: Where tensors of a space may wait.
OUTLETS = {Space.L1: (Space.DRAM, Space.HOST), Space.DRAM: (Space.HOST,)}


def check_plan(plan: Plan) -> tuple[Problem, ...]:
    """Everything that is wrong with a plan, found by running it symbolically.

    Each problem names the step it was found at; empty for a sound plan. Problems of a kind in
    `WARNINGS` say that a claim is missing, not that the plan is wrong. Never raises.
    """
    checker = _Checker(plan)
    for index, step in enumerate(plan.steps):
        checker.step(index, step)
    for kind, detail in end_problems(
        plan, checker.symbolic_memory, frozenset(checker.read), tuple(checker.used)
    ):
        checker.problems.append(Problem(kind, "end", detail))
    if checker.next_task != len(plan.request.tasks):
        missing = f"only {checker.next_task} of {len(plan.request.tasks)} tasks run"
        checker.problems.append(Problem("order", "end", missing))
    return tuple(checker.problems)


def _bare(desc: TensorDesc) -> TensorDesc:
    return desc.without_address()


class _Checker(Inspection):
    """One run through a plan."""

    def step(self, index: int, step: object) -> None:
        self.index = index
        if isinstance(step, Allocate):
            self._allocate(step)
        elif isinstance(step, Free):
            self._free(step)
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            check_relocation(self, step)
        elif isinstance(step, Execute):
            self._execute(step)

    # -- buffers ----------------------------------------------------------------------------------

    def _allocate(self, step: Allocate) -> None:
        buffer = step.buffer
        if buffer.number in self.symbolic_memory.buffers:
            self.say("buffer", f"buffer {buffer.number} exists already")
            return
        if buffer.address is None or buffer.pinned or buffer.desc.layout.space is not buffer.space:
            self.say("buffer", f"buffer {buffer.number} cannot be allocated as described")
            return
        if not self.region(buffer.origin, buffer.space, buffer.address, buffer.size_per_bank):
            return
        end = buffer.address + buffer.size_per_bank
        taken = self.symbolic_memory.live_in(buffer.space, buffer.address, end)
        if taken:
            self.say("address", f"{buffer.origin} overlaps {taken[0].origin}")
        if buffer.size_per_bank < footprint(buffer.desc, self.machine.shape).size_per_bank:
            self.say("room", f"{buffer.desc.text()} does not fit {buffer.size_per_bank} B per bank")
        self.symbolic_memory.buffers[buffer.number] = buffer
        self.used.append((buffer.space, buffer.address, end))
        place, start, stop = self.symbolic_memory.span(buffer)
        self.symbolic_memory.memory(place).erase(start, stop)

    def _free(self, step: Free) -> None:
        buffer = self.symbolic_memory.buffers.get(step.buffer)
        if buffer is None or buffer.address is None:
            self.say("buffer", f"buffer {step.buffer} is freed and is not alive")
            return
        if buffer.pinned:
            self.say("pinned", f"{buffer.origin} is pinned and freed")
        self.reads(step.buffer)
        place, start, stop = self.symbolic_memory.span(buffer)
        self.symbolic_memory.memory(place).erase(start, stop)
        del self.symbolic_memory.buffers[step.buffer]

    # -- copies ----------------------------------------------------------------------------------

    def _copy(self, step: Copy) -> None:
        symbolic_memory = self.symbolic_memory
        source, target = (symbolic_memory.buffers.get(i.buffer) for i in (step.source, step.target))
        if source is None or target is None:
            missing = step.source.buffer if source is None else step.target.buffer
            self.say("buffer", f"buffer {missing} is not alive")
            return
        self.reads(step.source.buffer)
        if target.pinned or target.address is None or target.number == source.number:
            self.say("overlap", f"{target.origin} cannot be written by this copy")
            return
        if not symbolic_memory.room(step.target):
            self.say("room", f"{step.target.desc.text()} does not fit {target.origin}")
            return
        written = footprint(step.target.desc, self.machine.shape)
        if step.nbytes != written.own_nbytes:
            self.say("bytes", f"{step.nbytes} B are claimed, {written.pages} pages are written")
        source_desc, target_desc = _bare(step.source.desc), _bare(step.target.desc)
        counts = copy_counts(source_desc, target_desc, self.machine)
        self.check_seconds(step.seconds, self.machine.copy_seconds(counts))
        if step.kind != "copy":
            self._carry(step, source, target)
            symbolic_memory.carry(source, target)
            return
        if not symbolic_memory.holds(step.source, step.value):
            self.say("content", f"value {step.value} does not lie whole in {source.origin}")
        if step.source.desc.layout.data_type is not symbolic_memory.made_in.get(step.value):
            self.say("lossy", f"value {step.value} is read from a copy of another data type")
        if step.source.desc.shape != step.target.desc.shape:
            self.say("layout", "a copy keeps the shape")
        if step.made != step.value:
            self._run_copy_task(step)
        symbolic_memory.write(step.target, step.made)

    def _carry(self, step: Copy, buffer: Buffer, target: Buffer) -> None:
        """A whole buffer leaves its space, or comes back."""
        expected = Instance(target.number, 0, waiting_form(buffer.desc, target.space))
        returns = step.kind == "return"
        outer, inner = (buffer, target) if returns else (target, buffer)
        if (
            outer.space not in OUTLETS.get(inner.space, ())
            or step.source != Instance(buffer.number, 0, buffer.desc)
            or step.target != expected
        ):
            self.say("layout", f"{buffer.origin} is carried in another form than it has")
        if returns:
            return
        if buffer.pinned:
            self.say("pinned", f"{buffer.origin} is pinned and evicted")
        if step.certificate is None:
            self.say("uncertified", f"{buffer.origin} is evicted without a certificate")
            return
        defect = eviction_defect(self, buffer, step.certificate)
        if defect is not None:
            self.say(*defect)

    def _run_copy_task(self, step: Copy) -> None:
        task = self._start(self.next_task)
        if task is None or task.transformation.kind is not TransformationKind.COPY:
            self.say("order", f"value {step.made} is made by no task that is due")
            return
        wanted = task.transformation.outputs[0]
        if (task.inputs[0], task.outputs[0]) != (step.value, step.made):
            self.say("order", "this copy is not what the task that is due asks for")
        self._in_form(f"output of {task.transformation.name!r}", step.target, wanted)

    def _start(self, index: int) -> NumberedTask | None:
        tasks = self.plan.request.tasks
        if index != self.next_task or index >= len(tasks):
            self.say("order", f"task {index} runs where task {self.next_task} is due")
            return tasks[index] if 0 <= index < len(tasks) else None
        self.next_task = index + 1
        return tasks[index]

    # -- tasks -----------------------------------------------------------------------------------

    def _in_form(self, what: str, instance: Instance, wanted: TensorDesc) -> None:
        buffer = self.symbolic_memory.buffers.get(instance.buffer)
        if instance.desc != _bare(wanted):
            self.say("layout", f"{what} is {instance.desc.text()}, wanted {wanted.text()}")
        at = wanted.layout.address
        if buffer is None or buffer.address is None or not self.symbolic_memory.room(instance):
            self.say("room", f"{what} has no room in buffer {instance.buffer}")
        elif at is not None and (buffer.address != at or instance.offset_nbytes):
            self.say("layout", f"{what} lies at {buffer.address:#x}, wanted {at:#x}")

    def _execute(self, step: Execute) -> None:
        task = self._start(step.task)
        if task is None or task.transformation.kind is TransformationKind.COPY:
            self.say("order", f"there is no program {step.task} to run")
            return
        what, symbolic_memory = task.transformation, self.symbolic_memory
        if len(step.inputs) != len(what.inputs) or len(step.outputs) != len(what.outputs):
            self.say("layout", f"{what.name!r} has other slots")
            return
        for i, (instance, wanted) in enumerate(zip(step.inputs, what.inputs, strict=True)):
            self.reads(instance.buffer)
            self._in_form(f"input {what.input_name(i)!r} of {what.name!r}", instance, wanted)
            if not symbolic_memory.holds(instance, task.inputs[i]):
                self.say("content", f"input {what.input_name(i)!r} does not hold its value")
        self._outputs(step, task)
        self._scratch(step, task)
        for instance, value in zip(step.outputs, task.outputs, strict=True):
            if instance.buffer in symbolic_memory.buffers and symbolic_memory.room(instance):
                symbolic_memory.write(instance, value)

    def _outputs(self, step: Execute, task: NumberedTask) -> None:
        what = task.transformation
        aliases = dict(what.aliases)
        for o, (instance, wanted) in enumerate(zip(step.outputs, what.outputs, strict=True)):
            self._in_form(f"output {what.output_name(o)!r} of {what.name!r}", instance, wanted)
            buffer = self.symbolic_memory.buffers.get(instance.buffer)
            given = aliases.get(o)
            if buffer is not None and buffer.pinned and not (buffer.shared and given is not None):
                self.say("pinned", f"output {what.output_name(o)!r} overwrites {buffer.origin}")
            if given is not None and step.inputs[given] != instance:
                self.say("alias", f"output {what.output_name(o)!r} does not take its input's place")
            others = [x.buffer for i, x in enumerate(step.inputs) if i != given]
            others += [x.buffer for i, x in enumerate(step.outputs) if i != o]
            if instance.buffer in others:
                self.say("overlap", f"output {what.output_name(o)!r} overwrites another operand")

    def _scratch(self, step: Execute, task: NumberedTask) -> None:
        wanted = task.transformation.scratch
        if wanted is None or wanted.size_per_bank == 0:
            if step.scratch is not None:
                self.say("scratch", "a region is given to a task that wants none")
            return
        if step.scratch is None or step.scratch[0] is not wanted.space:
            self.say("scratch", "the task has no scratch")
            return
        space, address, size = step.scratch
        shape = self.machine.shape.space(space)
        self.region("scratch", space, address, size)
        if size < wanted.size_per_bank or (space is Space.L1 and address != shape.base):
            self.say("scratch", f"{size} B per bank at {address:#x} are not what was promised")
        operands = {i.buffer for i in (*step.inputs, *step.outputs)}
        for buffer in self.symbolic_memory.live_in(space, address, address + size):
            own = (buffer.address, buffer.size_per_bank) == (address, size) and not bytes_of(
                self, buffer.number
            )
            if space is Space.L1 or not own or buffer.number in operands:
                self.say("scratch", f"scratch overlaps {buffer.origin}, which is alive")
        self.used.append((space, address, address + size))
        self.symbolic_memory.memory(space).erase(
            address * shape.banks, (address + size) * shape.banks
        )
