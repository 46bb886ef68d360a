"""The task graph: values are numbered in order, futures point back, work that repeats is seen."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.errors import TaskError
from stitch.program import DataType, TensorDesc, host_layout
from stitch.tasks import Future, TaskGraph, Transformation, TransformationKind
from stitch.tasks.task import least_period

DESC = TensorDesc((2,), host_layout(DataType.FLOAT32))


def transformation(inputs: int = 1, outputs: int = 1, name: str = "t") -> Transformation:
    return Transformation(name, TransformationKind.PROGRAM, (DESC,) * inputs, (DESC,) * outputs)


def test_values_are_numbered_in_the_order_of_calls() -> None:
    graph, two = TaskGraph(), transformation(outputs=2)
    assert (graph.source(), graph.add(two, (0,)), graph.source()) == (0, 1, 3)
    assert graph.values == 4 and len(graph) == 1
    assert graph.tasks[0].outputs == (1, 2)


def test_a_value_knows_the_task_that_makes_it() -> None:
    graph, two = TaskGraph(), transformation(outputs=2)
    graph.source()
    graph.add(two, (0,))
    graph.add(two, (1,))
    assert [graph.future(value) for value in range(graph.values)] == [
        None, Future(0, 0), Future(0, 1), Future(1, 0), Future(1, 1),
    ]  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-2, 12), max_size=3))))
def test_a_future_only_points_at_an_earlier_task(calls: list[tuple[int, list[int]]]) -> None:
    graph = TaskGraph()
    for outputs, inputs in calls:
        graph.source()
        known = graph.values
        if all(0 <= i < known for i in inputs):
            graph.add(transformation(len(inputs), outputs), tuple(inputs))
        else:
            with pytest.raises(TaskError):
                graph.add(transformation(len(inputs), outputs), tuple(inputs))
    for index, task in enumerate(graph.tasks):
        made = [graph.future(value) for value in task.inputs]
        assert all(future is None or future.task < index for future in made)
        assert [graph.future(v) for v in task.outputs] == [
            Future(index, o) for o in range(len(task.outputs))
        ]


@pytest.mark.parametrize("inputs", [(1,), (-1,), (0, 5), (0, -3)])
def test_a_refused_task_leaves_the_graph_as_it_was(inputs: tuple[int, ...]) -> None:
    graph, what = TaskGraph(), transformation(name="late")
    graph.source()
    before = (graph.values, graph.key(), graph.tasks)
    with pytest.raises(TaskError, match="'late' refers to a value that no earlier task makes"):
        graph.add(what, inputs)
    assert (graph.values, graph.key(), graph.tasks) == before


def test_a_task_cannot_read_its_own_output() -> None:
    graph = TaskGraph()
    with pytest.raises(TaskError):
        graph.add(transformation(), (0,))


def test_a_task_without_inputs_or_outputs_is_allowed() -> None:
    graph = TaskGraph()
    assert graph.add(transformation(0, 0), ()) == 0
    assert (len(graph), graph.values) == (1, 0)


# -- keys -----------------------------------------------------------------------------------------


def build(calls: list[tuple[Transformation | None, tuple[int, ...]]]) -> TaskGraph:
    graph = TaskGraph()
    for what, inputs in calls:
        if what is None:
            graph.source()
        else:
            graph.add(what, inputs)
    return graph


def test_the_same_calls_have_the_same_key() -> None:
    a, b = transformation(2), transformation()
    calls: list[tuple[Transformation | None, tuple[int, ...]]] = [
        (None, ()), (None, ()), (a, (0, 1)), (b, (2,)),
    ]  # fmt: skip
    assert build(calls).key() == build(calls).key()


def test_other_transformations_references_or_lengths_have_other_keys() -> None:
    a, b, twin = transformation(2), transformation(), transformation()
    graphs = [
        build([(None, ()), (None, ()), *rest])
        for rest in (
            [(a, (0, 1)), (b, (2,))],
            [(a, (1, 0)), (b, (2,))],
            [(a, (0, 0)), (b, (2,))],
            [(a, (0, 1)), (b, (1,))],
            [(a, (0, 1)), (twin, (2,))],
            [(a, (0, 1))],
            [(a, (0, 1)), (b, (2,)), (b, (3,))],
        )
    ]
    for one, other in itertools.combinations(graphs, 2):
        assert one.key() != other.key()


def test_a_source_and_an_output_under_one_number_have_different_keys() -> None:
    what = transformation()
    reads_a_source = build([(None, ()), (None, ()), (what, (0,)), (what, (1,))])
    reads_an_output = build([(None, ()), (what, (0,)), (None, ()), (what, (1,))])
    assert reads_a_source.values == reads_an_output.values
    assert reads_a_source.key() != reads_an_output.key()


def test_two_transformations_are_never_equal_by_chance() -> None:
    one, other = transformation(), transformation()
    assert one != other and one.key != other.key


# -- periods --------------------------------------------------------------------------------------


def test_a_chain_that_repeats_has_a_period() -> None:
    a, b, c = (transformation(name=n) for n in "abc")
    graph = TaskGraph()
    value = graph.source()
    for what in (a, b, c, a, b, c, a):
        value = graph.add(what, (value,))
    assert graph.period() == 3


def test_work_that_was_seen_only_once_has_no_period() -> None:
    a, b, c = (transformation(name=n) for n in "abc")
    graph = TaskGraph()
    value = graph.source()
    for what in (a, b, c, a, b):
        value = graph.add(what, (value,))
    assert graph.period() == 0


@given(st.lists(st.integers(0, 2), max_size=14))
def test_the_period_is_the_least_shift_that_maps_the_work_onto_itself(items: list[int]) -> None:
    shifts = [
        p
        for p in range(1, len(items) // 2 + 1)
        if all(items[i] == items[i + p] for i in range(len(items) - p))
    ]
    assert least_period(items) == (min(shifts) if shifts else 0)


def test_a_cleared_graph_starts_anew_and_leaves_earlier_tasks_to_their_holders() -> None:
    graph, what = TaskGraph(), transformation()
    graph.source()
    graph.add(what, (0,))
    held = graph.tasks
    graph.clear()
    assert (graph.values, len(graph), graph.key(), graph.tasks) == (0, 0, (), ())
    assert len(held) == 1
    assert graph.add(transformation(0), ()) == 0


def test_slots_without_names_are_counted_in_messages() -> None:
    what = Transformation(
        "t", TransformationKind.PROGRAM, (DESC, DESC), (DESC,), input_names=("x",)
    )
    assert [what.input_name(i) for i in range(2)] == ["x", "input 1"]
    assert what.output_name(0) == "output 0"
