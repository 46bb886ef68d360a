"""`explain` tells what became of a function: who runs what, why, and what passed between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from stitch.errors import CompileError, UsageError
from stitch.torch import explain, graph_counts
from tests.support.torch.compiled import compiled

ALL_PARTS = {"min_operations": 1}


def _two_fallbacks(x: Any) -> Any:
    first = torch.special.i0(x * 2)
    return torch.special.i0(first.sin()) + torch.linalg.det(first)


def test_operators_are_counted_by_who_runs_them() -> None:
    found = explain(_two_fallbacks, options=ALL_PARTS)(torch.rand(3, 3))
    assert found.by_torch == {"aten.i0.default": 2, "aten._linalg_det.default": 1}
    assert found.by_stitch == {"aten.mul.Tensor": 1, "aten.sin.default": 1, "aten.add.Tensor": 1}
    assert [graph.role for graph in found.graphs] == ["inference"]
    assert found.programs == 3


@pytest.mark.parametrize(("operations", "programs"), [(3, 0), (4, 1)])
def test_torch_runs_parts_that_are_not_worth_a_program(operations: int, programs: int) -> None:
    def function(x: Any) -> Any:
        x = torch.special.i0(x)
        for _ in range(operations):
            x = torch.sin(x)
        return torch.special.i0(x)

    found = explain(function)(torch.rand(3))
    assert (found.programs, found.by_stitch.get("aten.sin.default", 0)) == (
        programs, operations * programs,
    )  # fmt: skip


def test_fallbacks_have_reasons_and_lines() -> None:
    found = explain(_two_fallbacks, options=ALL_PARTS)(torch.rand(3, 3))
    first, second = found.fallbacks
    line = _two_fallbacks.__code__.co_firstlineno + 1
    assert (first.operator, first.count, first.reason) == ("aten.i0.default", 2, "no lowering")
    assert first.places == (f"test_torch_explain.py:{line}", f"test_torch_explain.py:{line + 1}")
    assert second.operator == "aten._linalg_det.default"


def test_what_reads_a_type_that_programs_lack_says_so() -> None:
    def rounded(x: Any) -> Any:
        return torch.special.i0(x * 2).to(torch.float8_e4m3fn).to(torch.float32) * 2

    found = explain(rounded, options=ALL_PARTS)(torch.rand(3))
    reasons = {row.operator: row.reason for row in found.fallbacks}
    assert any("float8_e4m3fn" in reason for reason in reasons.values())


def test_bytes_that_cross_are_counted_in_each_direction() -> None:
    def function(x: Any) -> Any:
        return torch.special.i0(x * 2).sin()

    x = torch.rand(10, 10)
    found = explain(function, options=ALL_PARTS)(x)
    assert found.to_programs_nbytes == 2 * x.nbytes
    assert found.to_torch_nbytes == 2 * x.nbytes
    assert 0 < found.copied_nbytes <= found.to_programs_nbytes + found.to_torch_nbytes


def test_the_graph_of_gradients_is_told_as_well() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = explain(module)(torch.rand(2, 4))
    assert [graph.role for graph in found.graphs] == ["forward", "backward"]
    assert all(graph.programs == 1 for graph in found.graphs)
    assert found.by_torch == {}
    assert module[0].weight.grad is None


def test_the_text_says_all_of_it() -> None:
    def function(x: Any) -> Any:
        made = torch.special.i0(x * 2)
        torch._dynamo.graph_break()
        return made.sin()

    text = str(explain(function, options=ALL_PARTS)(torch.rand(3)))
    for part in (
        "2 graphs, 2 programs: 2 operators run by Stitch, 1 by torch",
        "left to torch:\n  1 x aten.i0.default (test_torch_explain.py:",
        "): no lowering",
        "bytes a call: 24 of torch's read by programs, 24 given to torch;",
    ):
        assert part in text


def test_something_compiled_already_is_explained_as_what_it_was_made_of() -> None:
    for given in (_two_fallbacks, nn.Sequential(nn.Linear(3, 3))):
        run = torch.compile(given, backend="eager")
        assert len(explain(run)(torch.rand(3, 3)).graphs) >= 1


def test_an_error_under_fallback_error_comes_through() -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        explain(_two_fallbacks, options={"fallback": "error"})(torch.rand(3, 3))
    assert isinstance(caught.value.inner_exception, CompileError)
    with pytest.raises(UsageError, match="fallback"):
        explain(_two_fallbacks, options={"fallback": "never"})


def test_counts_of_a_device_grow_with_each_graph() -> None:
    options: dict[str, Any] = {**ALL_PARTS, "window": 61}
    before = graph_counts(options)
    graphs, programs, fallbacks = before.graphs, before.programs, before.by_torch["aten.i0.default"]
    run = compiled(_two_fallbacks, fallback="torch", **options)
    run(torch.rand(3, 3))
    counts = graph_counts(options)
    assert (counts.graphs, counts.programs) == (graphs + 1, programs + 3)
    assert counts.by_torch["aten.i0.default"] == fallbacks + 2
    run(torch.rand(3, 3))
    assert graph_counts(options).graphs == graphs + 1
