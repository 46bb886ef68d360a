"""Random planning requests on small machines, and short words to write requests by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from stitch.errors import LayoutError
from stitch.machine import Machine, footprint, load_machine, shard_layout
from stitch.memory import Allocator
from stitch.planner import Buffer, Instance, PlanRequest, Resident
from stitch.program import DataType, Layout, MemoryLayout, Scratch, Space, TensorDesc
from stitch.tasks import NumberedTask, Transformation, TransformationKind
from tests.support.machines import without_path

TINY = load_machine("tiny")
F32, BF16 = DataType.FLOAT32, DataType.BFLOAT16
L1, DRAM, HOST = Space.L1, Space.DRAM, Space.HOST


def machine_with(*, l1_nbytes: int | None = None, dram_nbytes: int | None = None,
                 base: int = 1024) -> Machine:  # fmt: skip
    """The tiny machine with other sizes, in usable bytes per bank."""
    shape = TINY.shape
    assert shape.l1 is not None and shape.dram is not None
    l1 = shape.l1 if l1_nbytes is None else replace(shape.l1, base=base, limit=base + l1_nbytes)
    dram = shape.dram
    if dram_nbytes is not None:
        dram = replace(dram, base=0, limit=dram_nbytes)
    return replace(TINY, shape=replace(shape, l1=l1, dram=dram))


SMALL = machine_with(l1_nbytes=4096)


MACHINES = (
    TINY,
    machine_with(l1_nbytes=4096),
    machine_with(l1_nbytes=2048),
    without_path(machine_with(l1_nbytes=4096), L1, L1),
    machine_with(l1_nbytes=4096, dram_nbytes=8192),
    without_path(machine_with(l1_nbytes=4096, base=0), L1, DRAM),
)


def desc_of(nbytes_per_bank: int, space: Space = L1, address: int | None = None) -> TensorDesc:
    """A float32 tensor of the tiny machine that takes so many bytes per bank of L1 (16s)."""
    rows = nbytes_per_bank // 16 * 4
    return TensorDesc((rows, 4), Layout(F32, space, address=address))


def program(name: str, inputs: list[TensorDesc], outputs: list[TensorDesc],
            *, scratch: int = 0, aliases: tuple[tuple[int, int], ...] = (),
            scratch_space: Space = L1) -> Transformation:  # fmt: skip
    """A transformation that an executor would run."""
    return Transformation(
        name,
        TransformationKind.PROGRAM,
        tuple(inputs),
        tuple(outputs),
        donated=frozenset(i for _, i in aliases),
        aliases=aliases,
        scratch=Scratch(scratch_space, scratch) if scratch else None,
    )


def to_layout(desc: TensorDesc, name: str = "to_layout") -> Transformation:
    """A transformation that copies."""
    return Transformation(name, TransformationKind.COPY, (), (desc,))


def bare(desc: TensorDesc) -> TensorDesc:
    return TensorDesc(desc.shape, desc.layout.without_address())


class Scene:
    """A request under construction: buffers at addresses, values in them, tasks over values."""

    def __init__(self, machine: Machine = TINY) -> None:
        self.machine = machine
        self.buffers: list[Buffer] = []
        self.residents: list[Resident] = []
        self.tasks: list[NumberedTask] = []
        self.kept: set[int] = set()
        self.count = itertools.count()

    def buffer(self, desc: TensorDesc, address: int | None, *, pinned: bool = False) -> Buffer:
        space = desc.layout.space
        size = footprint(desc, self.machine.shape).size_per_bank if address is not None else 0
        number = len(self.buffers)
        self.buffers.append(
            Buffer(number, space, address, size, bare(desc), f"buffer {number}", pinned)
        )
        return self.buffers[-1]

    def value(self, *instances: Instance, idle: int = 0, keep: bool = False) -> int:
        value = next(self.count)
        self.residents.append(Resident(value, instances, idle))
        if keep:
            self.kept.add(value)
        return value

    def tensor(self, desc: TensorDesc, address: int | None, *, pinned: bool = False,
               keep: bool = False, idle: int = 0) -> int:  # fmt: skip
        """A resident value in a buffer of its own."""
        buffer = self.buffer(desc, address, pinned=pinned)
        return self.value(Instance(buffer.number, 0, bare(desc)), idle=idle, keep=keep)

    def run(self, what: Transformation, *inputs: int, keep: bool = False) -> tuple[int, ...]:
        outputs = tuple(next(self.count) for _ in what.outputs)
        self.tasks.append(NumberedTask(what, inputs, outputs))
        if keep:
            self.kept.update(outputs)
        return outputs

    def request(self) -> PlanRequest:
        return PlanRequest(
            self.machine,
            tuple(self.tasks),
            tuple(self.buffers),
            tuple(self.residents),
            frozenset(self.kept),
        )


def relaid(scene: Scene, *tensors: tuple[int, int, int]) -> PlanRequest:
    """Tensors of L1 (bytes per bank, address) that a program wants at other addresses."""
    shape, values, wanted = scene.machine.shape, [], []
    for size, at, to in tensors:
        desc = TensorDesc((shape.space(L1).banks, size), Layout(DataType.UINT8, L1))
        values.append(scene.tensor(desc, at, keep=True))
        wanted.append(replace(desc, layout=replace(desc.layout, address=to)))
    out = TensorDesc((shape.space(DRAM).banks, 32), Layout(DataType.UINT8, DRAM))
    scene.run(program("p", wanted, [out]), *values, keep=True)
    return scene.request()


# -- random requests ----------------------------------------------------------------------------

SHAPES = (
    (4, 4),
    (16, 4),
    (48, 4),
    (64, 4),
    (12, 32),
    (100, 4),
    (128, 4),
    (2, 33),
    (32, 32),
    (0, 3),
)


def _layout(random: Random, shape: tuple[int, ...], machine: Machine, kind: DataType,
            space: Space) -> TensorDesc:  # fmt: skip
    form = random.randrange(8)
    tile = (32, 32) if form == 6 else None
    desc = TensorDesc(shape, Layout(kind, space, tile))
    if form == 7 and space is not HOST:
        try:
            sharded = shard_layout(
                shape, MemoryLayout.HEIGHT_SHARDED, machine.shape, data_type=kind, space=space
            )
            desc = TensorDesc(shape, sharded)
            footprint(desc, machine.shape)
        except LayoutError:
            return TensorDesc(shape, Layout(kind, space))
    return desc


def _fitting(random: Random, machine: Machine, shape: tuple[int, ...]) -> TensorDesc:
    space = random.choice((L1, L1, L1, DRAM, HOST))
    kind = random.choice((F32, F32, BF16))
    desc = _layout(random, shape, machine, kind, space)
    room = machine.shape.space(space).capacity
    if footprint(desc, machine.shape).size_per_bank * 3 > room * 2:
        return TensorDesc(shape, Layout(kind, DRAM))
    return desc


def _at_an_address(random: Random, machine: Machine, desc: TensorDesc) -> TensorDesc:
    if desc.layout.space is not L1 or random.randrange(6):
        return desc
    shape = machine.shape.space(L1)
    size = footprint(desc, machine.shape).size_per_bank
    slots = (shape.limit - size - shape.base) // shape.granule
    step = random.choice((1, 8, 16))
    address = shape.base + random.randrange(slots // step + 1) * step * shape.granule
    return TensorDesc(desc.shape, replace(desc.layout, address=address))


def _residents(random: Random, scene: Scene) -> list[tuple[int, tuple[int, ...]]]:
    machine = scene.machine
    known: list[tuple[int, tuple[int, ...]]] = []
    allocators = {
        s: Allocator.of(x) for s in machine.shape.spaces for x in [machine.shape.space(s)]
    }

    def placed(desc: TensorDesc, pinned: bool) -> Buffer | None:
        size = footprint(desc, machine.shape).size_per_bank
        address = allocators[desc.layout.space].try_alloc(size, low=bool(random.randrange(2)))
        return None if address is None else scene.buffer(desc, address, pinned=pinned)

    for _ in range(random.randrange(8)):
        shape = random.choice(SHAPES)
        if not random.randrange(6):
            known.append((scene.tensor(TensorDesc(shape, Layout(F32)), None), shape))
            continue
        desc = _fitting(random, machine, shape)
        hole = allocators[desc.layout.space].try_alloc(16 * random.randrange(1, 40))
        buffer = placed(desc, not random.randrange(8))
        if hole is not None:
            allocators[desc.layout.space].free(hole)
        if buffer is None:
            continue
        instances = [Instance(buffer.number, 0, desc)]
        if not random.randrange(4):
            again = _fitting(random, machine, shape)
            other = placed(again, pinned=False)
            if other is not None:
                instances.append(Instance(other.number, 0, again))
                if not random.randrange(3):
                    third = placed(TensorDesc(shape, replace(desc.layout)), pinned=False)
                    if third is not None:
                        instances.append(Instance(third.number, 0, desc))
        known.append((scene.value(*instances, idle=random.randrange(4)), shape))
        if desc.layout.is_dense and shape[0] > 3 and not random.randrange(4):
            start = random.randrange(1, shape[0])
            part = TensorDesc((shape[0] - start, *shape[1:]), desc.layout)
            offset = start * shape[1] * desc.layout.data_type.itemsize
            view = scene.value(Instance(buffer.number, offset, part))
            known.append((view, part.shape))
    return known


def _program(random: Random, scene: Scene, known: list[tuple[int, tuple[int, ...]]],
             index: int) -> set[int]:  # fmt: skip
    """Append a task; gives the values that it consumes."""
    machine = scene.machine
    picked = [
        random.choice(known[-6:])
        for _ in range(random.randrange(1, 4))
        if known and random.randrange(5)
    ]
    inputs = [
        _at_an_address(random, machine, _fitting(random, machine, shape)) for _, shape in picked
    ]
    outputs = [
        _at_an_address(random, machine, _fitting(random, machine, random.choice(SHAPES)))
        for _ in range(random.randrange(1, 3))
    ]
    aliases: tuple[tuple[int, int], ...] = ()
    consumed = set()
    if inputs and not random.randrange(3):
        outputs[0] = inputs[0]
        aliases = ((0, 0),)
        if random.randrange(4):
            consumed.add(picked[0][0])
    scratch, where = 0, L1
    if not random.randrange(3):
        scratch = random.randrange(1, machine.shape.space(L1).capacity // 2)
        where = random.choice((L1, L1, L1, DRAM, HOST))
    what = program(f"p{index}", inputs, outputs, scratch=scratch, aliases=aliases,
                   scratch_space=where)  # fmt: skip
    made = scene.run(what, *(value for value, _ in picked))
    known.extend(zip(made, (d.shape for d in outputs), strict=True))
    return consumed


def random_request(random: Random, machine: Machine | None = None) -> PlanRequest:
    """A request with residents, views, pins, programs, copies, scratch, aliases, addresses."""
    scene = Scene(machine if machine is not None else random.choice(MACHINES))
    known = _residents(random, scene)
    bystanders = {r.value for r in scene.residents}
    for index in range(random.randrange(1, 8)):
        if known and not random.randrange(5):
            value, shape = random.choice(known)
            desc = _at_an_address(random, scene.machine, _fitting(random, scene.machine, shape))
            (made,) = scene.run(to_layout(desc, f"copy{index}"), value)
            known.append((made, shape))
            continue
        consumed = _program(random, scene, known, index)
        known = [k for k in known if k[0] not in consumed]
    used = {v for task in scene.tasks for v in task.inputs}
    alive = {value for value, _ in known}
    scene.kept = {v for v in alive if random.randrange(3)} | (bystanders - used)
    return scene.request()
