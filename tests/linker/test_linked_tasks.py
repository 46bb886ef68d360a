"""Merged tasks of programs become one program each, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import stitch
from stitch.linker import link_tasks
from stitch.machine import load_machine
from stitch.program import TILE_SHAPE, DataType, Layout, Space, TensorDesc
from stitch.tasks import MergedAgent, ProgramAgent, TaskGraph, aggregate
from tests.support.small_programs import HOST, program
from tests.support.task_graphs import inputs_of, interpreted, random_graph, same

TINY = load_machine("tiny").shape


def linked(graph: TaskGraph, branches: str = "keep") -> TaskGraph:
    table = aggregate(graph, branches, kinds="same").table()
    return TaskGraph.of(link_tasks(table, TINY))


def outputs(device: stitch.Device, graph: TaskGraph, given: dict[str, Any]) -> dict[str, Any]:
    results = device.prepare(graph)(**given)
    tensors = results if isinstance(results, tuple) else (results,)
    return {name: tensor.numpy() for name, tensor in zip(graph.outputs, tensors, strict=True)}


def test_a_chain_becomes_one_program_whose_boundaries_are_gone() -> None:
    graph = TaskGraph()
    x = graph.input(HOST, "x")
    y = graph.input(HOST, "y")
    hidden = graph.call(program("a"), x, y)
    graph.output(graph.call(program("b", "Sub"), hidden, x), "last")
    graph.output(hidden, "hidden")
    (task,) = linked(graph).tasks
    assert isinstance(task.agent, ProgramAgent) and task.name == "a+b"
    assert [f.output for f in task.inputs] == [0, 1, 0] and len(task.agent.program.operations) == 2
    assert len(task.outputs) == 2


def test_linked_graphs_compute_the_same_bits() -> None:
    merged = 0
    with stitch.open_device("tiny") as device:
        for seed in range(25):
            graph = random_graph(seed)
            given = inputs_of(graph.table(), seed)
            expected = interpreted(graph.table(), given)
            for branches in ("stop", "keep"):
                whole = linked(graph, branches)
                assert whole.validate() == ()
                assert same(outputs(device, whole, given), expected)
                merged += len(whole) < len(graph)
    assert merged > 25


@pytest.mark.parametrize("why", ["block", "host", "taken"])
def test_what_cannot_be_linked_stays_merged(why: str) -> None:
    graph = TaskGraph()
    x = graph.input(HOST, "x")
    if why == "block":
        tiles = TensorDesc(HOST.shape, Layout(DataType.BFP8, Space.DRAM, TILE_SHAPE))
        tiled = program("a", "Abs", 1, desc=tiles)
        graph.output(graph.call(tiled, graph.call(tiled, x)))
    elif why == "host":
        graph.output(graph.host(lambda x: x, graph.call(program(), x, x), returns=HOST))
    else:
        hidden = graph.call(program("a", "Abs", 1), x)
        graph.output(graph.call(program("g", donated=(0,)), x, hidden))
    table = aggregate(graph, "keep").table()
    (task,) = link_tasks(table, TINY).tasks
    assert isinstance(task.agent, MergedAgent)


def test_a_merged_task_whose_outputs_stand_in_another_order_stays_merged() -> None:
    graph = TaskGraph()
    x = graph.input(HOST, "x")
    hidden = graph.call(program("a", "Abs", 1), x)
    graph.output(hidden)
    graph.output(graph.call(program("b", "Sub"), hidden, x))
    table = aggregate(graph, "keep").table()
    (row,) = table.tasks
    agent = row.agent
    assert isinstance(agent, MergedAgent) and len(agent.kept) == 2
    turned = replace(agent, kept=agent.kept[::-1])
    (task,) = link_tasks(replace(table, tasks=(row._replace(agent=turned),)), TINY).tasks
    assert task.agent is turned
