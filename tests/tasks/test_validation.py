"""Validation finds everything that keeps a graph from running, and says where it is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stitch
from stitch.errors import UsageError
from stitch.program import DataType, Layout, TensorDesc
from stitch.tasks import (
    CopyAgent,
    NamedValue,
    TaskGraph,
    TaskRow,
    TaskTable,
    edges_of,
    problems_of,
    task,
)
from tests.support.small_programs import DRAM, HOST, SHAPE, program


def kinds(table: TaskTable) -> list[str]:
    return [problem.kind for problem in problems_of(table)]


def chain() -> TaskTable:
    """x -> a -> b -> y."""
    graph = TaskGraph("chain")
    x = graph.input(HOST, "x")
    graph.output(graph.call(program("b"), graph.call(program("a"), x, x), x), "y")
    return graph.table()


@task(updates="x")
def bump(x: Any, by: Any) -> None:
    x += by


@task(returns=HOST)
def seen(x: Any) -> Any:
    return x.copy()


def test_a_future_points_at_an_earlier_task() -> None:
    table = chain()
    backwards = replace(table, tasks=(
        TaskRow(table.tasks[1].agent, (2, 0), (1,)), TaskRow(table.tasks[0].agent, (0, 0), (2,)),
    ))  # fmt: skip
    (problem,) = problems_of(backwards)
    assert problem.kind == "direction" and problem.where == "task 0 (b), 'x0'"
    assert problem.detail == "it reads what the later task 1 (a) makes"


def test_tasks_that_wait_for_each_other_are_a_cycle() -> None:
    table = chain()
    first, second = table.tasks
    circle = replace(table, tasks=(first._replace(inputs=(2, 0)), second))
    direction, cycle = problems_of(circle)
    assert direction.kind == "direction" and cycle.kind == "cycle"
    assert cycle.detail == (
        "tasks wait for each other: task 1 (b) -> task 0 (a) -> task 1 (b)"
    ) or cycle.detail.endswith("task 0 (a) -> task 1 (b) -> task 0 (a)")
    own = replace(table, tasks=(first._replace(inputs=(1, 0)), second))
    assert problems_of(own)[0].detail == "it reads what itself makes"


def test_a_task_has_the_inputs_and_outputs_of_its_agent() -> None:
    table = chain()
    first, second = table.tasks
    short = replace(table, tasks=(first._replace(inputs=(0,)), second))
    assert kinds(short) == ["signature"]
    wrong = replace(table, descs=(HOST, HOST, DRAM))
    assert [p.where for p in problems_of(wrong)] == ["task 0 (a)"]


def test_shapes_and_types_fit_as_on_any_link() -> None:
    graph = TaskGraph()
    wide = graph.input(TensorDesc((4, 9), HOST.layout))
    whole = graph.input(TensorDesc(SHAPE, Layout(DataType.INT32)))
    half = graph.input(TensorDesc(SHAPE, Layout(DataType.BFLOAT16)))
    graph.call(program("a"), wide, whole)
    graph.call(program("b"), half, half)
    first, second = graph.validate()
    assert first.where == "task 0 (a), 'x0'" and "[4, 9] is not [4, 8]" in first.detail
    assert second.where == "task 0 (a), 'x1'" and "int32 never turns into float32" in second.detail


def test_write_after_read_a_reader_that_was_added_earlier_is_ordered_before() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    graph.output(graph.host(seen, x))
    graph.output(graph.host(seen, x))
    after = graph.host(bump, x, 1.0)
    graph.output(graph.host(seen, after))
    assert graph.validate() == ()
    assert [*map(sorted, edges_of(graph.rows))] == [[], [], [0, 1], [2]]


def test_write_after_write_the_later_reads_what_the_earlier_made() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    graph.output(graph.host(bump, graph.host(bump, x, 1.0), 2.0))
    assert [*map(sorted, edges_of(graph.rows))] == [[], [0]]
    graph.host(bump, x, 3.0)
    (problem,) = graph.validate()
    assert problem.kind == "write_after_write"
    assert problem.detail == "it overwrites a value that task 0 (bump) has taken over"


def test_a_value_that_was_overwritten_is_gone() -> None:
    graph = TaskGraph()
    x = graph.input(HOST, "x")
    graph.output(x, "before")
    graph.call(program("a", donated=(1,)), x, x)
    graph.host(seen, x)
    twice, late, output = graph.validate()
    assert twice.kind == "write_after_read" and twice.where == "task 0 (a), 'x1'"
    assert late.kind == "read_after_overwrite" and late.where == "task 1 (seen), 'x'"
    assert output.where == "output 'before'"


def test_unknown_values_and_names_that_stand_twice() -> None:
    table = chain()
    first, second = table.tasks
    wild = replace(
        table, tasks=(first._replace(inputs=(7, -1)), second),
        inputs=(*table.inputs, *table.inputs), outputs=(NamedValue("", 1), NamedValue("y", 9)),
    )  # fmt: skip
    assert kinds(wild) == ["bad_name", "bad_name", *["unknown_value"] * 3]


_NUMBER = st.integers(-2, 12)
_ROW = st.builds(
    TaskRow,
    st.sampled_from([CopyAgent(HOST), CopyAgent(DRAM)]),
    st.lists(_NUMBER, max_size=3).map(tuple),
    st.lists(_NUMBER, max_size=2).map(tuple),
)


@given(st.lists(_ROW, max_size=8), st.lists(_NUMBER, max_size=2))
def test_whatever_a_table_holds_problems_are_found_and_nothing_breaks(
    rows: list[TaskRow], outputs: list[int]
) -> None:
    named = tuple([NamedValue(f"y{i}", n) for i, n in enumerate(outputs)])
    table = TaskTable("", (NamedValue("x", 0),), tuple(rows), named, (HOST,) * 5)
    found = problems_of(table)
    made: set[int] = {0}
    for row in rows:
        if not made.issuperset(row.inputs):
            assert found
        made.update(row.outputs)


def test_what_no_device_prepares_is_listed() -> None:
    """Without tasks, with an input that no task reads, with an input for an output."""
    empty = TaskGraph("empty")
    assert [p.kind for p in empty.validate()] == ["no_tasks"]

    graph = TaskGraph("g")
    x = graph.input(HOST, "x")
    graph.input(HOST, "spare")
    graph.output(graph.call(program("a", "Abs", 1), x), "y")
    graph.output(x, "same")
    assert [(p.kind, p.where) for p in graph.validate()] == [
        ("unread_input", "input 'spare'"), ("passed_input", "output 'same'"),
    ]  # fmt: skip
    with stitch.open_device("host") as device:
        for unfit in (empty, graph):
            with pytest.raises(UsageError, match=re.escape(unfit.validate()[0].detail)):
                device.prepare(unfit)
    # They are sound: they may be written down, and joined to others.
    assert TaskGraph.from_json(graph.as_json(), programs=graph.programs) == graph


def test_of_a_long_circle_some_are_named() -> None:
    graph = TaskGraph("long")
    value = graph.input(HOST, "x")
    for _ in range(1000):
        made = graph.call(program("p", "Abs", 1), value)
        assert not isinstance(made, tuple)
        value = made
    graph.output(value, "y")
    table = graph.table()
    first, *others = table.tasks
    circle = replace(table, tasks=(first._replace(inputs=(value.number,)), *others))
    cycle = next(problem for problem in problems_of(circle) if problem.kind == "cycle")
    assert " -> 980 more -> " in cycle.detail and len(cycle.detail) < 1000
