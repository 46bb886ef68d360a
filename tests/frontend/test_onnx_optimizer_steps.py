"""Adagrad, Adam and Momentum of ONNX's preview domain, against ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from stitch.errors import CompileError, FormatError
from stitch.frontend.onnx import from_onnx
from stitch.program import Array
from tests.support.onnx.models import Drawn, one_node, ours

DOMAIN = "ai.onnx.preview.training"
MOMENTUM = {"alpha": 0.9, "beta": 0.8, "norm_coefficient": 0.01, "mode": "standard"}
ROWS: list[tuple[str, int, dict[str, Any]]] = [
    ("Adagrad", 1, {"norm_coefficient": 0.1, "decay_factor": 0.2}),
    ("Adagrad", 1, {}),
    ("Adam", 2, {"norm_coefficient": 0.1, "norm_coefficient_post": 0.05}),
    ("Adam", 2, {"alpha": 0.8, "beta": 0.9, "epsilon": 1e-3}),
    ("Momentum", 1, MOMENTUM),
    ("Momentum", 1, MOMENTUM | {"mode": "nesterov"}),
]


def case(states: int, count: int, step: int, attributes: dict[str, Any]) -> Drawn:
    rng = np.random.default_rng(5)
    shapes = [(3, 2), (4,)][:count] * (states + 2)
    tensors = [np.asarray(abs(rng.normal(0, 1, s)), np.float32) for s in shapes]
    operands: list[Array | None] = [np.array(0.1, np.float32), np.array(step), *tensors]
    return operands, count * (states + 1), attributes


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("op", "states", "attributes"), ROWS)
def test_a_step_is_that_of_onnx(
    op: str, states: int, attributes: dict[str, Any], count: int, step: int
) -> None:
    proto, operands = one_node(op, case(states, count, step, attributes), DOMAIN)
    names = [one.name for one in proto.graph.input]
    theirs = ReferenceEvaluator(proto).run(None, dict(zip(names, operands, strict=True)))
    for mine, other in zip(ours(proto, operands), theirs, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_a_state_that_is_not_there_is_missed() -> None:
    proto, _ = one_node("Adam", case(1, 1, 0, {}), DOMAIN)
    with pytest.raises((CompileError, FormatError), match="per parameter"):
        from_onnx(proto)
