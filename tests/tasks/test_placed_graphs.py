"""Tasks on named devices: a block of `graph.on` names them, and all forms of a graph keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.errors import TaskError, UsageError
from stitch.tasks import MergedAgent, TaskGraph, aggregate, compose
from tests.support.placed_graphs import DESCS, MACHINE, WIDE, by_one_device, placed, placed_case
from tests.support.small_programs import DRAM, HOST, program
from tests.support.task_graphs import random_graph, same


def chain(*devices: str | None) -> TaskGraph:
    """x -> p0 -> p1 ... -> y, a task on each device."""
    graph = TaskGraph("chain")
    value = graph.input(HOST, "x")
    for i, device in enumerate(devices):
        called = program(f"p{i}", "Abs", 1)
        if device is None:
            value = graph.call(called, value)
        else:
            with graph.on(device):
                value = graph.call(called, value)
    graph.output(value, "y")
    return graph


def devices_of(graph: TaskGraph) -> tuple[str | None, ...]:
    return graph.table().devices


def test_tasks_of_any_kind_that_are_added_in_a_block_are_on_its_device() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    before = graph.call(program("a", "Abs", 1), x)
    with graph.on("left"):
        called = graph.call(program("b", "Abs", 1), before)
        copied = graph.copy(called, DRAM)
        late = graph.input(HOST)
        hosted = graph.host(lambda a, b: a, copied, late, returns=HOST)
    graph.call(program("c", "Abs", 1), hosted)
    assert devices_of(graph) == (None, "left", "left", "left", None)
    assert [task.device for task in graph.tasks] == [*devices_of(graph)]


def test_of_nested_blocks_the_innermost_decides() -> None:
    graph = TaskGraph()
    value = graph.input(HOST)

    def add() -> None:
        nonlocal value
        value = graph.call(program("a", "Abs", 1), value)

    with graph.on("left"):
        add()
        with graph.on("right"):
            add()
        add()
    add()
    assert devices_of(graph) == ("left", "right", "left", None)


def test_a_block_that_raises_ends_like_any_other() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    with graph.on("left"):
        with pytest.raises(UsageError), graph.on("right"):
            graph.call(program())
        graph.call(program("a", "Abs", 1), x)
    graph.call(program("a", "Abs", 1), x)
    assert devices_of(graph) == ("left", None)


@pytest.mark.parametrize("wrong", ["", None, 3, b"left"])
def test_a_device_has_a_name(wrong: Any) -> None:
    graph = TaskGraph()
    with pytest.raises(UsageError, match="takes the name of a device as device"):
        graph.on(wrong)


def test_a_table_without_devices_is_equal_to_those_that_never_had_any() -> None:
    plain = chain(None, None)
    assert devices_of(plain) == ()
    assert TaskGraph.of(replace(plain.table(), devices=(None, None))).table() == plain.table()
    copied = TaskGraph()
    copied.copy(copied.input(HOST), DRAM)
    table = copied.table()
    assert hash(table) == hash(replace(TaskGraph.of(table).table(), devices=()))
    assert len({table, replace(table, devices=("left",))}) == 2


def test_graphs_are_equal_where_their_tasks_are_on_the_same_devices() -> None:
    called = program("a", "Abs", 1)

    def graph(device: str) -> TaskGraph:
        made = TaskGraph()
        x = made.input(HOST)
        with made.on(device):
            made.output(made.call(called, x))
        return made

    assert graph("left") == graph("left") != graph("right")
    assert graph("left") != TaskGraph.of(replace(graph("left").table(), devices=()))


def test_a_copy_of_a_graph_keeps_devices_and_grows() -> None:
    graph = TaskGraph.of(chain("left", None).table())
    with graph.on("right"):
        graph.call(program("a", "Abs", 1), graph.outputs["y"])
    assert devices_of(graph) == ("left", None, "right")


def test_tasks_of_different_devices_do_not_become_one() -> None:
    graph = chain("left", "left", "right", None)
    for branches in ("stop", "keep"):
        merged = aggregate(graph, branches)
        assert devices_of(merged) == ("left", "right", None)
        assert isinstance(merged.tasks[0].agent, MergedAgent)
    first, second, third, last = graph.tasks
    assert compose(first, second).device == "left"
    for one, other in ((second, third), (third, last)):
        with pytest.raises(TaskError, match="cannot become one: they are on different devices"):
            compose(one, other)


@pytest.mark.parametrize("seed", range(40))
def test_an_aggregated_graph_has_each_task_on_its_device(seed: int) -> None:
    graph = placed(random_graph(seed), seed)

    def on_devices(form: TaskGraph) -> list[tuple[str, str | None]]:
        table = form.table().flattened()
        named = [(row.agent.name, table.device_of(i)) for i, row in enumerate(table.tasks)]
        return sorted(named, key=repr)

    for branches in ("stop", "keep"):
        assert on_devices(aggregate(graph, branches)) == on_devices(graph)


def test_one_device_refuses_a_graph_that_names_several() -> None:
    with stitch.open_device(MACHINE) as device:
        with pytest.raises(UsageError, match="names several\n  got: left, right") as caught:
            device.prepare(chain("left", None, "right"))
        assert "stitch.open_mesh(...).prepare(graph)" in str(caught.value)


def test_one_device_runs_a_graph_that_names_one() -> None:
    graph = TaskGraph()
    x = graph.input(DESCS[WIDE], "x")
    with graph.on("left"):
        graph.output(graph.host(np.negative, x, returns=DESCS[WIDE]))
    with stitch.open_device(MACHINE) as device:
        given = np.ones((4, 8), np.float32)
        assert np.array_equal(device.prepare(graph)(given).numpy(), -given)


def test_random_placed_graphs_have_what_tests_of_several_devices_need() -> None:
    """Both ways of running them agree, and a check that fails cancels a part or all."""
    agents, partly = set(), 0
    with stitch.open_device(MACHINE) as device:
        for seed in range(40):
            case = placed_case(seed)
            agents |= {row.agent.name for row in case.graph.rows}
            whole = by_one_device(case.graph, case.inputs, device)
            assert list(whole) == list(case.graph.outputs)
            results = device.prepare(TaskGraph.of(replace(case.graph.table(), devices=())))(
                **case.inputs
            )
            tensors = results if isinstance(results, tuple) else (results,)
            arrays = [tensor.numpy() for tensor in tensors]
            assert same(whole, dict(zip(whole, arrays, strict=True)))
            left = by_one_device(case.graph, case.stopping(case.checks - 1), device)
            assert same(left, {name: whole[name] for name in left})
            partly += 0 < len(left) < len(whole)
    assert partly > 5 and len(agents) == 14
