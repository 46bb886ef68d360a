"""The code between programs: operands, constants, and when values end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stitch.frontend.torch.compile.stitched_graph import HostGraph

Function = Callable[..., Any]


def _outer(graph: Any, module: Any | None = None) -> Function:
    steps = [n for n in graph.nodes if n.op == "call_function" and n.all_input_nodes]
    run = HostGraph(module or SimpleNamespace(graph=graph), is_backward=False).run(steps, [])
    return lambda *arguments: run(list(arguments))


def test_operands_of_every_kind_reach_an_operator() -> None:
    def echo(*given: Any, **named: Any) -> Any:
        return given, named

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    odd = {"from": y, "dtype": torch.int8, "not a name": 1.5}
    given = ([x, (y,)], slice(x, None, 2), {"key": x}, float("inf"), "word", None, True, ())
    graph.output([graph.call_function(echo, given, odd)])
    made = _outer(graph)(3, 4)[0]
    assert made == (
        ([3, (4,)], slice(3, None, 2), {"key": 3}, float("inf"), "word", None, True, ()),
        {"from": 4, "dtype": torch.int8, "not a name": 1.5},
    )


def test_constants_are_read_from_the_module() -> None:
    module = nn.Module()
    module.register_buffer("held", torch.arange(3.0))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    held = graph.get_attr("held")
    full = graph.call_function(torch.ops.aten.full.default, ([3], 2.0))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, held))
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (total, full)), held])
    made, constant = _outer(graph, torch.fx.GraphModule(module, graph))(torch.ones(3))
    assert made.tolist() == [2.0, 4.0, 6.0]
    assert constant.tolist() == [0.0, 1.0, 2.0]
