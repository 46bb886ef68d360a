"""The plan checker: runs a plan symbolically and reports everything that is wrong with it.

Comes in: a `Plan`. Goes out: problems, none for a sound plan. It shares no code with what makes
plans (residency, room, repack, planner): it follows contents byte range by byte range instead.

Kinds of problems: `address` (out of range, misaligned, taken), `block` (unknown, or made twice),
`room` (does not fit its block), `content` (bytes are not what the step takes them for), `order`
(tasks left out, repeated or out of order), `layout`, `pinned`, `overlap`, `lossy`, `transfer`,
`stage`, `scratch`, `alias`, `bytes`, `certificate`, `final`, `kept`, `free_region`, `touched`;
and `uncertified`, a warning: bytes left L1 and the plan does not prove that they had to.
"""

from __future__ import annotations

from stitch.errors import Problem
from stitch.machine import footprint
from stitch.planner.byte_map import ByteMap
from stitch.planner.check_end import end_problems
from stitch.planner.plan import (
    Allocate,
    Certificate,
    Copy,
    Execute,
    Free,
    Instance,
    Plan,
    Relocate,
    Transfer,
)
from stitch.planner.proof import certificate_defect
from stitch.planner.witness import Witness, waiting_form
from stitch.program import Space, TensorDesc
from stitch.task import Task, TransformationKind

#: Kinds that do not make a plan wrong.
WARNINGS = frozenset({"uncertified"})


def check_plan(plan: Plan) -> tuple[Problem, ...]:
    """Everything that is wrong with a plan, found by running it symbolically (DESIGN, 5.5).

    Each problem names the step it was found at; empty for a sound plan. Problems of a kind in
    `WARNINGS` say that a claim is missing, not that the plan is wrong. Never raises.
    """
    checker = _Checker(plan)
    for index, step in enumerate(plan.steps):
        checker.step(index, step)
    for kind, detail in end_problems(
        plan, checker.witness, frozenset(checker.read), tuple(checker.used)
    ):
        checker.problems.append(Problem(kind, "end", detail))
    if checker.next_task != len(plan.request.tasks):
        missing = f"only {checker.next_task} of {len(plan.request.tasks)} tasks run"
        checker.problems.append(Problem("order", "end", missing))
    return tuple(checker.problems)


def _bare(desc: TensorDesc) -> TensorDesc:
    return TensorDesc(desc.shape, desc.layout.without_address())


class _Checker:
    """One run through a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.machine = plan.request.machine
        self.witness = Witness(plan.request)
        self.residents = frozenset(b.number for b in plan.request.blocks)
        self.problems: list[Problem] = []
        self.next_task = 0
        #: Resident blocks that were read, moved or freed; regions taken (bytes per bank).
        self.read: set[int] = set()
        self.used: list[tuple[Space, int, int]] = []
        self.index = 0

    def say(self, kind: str, detail: str) -> None:
        self.problems.append(Problem(kind, f"step {self.index}", detail))

    def step(self, index: int, step: object) -> None:
        self.index = index
        if isinstance(step, Allocate):
            self._allocate(step)
        elif isinstance(step, Free):
            self._free(step)
        elif isinstance(step, Copy):
            self._copy(step)
        elif isinstance(step, Relocate):
            self._relocate(step)
        elif isinstance(step, Execute):
            self._execute(step)

    def _reads(self, block: int) -> None:
        if block in self.residents:
            self.read.add(block)

    def _region(self, what: str, space: Space, address: int, size: int) -> bool:
        """Whether a region (bytes per bank) is in range and aligned; says so if not."""
        if space not in self.machine.shape.spaces:
            self.say("address", f"{what}: the machine has no {space.value}")
            return False
        shape = self.machine.shape.space(space)
        if address < shape.base or address + size > shape.limit or address % shape.alignment:
            where = f"[{address:#x}, {address + size:#x}) of {space.value}"
            self.say("address", f"{what} at {where} is out of range or misaligned")
            return False
        return True

    # -- blocks ----------------------------------------------------------------------------------

    def _allocate(self, step: Allocate) -> None:
        block = step.block
        if block.number in self.witness.blocks:
            self.say("block", f"block {block.number} exists already")
            return
        if block.address is None or block.pinned or block.desc.layout.space is not block.space:
            self.say("block", f"block {block.number} cannot be allocated as described")
            return
        if not self._region(block.origin, block.space, block.address, block.size_per_bank):
            return
        end = block.address + block.size_per_bank
        taken = self.witness.live_in(block.space, block.address, end)
        if taken:
            self.say("address", f"{block.origin} overlaps {taken[0].origin}")
        if block.size_per_bank < footprint(block.desc, self.machine.shape).size_per_bank:
            self.say("room", f"{block.desc.text()} does not fit {block.size_per_bank} B per bank")
        self.witness.blocks[block.number] = block
        self.used.append((block.space, block.address, end))
        place, start, stop = self.witness.span(block)
        self.witness.memory(place).erase(start, stop)

    def _free(self, step: Free) -> None:
        block = self.witness.blocks.get(step.block)
        if block is None or block.address is None:
            self.say("block", f"block {step.block} is freed and is not alive")
            return
        if block.pinned:
            self.say("pinned", f"{block.origin} is pinned and freed")
        self._reads(step.block)
        place, start, stop = self.witness.span(block)
        self.witness.memory(place).erase(start, stop)
        del self.witness.blocks[step.block]

    # -- copies ----------------------------------------------------------------------------------

    def _copy(self, step: Copy) -> None:
        witness = self.witness
        source, target = (witness.blocks.get(i.block) for i in (step.source, step.target))
        if source is None or target is None:
            missing = step.source.block if source is None else step.target.block
            self.say("block", f"block {missing} is not alive")
            return
        self._reads(step.source.block)
        if target.pinned or target.address is None or target.number == source.number:
            self.say("overlap", f"{target.origin} cannot be written by this copy")
            return
        if not witness.room(step.target):
            self.say("room", f"{step.target.desc.text()} does not fit {target.origin}")
            return
        written = footprint(step.target.desc, self.machine.shape)
        if step.nbytes != written.pages * written.page_nbytes:
            self.say("bytes", f"{step.nbytes} B are claimed, {written.pages} pages are written")
        if step.kind == "evict":
            self._evict(step)
            witness.carry(source, target)
            return
        if not witness.holds(step.source, step.value):
            self.say("content", f"value {step.value} does not lie whole in {source.origin}")
        if step.source.desc.layout.data_type is not witness.made_in.get(step.value):
            self.say("lossy", f"value {step.value} is read from a copy of another data type")
        if step.source.desc.shape != step.target.desc.shape:
            self.say("layout", "a copy keeps the shape")
        if step.made != step.value:
            self._run_copy_task(step)
        witness.write(step.target, step.made)

    def _evict(self, step: Copy) -> None:
        block = self.witness.blocks[step.source.block]
        expected = Instance(step.target.block, 0, waiting_form(block.desc))
        if (
            block.space is not Space.L1
            or step.source != Instance(block.number, 0, block.desc)
            or step.target != expected
        ):
            self.say("layout", f"{block.origin} is evicted in another form than it has")
        if block.pinned:
            self.say("pinned", f"{block.origin} is pinned and evicted")
        if step.certificate is None:
            self.say("uncertified", f"{block.origin} is evicted without a certificate")
            return
        pieces, gaps = self._wanted_in_l1()
        defect = certificate_defect(step.certificate, pieces, gaps)
        if defect is not None:
            self.say("certificate", defect)

    def _run_copy_task(self, step: Copy) -> None:
        task = self._start(self.next_task)
        if task is None or task.transformation.kind is not TransformationKind.COPY:
            self.say("order", f"value {step.made} is made by no task that is due")
            return
        wanted = task.transformation.outputs[0]
        if (task.inputs[0], task.outputs[0]) != (step.value, step.made):
            self.say("order", "this copy is not what the task that is due asks for")
        self._in_form(f"output of {task.transformation.name!r}", step.target, wanted)

    def _start(self, index: int) -> Task | None:
        tasks = self.plan.request.tasks
        if index != self.next_task or index >= len(tasks):
            self.say("order", f"task {index} runs where task {self.next_task} is due")
            return tasks[index] if 0 <= index < len(tasks) else None
        self.next_task = index + 1
        return tasks[index]

    # -- what an eviction must be justified by ---------------------------------------------------

    def _wanted_in_l1(self) -> tuple[list[int], list[int]]:
        """The pieces that the coming task wants in L1 beside what is there, and the gaps."""
        shape = self.machine.shape.space(Space.L1)
        made: list[Allocate] = []
        tasks = self.plan.request.tasks
        fixed: dict[int, int] = {}
        stuck: list[tuple[int, int]] = []
        for step in self.plan.steps[self.index + 1 :]:
            if isinstance(step, Allocate) and step.block.space is Space.L1:
                made.append(step)
            elif isinstance(step, Copy) and step.made != step.value:
                for task in tasks[self.next_task : self.next_task + 1]:
                    address = task.transformation.outputs[0].layout.address
                    if address is not None:
                        fixed[step.target.block] = address
                break
            elif isinstance(step, Execute) and step.task < len(tasks):
                asked = tasks[step.task].transformation
                for found, desc in (
                    *zip(step.inputs, asked.inputs, strict=False),
                    *zip(step.outputs, asked.outputs, strict=False),
                ):
                    if desc.layout.address is not None:
                        fixed[found.block] = desc.layout.address
                if step.scratch is not None and step.scratch[0] is Space.L1:
                    stuck.append(step.scratch[1:])
                break
        blocks = [b for b in self.witness.blocks.values() if b.space is Space.L1]
        pieces = [b.size_per_bank for b in blocks if not b.pinned and b.number not in fixed]
        pieces += [s.block.size_per_bank for s in made if s.block.number not in fixed]
        stuck += [
            (fixed.get(b.number, b.address or 0), b.size_per_bank)
            for b in (*blocks, *(s.block for s in made))
            if b.number in fixed or b.pinned
        ]
        taken = ByteMap()
        for address, size in stuck:
            taken.write(address, address + size, 0)
        edges = [shape.base, *(x for p in taken.read(shape.base, shape.limit) for x in p[:2]),
                 shape.limit]  # fmt: skip
        return pieces, [b - a for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]

    # -- moves -----------------------------------------------------------------------------------

    def _relocate(self, step: Relocate) -> None:
        witness, moving = self.witness, dict(step.targets)
        if len(moving) != len(step.targets) or any(n not in witness.blocks for n in moving):
            self.say("block", "a block that is not alive, or one twice, is moved")
            return
        before = {b: self._bytes_of(b) for b in witness.blocks}
        if step.nbytes != sum(t.nbytes for t in step.transfers):
            self.say("bytes", f"{step.nbytes} B are claimed, the transfers add up to another sum")
        self._stage(step)
        homes = [
            (b.address or 0, b.size_per_bank) for n, b in witness.blocks.items() if n in moving
        ]
        homes += [(a, witness.blocks[n].size_per_bank) for n, a in moving.items()]
        for transfer in step.transfers:
            self._transfer(step, transfer, homes)
        for number, address in step.targets:
            block = witness.blocks[number]
            self._reads(number)
            if block.pinned or block.address is None or block.space is not step.space:
                self.say("pinned", f"{block.origin} cannot move")
            self._region(block.origin, step.space, address, block.size_per_bank)
            self.used.append((step.space, address, address + block.size_per_bank))
            witness.place_at(number, address)
        for number in moving:
            block, stop = witness.blocks[number], moving[number]
            others = witness.live_in(block.space, stop, stop + block.size_per_bank)
            if len(others) > 1:
                self.say("overlap", f"{block.origin} is moved onto another block")
        for number, held in before.items():
            if not held <= self._bytes_of(number):
                self.say("content", f"{witness.blocks[number].origin} is not whole after the moves")
        self._tidy(step.space, homes)
        if step.stage is not None:
            self._tidy(step.stage_space, [step.stage])

    def _bytes_of(self, number: int) -> set[tuple[int, int, int, int]]:
        """What a block holds, counted from its own start."""
        place, start, end = self.witness.span(self.witness.blocks[number])
        return {p._replace(start=p.start - start, end=p.end - start)
                for p in self.witness.memory(place).read(start, end)}  # fmt: skip

    def _tidy(self, space: Space, regions: list[tuple[int, int]]) -> None:
        """What was left behind outside all blocks is garbage."""
        if space not in self.machine.shape.spaces:
            return
        banks, memory = self.machine.shape.space(space).banks, self.witness.memory(space)
        blocks = self.witness.live_in(space, 0, self.machine.shape.space(space).limit)
        kept = sorted((b.address or 0, b.size_per_bank) for b in blocks)
        for address, size in regions:
            at, end = address, address + size
            for start, length in kept:
                if at < start < end:
                    memory.erase(at * banks, start * banks)
                if start < end:
                    at = max(at, start + length)
            if at < end:
                memory.erase(at * banks, end * banks)

    def _stage(self, step: Relocate) -> None:
        leaves = any(step.space is not s for t in step.transfers
                     for s in (t.source_space, t.target_space))  # fmt: skip
        if leaves and step.stage is None:
            self.say("stage", "bytes leave the space and no stage is declared")
        if step.stage is not None:
            address, size = step.stage
            self._region("the stage", step.stage_space, address, size)
            if self.witness.live_in(step.stage_space, address, address + size):
                self.say("stage", "the stage overlaps a live block")
            self.used.append((step.stage_space, address, address + size))
        if leaves:
            self._justify(step, step.certificate)

    def _justify(self, step: Relocate, certificate: Certificate | None) -> None:
        if certificate is None:
            self.say("uncertified", "bytes pass through another space without a certificate")
        elif certificate.kind == "no_path":
            if self.machine.path(step.space, step.space) is not None:
                self.say("certificate", f"the machine has a path inside {step.space.value}")
        elif certificate.kind == "cycle":
            shape = self.machine.shape.space(step.space)
            full = sum(b.size_per_bank for b in self.witness.live_in(step.space, 0, shape.limit))
            if full < shape.capacity:
                self.say("certificate", f"{shape.capacity - full} B of {step.space.value} are free")
        else:
            self.say("certificate", f"{certificate.kind!r} is no reason to bounce")

    def _transfer(self, step: Relocate, t: Transfer, homes: list[tuple[int, int]]) -> None:
        inside = t.source_space is t.target_space
        if inside and self.machine.path(t.source_space, t.target_space) is None:
            self.say("transfer", f"the machine has no path inside {t.source_space.value}")
        ends = ((t.source_space, t.source_address), (t.target_space, t.target_address))
        for space, address in ends:
            if space not in self.machine.shape.spaces:
                self.say("transfer", f"the machine has no {space.value}")
                return
            size = -(-t.nbytes // self.machine.shape.space(space).banks)
            if not self._region("a transfer", space, address, size):
                return
            if space is step.space:
                continue
            stage = step.stage or (0, 0)
            if address < stage[0] or address + size > sum(stage) or space is not step.stage_space:
                self.say("stage", "a transfer goes beside the stage")
        banks = self.machine.shape.space(t.source_space).banks
        read = self.witness.memory(t.source_space).read(
            t.source_address * banks, t.source_address * banks + t.nbytes
        )
        banks_there = self.machine.shape.space(t.target_space).banks
        start = t.target_address * banks_there
        self.witness.memory(t.target_space).put(
            read, start, start + t.nbytes, start - t.source_address * banks
        )
        if t.target_space is step.space:
            end = t.target_address + t.nbytes // banks_there
            self.used.append((step.space, t.target_address, end))
            homes.append((t.target_address, end - t.target_address))

    # -- tasks -----------------------------------------------------------------------------------

    def _in_form(self, what: str, found: Instance, wanted: TensorDesc) -> None:
        block = self.witness.blocks.get(found.block)
        if found.desc != _bare(wanted):
            self.say("layout", f"{what} is {found.desc.text()}, wanted {wanted.text()}")
        at = wanted.layout.address
        if block is None or block.address is None or not self.witness.room(found):
            self.say("room", f"{what} has no room in block {found.block}")
        elif at is not None and (block.address != at or found.offset_nbytes):
            self.say("layout", f"{what} lies at {block.address:#x}, wanted {at:#x}")

    def _execute(self, step: Execute) -> None:
        task = self._start(step.task)
        if task is None or task.transformation.kind is not TransformationKind.PROGRAM:
            self.say("order", f"there is no program {step.task} to run")
            return
        what, witness = task.transformation, self.witness
        if len(step.inputs) != len(what.inputs) or len(step.outputs) != len(what.outputs):
            self.say("layout", f"{what.name!r} has other slots")
            return
        for i, (found, wanted) in enumerate(zip(step.inputs, what.inputs, strict=True)):
            self._reads(found.block)
            self._in_form(f"input {what.input_name(i)!r} of {what.name!r}", found, wanted)
            if not witness.holds(found, task.inputs[i]):
                self.say("content", f"input {what.input_name(i)!r} does not hold its value")
        self._outputs(step, task)
        self._scratch(step, task)
        for found, value in zip(step.outputs, task.outputs, strict=True):
            if found.block in witness.blocks and witness.room(found):
                witness.write(found, value)

    def _outputs(self, step: Execute, task: Task) -> None:
        what = task.transformation
        aliases = dict(what.aliases)
        for o, (found, wanted) in enumerate(zip(step.outputs, what.outputs, strict=True)):
            self._in_form(f"output {what.output_name(o)!r} of {what.name!r}", found, wanted)
            block = self.witness.blocks.get(found.block)
            if block is not None and block.pinned:
                self.say("pinned", f"output {what.output_name(o)!r} overwrites {block.origin}")
            given = aliases.get(o)
            if given is not None and step.inputs[given] != found:
                self.say("alias", f"output {what.output_name(o)!r} does not take its input's place")
            others = [x.block for i, x in enumerate(step.inputs) if i != given]
            others += [x.block for i, x in enumerate(step.outputs) if i != o]
            if found.block in others:
                self.say("overlap", f"output {what.output_name(o)!r} overwrites another operand")

    def _scratch(self, step: Execute, task: Task) -> None:
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
        self._region("scratch", space, address, size)
        if size < wanted.size_per_bank or (space is Space.L1 and address != shape.base):
            self.say("scratch", f"{size} B per bank at {address:#x} are not what was promised")
        operands = {i.block for i in (*step.inputs, *step.outputs)}
        for block in self.witness.live_in(space, address, address + size):
            own = (block.address, block.size_per_bank) == (address, size) and not self._bytes_of(
                block.number
            )
            if space is Space.L1 or not own or block.number in operands:
                self.say("scratch", f"scratch overlaps {block.origin}, which is alive")
        self.used.append((space, address, address + size))
        self.witness.memory(space).erase(address * shape.banks, (address + size) * shape.banks)
