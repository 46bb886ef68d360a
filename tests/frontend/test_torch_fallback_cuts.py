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
from stitch.frontend.torch.compile.subgraphs import GraphPart, cut_graph, restrided, unit_of
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
    outputs = len(next(reversed(module.graph.nodes)).args[0])
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


def test_all_operators_may_be_torchs() -> None:
    def function(x: Any) -> Any:
        return ((x @ x).relu() + 1, x.t().sum(0))

    x = torch.rand(3, 3)
    module = _traced(function, [x])
    results, report = _run(module, dict.fromkeys(_operators(module), "all"), [x])
    assert_same(results, function(x))
    assert report.programs == 0
    assert not report.by_stitch


def test_one_part_for_each_turn_however_many_branches() -> None:
    def function(x: Any) -> Any:
        branches = [torch.special.i0((x * k).sin()).cos() + k for k in range(1, 6)]
        return (torch.stack(branches).sum(0),)

    x = torch.rand(3, 3)
    results, report = _run(_traced(function, [x]), {}, [x])
    assert_same(results, function(x))
    assert report.programs == 2
    assert dict(report.by_torch) == {"aten.i0.default": 5}


def test_parts_that_are_smaller_than_asked_for_are_torchs_with_their_reason() -> None:
    def function(x: Any) -> Any:
        return (torch.special.i0(torch.special.i0(x).sin() * 2).cos().exp().tanh() + 1,)

    x = torch.rand(3, 3)
    _, report = _run(_traced(function, [x]), {}, [x], min_operations=3)
    assert report.programs == 1
    reasons = {fallback.operator: fallback.reason for fallback in report.fallbacks}
    assert reasons["aten.sin.default"] == ("its part of the graph has 2 of the 3 operations wanted")
    assert reasons["aten.i0.default"] == "no lowering"


def _steps(module: Any, names: set[str], **settings: Any) -> tuple[list[Any], set[Any]]:
    by_torch = {node for node in module.graph.nodes if str(node.target) in names}
    given = {"static": frozenset(), "visible": 9, "share": False, **settings}
    return list(cut_graph(module.graph, by_torch, **given)), by_torch


def _position_of(steps: list[Any], name: str) -> int:
    for position, step in enumerate(steps):
        nodes = step.nodes if isinstance(step, GraphPart) else (step,)
        if any(str(node.target) == name for node in nodes):
            return position
    raise AssertionError(f"no {name} in {steps}")


def test_no_part_reads_what_comes_after_it() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        arguments = [torch.rand(4, 4), torch.rand(4, 4)]
        module = _traced(_drawn_function(rng), arguments)
        by_torch = {node for node in _operators(module) if rng.random() < 0.3}
        steps = cut_graph(
            module.graph, by_torch, static=frozenset({1}), visible=4, share=rng.random() < 0.5
        )
        made = {node for node in module.graph.nodes if node.op == "placeholder"}
        for step in steps:
            read = step.inputs if isinstance(step, GraphPart) else step.all_input_nodes
            for node in read:
                nothing = not node.all_input_nodes and node.op == "call_function"
                assert node in made or nothing, (seed, step, node)
            made.update(step.nodes if isinstance(step, GraphPart) else (step,))
            if isinstance(step, GraphPart):
                assert not any(unit_of(node) in by_torch for node in step.nodes)


def test_what_is_made_of_arguments_alone_waits_for_who_reads_it() -> None:
    def function(x: Any, w: Any) -> Any:
        for _ in range(3):
            x = torch.special.i0(x @ w.t().exp())
        return (x,)

    module = _traced(function, [torch.rand(3, 3), torch.rand(3, 3)])
    steps, _ = _steps(module, {"aten.i0.default"}, static=frozenset({1}))
    parts = [step for step in steps if isinstance(step, GraphPart)]
    assert len(parts) == 3
    # One weight each, and no result of the first part but what torch reads.
    assert [len(part.outputs) for part in parts] == [1, 1, 1]


def test_views_that_torch_reads_are_torchs_and_cost_programs_no_output() -> None:
    def function(x: Any) -> Any:
        made = (x * 2).sin()
        return torch.special.i0(made.t()[1:]), made.t().exp()

    steps, _ = _steps(_traced(function, [torch.rand(3, 3)]), {"aten.i0.default"})
    assert [str(node.target) for node in steps if not isinstance(node, GraphPart)] == [
        "aten.t.default", "aten.slice.Tensor", "aten.i0.default",
    ]  # fmt: skip
    first = steps[0]
    assert [str(node.target) for node in first.outputs] == ["aten.sin.default", "aten.exp.default"]


def test_random_operators_of_torch_keep_their_order() -> None:
    def function(x: Any) -> Any:
        late = torch.poisson(torch.special.i0(torch.special.i0(x).sin()).sin())
        early = torch.bernoulli(x)
        return late, early

    names = {"aten.i0.default", "aten.poisson.default", "aten.bernoulli.default"}
    steps, _ = _steps(_traced(function, [torch.rand(3, 3)]), names)
    first, second = (
        _position_of(steps, f"aten.{name}.default") for name in ("poisson", "bernoulli")
    )
    assert first < second


def test_who_writes_to_an_argument_waits_for_those_who_read_it_before() -> None:
    def function(x: Any, y: Any) -> Any:
        late = torch.special.i0(y).sin() + x
        x.copy_(y)
        return late, x.exp()

    module = _traced(function, [torch.rand(3, 3), torch.rand(3, 3)])
    steps, _ = _steps(module, {"aten.i0.default", "aten.copy_.default"})
    reader = _position_of(steps, "aten.add.Tensor")
    writer = _position_of(steps, "aten.copy_.default")
    assert reader < writer < _position_of(steps, "aten.exp.default")


def test_in_a_long_chain_each_part_reads_only_what_is_next_to_it() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2)
    by_torch, value = set(), x
    for number in range(3000):
        value = graph.call_function(torch.ops.aten.add.Tensor, (value, x))
        value.meta["val"] = torch.empty(2)
        if number % 3 == 0:
            by_torch.add(value)
    graph.output((value,))
    steps = cut_graph(graph, by_torch, static=frozenset(), visible=1, share=True)
    parts = [step for step in steps if isinstance(step, GraphPart)]
    assert len(parts) == 1000
    # Each node is in one part, and a part reads what is next to it.
    assert sum(len(part.nodes) for part in parts) == 2000
    assert max(len(part.inputs) for part in parts) == 2


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


def test_arguments_of_a_part_that_are_the_same_at_every_call_are_lent_at_the_first() -> None:
    def function(u: Any, x: Any, w: Any) -> Any:
        return (torch.special.i0(u), x @ w)

    arguments = [torch.rand(2, 2), torch.rand(3, 4), torch.rand(4, 5)]
    module, account = _traced(function, arguments), storage_of(executor="numpy")
    settings = GraphSettings("cut", static=frozenset({2}), exact_outputs=2)
    run = stitched(module, account, settings, lambda report: None)
    lent, copied = account.lent, account.copied
    assert_same(run(list(arguments)), function(*arguments))
    assert (account.lent - lent, account.copied - copied) == (1, 1)


def test_who_reads_what_was_written_waits_for_the_writer() -> None:
    """Through another tensor on the same bytes, of which no value passes between the two."""

    def function(x: Any, y: Any) -> Any:
        view = x.view(-1)
        x.copy_(torch.special.i0(y).sin())
        return (view.exp(),)

    module = _traced(function, [torch.rand(3, 3), torch.rand(3, 3)])
    steps, _ = _steps(module, {"aten.i0.default", "aten.copy_.default"})
    assert _position_of(steps, "aten.copy_.default") < _position_of(steps, "aten.exp.default")


def test_what_draws_is_drawn_once_though_several_parts_read_it() -> None:
    """What is made of nothing is made by everyone who reads it; random numbers are not nothing."""

    def function(x: Any) -> Any:
        drawn = torch.rand(3, 3)
        return (torch.special.i0(x * drawn).sin() - drawn.cos(),)

    module = _traced(function, [torch.rand(3, 3)])
    (draw,) = (node for node in module.graph.nodes if "rand" in str(node.target))
    steps, _ = _steps(module, {"aten.i0.default"})
    parts = [step for step in steps if isinstance(step, GraphPart)]
    made = [sum(node.target is draw.target for node in part.graph.nodes) for part in parts]
    assert sorted(made) == [0, 1]
