"""Loops on the executor of cards: rounds of known number are unrolled into its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import stitch
from stitch.errors import StitchError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan, scan_in_body
from stitch.program import Array
from stitch.runtime.executors import make_executor, tensor_loops, tensor_programs
from stitch.runtime.executors.cuda_graphs import Launch
from tests.support.onnx.models import BOOL, INT64, info, model
from tests.support.scan_cases import CASES, expected_of, graph_of, inputs_of

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def card() -> Iterator[stitch.Device]:
    with stitch.open_device("torch:cpu") as device:
        yield device


def arrays(result: Any) -> list[Array]:
    return [t.numpy().copy() for t in (result if isinstance(result, tuple) else (result,))]


def run(device: stitch.Device, graph: Any, *given: Any) -> tuple[list[Array], set[str]]:
    """The results, and the operators that were left to the host."""
    left: set[str] = device.backend.executor.left_to_numpy  # type: ignore[assignment]
    left.clear()
    program = device.load(stitch.compile(graph, given, target="cuda", schedule="rounds"))
    return arrays(program(*given)), set(left)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    "name", ["lstm", "weights", "two_ways", "nested", "map", "scalars", "bfloat16", "float16"]
)
def test_rounds_are_computed_on_the_device(card: stitch.Device, name: str, count: int) -> None:
    case = BY_NAME[name]
    found, left = run(card, graph_of(case, count), *inputs_of(case, count))
    assert not left
    for ours, theirs in zip(found, expected_of(case, count), strict=True):
        np.testing.assert_allclose(
            ours.astype(np.float64), theirs.astype(np.float64), case.tolerance, case.tolerance
        )


def chain(count: int) -> ComputationGraph:
    """Rounds with several temporaries, and a loop in the loop."""
    b = ComputationGraphBuilder("chain")
    xs = b.input("xs", (count, 3, 8), "float32")

    def inner(states: Sequence[Any], elements: Sequence[Any]) -> Any:
        return [np.tanh(states[0] * elements[0] + 0.5) - elements[0]], []

    def outer(body: Any, states: Sequence[Any], elements: Sequence[Any]) -> Any:
        (last,), _ = scan(body, inner, [states[0] * 0.5], [elements[0]])
        return [last], [np.exp(-last * last)]

    (last,), (seen,) = scan_in_body(b, outer, [b.constant(np.ones(8, np.float32))], [xs])
    b.output("last", last)
    b.output("seen", seen)
    return b.build()


def bound(count: int) -> Any:
    model = stitch.compile(chain(count), target="cuda", schedule="rounds")
    executor = make_executor("torch:cpu")
    prepared = executor.prepare(model.program, model.binary.machine)
    xs = torch.ones(count * 24)
    places = torch.zeros(8), torch.zeros(count * 8)
    scratch = torch.zeros(model.program.scratch.size_per_bank, dtype=torch.uint8)
    regions = [t.view(torch.uint8) for t in (xs, *places)]
    found = prepared.bind((regions[0],), (regions[1], regions[2]), scratch)
    return found, (prepared, regions, scratch, places)


def test_rounds_share_their_temporaries_and_so_do_bindings() -> None:
    few, many = bound(2), bound(64)
    assert len(many[0].steps) > 20 * len(few[0].steps)
    # Nothing splits the graph.
    assert {type(step) for step in many[0].steps} == {Launch}
    assert 0 < few[0].staging_nbytes == many[0].staging_nbytes
    prepared, regions, scratch, _ = many[1]
    again = prepared.bind((regions[0],), (regions[1], regions[2]), scratch)
    assert again.staging_nbytes == many[0].staging_nbytes


def test_steps_run_again_on_what_lies_in_the_same_places() -> None:
    found, (_, regions, _, (last, _)) = bound(5)
    state, results = np.ones(8, np.float32), []
    for turn in (1.0, 0.25):
        regions[0].view(torch.float32)[:] = turn
        for step in found.steps:
            step()
        state = np.ones(8, np.float32)
        for _ in range(5):
            state = state * np.float32(0.5)
            for _ in range(3):
                state = np.tanh(state * np.float32(turn) + np.float32(0.5)) - np.float32(turn)
        np.testing.assert_allclose(last.numpy(), state, 1e-5, 1e-6)
        results.append(state[0])
    assert results[0] != results[1]


@pytest.mark.parametrize("most", [10, 40])
def test_more_steps_than_a_graph_should_have_are_left_to_the_host(
    card: stitch.Device, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The limit is seen before the first round is bound, or after it."""
    for module in (tensor_programs, tensor_loops):
        monkeypatch.setattr(module, "MOST_STEPS", most)
    xs = np.linspace(-1, 1, 96, dtype=np.float32).reshape(4, 3, 8)
    (last, _), left = run(card, chain(4), xs)
    assert left == {"stitch.Scan"}
    monkeypatch.undo()
    (same, _), left = run(card, chain(4), xs)
    assert not left
    np.testing.assert_allclose(last, same, 1e-5, 1e-6)


def test_a_condition_on_data_is_left_to_the_host(card: stitch.Device) -> None:
    b = ComputationGraphBuilder("halved")
    x = b.input("x", (4,), "float32")

    def halve(_: Any, states: Sequence[Any], __: Any) -> Any:
        after = states[1] / 2
        return [after.sum() > 1, after], []

    (_, last), _ = scan_in_body(
        b, halve, [b.constant(np.array(True)), x], [], count=50, has_condition=True
    )
    b.output("y", last)
    (y,), left = run(card, b.build(), np.full(4, 3, np.float32))
    assert left == {"stitch.Scan"}
    assert y.tolist() == [0.1875] * 4


def numbered(index: str, rounds: int = 6) -> onnx.ModelProto:
    """A Loop of ONNX that reads the row of its number, or of another one computed of it."""
    nodes = [
        helper.make_node("Mul", ["i", "two"], ["i2"]),
        helper.make_node("Sub", ["i2", "three"], ["odd"]),
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Gather", ["x", index], ["row"]),
        helper.make_node("Mul", ["row", "f"], ["scaled"]),
        helper.make_node("Add", ["s", "scaled"], ["t"]),
        helper.make_node("Identity", ["t"], ["seen"]),
        helper.make_node("Identity", ["c"], ["go_on"]),
    ]
    body = helper.make_graph(
        nodes, "rounds",
        [info("i", [], INT64), info("c", [], BOOL), info("s", [2])],
        [info("go_on", [], BOOL), info("t", [2]), info("seen", [2])],
    )  # fmt: skip
    weights = {
        "m": np.array(rounds, np.int64), "go": np.array(True), "two": np.array(2, np.int64),
        "three": np.array(3, np.int64),
    }  # fmt: skip
    loop = helper.make_node("Loop", ["m", "go", "s0"], ["y", "ys"], body=body)
    return model([loop], [info("s0", [2]), info("x", [9, 2])], ["y", "ys"], weights)


@pytest.mark.parametrize("index", ["i", "odd"])
def test_numbers_of_rounds_are_known_when_they_are_bound(card: stitch.Device, index: str) -> None:
    s, x = np.array([1, -1], np.float32), np.arange(18, dtype=np.float32).reshape(9, 2)
    (last, seen), left = run(card, numbered(index), s, x)
    assert not left
    expected = []
    for i in range(6):
        s = s + x[i if index == "i" else 2 * i - 3] * np.float32(i)
        expected.append(s)
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(last, s)


def test_an_index_out_of_range_in_a_round_is_an_error_of_the_run(card: stitch.Device) -> None:
    s, x = np.zeros(2, np.float32), np.zeros((9, 2), np.float32)
    with pytest.raises(StitchError, match=r"9.*range|range.*9|out of"):
        run(card, numbered("i", rounds=12), s, x)
    found, left = run(card, numbered("i"), s, x)
    assert not left and not found[0].any()


def test_a_result_in_the_place_of_what_rounds_read_is_computed_beside_it() -> None:
    b = ComputationGraphBuilder("state")
    x, w = b.input("x", (8,), "float32"), b.input("w", (8,), "float32")
    (last,), _ = scan(b, lambda s, _: ([s[0] * w + w], []), [x], [], count=3)
    b.output("y", last)
    compiled = stitch.compile(b.build(), target="cuda", schedule="rounds")
    prepared = make_executor("torch:cpu").prepare(compiled.program, compiled.binary.machine)
    scratch = torch.zeros(compiled.program.scratch.size_per_bank, dtype=torch.uint8)
    given, weights = torch.arange(8.0), torch.arange(8.0) / 4
    expected = given.clone()
    for _ in range(3):
        expected = expected * weights + weights
    for place in (given, weights):
        x, y = given.clone(), weights.clone()
        out = x if place is given else y
        steps = prepared.bind(
            (x.view(torch.uint8), y.view(torch.uint8)), (out.view(torch.uint8),), scratch
        ).steps
        for step in steps:
            step()
        np.testing.assert_allclose(out.numpy(), expected.numpy(), 1e-6)
