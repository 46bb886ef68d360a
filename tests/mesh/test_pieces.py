"""Pieces: convex sets of tasks of one device, few of them, that compute what the graph computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

import stitch
from stitch.mesh import Piece, pieces_of
from stitch.program import Array
from stitch.report import Device
from stitch.tasks import TaskGraph, TaskTable, edges_of
from tests.support.placed_graphs import DEVICES, MACHINE, by_one_device, placed, placed_case
from tests.support.small_programs import HOST, program
from tests.support.task_graphs import bump, inputs_of, interpreted, random_graph, same

SEEDS = range(200)


def where_of(table: TaskTable) -> list[str]:
    """The devices of a table whose tasks are all placed."""
    return [device for device in table.devices if device is not None]


def fewest(table: TaskTable, where: Sequence[str]) -> int:
    """The least number of pieces, by trying every order of devices."""
    before = [set(edges) for edges in edges_of(table.tasks)]
    states, count = {frozenset[int]()}, 0
    while frozenset(range(len(before))) not in states:
        following = set()
        for state in states:
            for device in {*where}:
                done = set(state)
                for task, edges in enumerate(before):
                    if where[task] == device and edges <= done:
                        done.add(task)
                following.add(frozenset(done))
        states, count = following, count + 1
    return count


def reachable(table: TaskTable) -> list[set[int]]:
    """For each task those that must have run before it, also by way of others."""
    behind: list[set[int]] = []
    for edges in edges_of(table.tasks):
        behind.append({*edges}.union(*[behind[earlier] for earlier in edges]))
    return behind


def test_pieces_hold_each_task_once_and_are_convex_and_in_topological_order() -> None:
    for seed in SEEDS:
        table = placed(random_graph(seed, 24), seed, DEVICES).table()
        where = where_of(table)
        pieces = pieces_of(table, where)
        assert [piece.number for piece in pieces] == list(range(len(pieces)))
        assert sorted(task for piece in pieces for task in piece.tasks) == list(range(len(where)))
        piece_of = {task: piece.number for piece in pieces for task in piece.tasks}
        behind = reachable(table)
        for piece in pieces:
            assert {where[task] for task in piece.tasks} == {piece.device}
            inside = {*piece.tasks}
            for task in inside:
                for between in behind[task] - inside:
                    assert piece_of[between] < piece.number
                    assert behind[between].isdisjoint(inside)


def test_pieces_run_in_order_compute_what_the_graph_computes() -> None:
    for seed in SEEDS:
        table = placed(random_graph(seed, 24), seed, DEVICES).table()
        inputs = inputs_of(table)
        values: dict[int, Array] = {number: inputs[name] for name, number in table.inputs}
        made: set[int] = set()
        for piece in pieces_of(table, where_of(table)):
            given = dict(zip([name for name, _ in piece.table.inputs], piece.inputs, strict=True))
            results = interpreted(piece.table, {name: values[n] for name, n in given.items()})
            assert list(results) == [f"v{number}" for number in piece.outputs]
            assert made.isdisjoint(piece.outputs), "a value is the output of one piece"
            made.update(piece.outputs)
            values |= zip(piece.outputs, results.values(), strict=True)
        outputs = {name: values[number] for name, number in table.outputs}
        assert same(outputs, interpreted(table, inputs))
        assert made >= {number for _, number in table.outputs}


def test_for_two_devices_no_cut_has_fewer_pieces() -> None:
    for seed in SEEDS:
        table = placed(random_graph(seed, 24), seed, DEVICES[:2]).table()
        where = where_of(table)
        assert len(pieces_of(table, where)) == fewest(table, where)


@pytest.fixture(scope="module")
def devices() -> Iterator[dict[str, Device]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(stitch.open_device(MACHINE)) for name in (*DEVICES, "one")}


def test_each_device_runs_its_pieces_with_the_bits_of_one_device(
    devices: dict[str, Device],
) -> None:
    for seed in SEEDS[::4]:
        case = placed_case(seed)
        table = case.graph.table()
        values = {number: case.inputs[name] for name, number in table.inputs}
        for piece in pieces_of(table, where_of(table)):
            run = devices[piece.device].prepare(TaskGraph.of(piece.table))
            results = run(*[values[number] for number in piece.inputs])
            tensors = results if isinstance(results, tuple) else (results,)
            arrays = [tensor.numpy().copy() for tensor in tensors]
            values |= zip(piece.outputs, arrays, strict=True)
        outputs = {name: values[number] for name, number in table.outputs}
        assert same(outputs, by_one_device(case.graph, case.inputs, devices["one"]))


def chain(devices: str) -> tuple[TaskTable, list[str]]:
    """A chain of tasks, and their devices."""
    graph = TaskGraph("chain")
    value = graph.input(HOST, "x")
    for i in range(len(devices)):
        value = graph.call(program(f"p{i}", "Abs", 1), value)
    graph.output(value, "y")
    return graph.table(), list(devices)


@pytest.mark.parametrize(
    "devices, tasks",
    [("ABAB", [(0,), (1,), (2,), (3,)]), ("AABB", [(0, 1), (2, 3)]), ("A", [(0,)])],
)
def test_a_chain_is_cut_where_the_device_changes(devices: str, tasks: Any) -> None:
    pieces = pieces_of(*chain(devices))
    assert [piece.tasks for piece in pieces] == tasks
    for one, other in pairwise(pieces):
        assert one.outputs == other.inputs
        assert one.table.outputs[0].name == other.table.inputs[0].name == f"v{one.outputs[0]}"


def test_independent_programs_of_one_device_are_one_piece() -> None:
    graph = TaskGraph()
    for i in range(64):
        graph.output(graph.call(program("a", "Abs", 1), graph.input(HOST)), f"y{i}")
    pieces = pieces_of(graph.table(), ["A", "B"] * 32)
    assert [len(piece.tasks) for piece in pieces] == [32, 32]


def test_a_device_waits_for_another_where_that_saves_a_piece() -> None:
    graph = TaskGraph()
    x = graph.input(HOST)
    graph.output(graph.call(program("a", "Abs", 1), x))
    graph.output(graph.call(program("c", "Abs", 1), graph.call(program("b", "Abs", 1), x)))
    assert [p.tasks for p in pieces_of(graph.table(), ["A", "B", "A"])] == [(1,), (0, 2)]


def test_a_value_that_several_pieces_read_is_one_output() -> None:
    graph = TaskGraph()
    value = graph.call(program("a", "Abs", 1), graph.input(HOST))
    graph.output(value, "y")
    graph.output(value, "z")
    for name in ("b", "c"):
        graph.output(graph.call(program(name), value, value))
    first, *others = pieces_of(graph.table(), ["A", "B", "C"])
    assert first.outputs == (1,) and [one.inputs for one in others] == [(1,), (1,)]


def test_a_task_that_overwrites_a_value_is_behind_its_readers_on_other_devices() -> None:
    graph = TaskGraph()
    x, y = graph.input(HOST), graph.input(HOST)
    made = graph.call(program("make", "Abs", 1), x)
    graph.output(graph.call(program("read", "Abs", 1), made))
    graph.output(graph.host(bump, made, y))
    pieces = pieces_of(graph.table(), ["A", "B", "A"])
    assert [piece.tasks for piece in pieces] == [(0,), (1,), (2,)]
    assert pieces[0].outputs == (made.number,)


def test_the_table_of_a_piece_names_no_devices() -> None:
    graph = TaskGraph("steps")
    x = graph.input(HOST)
    with graph.on("left"):
        graph.output(graph.call(program("a", "Abs", 1), x))
    (piece,) = pieces_of(graph.table(), ["left"])
    assert isinstance(piece, Piece) and piece.table.devices == ()
    assert piece.table.name == "steps piece 0" and len(piece.table.descs) == 2


def test_an_empty_graph_has_no_pieces() -> None:
    assert pieces_of(TaskGraph().table(), []) == ()
