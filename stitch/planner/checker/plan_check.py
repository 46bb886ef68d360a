"""The plan checker: runs a plan symbolically and reports everything that is wrong with it.

Comes in: a `Plan`. Goes out: problems, none for a sound plan. It shares no code with what makes
plans (residency, making_room, mover, planner): it follows contents byte range by byte range
instead.

Kinds of problems: `address` (out of range, misaligned, taken), `buffer` (unknown, or made twice),
`room` (does not fit its buffer), `content` (bytes are not what the step takes them for), `order`
(tasks left out, repeated or out of order), `layout`, `pinned`, `overlap`, `lossy`, `transfer`,
`stage`, `scratch`, `alias`, `bytes`, `seconds`, `certificate`, `final`, `kept`, `free_region`,
`later` (no use that can be predicted for the request), `bound`, `touched`; and two warnings:
`uncertified`, bytes left a space and the plan does not say why; `undecided`, it does not prove that
they had to, and neither does the checker, within its bounds.
"""

from __future__ import annotations

from stitch.errors import Problem
from stitch.machine import copy_counts, footprint
from stitch.planner.checker.end import end_problems
from stitch.planner.checker.evictions import eviction_defect
from stitch.planner.checker.inspection import Inspection
from stitch.planner.checker.relocations import bytes_of, check_relocation
from stitch.planner.checker.symbolic_memory import waiting_form
from stitch.planner.plan import Allocate, Buffer, Copy, Execute, Free, Instance, Plan, Relocate
from stitch.program import Space, TensorDesc
from stitch.tasks import NumberedTask, TransformationKind

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
