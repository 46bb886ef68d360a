"""Loops without states computed some rounds at a time: the same as one by one and as all at once,
whatever their count; how many at a time is what costs least."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stitch
from stitch import fractal as ops
from stitch.compiler import CompileOptions, compile_graph, differentiate
from stitch.fractal import CompiledNest, FractalTensor
from stitch.fractal.tracing import GraphTracing
from stitch.graph import ComputationGraph, ComputationGraphBuilder, scan
from stitch.machine import Machine, load_machine
from stitch.ttb import Binary
from tests.support import plain_nests as plain
from tests.support.gradients.scans import loop_gradients
from tests.support.grids import every, in_turn
from tests.support.plain_nests import assert_same, lists_of

HOST = load_machine("host")
WIDTH = 4
NUMBERS = np.random.default_rng(11)
KEYS, VALUES = NUMBERS.normal(size=(2, 5, 1, WIDTH)).astype(np.float32)
PLACES = [
    ("host", "numpy"), ("host", "onnxruntime"), ("host", "torch"), ("host", "auto"),
    ("wormhole_n150", "numpy"), ("tiny", "numpy"),
]  # fmt: skip


@pytest.fixture(scope="module")
def devices() -> Iterator[list[stitch.Device]]:
    opened = [stitch.open_device(machine, executor=executor) for machine, executor in PLACES]
    yield opened
    for device in opened:
        device.close()


def queries(count: int) -> Any:
    return np.random.default_rng(count).normal(size=(count, 1, WIDTH)).astype(np.float32)


def attention(o: Any, queries: Any, keys: Any, values: Any) -> Any:
    """What each query sees, key by key: no matrix of scores."""
    start = np.full((1, 1), -1e30, np.float32), np.zeros((1, 1), np.float32), VALUES[0] * 0

    def step(state: Any, pair: Any, query: Any) -> Any:
        (largest, total, weighed), (key, value) = state, pair
        score = query @ key.T
        new = np.maximum(largest, score)
        before, power = np.exp(largest - new), np.exp(score - new)
        return new, total * before + power, weighed * before + power @ value

    def seen(query: Any) -> Any:
        pairs = o.zip(keys, values) if o is ops else (keys, values)
        _, total, weighed = o.fold(lambda s, p: step(s, p, query), pairs, start)
        return weighed / total

    return o.map(seen, queries)


def compiled(count: int, target: str | Machine = "host") -> CompiledNest:
    nests = map(FractalTensor, (queries(count), KEYS, VALUES))
    return ops.compile(
        lambda *given: attention(ops, *given), *nests, target=target, schedule="blocks"
    )


@pytest.mark.parametrize("count", every(3, [1, 2, 3, 4, 5, 7, 8, 12, 13, 31, 36, 97]))
def test_attention_of_any_number_of_queries(count: int, devices: list[stitch.Device]) -> None:
    device = devices[count % len(devices)]
    nest = compiled(count, target=device.machine)
    assert ("blocks" in {note.schedule for note in nest.loops}) == (count > 2)
    given = [*map(FractalTensor, (queries(count), KEYS, VALUES))]
    nest.on(device)
    expected = attention(plain, *map(list, (queries(count), KEYS, VALUES)))
    assert_same(lists_of(nest(*given)), expected, 1e-5, str(count))


def test_none_at_a_time_of_no_rounds() -> None:
    none = FractalTensor(queries(1))[:0]
    with ops.mode("parallel", schedule="blocks"):
        assert lists_of(ops.map(lambda x: np.tanh(x), none)) == []


@pytest.mark.parametrize("count", [3, 6, 7, 13])
def test_where_no_product_changes_its_shape_all_bits_are_the_same(count: int) -> None:
    xs = FractalTensor(NUMBERS.normal(size=(count, 3)).astype(np.float32))
    found = {
        schedule: lists_of(
            ops.compile(
                lambda xs: ops.map(lambda x: np.exp(x) / (1 + x * x) - x[::-1], xs), xs,
                schedule=schedule,
            )(xs)
        )
        for schedule in ("batch", "blocks", "rounds")
    }  # fmt: skip
    assert_same(found["blocks"], found["batch"], 0, "batch")
    assert_same(found["blocks"], found["rounds"], 0, "rounds")


def size_for(
    graph: ComputationGraph, machine: Machine, count: int, schedule: str | None = None
) -> int:
    """How many rounds of the loop of so many are computed at a time."""
    loops = compile_graph(graph, machine, CompileOptions(schedule=schedule)).loops
    (note,) = [n for n in loops if n.count == count]
    return int(note.batch_size) if note.schedule == "blocks" else count


@pytest.mark.parametrize(
    ("taken", "given", "schedule"),
    in_turn(
        [(False, False), (True, True), (True, False)],
        [(False,), (True,)],
        ["batch", "blocks", "rounds"],
    ),
)
def test_rounds_from_the_last_to_the_first(
    schedule: str, given: tuple[bool, ...], taken: tuple[bool, ...]
) -> None:
    b = ComputationGraphBuilder("turned")
    xs, ys = b.input("xs", (7, 2), "float32"), b.input("ys", (7, 2), "float32")
    _, (found,) = scan(
        b, lambda _, e: ([], [e[0] * 2 + e[1]]), [], [xs, ys], taken_backward=taken,
        given_backward=given,
    )  # fmt: skip
    b.output("found", found)
    arrays = [NUMBERS.normal(size=(7, 2)).astype(np.float32) for _ in range(2)]
    x, y = (a[::-1] if back else a for a, back in zip(arrays, taken, strict=True))
    expected = x * 2 + y
    program = compile_graph(b.build(), HOST, CompileOptions(schedule=schedule)).program
    with stitch.open_device("host", executor="numpy") as device:
        result = device.load(Binary((program,), HOST.shape, "test"))(*arrays)
        assert isinstance(result, stitch.Tensor)
        assert np.array_equal(result.numpy(), expected[::-1] if given[0] else expected)


@pytest.mark.parametrize("schedule", ["batch", "blocks"])
def test_an_operator_without_a_rule_runs_cell_by_cell_in_blocks_too(schedule: str) -> None:
    """A recurrent layer of which each cell has weights of its own."""
    b = ComputationGraphBuilder("layers")
    xs, ws = b.input("xs", (7, 3, 1, 2), "float32"), b.input("ws", (7, 1, 4, 2), "float32")
    own = b.parameter("own", np.eye(4, dtype=np.float32)[None])

    def cell(_: Any, elements: Any) -> Any:
        inside = elements[0].builder
        made = inside.apply("RNN", [*elements, own], 1, {"hidden_size": 4})
        return [], [made[0]]

    b.output("ys", scan(b, cell, [], [xs, ws])[1][0])
    compilation = compile_graph(b.build(), HOST, CompileOptions(schedule=schedule))
    (note,) = compilation.loops
    assert (note.schedule, note.without_rule) == (schedule, ("RNN",))
    x, w = (NUMBERS.normal(size=s).astype(np.float32) for s in ((7, 3, 1, 2), (7, 1, 4, 2)))
    state, expected = np.zeros((7, 1, 4), np.float32), []
    for step in range(3):
        state = np.tanh(x[:, step] @ w[:, 0].transpose(0, 2, 1) + state)
        expected.append(state)
    with stitch.open_device("host", executor="numpy") as device:
        found = device.load(Binary((compilation.program,), HOST.shape, "test"))(x, w)
        assert isinstance(found, stitch.Tensor)
        np.testing.assert_allclose(found.numpy()[:, :, 0], np.stack(expected, 1), 1e-5, 1e-6)


@pytest.mark.parametrize("count", [3, 7, 8])
def test_gradients_through_blocks_are_those_through_rounds(count: int) -> None:
    """Of attention: the queries' own, and the keys', which all queries have a part in."""
    tracing = GraphTracing("attention")
    given = [queries(count), KEYS, VALUES]
    nests = [tracing.as_leaf_inputs(FractalTensor(each)) for each in given]
    tracing.trace(lambda _: attention(ops, *nests))
    graph = tracing.graph()
    feeds = {slot.name: each for slot, each in zip(graph.inputs, given, strict=True)}
    both = differentiate(graph, [*feeds])
    assert size_for(both.forward, HOST, count, "blocks") < count
    _, _, found = loop_gradients(both, feeds, "blocks")
    _, _, expected = loop_gradients(both, feeds, "rounds")
    assert found.keys() == {*feeds}
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], 1e-5, 1e-6)
