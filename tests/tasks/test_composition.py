"""Composition and aggregation: each rule of the document, and each decision that it leaves open."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.errors import TaskError, UsageError
from stitch.tasks import MergedAgent, TaskGraph, aggregate, compose, edges_of, task
from stitch.tasks.composition import groups_of
from tests.support.small_programs import HOST, program
from tests.support.task_graphs import inputs_of, interpreted, random_graph, same

A, B, C, D = (program(name, "Abs", 1) for name in "abcd")
JOIN = program("join")


def graph_of(**inputs: Any) -> tuple[TaskGraph, Any]:
    graph = TaskGraph()
    return graph, graph.input(HOST, "x")


def names(graph: TaskGraph) -> list[str]:
    """The members of every task."""
    return [task.name for task in graph.tasks]


# -- composition -----------------------------------------------------------------------------------


def test_the_composition_of_two_tasks_is_a_task() -> None:
    graph, x = graph_of()
    y = graph.call(B, graph.call(A, x))
    both = compose(*graph.tasks)
    assert both.name == "a+b" and both.inputs == (x,) and both.outputs == (y,)
    assert isinstance(both.agent, MergedAgent)
    assert [(m.agent.name, m.inputs, m.outputs) for m in both.agent.members] == [
        ("a", (0,), (1,)), ("b", (1,), (2,)),
    ]  # fmt: skip
    assert both.agent.kept == (2,)


def test_inputs_are_those_of_the_first_and_those_of_the_second_that_the_first_does_not_make() -> (
    None
):
    graph, x1 = graph_of()
    x3 = graph.input(HOST, "x3")
    y = graph.call(JOIN, graph.call(A, x1), x3)
    both = compose(*graph.tasks)
    assert both.inputs == (x1, x3) and both.outputs == (y,)


def test_a_future_that_both_read_is_one_input() -> None:
    graph, x = graph_of()
    graph.call(JOIN, graph.call(A, x), x)
    assert compose(*graph.tasks).inputs == (x,)


def test_the_host_holds_or_reads_an_intermediate_it_stays_an_output() -> None:
    graph, x = graph_of()
    hidden = graph.call(A, x)
    y = graph.call(B, hidden)
    graph.output(hidden, "hidden")
    graph.output(y, "y")
    assert compose(*graph.tasks).outputs == (hidden, y)
    merged = aggregate(graph)
    assert names(merged) == ["a+b"] and list(merged.outputs) == ["hidden", "y"]


def test_other_outputs_of_a_merged_task_are_kept_if_anything_outside_refers_to_them() -> None:
    graph, x = graph_of()
    one, other = graph.call(program("pair", outputs=2), x, x)
    y = graph.call(A, one)
    assert compose(*graph.tasks).outputs == (y,)
    z = graph.call(B, other)
    assert compose(graph.tasks[0], graph.tasks[1]).outputs == (other, y)
    graph.output(y)
    graph.output(z)
    assert names(aggregate(graph)) == ["pair+a+b"]


def test_compositions_compose() -> None:
    graph, x = graph_of()
    graph.output(graph.call(C, graph.call(B, graph.call(A, x))))
    a, b, c = graph.tasks
    left, right = compose(compose(a, b), c), compose(a, compose(b, c))
    assert left == right and left.agent == aggregate(graph).tasks[0].agent


def test_a_merged_set_is_convex() -> None:
    graph, x = graph_of()
    first = graph.call(A, x)
    between = graph.call(B, first)
    graph.call(JOIN, first, between)
    a, b, join = graph.tasks
    with pytest.raises(TaskError, match=r"'a' and 'join' cannot become one: task 1 \(b\)"):
        compose(a, join)
    assert compose(compose(a, b), join).name == "a+b+join"


def test_composition_refuses_what_makes_no_task() -> None:
    graph, x = graph_of()
    graph.call(B, graph.call(A, x))
    other, z = graph_of()
    other.call(A, z)
    a, b = graph.tasks
    with pytest.raises(TaskError, match="the other way round"):
        compose(b, a)
    with pytest.raises(TaskError, match="two task graphs"):
        compose(a, other.tasks[0])
    with pytest.raises(TaskError, match="a task is in both"):
        compose(compose(a, b), a)
    with pytest.raises(UsageError, match="takes a Task as second"):
        compose(a, x)


def test_what_a_merged_task_takes_over_and_hands_on() -> None:
    @task(updates="x")
    def bump(x: Any) -> None:
        x += 1

    graph, x = graph_of()
    y = graph.input(HOST)
    graph.output(graph.host(bump, graph.host(bump, x)))
    graph.call(JOIN, y, y)
    both = compose(graph.tasks[0], graph.tasks[1])
    assert both.agent.consumes == {0} and both.agent.aliases == ((0, 0),)
    assert both.agent.input_name(0) == "bump.x"


# -- aggregation -----------------------------------------------------------------------------------


def test_a_chain_becomes_one_task() -> None:
    graph, x = graph_of()
    for p in (A, B, C, D):
        x = graph.call(p, x)
    graph.output(x, "y")
    merged = aggregate(graph)
    assert names(merged) == ["a+b+c+1 more"] and list(merged.inputs) == ["x"]


def test_an_output_that_two_tasks_read_makes_its_task_the_last_of_its_chain() -> None:
    graph, x = graph_of()
    last = graph.call(B, graph.call(A, x))
    graph.output(graph.call(JOIN, graph.call(C, last), graph.call(D, last)))
    assert names(aggregate(graph)) == ["a+b", "c+d+join"]
    assert names(aggregate(graph, "keep")) == ["a+b+c+2 more"]


def test_joins_may_be_aggregated() -> None:
    graph, x = graph_of()
    y = graph.input(HOST)
    graph.output(graph.call(JOIN, graph.call(A, x), graph.call(B, y)))
    assert names(aggregate(graph)) == ["a+b+join"]


def test_references_are_counted_per_output_over_distinct_consumer_tasks() -> None:
    graph, x = graph_of()
    one, other = graph.call(program("pair", outputs=2), x, x)
    graph.output(graph.call(A, one))
    graph.output(graph.call(B, other))
    assert names(aggregate(graph)) == ["pair+a+b"]
    graph.output(graph.call(C, other))
    assert names(aggregate(graph)) == ["pair", "a", "b", "c"]


def test_the_same_output_used_twice_by_one_task_is_one_reference() -> None:
    graph, x = graph_of()
    hidden = graph.call(A, x)
    graph.output(graph.call(JOIN, hidden, hidden))
    assert names(aggregate(graph)) == ["a+join"]


def test_in_place_writes_are_ordered_by_edges() -> None:
    @task(returns=HOST)
    def seen(x: Any) -> Any:
        return x.copy()

    @task(updates="x")
    def bump(x: Any) -> None:
        x += 1

    graph, x = graph_of()
    hidden = graph.host(seen, x)
    graph.output(graph.host(seen, hidden), "before")
    graph.output(graph.host(bump, hidden), "after")
    for branches in ("stop", "keep"):
        merged = aggregate(graph, branches)
        given = inputs_of(graph.table())
        assert same(interpreted(merged.table(), given), interpreted(graph.table(), given))
    assert names(aggregate(graph)) == ["seen", "seen", "bump"]
    assert names(aggregate(graph, "keep")) == ["seen+seen+bump"]


def test_tasks_without_a_path_between_them_stay_apart() -> None:
    graph, x = graph_of()
    graph.output(graph.call(B, graph.call(A, x)))
    graph.output(graph.call(D, graph.call(C, x)))
    assert names(aggregate(graph, "keep")) == ["a+b", "c+d"]


def test_tasks_of_one_kind_only_where_that_is_wanted() -> None:
    @task(returns=HOST)
    def seen(x: Any) -> Any:
        return x

    graph, x = graph_of()
    x = graph.call(B, graph.call(A, x))
    x = graph.host(seen, graph.host(seen, x))
    graph.output(graph.call(D, graph.call(C, x)))
    assert names(aggregate(graph, kinds="same")) == ["a+b", "seen+seen", "c+d"]
    assert len(aggregate(graph)) == 1


def test_members_keep_their_names_and_tables_flatten() -> None:
    graph, x = graph_of()
    graph.output(graph.call(B, graph.call(A, x)), "y")
    merged = aggregate(graph)
    assert merged.table().flattened() == graph.table()
    assert graph.table().flattened() == graph.table()


def test_keeping_branches_once_is_enough() -> None:
    for seed in range(50):
        for kinds in ("any", "same"):
            once = aggregate(random_graph(seed), "keep", kinds=kinds)
            assert len(aggregate(once, "keep", kinds=kinds)) == len(once)


@pytest.mark.parametrize("word", ["stopp", "", None, 1])
def test_misspelt_words_are_refused(word: Any) -> None:
    graph, _ = graph_of()
    with pytest.raises(UsageError, match='takes "stop" or "keep" as branches'):
        aggregate(graph, branches=word)
    with pytest.raises(UsageError, match='takes "any" or "same" as kinds'):
        aggregate(graph, kinds=word)


def test_a_graph_that_cannot_run_is_not_aggregated() -> None:
    graph, x = graph_of()
    given = program("given", donated=(0,))
    graph.call(given, x, graph.call(A, x))
    graph.call(A, x)
    with pytest.raises(TaskError, match="has taken over"):
        aggregate(graph)


# -- properties ------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.sampled_from(["stop", "keep"]), st.sampled_from(["any", "same"]))
@settings(deadline=None)
def test_an_aggregated_graph_computes_the_same(seed: int, branches: str, kinds: str) -> None:
    graph = random_graph(seed)
    table, merged = graph.table(), aggregate(graph, branches, kinds=kinds)
    given = inputs_of(table, seed)
    expected = interpreted(table, given)
    assert merged.validate() == ()
    assert same(interpreted(merged.table(), given), expected)
    assert same(interpreted(merged.table().flattened(), given), expected)
    assert len(merged.table().flattened().tasks) == len(graph)


@given(st.integers(0, 10**6), st.data())
@settings(deadline=None)
def test_sets_are_convex_wait_in_no_circle_and_keep_the_edges_that_must_stay(
    seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 9))
    before: list[dict[int, bool]] = [
        {e: data.draw(st.booleans()) for e in range(t) if data.draw(st.integers(0, 2)) == 0}
        for t in range(count)
    ]
    groups = groups_of(before)
    reach = [{t} for t in range(count)]
    for t, edges in enumerate(before):
        for e in edges:
            reach[t] |= reach[e]
    for t, edges in enumerate(before):
        assert all(vanishes or groups[e] != groups[t] for e, vanishes in edges.items())
        for e in edges:
            for between in range(count):
                inside = groups[e] == groups[t]
                if inside and between in reach[t] and e in reach[between]:
                    assert groups[between] == groups[t]
    ahead = {g: {groups[e] for t in range(count) if groups[t] == g for e in before[t]} - {g}
             for g in groups}  # fmt: skip
    while ahead:
        free = [g for g, others in ahead.items() if not others & ahead.keys()]
        assert free, "sets wait for each other in a circle"
        for g in free:
            del ahead[g]


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_stopping_at_branches_merges_no_value_that_two_tasks_read(seed: int) -> None:
    for row in aggregate(random_graph(seed)).rows:
        if isinstance(row.agent, MergedAgent):
            ends = {
                n for m in row.agent.members for n in m.outputs
                if sum(n in other.inputs for other in row.agent.members) > 1
            }  # fmt: skip
            assert not ends


@given(st.integers(0, 10**6))
@settings(deadline=None)
def test_composing_two_tasks_of_any_graph_is_refused_or_right(seed: int) -> None:
    graph = random_graph(seed, 7)
    rows, before = graph.rows, edges_of(graph.rows)
    reach = [{t} for t in range(len(rows))]
    for t, edges in enumerate(before):
        for e in edges:
            reach[t] |= reach[e]
    for j in range(len(rows)):
        for i in range(j):
            between = any(m in reach[j] and i in reach[m] for m in range(i + 1, j))
            if between:
                with pytest.raises(TaskError, match="cannot become one"):
                    compose(graph.tasks[i], graph.tasks[j])
            else:
                both = compose(graph.tasks[i], graph.tasks[j])
                made = {*graph.tasks[i].outputs}
                wanted = [*graph.tasks[i].inputs]
                wanted += [f for f in graph.tasks[j].inputs if f not in made]
                assert both.inputs == tuple(dict.fromkeys(wanted))
                assert {*graph.tasks[j].outputs} <= {*both.outputs}
