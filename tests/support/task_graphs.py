"""Random task graphs, and what they compute, by plain Python: one task after the other.

Values that a task takes over are really overwritten, so a wrong order shows in the results. A host
function that raises `Told` makes nothing, and neither does any task that reads what is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stitch.program import Array, DataType, Layout, Space, TensorDesc
from stitch.tasks import (
    OUTSIDE,
    CopyAgent,
    Future,
    HostCall,
    HostFunction,
    MergedAgent,
    ProgramAgent,
    TaskGraph,
    TaskTable,
    task,
)
from tests.support.small_programs import DRAM, HOST, SHAPE, program

L1 = TensorDesc(SHAPE, Layout(DataType.FLOAT32, Space.L1))

KERNELS: Mapping[str, Any] = {"Add": np.add, "Sub": np.subtract, "Abs": np.abs}


@task(returns=HOST)
def weighted(x: Any, y: Any, weight: float = 2.0) -> Any:
    return x * np.float32(0.5) + y * np.float32(weight) * np.float32(0.25)


@task(returns=(HOST, HOST))
def two(x: Any) -> Any:
    return x + np.float32(1), x * np.float32(0.5)


@task(updates="x")
def bump(x: Any, y: Any) -> None:
    x += y * np.float32(0.5)


@task(returns=HOST, writes="out")
def filled(out: Any, x: Any, *more: Any) -> None:
    np.copyto(out, x)
    for array in more:
        out -= array


FUNCTIONS: Mapping[str, HostFunction] = {f.name: f for f in (weighted, two, bump, filled)}
PROGRAMS = {
    p.name: p
    for p in (
        program("add"), program("sub", "Sub"), program("abs", "Abs", 1),
        program("pair", "Add", outputs=2), program("given", "Sub", donated=(0,)),
        program("near", "Sub", desc=L1),
    )
}  # fmt: skip
LAYOUTS = (HOST.layout, DRAM.layout, L1.layout)


class Told(Exception):
    """What a host function raises that was told to fail."""


def random_graph(
    seed: int,
    tasks: int = 12,
    *,
    of: Callable[[str], HostFunction] = FUNCTIONS.__getitem__,
    more: Sequence[str] = (),
) -> TaskGraph:
    """A sound graph: branches, joins, several outputs, updates in place, host reads.

    Every input is read, and every output is what a task makes, so that devices can run it. `of`
    gives the host function of a task; `more`: names of further ones, of one value that give one.
    """
    chance = random.Random(seed)
    graph = TaskGraph(f"random{seed}")
    alive = [graph.input(HOST, f"x{i}") for i in range(chance.randint(1, 3))]
    kept: list[Future] = []

    def some() -> Future:
        recent = alive[-3:] if chance.random() < 0.6 else alive
        return chance.choice(recent)

    def taken() -> Future | None:
        free = [future for future in alive if future not in kept]
        if len(alive) < 2 or not free:
            return None
        future = chance.choice(free)
        alive.remove(future)
        return future

    for _ in range(chance.randint(1, tasks)):
        what = chance.choice([*FUNCTIONS, *more, *PROGRAMS, "copy", "input"])
        gone = taken() if what in ("bump", "given") else None
        if what == "copy":
            made: Any = graph.copy(some(), chance.choice(LAYOUTS))
        elif what == "input":
            made = graph.input(HOST)
        elif what == "bump" and gone is not None:
            made = graph.host(of(what), gone, some())
        elif what == "given" and gone is not None:
            made = graph.call(PROGRAMS["given"], gone, some())
        elif what == "weighted":
            made = graph.host(of(what), some(), some(), weight=chance.randint(1, 4))
        elif what == "filled":
            made = graph.host(of(what), *[some() for _ in range(chance.randint(1, 3))])
        elif what == "two" or what in more:
            made = graph.host(of(what), some())
        elif what in ("add", "sub", "pair", "near"):
            made = graph.call(PROGRAMS[what], some(), some())
        else:
            made = graph.call(PROGRAMS["abs"], some())
        alive += made if isinstance(made, tuple) else [made]
        future = some()
        if chance.random() < 0.25 and future.task != OUTSIDE:
            kept.append(future)
            graph.output(future)
    read = {number for row in graph.rows for number in row.inputs}
    for source in graph.inputs.values():
        if source.number not in read:
            graph.output(graph.copy(source, DRAM))
    if not graph.outputs:
        graph.output(next(f for f in reversed(alive) if f.task != OUTSIDE))
    return graph


def inputs_of(table: TaskTable, seed: int = 0) -> dict[str, Any]:
    """An array for each input."""
    draw = np.random.default_rng(seed)
    return {v.name: draw.standard_normal(SHAPE).astype(np.float32) for v in table.inputs}


def interpreted(
    table: TaskTable, inputs: Mapping[str, Any], history: dict[int, Array] | None = None
) -> dict[str, Any]:
    """What a table computes, by name; what it does not, as a task was told to fail, is left out.

    `history` is given every value as it was when it was made, by number.
    """
    values: dict[int, Array] = {number: inputs[name].copy() for name, number in table.inputs}
    for agent, read, made in table.tasks:
        if not all(number in values for number in read):
            continue
        try:
            results = _run(agent, [values[number] for number in read])
        except Told:
            continue
        assert len(results) == len(made)
        values.update(zip(made, results, strict=True))
        if history is not None:
            history.update({number: values[number].copy() for number in made})
    return {name: values[number] for name, number in table.outputs if number in values}


def _run(agent: Any, arrays: list[Any]) -> list[Any]:
    if isinstance(agent, MergedAgent):
        local = list(arrays)
        for member in agent.members:
            assert member.outputs[:1] in ((), (len(local),))
            local += _run(member.agent, [local[number] for number in member.inputs])
        return [local[number] for number in agent.kept]
    if isinstance(agent, CopyAgent):
        return [arrays[0].copy()]
    if isinstance(agent, HostCall):
        written = [np.zeros(desc.shape, np.float32) for desc in agent.function.returns]
        written = written[: len(agent.function.writes)]
        returned = agent.run(arrays, written)
        rest = len(agent.function.returns) - len(written)
        results = () if rest == 0 else (returned,) if rest == 1 else returned
        return [*written, *results, *[arrays[i] for i in agent.updated]]
    assert isinstance(agent, ProgramAgent)
    results = [
        KERNELS[operation.op](*[arrays[number] for number in operation.inputs])
        for operation in agent.program.operations
    ]
    for i in agent.consumes:
        arrays[i][:] = np.nan
    return results


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs gave the same bits under the same names."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name], equal_nan=True) for name in one
    )
