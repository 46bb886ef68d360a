"""Choices and loops that data end: every executor gives what Python's `if` and `while` give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import stitch
from stitch.compiler import differentiate
from stitch.errors import CompileError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, choose, repeat_while, scan
from stitch.program import Array, ScanForm, is_scan
from stitch.ttb import binary, encode, load
from tests.support.grids import in_turn
from tests.support.stitched_models import one, several

EXECUTORS = ("numpy", "onnxruntime", "torch", "auto")
ROW = (6,)


def run(graph: ComputationGraph, executor: str, *given: Array, target: str = "host") -> list[Array]:
    with stitch.open_device(target, executor=executor) as device:
        made: Any = device.load(stitch.compile(graph, target=target))(*given)
        return [t.numpy().copy() for t in (made if isinstance(made, tuple) else (made,))]


def halved(limit: float = 1.0) -> ComputationGraph:
    """A row is halved while its sum is above a limit; how often is counted."""
    b = ComputationGraphBuilder("halved")
    x, factor = b.input("x", ROW, "float32"), b.input("factor", ROW, "float32")
    last, times = repeat_while(
        b, lambda s: b.greater(b.reduce_sum(s[0]), limit),
        lambda s: [b.mul(s[0], factor), b.add(s[1], 1)], [x, np.int64(0)],
    )  # fmt: skip
    b.output("last", last)
    b.output("times", times)
    return b.build()


def by_hand(x: Array, factor: Array, limit: float = 1.0) -> tuple[Array, int]:
    times = 0
    while x.sum() > limit:
        x, times = x * factor, times + 1
    return x, times


@pytest.mark.parametrize(("executor", "size"), in_turn(EXECUTORS, [0.0, 0.5, 1.0, 9.0, 1e6]))
def test_a_loop_ends_where_its_data_say(executor: str, size: float) -> None:
    x, factor = np.full(ROW, size, np.float32), np.full(ROW, 0.5, np.float32)
    last, times = run(halved(), executor, x, factor)
    wanted, often = by_hand(x, factor)
    assert times == often
    np.testing.assert_allclose(last, wanted, 1e-6)


def test_a_program_that_loops_by_data_runs_again_with_other_data() -> None:
    with stitch.open_device("host") as device:
        program = device.load(stitch.compile(halved(), target="host"))
        for size in (9.0, 0.0, 100.0, 0.1, 9.0):
            x, factor = np.full(ROW, size, np.float32), np.full(ROW, 0.5, np.float32)
            last, times = several(program(x, factor))
            assert times.numpy() == by_hand(x, factor)[1]
            np.testing.assert_allclose(last.numpy(), by_hand(x, factor)[0], 1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_a_round_computes_of_operands_alone_is_not_computed_without_one(executor: str) -> None:
    b = ComputationGraphBuilder("picked")
    x, index = b.input("x", ROW, "float32"), b.input("index", (), "int64")
    (last,) = repeat_while(
        b, lambda s: b.greater(b.reduce_sum(s[0]), 100),
        lambda s: [b.sub(s[0], b.gather(s[1], s[2]))], [x], [x, index],
    )  # fmt: skip
    b.output("last", last)
    row = np.full(ROW, 20, np.float32)
    (found,) = run(b.build(), executor, row / 20, np.asarray(99, np.int64))
    np.testing.assert_array_equal(found, row / 20)
    (found,) = run(b.build(), executor, row, np.asarray(1, np.int64))
    np.testing.assert_array_equal(found, np.zeros(ROW))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_device_with_memory_of_its_own_loops_by_data(executor: str) -> None:
    x, factor = np.full(ROW, 9, np.float32), np.full(ROW, 0.5, np.float32)
    last, times = run(halved(), executor, x, factor, target="wormhole_n150")
    assert times == by_hand(x, factor)[1]
    np.testing.assert_allclose(last, by_hand(x, factor)[0], 1e-6)


def chosen(write: Callable[..., Any], sides: int = 1) -> ComputationGraph:
    b = ComputationGraphBuilder("chosen")
    x, index = b.input("x", ROW, "float32"), b.input("index", (), "int64")
    results = write(b, x, index)
    for i, result in enumerate(results if isinstance(results, Sequence) else [results]):
        b.output(f"y{i}", result)
    return b.build()


def _two(b: Any, x: Any, index: Any) -> Any:
    return choose(
        b, b.less(index, 6), (lambda t: [b.sqrt(t[0]), t[1]], lambda t: [b.neg(t[0]), t[1]]),
        [x, index], [x.type, index.type],
    )  # fmt: skip


def _guarded(b: Any, x: Any, index: Any) -> Any:
    """An index that is out of range wherever its side is not taken."""
    sides = (lambda t: [b.gather(t[0], t[1])], lambda t: [b.reduce_sum(t[0])])
    return choose(b, b.less(index, 6), sides, [x, index], [b.reduce_sum(x).type])


def _nested(b: Any, x: Any, index: Any) -> Any:
    def inner(t: Any) -> Any:
        sides = (lambda u: [b.neg(u[0])], lambda u: [b.mul(u[0], 2)])
        return choose(b, b.less(t[1], 3), sides, [t[0]], [x.type])

    return choose(b, b.less(index, 6), (inner, lambda t: [t[0]]), [x, index], [x.type])


def _in_a_loop(b: Any, x: Any, index: Any) -> Any:
    """Rounds of a known count, each of which chooses, and loops by data."""

    def round_(states: Any, _: Any) -> Any:
        sides = (lambda t: [b.mul(t[0], 3)], lambda t: [b.div(t[0], 4)])
        (next_,) = choose(b, b.less(b.reduce_sum(states[0]), 20), sides, states, [x.type])
        (small,) = repeat_while(
            b, lambda s: b.greater(b.reduce_sum(s[0]), 50), lambda s: [b.div(s[0], 2)], [next_]
        )
        return [small], [small]

    last, rows = scan(b, round_, [x], [], count=7)
    return [*last, *rows]


def _lanes(b: Any, x: Any, index: Any) -> Any:
    """Each element of a sequence loops as often as it has to."""
    numbers = b.reshape(x, (6, 1))

    def round_(_: Any, elements: Any) -> Any:
        return [], list(repeat_while(
            b, lambda s: b.greater(b.reduce_sum(s[0]), 1), lambda s: [b.div(s[0], 2)], elements
        ))  # fmt: skip

    return scan(b, round_, [], [numbers])[1]


def _loop_by_hand(x: Array) -> list[Array]:
    rows = []
    for _ in range(7):
        x = x * 3 if x.sum() < 20 else x / 4
        while x.sum() > 50:
            x = x / 2
        rows.append(x)
    return [x, np.stack(rows)]


def _lanes_by_hand(x: Array) -> Array:
    x = x.copy()
    while (x > 1).any():
        x = np.where(x > 1, x / 2, x)
    return x.reshape(6, 1)


CHOICES: dict[str, tuple[Callable[..., Any], Callable[[Array, int], list[Any]]]] = {
    "two results": (_two, lambda x, i: [np.sqrt(x) if i < 6 else -x, i]),
    "an index": (_guarded, lambda x, i: [x[i] if i < 6 else x.sum()]),
    "nested": (_nested, lambda x, i: [x if i >= 6 else -x if i < 3 else x * 2]),
    "in a loop": (_in_a_loop, lambda x, _: _loop_by_hand(x)),
    "in lanes": (_lanes, lambda x, _: [_lanes_by_hand(x)]),
}


@pytest.mark.parametrize(("executor", "index", "name"), in_turn(EXECUTORS, [1, 4, 99], CHOICES))
def test_a_choice_gives_the_side_that_is_taken(name: str, index: int, executor: str) -> None:
    write, wanted = CHOICES[name]
    x = np.arange(6, dtype=np.float32) + 1
    found = run(chosen(write), executor, x, np.asarray(index, np.int64))
    for ours, theirs in zip(found, wanted(x, index), strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-6)


def test_a_condition_of_several_truth_values_is_refused() -> None:
    b = ComputationGraphBuilder("wrong")
    x = b.input("x", ROW, "float32")
    with pytest.raises(CompileError, match="a condition must be one boolean"):
        choose(b, b.greater(x, 0), (lambda t: t, lambda t: t), [x], [x.type])


def test_sides_of_another_type_than_was_said_are_refused() -> None:
    b = ComputationGraphBuilder("wrong")
    x = b.input("x", ROW, "float32")
    sides = (lambda t: [b.reduce_sum(t[0])], lambda t: t)
    with pytest.raises(CompileError, match="state 1 is 6xf32, and f32 after a round"):
        choose(b, b.greater(b.reduce_sum(x), 0), sides, [x], [x.type])


def test_a_loop_that_data_end_is_not_differentiated() -> None:
    graph = halved()
    with pytest.raises(CompileError, match="a loop depends on data"):
        differentiate(graph, ("x",))


def test_a_file_keeps_the_condition_and_names_its_feature(monkeypatch: Any) -> None:
    model = stitch.compile(halved(), target="host")
    file = encode(model.binary)
    read = load(file, verify="full")
    assert read.programs == model.binary.programs
    assert read.requires == ("bodies", "conditions", "scans")
    (loop,) = [o for o in read.programs[0].operations if is_scan(o)]
    assert ScanForm.of(loop).has_condition
    monkeypatch.setattr("stitch.ttb.file.FEATURES", binary.FEATURES - {"conditions"})
    with pytest.raises(stitch.StitchError, match="conditions"):
        load(file)


def test_a_result_that_nobody_reads_leaves_the_condition_of_the_others() -> None:
    b = ComputationGraphBuilder("halved")
    x = b.input("x", ROW, "float32")
    _, times = repeat_while(
        b, lambda s: b.greater(b.reduce_sum(s[0]), 1),
        lambda s: [b.div(s[0], 2), b.add(s[1], 1)], [x, np.int64(0)],
    )  # fmt: skip
    b.output("times", times)
    x_given = np.full(ROW, 9, np.float32)
    with stitch.open_device("host") as device:
        found = one(device.load(stitch.compile(b.build(), target="host"))(x_given))
        assert found.numpy() == by_hand(x_given, np.full(ROW, 0.5, np.float32))[1]
