"""Stretches that repeat are cut into pieces that are one stretch; the pieces are the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stitch.program import DataType, TensorDesc, host_layout
from stitch.tasks import SHORTEST, Cut, TaskSequence, Transformation, TransformationKind, cuts_of
from stitch.tasks.task_sequence import PIECE

DESC = TensorDesc((2,), host_layout(DataType.FLOAT32))
KINDS = [
    Transformation(f"t{i}", TransformationKind.PROGRAM, (DESC,) * i, (DESC,) * outputs)
    for i, outputs in enumerate((1, 1, 2, 1))
]


def queued(nothing: TaskSequence, calls: Sequence[Sequence[object]]) -> TaskSequence:
    """The stretch of calls, each on values by their names."""
    numbers: dict[object, int] = {}
    graph = nothing
    for at, names in enumerate(calls):
        what = KINDS[len(names)]
        fresh = [name for name in dict.fromkeys(names) if name not in numbers]
        for i, name in enumerate(fresh):
            numbers[name] = graph.values + i
        graph = graph.after(what, tuple([numbers[name] for name in names]), len(fresh))
        for output in range(len(what.outputs)):
            numbers[at, output] = graph.first + output
    return graph


def check(graph: TaskSequence, pieces: tuple[Cut, ...]) -> None:
    """The pieces are all tasks in order, and say which of their values later tasks read."""
    assert [piece.start for piece in pieces] == [0, *[piece.stop for piece in pieces[:-1]]]
    assert pieces[-1].stop == len(graph)
    for piece in pieces:
        tasks = graph.tasks[piece.start : piece.stop]
        for task, inside in zip(tasks, piece.graph.tasks, strict=True):
            assert inside.transformation is task.transformation
            assert tuple([piece.numbers[n] for n in inside.inputs]) == task.inputs
            assert tuple([piece.numbers[n] for n in inside.outputs]) == task.outputs
        later = {number for task in graph.tasks[piece.stop :] for number in task.inputs}
        assert piece.read_later == tuple([number in later for number in piece.numbers])


@pytest.mark.parametrize("rounds", [400, 2000])
def test_the_parts_of_a_chain_are_one_stretch_whatever_its_length(rounds: int) -> None:
    nothing = TaskSequence()
    graph = queued(nothing, [[(i - 1, 0), "w"] for i in range(rounds)])
    pieces = cuts_of(graph, nothing)
    check(graph, pieces)
    assert len({piece.graph for piece in pieces}) <= 3
    assert max(len(piece.graph) for piece in pieces) <= PIECE


def test_what_does_not_repeat_and_what_is_short_is_not_cut() -> None:
    nothing = TaskSequence()
    chain: list[list[object]] = [[(i - 1, 0), "w"] for i in range(SHORTEST - 1)]
    assert cuts_of(queued(nothing, chain), nothing) == ()
    draw = Random(0)
    apart: list[list[object]] = [[(draw.randrange(-1, i), 0), "w"] for i in range(400)]
    assert cuts_of(queued(nothing, apart), nothing) == ()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_parts_of_whatever_repeats_are_the_whole(data: st.DataObject) -> None:
    names = st.one_of(st.integers(-6, 0), st.sampled_from("abc"), st.none())
    pattern = data.draw(st.lists(st.lists(names, max_size=3), min_size=1, max_size=5))
    lead = data.draw(st.lists(st.lists(st.sampled_from([*"abz"]), max_size=3), max_size=9))
    calls: list[Sequence[object]] = [*lead]
    rounds = data.draw(st.integers(1, 500 // len(pattern)))
    for _ in range(rounds):
        for task in pattern:
            at = len(calls)
            calls.append([
                (at + name - 1, 0) if isinstance(name, int)
                else ("fresh", at, slot) if name is None else name
                for slot, name in enumerate(task)
            ])  # fmt: skip
    nothing = TaskSequence()
    graph = queued(nothing, [*calls, *lead])
    pieces = cuts_of(graph, nothing)
    if pieces:
        check(graph, pieces)
        sizes = [piece.stop - piece.start for piece in pieces]
        assert any(a == b for a, b in pairwise(sizes))
