"""Automatic placement: against all contiguous cuts, within memory, beside tasks with devices."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from stitch import compile
from stitch.errors import IncompatibleError, OutOfMemoryError, UsageError
from stitch.machine import Machine, copy_counts, load_machine, program_seconds, room_per_bank
from stitch.mesh import placement
from stitch.mesh.dry_runs import dry_run
from stitch.mesh.mesh import open_mesh
from stitch.mesh.placement import place
from stitch.mesh.specification import DeviceEntry, Link, MachineSpecification
from stitch.program import (
    Constant,
    DataType,
    InputSlot,
    Layout,
    Operation,
    OutputSlot,
    Program,
    Scratch,
    Space,
    TensorDesc,
    Value,
    ValueType,
)
from stitch.tasks import NamedValue, ProgramAgent, TaskGraph, TaskRow, TaskTable, program_agent

TINY = load_machine("tiny")
ROWS = 32


def product(name: str, width: int, *outputs: int, reads: Sequence[int] = ()) -> Program:
    """`y0 = x0 @ w0`, ...; further inputs are read by nothing. All in DRAM."""
    shapes = [(ROWS, width), *((ROWS, other) for other in reads)]
    names = [f"x{i}" for i in range(len(shapes))]
    for i, columns in enumerate(outputs):
        shapes += [(width, columns), (ROWS, columns)]
        names += [f"w{i}", f"y{i}"]
    layout = Layout(DataType.FLOAT32, Space.DRAM)
    taken = 1 + len(reads)
    return Program(
        name,
        tuple(InputSlot(names[i], i) for i in range(taken)),
        tuple(OutputSlot(f"y{i}", taken + 2 * i + 1) for i in range(len(outputs))),
        tuple(
            Value(name, ValueType(shape, DataType.FLOAT32), layout)
            for name, shape in zip(names, shapes, strict=True)
        ),
        tuple(
            Operation("MatMul", (0, taken + 2 * i), (taken + 2 * i + 1,))
            for i in range(len(outputs))
        ),
        tuple(
            Constant(taken + 2 * i, np.zeros((width, columns), np.float32))
            for i, columns in enumerate(outputs)
        ),
        Scratch(Space.L1, 0),
    )  # fmt: skip


def chain(widths: Sequence[int], devices: tuple[str | None, ...] = ()) -> TaskTable:
    """Tasks one after the other, each a product to the next width."""
    programs = [product(f"p{i}", a, b) for i, (a, b) in enumerate(pairwise(widths))]
    agents = [program_agent(program) for program in programs]
    return TaskTable(
        "chain", (NamedValue("x", 0),),
        tuple(TaskRow(agent, (i,), (i + 1,)) for i, agent in enumerate(agents)),
        (NamedValue("y", len(agents)),),
        (programs[0].input_desc(0), *[program.output_desc(0) for program in programs]),
        devices,
    )  # fmt: skip


def specification(
    machines: Sequence[Machine], dice: random.Random, *, equal_links: bool
) -> MachineSpecification:
    names = [f"d{i}" for i in range(len(machines))]
    figures = [(dice.choice([0.0, 1e-6, 1e-5]), dice.choice([1e9, 1e10, 1e11])) for _ in range(3)]
    links = tuple(
        Link(a, b, *(figures[0] if equal_links else dice.choice(figures)))
        for a in names for b in names if a != b
    )  # fmt: skip
    entries = map(DeviceEntry, machines)
    return MachineSpecification("test", dict(zip(names, entries, strict=True)), links)


def slower(times: float) -> Machine:
    assert TINY.compute is not None
    return replace(TINY, compute=replace(TINY.compute, clock_hz=1e9 / times))


def slowest(table: TaskTable, where: Sequence[str], spec: MachineSpecification) -> float:
    """The seconds of the slowest device: its programs, and each value that it receives, once.

    What a device receives crosses the link, and then goes from the host to DRAM.
    """
    seconds = dict.fromkeys(spec.devices, 0.0)
    received = set()
    maker = {value: where[t] for t, row in enumerate(table.tasks) for value in row.outputs}
    for task, device in zip(table.tasks, where, strict=True):
        assert isinstance(task.agent, ProgramAgent)
        seconds[device] += program_seconds(task.agent.program, spec.entry(device).machine)
        for value in task.inputs:
            if maker.get(value) != device:
                received.add((value, device))
    for value, device in received:
        desc = table.descs[value]
        if value in maker:
            nbytes = 4 * math.prod(desc.shape)
            seconds[device] += spec.link(maker[value], device).seconds(nbytes)
        on_host = TensorDesc(desc.shape, Layout(DataType.FLOAT32))
        machine = spec.entry(device).machine
        seconds[device] += machine.copy_seconds(copy_counts(on_host, desc, machine))
    return max(seconds.values())


def fits(table: TaskTable, where: Sequence[str], spec: MachineSpecification) -> bool:
    """Whether the DRAM of each device holds all constants and the slots of any one program."""
    for name, entry in spec.devices.items():
        shape = entry.machine.shape
        constants, slots = 0, [0]
        for task, device in zip(table.tasks, where, strict=True):
            if device != name:
                continue
            assert isinstance(task.agent, ProgramAgent)
            program = task.agent.program
            held = {constant.value for constant in program.constants}
            sizes = [room_per_bank(value.desc, shape) for value in program.values]
            constants += sum(sizes[value] for value in held)
            slots.append(sum(size for value, size in enumerate(sizes) if value not in held))
        if constants + max(slots) > shape.space(Space.DRAM).capacity:
            return False
    return True


def all_cuts(tasks: int, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All contiguous stages on devices in their order, some of them perhaps unused."""
    yield from combinations_with_replacement(names, tasks)


@pytest.mark.parametrize("seed", range(50))
def test_a_chain_is_cut_as_well_as_by_trying_all_cuts(seed: int) -> None:
    dice = random.Random(seed)
    table = chain([dice.choice([32, 64, 256, 512, 640]) for _ in range(dice.randint(2, 8))])
    machines = [dice.choice([TINY, slower(1.5), slower(4)]) for _ in range(dice.randint(1, 4))]
    spec = specification(machines, dice, equal_links=False)
    cuts = [
        cut for cut in all_cuts(len(table.tasks), tuple(spec.devices)) if fits(table, cut, spec)
    ]
    if not cuts:
        with pytest.raises(OutOfMemoryError):
            place(table, spec)
        return
    where = place(table, spec)
    assert where in cuts
    best = min(slowest(table, cut, spec) for cut in cuts)
    assert slowest(table, where, spec) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(20))
def test_a_graph_with_branches_is_cut_as_well_on_equal_links(seed: int) -> None:
    """Values that several stages read, and values that pass a stage by."""
    dice = random.Random(seed)
    rows: list[TaskRow] = []
    descs = [product("p", 64, 32).input_desc(0)]
    for task in range(7):
        reads = [dice.randrange(len(descs)) for _ in range(dice.randint(1, 3))]
        widths = [descs[value].shape[1] for value in reads]
        outputs = [dice.choice([32, 64, 128]) for _ in range(dice.randint(1, 2))]
        program = product(f"p{task}", widths[0], *outputs, reads=widths[1:])
        new = tuple(range(len(descs), len(descs) + len(outputs)))
        descs += [program.output_desc(i) for i in range(len(outputs))]
        rows.append(TaskRow(program_agent(program), tuple(reads), new))
    table = TaskTable("graph", (NamedValue("x", 0),), tuple(rows), (), tuple(descs))
    spec = specification([TINY, slower(2), TINY], dice, equal_links=True)
    best = min(slowest(table, cut, spec) for cut in all_cuts(7, tuple(spec.devices)))
    where = place(table, spec)
    assert list(where) == sorted(where)
    assert slowest(table, where, spec) == pytest.approx(best)


def test_equal_tasks_are_divided_evenly() -> None:
    table, three = chain([64] * 10), MachineSpecification.of(3, "tiny")
    assert place(table, three) == ("device0",) * 3 + ("device1",) * 3 + ("device2",) * 3


def test_devices_beyond_the_tasks_stay_unused() -> None:
    assert place(chain([320, 320, 320]), MachineSpecification.of(8, "tiny")) == (
        "device0",
        "device1",
    )


def test_a_link_that_costs_more_than_it_saves_is_not_used() -> None:
    entry = DeviceEntry(TINY)
    slow = Link("a", "b", 1.0, 1e9)
    two = MachineSpecification("two", {"a": entry, "b": entry}, (slow,))
    assert place(chain([64] * 5), two) == ("a",) * 4


def test_tasks_that_name_a_device_keep_it_and_count_for_it() -> None:
    two = MachineSpecification.of(2, "tiny")
    free = (None,)
    table = chain([128] * 9, ("device0",) * 4 + free * 4)
    assert place(table, two) == ("device0",) * 4 + ("device1",) * 4
    table = chain([128] * 9, free * 4 + ("device0",) * 4)
    assert place(table, two) == ("device1",) * 4 + ("device0",) * 4
    named = ("device1", "device0") * 4
    assert place(chain([128] * 9, named), two) == named


def test_an_unknown_device_is_refused_with_the_closest_name_and_the_task() -> None:
    table = chain([64, 64, 64], (None, "devise1"))
    with pytest.raises(UsageError, match="no device 'devise1'; did you mean 'device1'") as caught:
        place(table, MachineSpecification.of(2, "tiny"))
    assert caught.value.where == "task 1 (p1) of task graph 'chain'"


def test_what_no_device_can_hold_is_reported_by_stage_with_bytes_and_tensors() -> None:
    table = chain([32, 500, 500, 500, 500, 32])
    with pytest.raises(OutOfMemoryError) as caught:
        place(table, MachineSpecification.of(1, "tiny"))
    text = str(caught.value)
    constant = room_per_bank(table.tasks[1].agent.program.values[1].desc, TINY.shape)  # type: ignore[union-attr]
    free = TINY.shape.space(Space.DRAM).capacity
    assert "the devices of '1 tiny' cannot hold the task graph 'chain':\n" in text
    assert "  - device 'device0' (tiny): dram needs " in text
    assert f" B per bank, {free} B are free: constant 'w0' of 'p1' ({constant} B per bank)" in text
    assert place(table, MachineSpecification.of(3, "tiny"))[0] == "device0"


def test_constants_of_a_program_that_runs_twice_are_held_once() -> None:
    """Two programs of this size do not fit one device, one program as often as wanted does."""
    agent = program_agent(product("p", 420, 420))
    descs = (product("p", 420, 420).input_desc(0),) * 7
    rows = tuple(TaskRow(agent, (i,), (i + 1,)) for i in range(6))
    table = TaskTable("loop", (NamedValue("x", 0),), rows, (NamedValue("y", 6),), descs)
    assert place(table, MachineSpecification.of(1, "tiny")) == ("device0",) * 6
    with pytest.raises(OutOfMemoryError):
        place(chain([420] * 7), MachineSpecification.of(1, "tiny"))


def test_a_device_with_named_tasks_beyond_its_memory_is_reported() -> None:
    table = chain([500, 500, 500, 500], ("device1",) * 3)
    with pytest.raises(OutOfMemoryError, match=r"device 'device1' \(tiny\): dram needs"):
        place(table, MachineSpecification.of(2, "tiny"))


def test_a_program_runs_only_where_the_machine_has_its_spaces() -> None:
    """The host has no DRAM: everything goes to the other device, or nothing does."""
    host = DeviceEntry(load_machine("host"))
    mixed = MachineSpecification("mixed", {"a": host, "b": DeviceEntry(TINY)})
    assert place(chain([64, 64, 64]), mixed) == ("b", "b")
    with pytest.raises(IncompatibleError, match=r"device 'a' \(host\): program 'p0': "):
        place(chain([64, 64, 64]), MachineSpecification("none", {"a": host}))


def test_a_binary_runs_only_where_the_machine_is_as_it_was_compiled_for() -> None:
    x = np.ones((4, 8), np.float32)
    graph, model = TaskGraph("g"), compile(lambda x: x + 1, [x], target="wormhole_n150")
    graph.output(graph.call(model, graph.input(model.program.input_desc(0))))
    tiny, wide = DeviceEntry(TINY), DeviceEntry(load_machine("wormhole_n150"))
    mixed = MachineSpecification("mixed", {"a": tiny, "b": wide})
    assert place(graph.table(), mixed) == ("b",)
    with graph.on("a"):
        graph.output(graph.call(model, graph.input(model.program.input_desc(0))))
    with pytest.raises(IncompatibleError, match="compiled for 'wormhole_n150': core grid: needs"):
        place(graph.table(), mixed)


def test_a_long_graph_is_cut_at_some_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_POINTS", 4)
    table = chain([64] * 16)
    assert place(table, MachineSpecification.of(2, "tiny")) == ("device0",) * 8 + ("device1",) * 7


def test_a_graph_without_tasks_has_no_placement() -> None:
    assert place(TaskTable("none", (), (), (), ()), MachineSpecification.of(2, "tiny")) == ()


def test_stages_take_the_seconds_that_placement_counts() -> None:
    table, spec = chain([64, 128, 256, 128, 320, 64, 32]), MachineSpecification.of(3, "tiny")
    with open_mesh(spec, executor="null") as mesh:
        told = dry_run(mesh.prepare(TaskGraph.of(table)))
    assert [piece.device for piece in told.pieces] == ["device0", "device1", "device2"]
    where = place(table, spec)
    links = {"device0": 0.0}
    for piece in told.pieces[1:]:
        (value,) = piece.inputs
        nbytes = 4 * math.prod(table.descs[value].shape)
        links[piece.device] = spec.link("device0", piece.device).seconds(nbytes)
    found = [s + links[p.device] for s, p in zip(told.seconds, told.pieces, strict=True)]
    assert slowest(table, where, spec) == pytest.approx(max(found))
