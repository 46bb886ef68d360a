"""What directions, lengths, layouts and clips of recurrent layers mean, by other ways of saying it.

ONNX's reference evaluator has no activations but the default ones, and no lengths in LSTM.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stitch.errors import CompileError
from stitch.ops import evaluate
from stitch.program import Array

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STATES = {"RNN": 2, "GRU": 2, "LSTM": 3}
HIDDEN, LENGTH, BATCH, WIDTH = 3, 5, 2, 4


def drawn(op: str, directions: int) -> tuple[Array, list[Array]]:
    """X, then W, R, B."""
    rng = np.random.default_rng(11)
    rows = GATES[op] * HIDDEN
    shapes = [(directions, rows, WIDTH), (directions, rows, HIDDEN), (directions, 2 * rows)]
    return rng.normal(0, 1, (LENGTH, BATCH, WIDTH)), [rng.normal(0, 0.5, s) for s in shapes]


def run(op: str, operands: list[Any], **attributes: Any) -> tuple[Array, ...]:
    return evaluate(op, operands, attributes=attributes, outputs=STATES[op])


def agree(ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-12)


@pytest.mark.parametrize("op", GATES)
def test_the_reverse_direction_is_the_forward_one_over_the_flipped_sequence(op: str) -> None:
    x, weights = drawn(op, 1)
    whole, *last = run(op, [x, *weights], direction="reverse")
    flipped, *others = run(op, [x[::-1], *weights])
    agree((whole[::-1], *last), (flipped, *others))


@pytest.mark.parametrize("op", GATES)
def test_a_bidirectional_layer_is_both_directions_side_by_side(op: str) -> None:
    x, weights = drawn(op, 2)
    both = run(op, [x, *weights], direction="bidirectional", layout=0, **_names(op, 2))
    for d, direction in enumerate(("forward", "reverse")):
        one = run(op, [x, *(w[d : d + 1] for w in weights)], direction=direction, **_names(op, 1))
        agree((both[0][:, d : d + 1], *(s[d : d + 1] for s in both[1:])), one)


def _names(op: str, directions: int) -> dict[str, Any]:
    """Activations other than the default ones, with the parameters they take."""
    names = ("LeakyRelu", "HardSigmoid", "Softsign")[: {"RNN": 1, "GRU": 2, "LSTM": 3}[op]]
    alphas = (0.1, 0.3)[: len(names)]
    betas = (0.4,) if len(names) > 1 else ()
    found = {"activations": names * directions, "activation_alpha": alphas * directions}
    return found | ({"activation_beta": betas * directions} if betas else {})


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("op", GATES)
def test_each_sequence_ends_at_its_own_length(op: str, direction: str) -> None:
    x, weights = drawn(op, 1)
    lengths = np.array([2, 5], np.int32)
    whole, *last = run(op, [x, *weights, lengths], direction=direction)
    for row, length in enumerate(lengths):
        alone, *ends = run(op, [x[:length, row : row + 1], *weights], direction=direction)
        agree((whole[:length, :, row : row + 1],), (alone,))
        assert not whole[length:, :, row].any()
        agree(tuple(s[:, row : row + 1] for s in last), tuple(ends))


@pytest.mark.parametrize("op", GATES)
def test_the_other_layout_has_the_batch_first(op: str) -> None:
    x, weights = drawn(op, 2)
    states = [np.full((2, BATCH, HIDDEN), 0.5)] * (STATES[op] - 1)
    whole, *last = run(op, [x, *weights, None, *states], direction="bidirectional")
    turned = [s.transpose(1, 0, 2) for s in states]
    batched, *ends = run(
        op, [x.transpose(1, 0, 2), *weights, None, *turned], direction="bidirectional", layout=1
    )
    agree((batched.transpose(1, 2, 0, 3),), (whole,))
    agree(tuple(s.transpose(1, 0, 2) for s in ends), tuple(last))


@pytest.mark.parametrize("op", GATES)
def test_a_clip_bounds_what_activations_are_given(op: str) -> None:
    x, weights = drawn(op, 1)
    free, clipped = run(op, [x, *weights]), run(op, [x, *weights], clip=0.05)
    assert abs(free[0] - clipped[0]).max() > 1e-3
    agree(run(op, [x, *weights], clip=1e6), free)
    if op == "RNN":
        assert abs(clipped[0]).max() <= np.tanh(0.05)


def test_input_and_forget_gates_of_an_lstm_can_be_coupled() -> None:
    x, weights = drawn("LSTM", 1)
    # With an input gate that is open, the coupled forget gate is closed: nothing is remembered.
    w, r, b = (np.array(one) for one in weights)
    b[0, :HIDDEN] = 1e3
    _, h, c = run("LSTM", [x, w, r, b], input_forget=1)
    state = [None, np.zeros((1, BATCH, HIDDEN)), np.full((1, BATCH, HIDDEN), 9.0)]
    first = run("LSTM", [x[:1], w, r, b], input_forget=1)
    agree(run("LSTM", [x[:1], w, r, b, *state], input_forget=1), first)
    assert abs(c).max() <= 1
    assert h.shape == (1, BATCH, HIDDEN)


@pytest.mark.parametrize(
    "attributes",
    [{"direction": "sideways"}, {"activations": ("Tanh", "Tanh")}, {"hidden_size": 7},
     {"activations": ("Sigmoid", "Gelu")}]
)  # fmt: skip
def test_attributes_that_do_not_fit_are_refused(attributes: dict[str, Any]) -> None:
    x, weights = drawn("GRU", 2)
    with pytest.raises(CompileError):
        run("GRU", [x, *weights], **({"direction": "bidirectional"} | attributes))
