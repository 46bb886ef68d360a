"""Gradients of scans are those of torch's loops, and cost what a scan costs, unrolled never."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch.compiler import differentiate
from stitch.errors import CompileError, UsageError
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor, scan
from stitch.program import Array, Operation, ScanForm, is_scan
from stitch.training import TrainingOptions
from tests.support.gradients.running import Feeds
from tests.support.gradients.scans import (
    Inputs,
    Loop,
    TorchLoop,
    check_against_torch,
    drawn,
    loop_gradients,
    loop_graph,
)
from tests.support.grids import in_turn

COUNTS = [0, 1, 2, 7]
Results = Mapping[str, SymbolicTensor]


def scans_of(graph: ComputationGraph) -> list[Operation]:
    return [operation for operation in graph.operations if is_scan(operation)]


def lstm(b: ComputationGraphBuilder, given: Inputs) -> Results:
    """One layer: inputs, first states, two matrices and a vector for four gates."""

    def cell(states: Any, elements: Any) -> Any:
        h, c = states
        gates = b.matmul(elements[0], given["w"]) + b.matmul(h, given["r"]) + given["bias"]
        i, f, o, new = b.apply("Split", [gates], 4, {"axis": -1, "num_outputs": 4})
        c = b.sigmoid(f) * c + b.sigmoid(i) * b.tanh(new)
        h = b.sigmoid(o) * b.tanh(c)
        return [h, c], [h]

    (h, c), (ys,) = scan(b, cell, [given["h"], given["c"]], [given["x"]])
    return {"ys": ys, "last_h": h, "last_c": c}


def lstm_in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
    h, c, ys = given["h"], given["c"], []
    for x in given["x"]:
        i, f, o, new = (x @ given["w"] + h @ given["r"] + given["bias"]).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(new)
        h = torch.sigmoid(o) * torch.tanh(c)
        ys.append(h)
    return {"ys": stacked(ys, h), "last_h": h, "last_c": c}


def stacked(rows: list[Any], like: Any) -> Any:
    return torch.stack(rows) if rows else torch.zeros((0, *like.shape), dtype=like.dtype)


def lstm_feeds(count: int, dtype: Any = np.float64) -> Feeds:
    return drawn(5, dtype, x=(count, 2, 3), h=(2, 4), c=(2, 4), w=(3, 16), r=(4, 16), bias=(16,))


@pytest.mark.parametrize(("count", "dtype"), in_turn(COUNTS, [np.float32, np.float64]))
def test_a_layer_of_lstm_cells(count: int, dtype: Any) -> None:
    tolerance = 1e-12 if dtype is np.float64 else 1e-5
    check_against_torch(lstm, lstm_in_torch, lstm_feeds(count, dtype), tolerance)


@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_a_layer_of_lstm_cells_computed_again(recompute: Any) -> None:
    feeds = lstm_feeds(5)
    both = check_against_torch(lstm, lstm_in_torch, feeds, 1e-12, recompute=recompute)
    saved = differentiate(loop_graph(lstm, feeds), list(feeds)).saved
    assert len(both.saved) < len(saved)
    # What is read of a scan that runs again, runs once.
    assert len(scans_of(both.backward)) == (2 if recompute == "all" else 1)


@pytest.mark.parametrize("word", ["some", "every 8", ""])
def test_other_words_are_refused(word: str) -> None:
    feeds = lstm_feeds(2)
    with pytest.raises(UsageError, match="must be none, cheap or all"):
        differentiate(loop_graph(lstm, feeds), ["w"], recompute=word)
    with pytest.raises(UsageError, match="must be none, cheap or all"):
        TrainingOptions(recompute=word)


def powers(b: ComputationGraphBuilder, given: Inputs) -> Results:
    """Cumulative products, and their sum."""

    def one(states: Any, elements: Any) -> Any:
        product = states[0] * elements[0]
        return [product, states[1] + product], [product]

    zeros = b.constant(np.zeros(3))
    (_, total), (products,) = scan(b, one, [given["a"], zeros], [given["x"]])
    return {"products": products, "total": total}


@pytest.mark.parametrize("count", COUNTS)
def test_a_cumulative_product(count: int) -> None:
    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        products = torch.cumprod(torch.cat([given["a"][None], given["x"]]), 0)[1:]
        return {"products": products, "total": products.sum(0)}

    check_against_torch(powers, in_torch, drawn(x=(count, 3), a=(3,)), 1e-12)


def opposite(given_back: bool) -> tuple[Loop, TorchLoop]:
    """Two sequences and two results, each pair in opposite directions."""

    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, elements: Any) -> Any:
            x, y = elements
            # Both are operands of products with what all rounds share.
            mixed = b.tanh(b.matmul(x, given["w"]) + b.matmul(y, given["w"]) * states[0])
            return [mixed + states[0]], [mixed * y, b.matmul(mixed, given["w"])]

        (last,), rows = scan(
            b, one, [given["s"]], [given["x"], given["y"]],
            taken_backward=[False, True], given_backward=[given_back, not given_back],
        )  # fmt: skip
        return {"last": last, "first": rows[0], "second": rows[1]}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state, w, first, second = given["s"], given["w"], [], []
        for x, y in zip(given["x"], given["y"].flip(0), strict=True):
            mixed = torch.tanh(x @ w + (y @ w) * state)
            state = mixed + state
            first.append(mixed * y)
            second.append(mixed @ w)
        rows = [stacked(first, state), stacked(second, state)]
        rows[not given_back] = rows[not given_back].flip(0)
        return {"last": state, "first": rows[0], "second": rows[1]}

    return loop, in_torch


def opposite_feeds(count: int) -> Feeds:
    return drawn(x=(count, 2, 3), y=(count, 2, 3), s=(2, 3), w=(3, 3))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("given_back", [False, True])
def test_sequences_in_opposite_directions(count: int, given_back: bool) -> None:
    loop, in_torch = opposite(given_back)
    both = check_against_torch(loop, in_torch, opposite_feeds(count), 1e-12)
    if count:
        (backward,) = scans_of(both.backward)
        (body,) = both.backward.bodies
        # No state adds up what the weight gets: only the state of the loop has a gradient there.
        assert ScanForm.of(backward).states == 1
        assert all(o.attributes.get("transA") != 1 for o in body.operations)


@pytest.mark.parametrize("count", COUNTS)
def test_no_states(count: int) -> None:
    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(_: Any, elements: Any) -> Any:
            return [], [b.exp(b.matmul(elements[0], given["w"])) * given["scale"]]

        _, (rows,) = scan(b, one, [], [given["x"]])
        return {"rows": rows}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        return {"rows": torch.exp(given["x"] @ given["w"]) * given["scale"]}

    check_against_torch(loop, in_torch, drawn(x=(count, 2, 3), w=(3, 4), scale=()), 1e-12)


@pytest.mark.parametrize("count", COUNTS)
def test_rounds_without_sequences(count: int) -> None:
    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, _: Any) -> Any:
            return [b.tanh(b.matmul(given["w"], states[0]))], []

        (last,), _ = scan(b, one, [given["s"]], [], count=count)
        return {"last": last}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state = given["s"]
        for _ in range(count):
            state = torch.tanh(given["w"] @ state)
        return {"last": state}

    check_against_torch(loop, in_torch, drawn(s=(3, 2), w=(3, 3)), 1e-12)


def test_a_fold_of_which_the_last_state_alone_is_used() -> None:
    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, elements: Any) -> Any:
            state = b.tanh(states[0] * given["decay"] + elements[0])
            return [state], [b.exp(state)]

        (last,), _ = scan(b, one, [given["s"]], [given["x"]])
        return {"last": last}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state = given["s"]
        for x in given["x"]:
            state = torch.tanh(state * given["decay"] + x)
        return {"last": state}

    both = check_against_torch(loop, in_torch, drawn(s=(3,), x=(5, 3), decay=()), 1e-12)
    (backward,) = scans_of(both.backward)
    # Of each round the state after it is kept, which says the one before it; nothing else.
    (forward,) = scans_of(both.forward)
    assert ScanForm.of(backward).states == 2
    assert "Exp" not in [o.op for o in both.backward.bodies[0].operations]
    assert len(both.saved) == 1
    assert len(forward.outputs) == 2


@pytest.mark.parametrize("count", [1, 4])
def test_a_shared_matrix_that_is_used_twice(count: int) -> None:
    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        w = given["w"]

        def one(states: Any, elements: Any) -> Any:
            hidden = b.tanh(b.matmul(elements[0], w) + b.matmul(states[0], b.transpose(w, (1, 0))))
            return [b.matmul(hidden, w)], [hidden]

        (last,), (rows,) = scan(b, one, [given["s"]], [given["x"]])
        return {"last": last, "rows": rows + b.apply("ReduceSum", [w], 1, {"keepdims": 0})[0]}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state, w, rows = given["s"], given["w"], []
        for x in given["x"]:
            hidden = torch.tanh(x @ w + state @ w.T)
            state = hidden @ w
            rows.append(hidden)
        return {"last": state, "rows": torch.stack(rows) + w.sum()}

    check_against_torch(loop, in_torch, drawn(s=(2, 3), x=(count, 2, 3), w=(3, 3)), 1e-12)


@pytest.mark.parametrize(
    ("shape", "weight"),
    [((3,), (3, 5)), ((2, 4, 3), (3, 5)), ((2, 4, 3), (2, 3, 5)), ((2, 4, 3), (1, 3, 5)),
     ((4, 3), (3,))], ids=str,
)  # fmt: skip
def test_products_of_any_rank_with_a_shared_operand(
    shape: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(_: Any, elements: Any) -> Any:
            return [], [b.matmul(b.tanh(elements[0]), given["w"])]

        _, (rows,) = scan(b, one, [], [given["x"]])
        return {"rows": rows}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        return {"rows": torch.stack([torch.matmul(torch.tanh(x), given["w"]) for x in given["x"]])}

    check_against_torch(loop, in_torch, drawn(x=(3, *shape), w=weight), 1e-12)


def test_operands_that_rounds_take_apart_or_put_together() -> None:
    """What is linear is computed once, of what the rounds add up to."""

    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, elements: Any) -> Any:
            x = elements[0]
            # All in the round: what is made of the shared operand alone, too.
            w = given["w"] + x[0, 0] * 0.0
            left, right = w[:, :2], w[:, 2:]
            both = b.concat([b.matmul(x, left) * 2.0, -b.matmul(x, right)], 1)
            tall = b.reshape(b.concat([given["u"] + states[0][0, 0] * 0.0, w], 0), (2, 3, 5))
            return [b.tanh(b.matmul(both, b.transpose(tall[0], (1, 0))) + states[0])], []

        (last,), _ = scan(b, one, [given["s"]], [given["x"]])
        return {"last": last}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state = given["s"]
        for x in given["x"]:
            w = given["w"]
            both = torch.cat([x @ w[:, :2] * 2.0, -(x @ w[:, 2:])], 1)
            tall = torch.cat([given["u"], w]).reshape(2, 3, 5)
            state = torch.tanh(both @ tall[0].T + state)
        return {"last": state}

    feeds = drawn(x=(4, 2, 3), w=(3, 5), u=(3, 5), s=(2, 3))
    check_against_torch(loop, in_torch, feeds, 1e-12)


def rows_of_rows(b: ComputationGraphBuilder, given: Inputs) -> Results:
    """A scan over rows, in each of whose rounds one goes over the row."""

    def inner(states: Any, elements: Any) -> Any:
        state = b.tanh(b.matmul(states[0], given["w"]) + elements[0])
        return [state], [state * given["scale"]]

    def outer(states: Any, elements: Any) -> Any:
        (last,), (rows,) = scan(b, inner, states, [elements[0]], taken_backward=[True])
        return [last * 0.5], [rows]

    (last,), (rows,) = scan(b, outer, [given["s"]], [given["x"]])
    return {"last": last, "rows": rows}


def rows_of_rows_in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
    state, rows = given["s"], []
    for x in given["x"]:
        inside = []
        for y in x.flip(0):
            state = torch.tanh(state @ given["w"] + y)
            inside.append(state * given["scale"])
        state = state * 0.5
        rows.append(torch.stack(inside))
    return {"last": state, "rows": torch.stack(rows)}


def rows_of_rows_feeds(outer: int = 3, inner: int = 4) -> Feeds:
    return drawn(x=(outer, inner, 2, 3), s=(2, 3), w=(3, 3), scale=(3,))


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_a_scan_in_a_scan(recompute: Any) -> None:
    both = check_against_torch(
        rows_of_rows, rows_of_rows_in_torch, rows_of_rows_feeds(), 1e-12, recompute=recompute
    )
    # The matrix gets one product over all rounds of all rounds.
    products = [o for o in both.backward.operations if o.op == "Gemm"]
    assert [both.backward.values[v].type.shape for v in products[-1].inputs] == [(24, 3), (24, 3)]
    assert len(products) == 1


def test_whole_numbers_beside_others() -> None:
    """A sequence of indices, a state that counts, and a mask."""

    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, elements: Any) -> Any:
            state, number = states
            row = b.apply("Gather", [given["table"], elements[0]], 1, {"axis": 0})[0]
            big = b.apply("Greater", [row, state], 1, {})[0]
            state = b.where(big, state * row, state - row)
            return [state, number + 1], [state * b.cast(number, "float64"), number]

        first = [given["s"], b.constant(np.int64(1))]
        (last, number), (rows, numbers) = scan(b, one, first, [given["at"]])
        return {"last": last, "number": number, "rows": rows, "numbers": numbers}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state, rows = given["s"], []
        for number, at in enumerate(given["at"], 1):
            row = given["table"][at]
            state = torch.where(row > state, state * row, state - row)
            rows.append(state * number)
        return {"last": state, "rows": torch.stack(rows)}

    feeds = drawn(s=(3,), table=(4, 3)) | {"at": np.array([2, 0, 3, 2, 1])}
    check_against_torch(loop, in_torch, feeds, 1e-12)


def test_states_without_a_gradient() -> None:
    """One that is set anew each round, one that nothing wanted reaches, one that is never read."""

    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, elements: Any) -> Any:
            state, ramp, anew, unread = states
            after = b.tanh(state * ramp + elements[0] * anew)
            return [after, ramp * 0.5, elements[0] * 2.0, unread + after], []

        states = [given["s"], b.constant(np.ones(3)), given["anew"], given["unread"]]
        (last, _, set_anew, _), _ = scan(b, one, states, [given["x"]])
        return {"last": last, "anew_last": set_anew}

    def in_torch(given: dict[str, Any]) -> Mapping[str, Any]:
        state, ramp, anew = given["s"], 1.0, given["anew"]
        for x in given["x"]:
            state, ramp, anew = torch.tanh(state * ramp + x * anew), ramp * 0.5, x * 2.0
        return {"last": state, "anew_last": anew}

    feeds = drawn(s=(3,), anew=(3,), unread=(3,), x=(4, 3))
    both = check_against_torch(loop, in_torch, feeds, 1e-12)
    (backward,) = scans_of(both.backward)
    # Neither what no wanted input reaches, nor what no result reads.
    assert ScanForm.of(backward).states == 2


def test_half_precision_adds_up_in_float32() -> None:
    """In bfloat16, adding 2 to 512 would change nothing any more."""

    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, elements: Any) -> Any:
            return [states[0] + elements[0] * given["scale"]], []

        (last,), _ = scan(b, one, [given["s"]], [given["x"]])
        return {"last": last}

    half = stitch.DataType.BFLOAT16.dtype
    feeds = {"s": np.zeros((), half), "x": np.full((600,), 2, half), "scale": np.ones((), half)}
    both = differentiate(loop_graph(loop, feeds), ["scale"])
    _, seeds, found = loop_gradients(both, feeds)
    assert found["scale"].dtype == half
    expected = 1200 * float(seeds["last"])
    np.testing.assert_allclose(float(found["scale"]), expected, rtol=2**-8)


def test_a_body_without_a_gradient_is_refused_with_its_place() -> None:
    def loop(b: ComputationGraphBuilder, given: Inputs) -> Results:
        def one(states: Any, _: Any) -> Any:
            with states[0].builder.at("loop.py:7"):
                return [b.apply("BitCast", [states[0]], 1, {"to": 11})[0]], []

        (last,), _ = scan(b, one, [given["s"]], [], count=2)
        return {"last": last}

    with pytest.raises(CompileError, match=r"no gradient for BitCast at loop\.py:7"):
        differentiate(loop_graph(loop, drawn(s=(3,))), ["s"])


def test_what_is_computed_from_a_small_weight_stays_outside_of_the_body() -> None:
    """Were its data copied into the body, no gradient would come back to it."""
    b = ComputationGraphBuilder("loop")
    x, weight = b.input("x", (4, 3), "float32"), b.parameter("w", np.ones(3, np.float32))

    def one(_: Any, elements: Any) -> Any:
        return [], [elements[0] * b.exp(weight) + np.full(3, 2, np.float32)]

    _, (rows,) = scan(b, one, [], [x])
    b.output("rows", rows)
    graph = b.build()
    (scanned,) = scans_of(graph)
    assert len(scanned.inputs) == 2
    assert [constant.data.tolist() for constant in graph.bodies[0].constants] == [[2, 2, 2]]


def layer_of(feeds: Feeds, zeros: Array) -> Callable[[SymbolicTensor], SymbolicTensor]:
    """A function to trace: a layer of cells with these weights, from zeros on."""

    def layer(x: SymbolicTensor) -> SymbolicTensor:
        b: Any = x.builder
        given = {name: b.parameter(name, array) for name, array in feeds.items()}
        return lstm(b, {**given, "x": x, "h": b.constant(zeros), "c": b.constant(zeros)})["ys"]

    return layer


@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"precision": "bfloat16"}], ids=str)
def test_a_traced_function_with_a_scan_learns_as_torch_does(options: dict[str, Any]) -> None:
    tolerance = 3e-2 if "precision" in options else 1e-5
    count, rows, width = 5, 4, 3
    feeds = drawn(7, np.float32, w=(width, 4 * width), r=(width, 4 * width), bias=(4 * width,))
    rng = np.random.default_rng(3)
    xs = [rng.normal(0, 1, (count, rows, width)).astype(np.float32) for _ in range(5)]
    labels = [rng.normal(0, 1, (count, rows, width)).astype(np.float32) for _ in range(5)]
    zeros = np.zeros((rows, width), np.float32)

    model = stitch.compile(
        layer_of(feeds, zeros), (xs[0],), target="host", optimizer=stitch.SGD(lr=0.3), loss="mse",
        **options,
    )  # fmt: skip
    assert model.training is not None
    weights = {n: torch.tensor(a, requires_grad=True) for n, a in feeds.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.3)
    losses = []
    for x, y in zip(xs, labels, strict=True):
        loss = model.training.loss(model(x), y)
        loss.backward()
        model.training.optimizer.step()
        model.training.optimizer.zero_grad()
        given = {"x": torch.tensor(x), "h": torch.tensor(zeros), "c": torch.tensor(zeros)}
        made = lstm_in_torch({**given, **weights})["ys"]
        expected = torch.nn.functional.mse_loss(made, torch.tensor(y))
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((float(loss.item()), expected.item()))
    ours, theirs = np.array(losses).T
    np.testing.assert_allclose(ours, theirs, rtol=tolerance)
    for name, tensor in weights.items():
        found = model.instance.get_tensor(name)
        np.testing.assert_allclose(found, tensor.detach().numpy(), 0, tolerance)
        assert np.abs(found - feeds[name]).max() > 1e-3
