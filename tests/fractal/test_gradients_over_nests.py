"""Gradients of the examples over nests are those of the same networks in PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from stitch.compiler import differentiate
from stitch.fractal import FractalTensor, Zipped
from stitch.fractal.tracing import GraphTracing
from stitch.program import Array
from tests.support.gradients.scans import loop_gradients
from tests.support.grids import every
from tests.support.torch.nets_over_nests import NETWORKS


def flat(value: Any) -> list[tuple[Any, Array]]:
    """What a value is made of, as inputs of a graph are: nests and arrays, and their leaves."""
    if isinstance(value, Zipped):
        return [pair for part in value.parts for pair in flat(part)]
    if isinstance(value, tuple | list):
        return [pair for part in value for pair in flat(part)]
    if isinstance(value, FractalTensor):
        return [(value, value.leaves())]
    return [(value, np.asarray(value))]


class InTorch:
    """Values as tensors that want a gradient, each leaf of a nest its own."""

    def __init__(self) -> None:
        self.leaves: list[list[Any]] = []

    def of(self, value: Any) -> Any:
        """A nest as one tensor of its leaves, or a ragged one as lists of such."""
        if isinstance(value, Zipped):
            return tuple([self.of(part) for part in value.parts])
        if isinstance(value, tuple | list):
            return tuple([self.of(part) for part in value])
        self.leaves.append([])
        return self._tensor(value)

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, FractalTensor) and value.index.tree.uniform is None:
            return [self._tensor(element) for element in value]
        array = np.array(value)
        tensor = torch.tensor(array, requires_grad=array.dtype == np.float32)
        shape = value.leaf_shape if isinstance(value, FractalTensor) else None
        self.leaves[-1].append((tensor, shape))
        return tensor

    def gradients(self) -> list[Array]:
        """Of each value, leaf after leaf."""
        return [np.concatenate([self._rows(*part) for part in parts]) for parts in self.leaves]

    def _rows(self, tensor: Any, shape: tuple[int, ...] | None) -> Array:
        """The gradient of a tensor, a row for each leaf."""
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        rows: Array = gradient.numpy().reshape(-1, *(tensor.shape if shape is None else shape))
        return rows


@pytest.mark.parametrize("name", every(3, NETWORKS))
def test_gradients_of_an_example_are_those_of_pytorch(name: str) -> None:
    example = importlib.import_module(f"examples.fractal.{name}")
    given = example.inputs()
    tracing = GraphTracing(name)
    brought = {key: tracing.as_leaf_inputs(value) for key, value in given.items()}
    tracing.trace(lambda _: example.network(**brought))
    graph = tracing.graph()
    arrays = [array for value in given.values() for _, array in flat(value)]
    feeds = {slot.name: a for slot, a in zip(graph.inputs, arrays, strict=True)}
    wanted = [n for n, a in feeds.items() if a.dtype == np.float32]
    theirs = InTorch()
    inside = {key: theirs.of(value) for key, value in given.items()}
    both = differentiate(graph, wanted)
    _, seeds, found = loop_gradients(both, feeds)
    # One seed for all: the sum of all results, each weighted by what came in for it.
    values = list(leaves_of(NETWORKS[name](**inside)))
    total = torch.zeros(())
    at = 0
    for slot in graph.outputs:
        rows = seeds[slot.name].reshape(-1)
        taken = 0
        while taken < rows.size:
            part = values[at].reshape(-1)
            total = total + (part * torch.from_numpy(rows[taken : taken + len(part)])).sum()
            taken, at = taken + len(part), at + 1
    assert at == len(values)
    total.backward()
    for given_slot, gradient in zip(graph.inputs, theirs.gradients(), strict=True):
        if given_slot.name in wanted:
            ours = found[given_slot.name].reshape(gradient.shape)
            np.testing.assert_allclose(ours, gradient, 2e-4, 2e-5, err_msg=given_slot.name)


def leaves_of(value: Any) -> Any:
    """The tensors of a result, in order."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves_of(part)
    else:
        yield value
