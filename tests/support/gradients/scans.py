"""Graphs with scans, and how their gradients are run: compiled, on the NumPy executor.

A loop is built by a function of a builder and its inputs by name; the same numbers go through the
same loop in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import stitch
from stitch.compiler import Differentiated, differentiate
from stitch.graph import ComputationGraph, ComputationGraphBuilder, SymbolicTensor
from stitch.program import Array, DataType
from tests.support.gradients.running import Feeds, backward_feeds, seeds_of

Inputs = dict[str, SymbolicTensor]
#: From a builder and its inputs: the outputs by name.
Loop = Callable[[ComputationGraphBuilder, Inputs], Mapping[str, SymbolicTensor]]
#: The same on tensors of torch.
TorchLoop = Callable[[dict[str, Any]], Mapping[str, Any]]


def loop_graph(loop: Loop, feeds: Mapping[str, Array]) -> ComputationGraph:
    """The graph of a loop over inputs like these."""
    b = ComputationGraphBuilder("loop")
    given = {n: b.input(n, a.shape, DataType.from_dtype(a.dtype)) for n, a in feeds.items()}
    for name, tensor in loop(b, given).items():
        b.output(name, tensor)
    return b.build()


def run_compiled(
    graph: ComputationGraph, feeds: Mapping[str, Array], schedule: str | None = None
) -> Feeds:
    """Every output of a graph by name, compiled and run on the host."""
    model = stitch.compile(graph, target="host", schedule=schedule)
    with stitch.open_device("host", executor="numpy") as device:
        return _named(graph, device.load(model)(**{s.name: feeds[s.name] for s in graph.inputs}))


def _named(graph: ComputationGraph, made: Any) -> Feeds:
    results = made if isinstance(made, tuple) else (made,)
    return {slot.name: t.numpy() for slot, t in zip(graph.outputs, results, strict=True)}


def loop_gradients(
    both: Differentiated, feeds: Feeds, schedule: str | None = None
) -> tuple[Feeds, Feeds, Feeds]:
    """Results by name, what comes in for them by name, and gradients by the name of the input."""
    results = run_compiled(both.forward, feeds, schedule)
    seeds = seeds_of(both, results)
    made = run_compiled(both.backward, backward_feeds(both, feeds, results, seeds), schedule)
    given = {output: seeds[slot] for output, slot in both.seeds}
    return results, given, {name: made[slot] for name, slot in both.gradients}


def check_against_torch(
    loop: Loop,
    in_torch: TorchLoop,
    feeds: Feeds,
    tolerance: float = 1e-9,
    wanted: Sequence[str] | None = None,
    **options: Any,
) -> Differentiated:
    """Results and all gradients are those of torch's autograd; gives the graphs."""
    graph = loop_graph(loop, feeds)
    floating = [n for n, a in feeds.items() if a.dtype.kind == "f"]
    names = floating if wanted is None else list(wanted)
    both = differentiate(graph, names, **options)
    results, seeds, found = loop_gradients(both, feeds)
    tensors = {n: torch.tensor(a, requires_grad=n in names) for n, a in feeds.items()}
    expected = in_torch(tensors)
    total = torch.zeros((), dtype=torch.float64)
    for name, tensor in expected.items():
        np.testing.assert_allclose(results[name], tensor.detach().numpy(), tolerance, tolerance)
        if name in seeds:
            total = total + (tensor * torch.tensor(seeds[name])).sum()
    total.backward()
    assert sorted(found) == sorted(names)
    for name in names:
        grad = tensors[name].grad
        like = np.zeros_like(feeds[name]) if grad is None else grad.numpy()
        scale = max(1.0, float(np.abs(like).max(initial=0)))
        assert found[name].dtype == like.dtype
        np.testing.assert_allclose(found[name], like, 0, tolerance * scale, err_msg=name)
    return both


def drawn(
    seed: int = 5, dtype: type[np.floating[Any]] = np.float64, **shapes: Sequence[int]
) -> Feeds:
    """Numbers between -1 and 1, by name and shape."""
    rng = np.random.default_rng(seed)
    return {n: np.asarray(rng.uniform(-1, 1, s)).astype(dtype) for n, s in shapes.items()}
