"""Every operator's gradient equals torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stitch import ops
from stitch.program import Array
from tests.support.gradients.running import Case, gradients, graph_of, operands_of, run
from tests.support.gradients.tables import ROWS


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


@pytest.mark.parametrize("one", [one for one in ROWS if one.torch is not None], ids=str)
def test_values_equal_those_of_torch(one: Case) -> None:
    assert one.torch is not None
    operands = operands_of(one)
    given = [a for a, spec in zip(operands, one.specs, strict=True) if isinstance(spec, str)]
    made = one.torch(*(torch.from_numpy(np.array(array)) for array in given))
    ours = run(*graph_of(one, operands))
    wanted = made if isinstance(made, tuple | list) else (made,)
    for index, theirs in enumerate(wanted[: len(ours)]):
        assert_close(ours[f"y{index}"], theirs.numpy())


def test_every_operator_with_a_gradient_has_a_case() -> None:
    missing = {d.name for d in ops.operators() if d.gradient} - {one.op for one in ROWS}
    assert not missing


def test_every_case_is_of_an_operator_with_a_gradient() -> None:
    assert all(next(d for d in ops.operators() if d.name == one.op).gradient for one in ROWS)
