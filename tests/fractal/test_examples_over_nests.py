"""The examples over nests beside the same networks in plain PyTorch, in every mode."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stitch
from stitch import fractal as ops
from stitch.fractal import FractalTensor
from stitch.fractal.modes import MODES
from tests.support.grids import every
from tests.support.torch.nets_over_nests import NETWORKS

FOLDER = Path(__file__).parents[2] / "examples" / "fractal"


def tensors(value: Any) -> Any:
    """A nest as one tensor, or a ragged one as lists of such."""
    if not isinstance(value, FractalTensor) or value.index.tree.uniform is not None:
        return torch.from_numpy(np.array(value))
    return [tensors(element) for element in value]


def assert_alike(found: Any, wanted: Any) -> None:
    """The same lengths throughout, and the same numbers."""
    if isinstance(wanted, tuple):
        assert isinstance(found, tuple) and len(found) == len(wanted)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.asarray(found), wanted.numpy(), rtol=1e-5, atol=1e-5)
        return
    else:
        assert isinstance(found, FractalTensor) and len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_alike(ours, theirs)


@pytest.fixture(params=MODES)
def within(request: pytest.FixtureRequest) -> Iterator[None]:
    """A mode, on a device that computes with NumPy."""
    with (
        stitch.open_device("host", executor="numpy") as device,
        ops.mode(request.param, device=device),
    ):
        yield


@pytest.mark.parametrize("name", every(2, NETWORKS))
@pytest.mark.usefixtures("within")
def test_an_example_is_the_network_of_pytorch(name: str) -> None:
    example = importlib.import_module(f"examples.fractal.{name}")
    given = example.inputs()
    found = example.network(**given)
    assert_alike(found, NETWORKS[name](**{key: tensors(value) for key, value in given.items()}))


def test_every_example_has_a_network_in_pytorch() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == NETWORKS.keys()
