"""Task graphs: tasks are added in order, futures point at what is earlier, a table freezes it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stitch.errors import TaskError, UsageError
from stitch.machine import load_machine
from stitch.program import DataType, Layout, Space, TensorDesc
from stitch.tasks import OUTSIDE, InputPlace, OutputPlace, ProgramAgent, TaskGraph, task
from stitch.ttb import Binary
from tests.support.small_programs import DRAM, HOST, program


@task(returns=HOST)
def host_add(x: Any, y: Any) -> Any:
    return x + y


def test_futures_may_be_used_before_their_value_exists() -> None:
    graph = TaskGraph("mixed")
    x = graph.input(HOST, "x")
    hidden = graph.call(program("a"), x, x)
    total = graph.host(host_add, hidden, x)
    moved = graph.copy(total, Layout(DataType.FLOAT32, Space.L1))
    graph.output(graph.call(program("b"), x0=moved, x1=hidden), "y")
    assert [t.name for t in graph.tasks] == ["a", "host_add", "to_layout", "b"]
    assert moved.desc.layout.space is Space.L1 and hidden.desc == DRAM
    assert graph.inputs == {"x": x} and list(graph.outputs) == ["y"]


def test_the_producer_of_a_value_is_known() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    one, two = graph.call(program("two", outputs=2), x, x)
    assert (x.task, x.output) == (OUTSIDE, 0)
    assert (one.task, one.output) == (0, 0) and (two.task, two.output) == (0, 1)
    assert graph.producer(two) == graph.tasks[0] and graph.producer(x) is None
    assert graph.input(HOST).output == 1


def test_a_task_has_a_lookup_table_from_futures_to_places() -> None:
    graph = TaskGraph()
    x, y = graph.input(HOST), graph.input(HOST)
    z = graph.call(program(inputs=3, op="Sum"), x, y, x)
    assert graph.tasks[0].places == {x: InputPlace(0), y: InputPlace(1), z: OutputPlace(0)}


def test_a_table_numbers_inputs_first_and_then_what_tasks_make() -> None:
    graph = TaskGraph("g")
    x = graph.input(HOST, "x")
    a = graph.call(program("a"), x, x)
    y = graph.input(DRAM, "y")
    graph.output(graph.call(program("b", outputs=2), a, y)[1], "out")
    table = graph.table()
    assert table.inputs == (("x", 0), ("y", 1)) and table.outputs == (("out", 4),)
    assert [(t.inputs, t.outputs) for t in table.tasks] == [((0, 0), (2,)), ((2, 1), (3, 4))]
    assert table.descs == (HOST, DRAM, DRAM, DRAM, DRAM)
    assert table.task_name(1) == "task 1 (b)"


def test_programs_come_bare_loaded_or_compiled() -> None:
    bare = program()
    graph = TaskGraph()
    x = graph.input(HOST)
    graph.call(bare, x, x)
    loaded = SimpleNamespace(program=bare)
    graph.call(loaded, x, x)
    first, second = graph.tasks[0].agent, graph.tasks[1].agent
    assert isinstance(first, ProgramAgent) and isinstance(second, ProgramAgent)
    assert second.source is loaded and first == second
    for wrong in (len, SimpleNamespace(program=3), "a.ttb"):
        with pytest.raises(UsageError, match="calls a Program, a loaded program"):
            graph.call(wrong, x)  # type: ignore[arg-type]


def test_a_binary_of_one_program_is_called_and_one_of_several_is_not() -> None:
    bare = program()
    shape = load_machine("tiny").shape
    one = Binary((bare,), shape, "test")
    graph = TaskGraph()
    x = graph.input(HOST)
    graph.call(one, x, x)
    agent = graph.tasks[0].agent
    assert isinstance(agent, ProgramAgent) and agent.program is bare and agent.source is one
    two = Binary((bare, replace(bare, name="other")), shape, "test")
    with pytest.raises(
        UsageError, match=r"not a Binary of 2 programs\n  got: \w+, other\n.*binary\.program\('"
    ):
        graph.call(two, x, x)


def test_a_refused_call_leaves_the_graph_as_it_was() -> None:
    graph, other = TaskGraph(), TaskGraph()
    x, foreign = graph.input(HOST, "x"), other.input(HOST)
    before = graph.table()
    with pytest.raises(UsageError, match="wrong inputs for program 'p': missing: x1"):
        graph.call(program(), x)
    with pytest.raises(UsageError, match="'x1' of 'p'"):
        graph.call(program(), x, 3)
    with pytest.raises(TaskError, match="a future of another task graph was given as 'x1' of 'p'"):
        graph.call(program(), x, foreign)
    with pytest.raises(TaskError, match="another task graph"):
        graph.host(host_add, x, foreign)
    with pytest.raises(UsageError, match="same shape"):
        graph.copy(x, TensorDesc((3,), HOST.layout))
    with pytest.raises(UsageError, match="another input has it"):
        graph.input(HOST, "x")
    with pytest.raises(UsageError, match="has said already"):
        graph.host(host_add, x, x, returns=HOST)
    with pytest.raises(UsageError, match="an array is no plain argument"):
        graph.host(host_add, x, np.zeros(3))
    with pytest.raises(UsageError, match="as an output"):
        graph.output(x.desc, "y")  # type: ignore[arg-type]
    assert graph.table() == before
