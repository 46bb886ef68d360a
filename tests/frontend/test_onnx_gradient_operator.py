"""ONNX's Gradient of training previews."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from stitch.errors import CompileError
from stitch.frontend.onnx import from_onnx
from tests.support.onnx.models import drawn, info, model, ours

node = helper.make_node
TRAINING = "ai.onnx.preview.training"


def gradient(xs: list[str], y: str, **attributes: Any) -> Any:
    made = [f"d{name}" for name in xs]
    operands = [*xs, *attributes.get("zs", [])]
    return node("Gradient", operands, made, domain=TRAINING, xs=xs, y=y, **attributes)


def test_a_gradient_is_that_of_the_operators_on_the_way() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Tanh", ["h"], ["t"]),
        node("ReduceSum", ["t"], ["y"], keepdims=0),
        gradient(["x", "w"], "y"),
    ]
    proto = model(nodes, [info("x", [2, 3]), info("w", [3, 4])], ["dx", "dw"],
                  domains={TRAINING: 1})  # fmt: skip
    x, w = drawn(2, 3), drawn(3, 4)
    slope = 1 - np.tanh(x @ w) ** 2
    dx, dw = ours(proto, [x, w])
    np.testing.assert_allclose(dx, slope @ w.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, x.T @ slope, rtol=1e-5, atol=1e-6)


def test_a_gradient_stops_at_the_value_that_it_is_taken_by() -> None:
    """By h, which is made from x, and by x beside it: h is held still for the latter."""
    nodes = [
        node("Mul", ["x", "x"], ["h"]),
        node("Mul", ["h", "x"], ["y"]),
        gradient(["h", "x"], "y"),
    ]
    proto = model(nodes, [info("x", [3])], ["dh", "dx"], domains={TRAINING: 1})
    x = drawn(3)
    dh, dx = ours(proto, [x])
    np.testing.assert_allclose(dh, x, rtol=1e-6)
    np.testing.assert_allclose(dx, x * x, rtol=1e-6)


def test_a_value_that_nothing_depends_on_has_a_gradient_of_zeros() -> None:
    nodes = [node("Exp", ["x"], ["y"]), gradient(["w"], "y", zs=["x"])]
    proto = model(nodes, [info("x", [3]), info("w", [2])], ["dw"], domains={TRAINING: 1})
    assert ours(proto, [drawn(3), drawn(2)])[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Exp", ["x"], ["y"]), node("Neg", ["x"], ["z"]),
          node("Gradient", ["z"], ["d"], domain=TRAINING, xs=["x"], y="y")],
         "not supported at other values"),
        ([node("Det", ["m"], ["y"]),
          node("Gradient", ["m"], ["d"], domain=TRAINING, xs=["m"], y="y")],
         "not supported through Det"),
    ],
)  # fmt: skip
def test_a_gradient_that_cannot_be_taken_is_refused_by_name(nodes: list[Any], words: str) -> None:
    inputs = [info("x", [3]), info("m", [2, 2])]
    with pytest.raises(CompileError, match=words):
        from_onnx(model(nodes, inputs, ["d"], domains={TRAINING: 1}))
