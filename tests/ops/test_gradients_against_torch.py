"""Every operator's gradient equals torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stitch import ops
from stitch.program import Array
from tests.support.gradients import elementwise_rows, layer_rows, moving_rows, recurrent_rows
from tests.support.gradients.running import Case, gradients, operands_of

ROWS = [
    *elementwise_rows.ROWS,
    *moving_rows.ROWS,
    *layer_rows.ROWS,
    *recurrent_rows.ROWS,
]


def torch_gradients(one: Case, seeds: dict[str, Array], names: list[str]) -> dict[str, Array]:
    """What torch says of the same function."""
    assert one.torch is not None
    given: dict[str, Any] = {}
    for index, array in enumerate(operands_of(one)):
        if isinstance(one.specs[index], str):
            tensor = torch.from_numpy(np.array(array))
            given[f"x{index}"] = tensor.requires_grad_(f"x{index}" in names)
    made = one.torch(*given.values())
    results = made if isinstance(made, tuple | list) else (made,)
    pairs = [(r, seeds[f"y{i}"]) for i, r in enumerate(results) if f"y{i}" in seeds]
    found = torch.autograd.grad(
        [r for r, _ in pairs],
        [given[name] for name in names],
        [torch.from_numpy(seed) for _, seed in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return {name: tensor.numpy() for name, tensor in zip(names, found, strict=True)}


def assert_close(ours: Array, theirs: Array) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    tolerance = 1e-9 if ours.dtype == np.float64 else 2e-5
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("one", [one for one in ROWS if one.torch is not None], ids=str)
def test_gradients_equal_those_of_torch(one: Case) -> None:
    made, seeds, _ = gradients(one)
    assert made
    for name, theirs in torch_gradients(one, seeds, list(made)).items():
        assert_close(made[name], theirs)


def test_every_operator_with_a_gradient_has_a_case() -> None:
    missing = {d.name for d in ops.operators() if d.gradient} - {one.op for one in ROWS}
    assert not missing


def test_every_case_is_of_an_operator_with_a_gradient() -> None:
    assert all(next(d for d in ops.operators() if d.name == one.op).gradient for one in ROWS)
