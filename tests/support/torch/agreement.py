"""What the tests of the torch front end share: run a module here and there, and compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import stitch
from stitch.graph import ComputationGraph

TOLERANCE = 1e-4


class Applied(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: Any, **named: Any) -> Any:
        return self.function(*operands, **named)


class Every(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Many functions and layers as one module, each with operands of its own: captured once."""

    def __init__(self, parts: Sequence[Callable[..., Any]], counts: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])
        self.parts, self.counts = list(parts), list(counts)

    def forward(self, operands: Any) -> Any:
        return [
            part(*(operands[index][place] for place in range(count)))
            for index, (part, count) in enumerate(zip(self.parts, self.counts, strict=True))
        ]


def tensors_of(nested: Any) -> list[Any]:
    """The tensors of what a module takes or gives, in torch's order."""
    return [leaf for leaf in pytree.tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def run_graph(graph: ComputationGraph, examples: Any) -> list[Any]:
    """What the compiled graph gives for these examples, as arrays."""
    with stitch.open_device() as device:
        made = device.load(stitch.compile(graph))(*(t.numpy() for t in tensors_of(examples)))
        return [t.numpy() for t in (made if isinstance(made, tuple) else (made,))]


Case = tuple[Callable[..., Any], tuple[Any, ...]]
Outcome = tuple[list[Any], list[Any]]


def outcomes_of(cases: Mapping[str, Case], traced: bool) -> dict[str, Outcome]:
    """What each case gives, compiled with all others as one module, and what torch gives."""
    examples = [[t.clone() for t in operands] for _, operands in cases.values()]
    every = Every([part for part, _ in cases.values()], [len(one) for one in examples]).eval()
    with torch.no_grad():
        wanted = [tensors_of(one) for one in every(examples)]
    module = torch.fx.symbolic_trace(every) if traced else every
    got = run_graph(stitch.compile(module, (examples,)).graph, examples)
    assert len(got) == sum(map(len, wanted))
    found = iter(got)
    return {
        name: ([next(found) for _ in want], want) for name, want in zip(cases, wanted, strict=True)
    }


def assert_close(results: Sequence[Any], expected: Sequence[Any]) -> None:
    """The same types, and the same numbers within the tolerance."""
    assert len(results) == len(expected) > 0
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == want.numpy().dtype
        np.testing.assert_allclose(got, want.numpy(), rtol=TOLERANCE, atol=TOLERANCE)


def assert_agrees(module: Any, examples: Any) -> ComputationGraph:
    """Compiles a module for its examples and compares with eager torch; gives the graph."""
    with torch.no_grad():
        wanted = module(**examples) if isinstance(examples, dict) else module(*examples)
    graph = stitch.compile(module, examples).graph
    assert_close(run_graph(graph, examples), tensors_of(wanted))
    return graph
