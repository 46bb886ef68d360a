"""Stretches: values have numbers in order, tasks read what is earlier, repeats are seen."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stitch.errors import TaskError
from stitch.program import DataType, TensorDesc, host_layout
from stitch.tasks import TaskSequence, Transformation, TransformationKind

DESC = TensorDesc((2,), host_layout(DataType.FLOAT32))


def transformation(inputs: int = 1, outputs: int = 1, name: str = "t") -> Transformation:
    return Transformation(name, TransformationKind.PROGRAM, (DESC,) * inputs, (DESC,) * outputs)


def test_values_are_numbered_in_the_order_of_calls() -> None:
    two = transformation(outputs=2)
    graph = TaskSequence().after(two, (0,), 1).after(two, (3, 1), 1)
    assert graph.values == 6 and len(graph) == 2
    assert [task.outputs for task in graph.tasks] == [(1, 2), (4, 5)]
    assert graph.first == 4


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(-2, 12), max_size=3))))
def test_a_task_reads_only_what_is_earlier(calls: list[tuple[int, list[int]]]) -> None:
    graph = TaskSequence()
    for outputs, inputs in calls:
        known = graph.values + 1
        if all(0 <= i < known for i in inputs):
            graph = graph.after(transformation(len(inputs), outputs), tuple(inputs), 1)
        else:
            with pytest.raises(TaskError):
                graph.after(transformation(len(inputs), outputs), tuple(inputs), 1)
    made: set[int] = set(graph.sources)
    for task in graph.tasks:
        assert made.issuperset(task.inputs)
        made.update(task.outputs)
    assert made == set(range(graph.values))


@pytest.mark.parametrize("inputs", [(1,), (-1,), (0, 5), (0, -3)])
def test_a_refused_task_leaves_the_graph_as_it_was(inputs: tuple[int, ...]) -> None:
    graph, what = TaskSequence(), transformation(name="late")
    with pytest.raises(TaskError, match="'late' refers to a value that no earlier task makes"):
        graph.after(what, inputs, 1)
    assert (graph.values, graph.tasks, graph.following) == (0, (), None)


# -- the same work --------------------------------------------------------------------------------


Call = tuple[Transformation, tuple[int, ...], int]


def build(graph: TaskSequence, *calls: Call) -> TaskSequence:
    for call in calls:
        graph = graph.after(*call)
    return graph


def test_the_same_calls_after_the_same_graph_give_the_same_graph() -> None:
    nothing, a, b, c = TaskSequence(), transformation(2), transformation(), transformation()
    one = build(nothing, (a, (0, 1), 2), (b, (2,), 0))
    other = build(nothing, (a, (0, 1), 2), (c, (2,), 0))
    assert build(nothing, (a, (0, 1), 2), (b, (2,), 0)) is one
    assert build(nothing, (a, (0, 1), 2), (c, (2,), 0)) is other
    assert build(TaskSequence(), (a, (0, 1), 2), (b, (2,), 0)) is not one


def test_other_transformations_references_or_lengths_give_other_graphs() -> None:
    nothing, a, b, twin = TaskSequence(), transformation(2), transformation(), transformation()
    graphs = [
        build(nothing, *calls)
        for calls in (
            [(a, (0, 1), 2), (b, (2,), 0)],
            [(a, (1, 0), 2), (b, (2,), 0)],
            [(a, (0, 0), 2), (b, (2,), 0)],
            [(a, (0, 1), 2), (b, (1,), 0)],
            [(a, (0, 1), 2), (twin, (2,), 0)],
            [(a, (0, 1), 2)],
            [(a, (0, 1), 2), (b, (2,), 0), (b, (3,), 0)],
        )
    ]
    for one, other in itertools.combinations(graphs, 2):
        assert one is not other


def test_graphs_that_nobody_refers_to_are_forgotten() -> None:
    nothing, what, other = TaskSequence(), transformation(), transformation()
    gone = weakref.ref(build(nothing, (what, (0,), 1), (what, (1,), 0)))
    held = build(nothing, (other, (0,), 1))
    gc.collect()
    assert gone() is None
    assert build(nothing, (other, (0,), 1)) is held
