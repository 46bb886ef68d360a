"""Adagrad, Adam and Momentum of ONNX's preview domain, against ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from stitch.errors import CompileError
from stitch.ops import evaluate
from stitch.program import Array

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


def drawn(states: int, count: int, step: int) -> list[Array]:
    rng = np.random.default_rng(5)
    shapes = [(3, 2), (4,)][:count] * (states + 2)
    tensors = [np.asarray(abs(rng.normal(0, 1, s)), np.float32) for s in shapes]
    return [np.array(0.1, np.float32), np.array(step), *tensors]


def reference(op: str, operands: list[Array], attributes: Any, outputs: int) -> list[Array]:
    names = [f"x{i}" for i in range(len(operands))]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, made, domain=DOMAIN, **attributes)
    infos = [[helper.make_empty_tensor_value_info(n) for n in side] for side in (names, made)]
    imports = [helper.make_opsetid("", 26), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "g", *infos), opset_imports=imports)
    return list(ReferenceEvaluator(model).run(None, dict(zip(names, operands, strict=True))))


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("op", "states", "attributes"), ROWS)
def test_a_step_is_that_of_onnx(
    op: str, states: int, attributes: dict[str, Any], count: int, step: int
) -> None:
    operands, outputs = drawn(states, count, step), count * (states + 1)
    ours = evaluate(op, operands, domain=DOMAIN, attributes=attributes, outputs=outputs)
    theirs = reference(op, operands, attributes, outputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_a_state_that_is_not_there_is_missed() -> None:
    with pytest.raises(CompileError, match="per parameter"):
        evaluate("Adam", drawn(1, 1, 0), domain=DOMAIN, outputs=3)
