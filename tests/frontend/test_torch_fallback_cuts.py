"""Graphs cut anywhere compute what they compute whole: any nodes may be torch's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stitch.frontend.torch.compile import GraphReport
from stitch.frontend.torch.compile.graph_program import GraphSettings
from stitch.frontend.torch.compile.stitched_graph import stitched
from stitch.frontend.torch.compile.subgraphs import restrided
from tests.support.grids import every
from tests.support.torch.compiled import assert_same, storage_of

Function = Callable[..., Any]


def _traced(function: Function, arguments: list[Any]) -> Any:
    return make_fx(function, tracing_mode="fake")(*arguments)


def _drawn_function(rng: random.Random) -> Function:
    """A function of two matrices, of operators, views and parts drawn at random."""
    steps = [(rng.random(), rng.random(), rng.randrange(9)) for _ in range(rng.randrange(4, 30))]
    given = [rng.random() for _ in range(4)]

    def function(x: Any, y: Any) -> Any:
        values = [x, y]
        for first, second, kind in steps:
            a, b = values[int(first * len(values))], values[int(second * len(values))]
            if kind == 0:
                made = a.t()
            elif kind == 1:
                made = torch.cat([a[:, ::2], b[:, 1::2]], 1)
            elif kind == 2:
                left, right = a.split(2, 1)
                values.append(torch.stack([left, right], 1).view(4, 4))
                made = right.repeat(1, 2)
            elif kind == 3:
                made = (a @ b) * 0.3
            elif kind == 4:
                made = a.sum(0, keepdim=True).expand(4, 4)
            elif kind == 5:
                values_and_places = a.max(1, keepdim=True)
                made = values_and_places.values * b + values_and_places.indices
            elif kind == 6:
                made = a.view(-1).view(2, 8)[:, :4].repeat(2, 1) if a.is_contiguous() else a.sin()
            elif kind == 7:
                made = torch.full((4, 4), 0.5) + a
            else:
                made = (a - b).sin()
            values.append(made)
        return tuple(values[int(place * len(values))] for place in given if place * len(values) > 2)

    return function


def _run(
    module: Any, refused: dict[Any, str], arguments: list[Any], **settings: Any
) -> tuple[Any, GraphReport]:
    heard: list[GraphReport] = []
    outputs = len(next(iter(reversed(module.graph.nodes))).args[0])
    wanted = GraphSettings("cut", exact_outputs=outputs, **settings)
    run = stitched(module, storage_of(executor="numpy"), wanted, heard.append, refused)
    for _ in range(2):
        results = run(list(arguments))
    return results, heard[-1]


def _operators(module: Any) -> list[Any]:
    return [n for n in module.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


@pytest.mark.parametrize("seed", every(5, range(40)))
def test_whatever_torch_is_made_to_run_the_results_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    function, arguments = _drawn_function(rng), [torch.rand(4, 4), torch.rand(4, 4)]
    wanted = function(*arguments)
    if not wanted:
        return
    share = rng.choice([0.1, 0.3, 0.6])
    module = _traced(function, arguments)
    refused = {node: "drawn" for node in _operators(module) if rng.random() < share}
    role = rng.choice(["inference", "forward"])
    least = rng.choice([1, 1, 3])
    results, _ = _run(module, refused, arguments, role=role, min_operations=least)
    assert_same(results, wanted, strides=False)
    _assert_dense_strides(results, wanted)


def _assert_dense_strides(results: Any, wanted: Any) -> None:
    """What is dense in eager torch has the same strides."""
    for found, expected in zip(results, wanted, strict=True):
        if torch._prims_common.is_non_overlapping_and_dense_or_false(expected):
            assert found.stride() == expected.stride()


@pytest.mark.parametrize("role", ["backward", "inference"])
def test_what_a_backward_pass_is_given_is_put_into_the_strides_that_were_promised(
    role: str,
) -> None:
    """A program of the forward pass has made it, perhaps; what torch gives has its strides."""
    module = _traced(lambda x: (torch.special.i0(x),), [torch.rand(3, 4).t()])
    dense = torch.rand(4, 3)
    ((result,), _) = _run(module, {}, [dense], role=role)
    assert_same(result, torch.special.i0(dense), strides=False)
    assert result.stride() == ((1, 4) if role == "backward" else (3, 1))


def test_a_saved_tensor_is_put_into_the_strides_that_were_promised() -> None:
    dense = torch.arange(6.0).view(2, 3)
    for strides in ((1, 2), (6, 2)):
        made = restrided(dense, strides)
        assert made.stride() == strides
        assert_same(made, dense, strides=False)
    wide = restrided(torch.ones(2, 3), (0, 1))
    assert wide.stride() == (0, 1)
    assert_same(wide, torch.ones(2, 3), strides=False)
    assert restrided(dense, (3, 1)) is dense
