"""Random placed graphs: compiled programs, host functions and copies on several devices.

Host functions are functions of this module, which another process finds by their names. Values are
float32 and bfloat16. `checked` raises `Told` where the input `stop` says so.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import stitch
from stitch.graph import ComputationGraphBuilder
from stitch.program import Array, DataType, Layout, Ownership, Space, TensorDesc
from stitch.report import Device
from stitch.tasks import (
    CopyAgent,
    Future,
    HostCall,
    HostFunction,
    InputPlace,
    ProgramAgent,
    TaskGraph,
    host_function,
)
from tests.support.task_graphs import Told

MACHINE = "tiny"
DEVICES = ("left", "middle", "right")
SHAPE = (4, 8)
WIDE, NARROW = DataType.FLOAT32, DataType.BFLOAT16
DESCS = {kind: TensorDesc(SHAPE, Layout(kind)) for kind in (WIDE, NARROW)}


def weighted(x: Array, y: Array, weight: float = 2.0) -> Array:
    return x * np.float32(0.5) + y * np.float32(weight) * np.float32(0.25)


def two(x: Array) -> tuple[Array, Array]:
    return x + np.float32(1), (x * np.float32(0.5)).astype(NARROW.dtype)


def bump(x: Array, y: Array) -> None:
    x += y * np.float32(0.5)


def filled(out: Array, x: Array, y: Array) -> None:
    np.subtract(x, y, out=out)


def larger(x: Array, y: Array) -> Array:
    return np.maximum(x, y)


def checked(x: Array, stop: Array, which: int) -> Array:
    """Half of x; raises `Told` where the first element of `stop` is `which`."""
    if stop[0, 0] == which:
        raise Told(which)
    return x * np.float32(0.5)


def noticed(x: Array, stop: Array, which: int) -> None:
    """Raises `Told` where the first element of `stop` is `which`."""
    checked(x, stop, which)


#: The functions, and the types of their arrays.
FUNCTIONS: Mapping[str, tuple[HostFunction, tuple[DataType, ...]]] = {
    "weighted": (host_function(weighted, returns=DESCS[WIDE]), (WIDE, WIDE)),
    "two": (host_function(two, returns=(DESCS[WIDE], DESCS[NARROW])), (WIDE,)),
    "bump": (host_function(bump, updates="x"), (WIDE, WIDE)),
    "filled": (host_function(filled, returns=DESCS[WIDE], writes="out"), (WIDE, WIDE)),
    "larger": (host_function(larger, returns=DESCS[NARROW]), (NARROW, NARROW)),
    "checked": (host_function(checked, returns=DESCS[WIDE]), (WIDE,)),
}
#: The programs, and the types of their inputs.
PROGRAMS: Mapping[str, tuple[DataType, ...]] = {
    "add": (WIDE, WIDE), "mixed": (WIDE, WIDE), "dense": (WIDE,), "taken": (WIDE, WIDE),
    "narrowed": (WIDE,), "widened": (NARROW,), "sum": (NARROW, NARROW),
}  # fmt: skip
#: Tasks that overwrite their first input.
OVERWRITING = ("bump", "taken")


@cache
def compiled(name: str) -> stitch.CompiledModel:
    """A program; `.binary` is what a file of it holds."""
    builder = ComputationGraphBuilder(name)
    x, *more = [
        builder.input(
            f"x{i}", SHAPE, kind.value,
            ownership=Ownership.DONATE if name == "taken" and i == 0 else Ownership.BORROW,
        )
        for i, kind in enumerate(PROGRAMS[name])
    ]  # fmt: skip
    if name == "dense":
        weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
        results = [builder.op("MatMul", x, builder.constant(weight))]
    elif name in ("narrowed", "widened"):
        results = [builder.op("Cast", x, to=16 if name == "narrowed" else 1)]  # ONNX's numbers
    else:
        results = [builder.op("Sub" if name == "taken" else "Add", x, *more)]
        if name == "mixed":
            results.append(builder.op("Sub", x, *more))
    for i, result in enumerate(results):
        builder.output(f"y{i}", result)
    return stitch.compile(builder.build(), target=MACHINE)


@dataclass(frozen=True)
class PlacedCase:
    """A graph whose tasks are all placed, and its inputs by name.

    `checks`: of so many tasks each fails where `stopping` chooses it.
    """

    graph: TaskGraph
    inputs: Mapping[str, Array]
    checks: int

    def stopping(self, which: int) -> dict[str, Array]:
        """The inputs for which one check fails."""
        return {**self.inputs, "stop": np.full(SHAPE, which, np.float32)}


def placed(
    graph: TaskGraph, seed: int, devices: Sequence[str | None] = (*DEVICES, None)
) -> TaskGraph:
    """The same graph on devices that are drawn, neighbours often on one."""
    chance = random.Random(seed)
    where: list[str | None] = []
    for _ in graph.rows:
        stays = where and chance.random() < 0.4
        where.append(where[-1] if stays else chance.choice(devices))
    return TaskGraph.of(replace(graph.table(), devices=tuple(where)))


def placed_case(seed: int, tasks: int = 20, devices: Sequence[str] = DEVICES) -> PlacedCase:
    """A graph that can run: branches, joins, several outputs, overwritten values, checks.

    Every input is read, and every output is what a task makes.
    """
    chance = random.Random(seed)
    draw = np.random.default_rng(seed)
    graph = TaskGraph(f"placed{seed}")
    inputs: dict[str, Array] = {}
    alive: dict[DataType, list[Future]] = {}
    for kind in chance.choice([(WIDE, WIDE, NARROW), (WIDE, WIDE, NARROW, NARROW)]):
        name = f"x{len(inputs)}"
        alive.setdefault(kind, []).append(graph.input(DESCS[kind], name))
        inputs[name] = draw.standard_normal(SHAPE).astype(kind.dtype)
    stop = graph.input(DESCS[WIDE], "stop")
    inputs["stop"] = np.full(SHAPE, -1, np.float32)
    kept: set[Future] = set()
    checks = 0

    def some(kind: DataType) -> Future:
        return chance.choice(alive[kind][-3:] if chance.random() < 0.6 else alive[kind])

    for left in reversed(range(chance.randint(4, tasks))):
        name = chance.choice([*FUNCTIONS, *PROGRAMS, "copy"]) if left or checks else "checked"
        if name == "copy":
            kind = chance.choice((WIDE, NARROW))
            to = Layout(chance.choice((WIDE, NARROW)), chance.choice((Space.HOST, Space.DRAM)))
            made: Any = graph.copy(some(kind), to)
        else:
            function, kinds = FUNCTIONS.get(name) or (None, PROGRAMS[name])
            given = [some(kind) for kind in kinds]
            if name in OVERWRITING:
                free = [f for f in alive[WIDE] if f not in kept]
                if not free or len(alive[WIDE]) < 2:
                    continue
                given[0] = chance.choice(free)
                alive[WIDE].remove(given[0])
                given[1] = some(WIDE)
            if function is None:
                made = graph.call(compiled(name), *given)
            elif name == "checked":
                made = graph.host(function, *given, stop, checks)
                checks += 1
            else:
                made = graph.host(function, *given)
        for future in made if isinstance(made, tuple) else (made,):
            alive[future.desc.layout.data_type].append(future)
            if chance.random() < 0.25:
                kept.add(future)
                graph.output(future)
    read = {number for row in graph.rows for number in row.inputs}
    for source in graph.inputs.values():
        if source.number not in read:
            graph.output(graph.copy(source, Layout(WIDE, Space.DRAM)))
    if not graph.outputs:
        graph.output(made if isinstance(made, Future) else made[0])
    return PlacedCase(placed(graph, seed, devices), inputs, checks)


def by_one_device(
    graph: TaskGraph, inputs: Mapping[str, Array], device: Device
) -> dict[str, Array]:
    """The outputs by name, each task run by itself; without what a failed check cancels."""
    table = graph.table()
    values: dict[int, Any] = {number: device.tensor(inputs[name]) for name, number in table.inputs}
    found: dict[int, Array] = {}
    for agent, read, made in table.tasks:
        if not values.keys() >= {*read}:
            continue
        given = [values[number] for number in read]
        try:
            if isinstance(agent, ProgramAgent):
                results = device.loaded(agent.source, 0)(*given)
            elif isinstance(agent, CopyAgent):
                results = device.to_layout(given[0], agent.desc, copy=True)
            else:
                assert isinstance(agent, HostCall)
                arguments = [
                    given[value.index] if isinstance(value, InputPlace) else value
                    for value in agent.arguments[len(agent.function.writes) :]
                ]
                results = device.call(agent.function, *arguments)
            device.wait()
        except Told:
            continue
        tensors = results if isinstance(results, tuple) else (results,)
        for number, tensor in zip(made, tensors, strict=True):
            values[number], found[number] = tensor, tensor.numpy().copy()
    return {name: found[number] for name, number in table.outputs if number in found}
