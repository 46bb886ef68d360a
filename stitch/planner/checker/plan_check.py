"""Check a plan by running it symbolically, and report everything that is wrong with it.

Kinds of problems: `address` (out of range, misaligned, overlapping), `buffer` (unknown, or
allocated twice), `fits` (does not fit its buffer), `content` (the bytes are not those that the step
expects), `order` (tasks missing, repeated or out of order), `layout`, `pinned`, `overlap`, `lossy`,
`transfer`, `stage`, `scratch`, `alias`, `bytes`, `seconds`, `certificate`, `final`, `kept`,
`free_region`, `later` (an impossible prediction), `bound`, `touched`; and two warnings:
`uncertified`, bytes left a space without a reason; `undecided`, neither the certificate nor the
checker, within its work limit, proves that they had to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from stitch.errors import Problem
from stitch.machine import copy_counts, footprint
from stitch.planner.checker.proof import certificate_defect
from stitch.planner.checker.relocations import bytes_of, check_relocation
from stitch.planner.checker.symbolic_memory import Inspection, SymbolicMemory, gaps
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
    evicted_desc,
)
from stitch.program import Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

Found = tuple[str, str]
Region = tuple[Space, int, int]


def end_problems(
    plan: Plan, state: SymbolicMemory, read: frozenset[int], used: Sequence[Region]
) -> Iterator[Found]:
    """Yield (kind, detail) of every difference between a plan's claims and its steps.

    `read`: resident buffers that steps read, moved or freed. `used`: regions (space, start, end)
    that steps used, in bytes per bank.
    """
    yield from _final_buffers(plan, state)
    yield from _final_values(plan, state)
    yield from _kept_values(plan, state)
    yield from _free_regions(plan, used)
    yield from _prediction_problems(plan.request)
    if not 0 <= plan.least_seconds <= plan.seconds * (1 + 1e-9):
        least, taken = plan.least_seconds * 1e6, plan.seconds * 1e6
        yield "bound", f"the lower bound is {least:g} us, but this plan takes {taken:g} us"
    for number in sorted(read - plan.touched):
        yield "touched", f"resident buffer {number} is used but not in `touched`"
    for number in sorted(plan.touched - {b.number for b in plan.request.buffers}):
        yield "touched", f"buffer {number} in `touched` is not resident"


def _final_buffers(plan: Plan, state: SymbolicMemory) -> Iterator[Found]:
    declared = {b.number: b for b in plan.final_buffers}
    in_spaces = {n: b for n, b in state.buffers.items() if b.address is not None}
    for number in sorted(
        {n for n, b in declared.items() if b.address is not None} | set(in_spaces)
    ):
        ends, wanted = in_spaces.get(number), declared.get(number)
        if ends is not wanted and _nameless(ends) != _nameless(wanted):
            yield (
                "final",
                f"buffer {number} is {_nameless(ends)} at the end, expected {_nameless(wanted)}",
            )
    held = {i.buffer for r in plan.final_values for i in r.instances}
    held |= {b.number for b in plan.request.buffers if b.pinned}
    # Buffers without values at the start are not the plan's responsibility.
    began = {i.buffer for r in plan.request.residents for i in r.instances}
    held |= {b.number for b in plan.request.buffers} - began
    for number in sorted(set(declared) - held):
        yield "final", f"buffer {number} is alive at the end but holds no value"


def _nameless(buffer: Buffer | None) -> Buffer | None:
    return None if buffer is None else replace(buffer, origin="")


def _final_values(plan: Plan, state: SymbolicMemory) -> Iterator[Found]:
    for resident in plan.final_values:
        if not resident.instances:
            yield "final", f"value {resident.value} is alive at the end but has no instance"
            continue
        for instance in resident.instances:
            if not state.holds(instance, resident.value):
                where = f"buffer {instance.buffer} as {instance.desc.text()}"
                yield "final", f"value {resident.value} is not stored in {where}"
        primary = resident.instances[0].desc.layout.data_type
        if primary is not state.dtypes.get(resident.value):
            yield "lossy", f"the primary instance of value {resident.value} lost precision"


def _kept_values(plan: Plan, state: SymbolicMemory) -> Iterator[Found]:
    request = plan.request
    known = {r.value for r in request.residents if r.instances}
    known |= {v for task in request.tasks for v in task.outputs}
    final = {r.value: r.instances for r in plan.final_values}
    for value in sorted(request.kept & known):
        whole = [
            i
            for i in final.get(value, ())
            if i.desc.layout.data_type is state.dtypes[value] and state.holds(i, value)
        ]
        if not whole:
            yield "kept", f"value {value} must be kept, but no exact instance is"


def _prediction_problems(request: PlanRequest) -> Iterator[Found]:
    """Yield the first prediction that is impossible for this request."""
    known = {r.value for r in request.residents}.union(*(task.outputs for task in request.tasks))
    end, before = len(request.tasks), -1
    for value, use in request.later:
        if value not in request.kept or value not in known:
            yield "later", f"value {value} is predicted to be read, but is not kept"
        elif value <= before:
            yield "later", f"the prediction of value {value} follows that of value {before}"
        elif use < end:
            yield "later", f"value {value} is predicted to be read by task {use}, before task {end}"
        else:
            before = value
            continue
        return


def _free_regions(plan: Plan, used: Sequence[Region]) -> Iterator[Found]:
    resident = [(b, b.address, b.address + b.size_per_bank)
                for b in plan.request.buffers if b.address is not None]  # fmt: skip
    for space, address, size in plan.free_regions:
        for buffer, start, end in resident:
            if buffer.space is space and start < address + size and address < end:
                yield "free_region", f"{buffer.origin} overlaps a region that must be free"
    for space in plan.request.machine.shape.spaces:
        whole = 0, plan.request.machine.shape.space(space).limit
        declared = [(at, at + size) for place, at, size in plan.free_regions if place is space]
        taken = [(start, end) for place, start, end in used if place is space]
        held = [(start, end) for b, start, end in resident
                if b.space is space and b.number in plan.touched]  # fmt: skip
        declared = gaps(gaps(declared, *whole), *whole)
        needed = gaps([*gaps(taken, *whole), *held], *whole)
        for spans, others, what in (
            (declared, needed, "declared free but not used"),
            (needed, declared, "used but not declared free"),
        ):
            for start, end in spans:
                if not any(a <= start and end <= b for a, b in others):
                    yield "free_region", f"{space.value} [{start:#x}, {end:#x}) is {what}"


def eviction_defect(
    run: Inspection, buffer: Buffer, certificate: Certificate
) -> tuple[str, str] | None:
    """Return what is wrong with the certificate of an eviction; None if it is confirmed.

    All evictions for one demand are justified together: with this buffer kept, and the others gone,
    the demand must not fit.
    """
    pieces, gaps = _demand_in(run, buffer.space)
    for other in _evicted_with(run, buffer):
        pieces.remove(other)
    return certificate_defect(certificate, pieces, gaps)


def _evicted_with(run: Inspection, buffer: Buffer) -> list[int]:
    """Return the sizes of the buffers evicted after this one for the same demand."""
    there = {
        n: b.size_per_bank
        for n, b in run.state.buffers.items()
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


def _demand_in(run: Inspection, space: Space) -> tuple[list[int], list[int]]:
    """Return the pieces to place in a space, including its live buffers, and the gaps.

    The demand is what comes next: an eviction into the space, a bounce through it, or the next
    task.
    """
    shape = run.machine.shape.space(space)
    buffers = [b for b in run.state.buffers.values() if b.space is space]
    pieces: list[int] = []
    fixed: dict[int, int] = {}
    immovable: list[tuple[int, int]] = []
    passing = _incoming(run, space)
    if passing is None:
        allocated, fixed, immovable = _next_demand(run, space)
        buffers += [step.buffer for step in allocated]
    else:
        pieces.append(passing)
    pieces += [b.size_per_bank for b in buffers if not b.pinned and b.number not in fixed]
    immovable += [
        (fixed.get(b.number, b.address or 0), b.size_per_bank)
        for b in buffers
        if b.number in fixed or b.pinned
    ]
    taken = [(address, address + size) for address, size in immovable]
    return pieces, [end - start for start, end in gaps(taken, shape.base, shape.limit)]


def _incoming(run: Inspection, space: Space) -> int | None:
    """Return the bytes per bank that come from another space next; None if a task is next."""
    for step, after in pairwise(islice(run.plan.steps, run.index + 1, None)):
        if isinstance(step, Allocate) and step.buffer.space is space:
            is_carried = isinstance(after, Copy) and after.kind == "evict"
            return step.buffer.size_per_bank if is_carried else None
        if isinstance(step, Relocate) and step.space is not space and step.stage is not None:
            return step.stage[1] if step.stage_space is space else None
        if isinstance(step, Execute):
            return None
    return None


def _next_demand(
    run: Inspection, space: Space
) -> tuple[list[Allocate], dict[int, int], list[tuple[int, int]]]:
    """Return the next task's new buffers in a space, its required addresses, and fixed scratch."""
    allocated: list[Allocate] = []
    tasks = run.plan.request.tasks
    fixed: dict[int, int] = {}
    immovable: list[tuple[int, int]] = []
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
            transformation = tasks[step.task].transformation
            for instance, desc in (
                *zip(step.inputs, transformation.inputs, strict=False),
                *zip(step.outputs, transformation.outputs, strict=False),
            ):
                if desc.layout.address is not None:
                    fixed[instance.buffer] = desc.layout.address
            if step.scratch is not None and step.scratch[0] is space is Space.L1:
                immovable.append(step.scratch[1:])
            break
    return allocated, fixed, immovable


#: Kinds of problems that do not make a plan wrong.
WARNINGS = frozenset({"uncertified", "undecided"})
#: The spaces that tensors of a space can be evicted to.
OUTLETS = {Space.L1: (Space.DRAM, Space.HOST), Space.DRAM: (Space.HOST,)}


def check_plan(plan: Plan) -> tuple[Problem, ...]:
    """Return everything that is wrong with a plan, found by running it symbolically; never raises.

    Each problem names its step. Problems of a kind in `WARNINGS` mean that a proof is missing, not
    that the plan is wrong.
    """
    checker = _Checker(plan)
    for index, step in enumerate(plan.steps):
        checker.step(index, step)
    for kind, detail in end_problems(
        plan, checker.state, frozenset(checker.read), tuple(checker.used)
    ):
        checker.problems.append(Problem(kind, "end", detail))
    if checker.next_task != len(plan.request.tasks):
        missing = f"only {checker.next_task} of {len(plan.request.tasks)} tasks run"
        checker.problems.append(Problem("order", "end", missing))
    return tuple(checker.problems)


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

    def _allocate(self, step: Allocate) -> None:
        buffer = step.buffer
        if buffer.number in self.state.buffers:
            self.report("buffer", f"buffer {buffer.number} exists already")
            return
        if buffer.address is None or buffer.pinned or buffer.desc.layout.space is not buffer.space:
            self.report("buffer", f"buffer {buffer.number} cannot be allocated as described")
            return
        if not self.region(buffer.origin, buffer.space, buffer.address, buffer.size_per_bank):
            return
        end = buffer.address + buffer.size_per_bank
        taken = self.state.live_in(buffer.space, buffer.address, end)
        if taken:
            self.report("address", f"{buffer.origin} overlaps {taken[0].origin}")
        if buffer.size_per_bank < footprint(buffer.desc, self.machine.shape).size_per_bank:
            self.report(
                "room", f"{buffer.desc.text()} does not fit {buffer.size_per_bank} B per bank"
            )
        self.state.buffers[buffer.number] = buffer
        self.used.append((buffer.space, buffer.address, end))
        place, start, stop = self.state.span(buffer)
        self.state.memory(place).erase(start, stop)

    def _free(self, step: Free) -> None:
        buffer = self.state.buffers.get(step.buffer)
        if buffer is None or buffer.address is None:
            self.report("buffer", f"buffer {step.buffer} is freed but not alive")
            return
        if buffer.pinned:
            self.report("pinned", f"{buffer.origin} is freed although pinned")
        self.reads(step.buffer)
        place, start, stop = self.state.span(buffer)
        self.state.memory(place).erase(start, stop)
        del self.state.buffers[step.buffer]

    def _copy(self, step: Copy) -> None:
        state = self.state
        source, target = (state.buffers.get(i.buffer) for i in (step.source, step.target))
        if source is None or target is None:
            missing = step.source.buffer if source is None else step.target.buffer
            self.report("buffer", f"buffer {missing} is not alive")
            return
        self.reads(step.source.buffer)
        if target.pinned or target.address is None or target.number == source.number:
            self.report("overlap", f"{target.origin} cannot be written by this copy")
            return
        if not state.fits(step.target):
            self.report("room", f"{step.target.desc.text()} does not fit {target.origin}")
            return
        written = footprint(step.target.desc, self.machine.shape)
        if step.nbytes != written.own_nbytes:
            self.report("bytes", f"it claims {step.nbytes} B, but writes {written.own_nbytes} B")
        ends = step.source.desc.without_address(), step.target.desc.without_address()
        counts = copy_counts(*ends, self.machine)
        self.check_seconds(step.seconds, self.machine.copy_seconds(counts))
        if step.kind != "copy":
            self._carry(step, source, target)
            state.carry(source, target)
            return
        if not state.holds(step.source, step.value):
            self.report(
                "content", f"value {step.value} is not completely stored in {source.origin}"
            )
        if step.source.desc.layout.data_type is not state.dtypes.get(step.value):
            self.report("lossy", f"value {step.value} is read from a copy of another data type")
        if step.source.desc.shape != step.target.desc.shape:
            self.report("layout", "a copy must keep the shape")
        if step.made != step.value:
            self._run_copy_task(step)
        state.write(step.target, step.made)

    def _carry(self, step: Copy, buffer: Buffer, target: Buffer) -> None:
        """Check an eviction or return of a whole buffer."""
        expected = Instance(target.number, 0, evicted_desc(buffer.desc, target.space))
        returns = step.kind == "return"
        outer, inner = (buffer, target) if returns else (target, buffer)
        if (
            outer.space not in OUTLETS.get(inner.space, ())
            or step.source != Instance(buffer.number, 0, buffer.desc)
            or step.target != expected
        ):
            self.report("layout", f"{buffer.origin} is carried in another layout than its own")
        if returns:
            return
        if buffer.pinned:
            self.report("pinned", f"{buffer.origin} is evicted although pinned")
        if step.certificate is None:
            self.report("uncertified", f"{buffer.origin} is evicted without a certificate")
            return
        defect = eviction_defect(self, buffer, step.certificate)
        if defect is not None:
            self.report(*defect)

    def _run_copy_task(self, step: Copy) -> None:
        task = self._start(self.next_task)
        if task is None or task.transformation.kind is not TransformationKind.COPY:
            self.report("order", f"value {step.made} is not made by the next task")
            return
        wanted = task.transformation.outputs[0]
        if (task.inputs[0], task.outputs[0]) != (step.value, step.made):
            self.report("order", "this copy is not the one of the next task")
        self._in_form(f"output of {task.transformation.name!r}", step.target, wanted)

    def _start(self, index: int) -> NumberedTask | None:
        tasks = self.plan.request.tasks
        if index != self.next_task or index >= len(tasks):
            self.report("order", f"task {index} runs, expected task {self.next_task}")
            return tasks[index] if 0 <= index < len(tasks) else None
        self.next_task = index + 1
        return tasks[index]

    def _in_form(self, what: str, instance: Instance, wanted: TensorDesc) -> None:
        buffer = self.state.buffers.get(instance.buffer)
        if instance.desc != wanted.without_address():
            self.report("layout", f"{what} is {instance.desc.text()}, expected {wanted.text()}")
        at = wanted.layout.address
        if buffer is None or buffer.address is None or not self.state.fits(instance):
            self.report("room", f"{what} does not fit into buffer {instance.buffer}")
        elif at is not None and (buffer.address != at or instance.offset_nbytes):
            self.report("layout", f"{what} is at {buffer.address:#x}, expected {at:#x}")

    def _execute(self, step: Execute) -> None:
        task = self._start(step.task)
        if task is None or task.transformation.kind is TransformationKind.COPY:
            self.report("order", f"task {step.task} is not a program")
            return
        what, state = task.transformation, self.state
        if len(step.inputs) != len(what.inputs) or len(step.outputs) != len(what.outputs):
            self.report("layout", f"{what.name!r} runs with the wrong number of slots")
            return
        for i, (instance, wanted) in enumerate(zip(step.inputs, what.inputs, strict=True)):
            self.reads(instance.buffer)
            self._in_form(f"input {what.input_name(i)!r} of {what.name!r}", instance, wanted)
            if not state.holds(instance, task.inputs[i]):
                self.report("content", f"input {what.input_name(i)!r} does not hold its value")
        self._outputs(step, task)
        self._scratch(step, task)
        for instance, value in zip(step.outputs, task.outputs, strict=True):
            if instance.buffer in state.buffers and state.fits(instance):
                state.write(instance, value)

    def _outputs(self, step: Execute, task: NumberedTask) -> None:
        what = task.transformation
        aliases = dict(what.aliases)
        for o, (instance, wanted) in enumerate(zip(step.outputs, what.outputs, strict=True)):
            self._in_form(f"output {what.output_name(o)!r} of {what.name!r}", instance, wanted)
            buffer = self.state.buffers.get(instance.buffer)
            given = aliases.get(o)
            if buffer is not None and buffer.pinned and not (buffer.shared and given is not None):
                self.report("pinned", f"output {what.output_name(o)!r} overwrites {buffer.origin}")
            if given is not None and step.inputs[given] != instance:
                self.report(
                    "alias", f"output {what.output_name(o)!r} does not overwrite its aliased input"
                )
            others = [x.buffer for i, x in enumerate(step.inputs) if i != given]
            others += [x.buffer for i, x in enumerate(step.outputs) if i != o]
            if instance.buffer in others:
                self.report("overlap", f"output {what.output_name(o)!r} overwrites another operand")

    def _scratch(self, step: Execute, task: NumberedTask) -> None:
        wanted = task.transformation.scratch
        if wanted is None or wanted.size_per_bank == 0:
            if step.scratch is not None:
                self.report("scratch", "the task has a scratch region but uses none")
            return
        if step.scratch is None or step.scratch[0] is not wanted.space:
            self.report("scratch", f"the task needs scratch in {wanted.space.value}")
            return
        space, address, size = step.scratch
        shape = self.machine.shape.space(space)
        self.region("scratch", space, address, size)
        if size < wanted.size_per_bank or (space is Space.L1 and address != shape.base):
            self.report(
                "scratch", f"{size} B per bank at {address:#x} are too small or not at the base"
            )
        operands = {i.buffer for i in (*step.inputs, *step.outputs)}
        for buffer in self.state.live_in(space, address, address + size):
            own = (buffer.address, buffer.size_per_bank) == (address, size) and not bytes_of(
                self, buffer.number
            )
            if space is Space.L1 or not own or buffer.number in operands:
                self.report("scratch", f"scratch overlaps {buffer.origin}, which is alive")
        self.used.append((space, address, address + size))
        self.state.memory(space).erase(address * shape.banks, (address + size) * shape.banks)
