"""Whose bytes are where when torch runs a part of a graph, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from stitch.frontend.torch.compile.graph_program import GraphSettings
from stitch.frontend.torch.compile.stitched_graph import stitched
from tests.support import garbage
from tests.support.grids import every
from tests.support.torch.compiled import assert_gone, assert_same, compiled, storage_of

ALL_PARTS: dict[str, Any] = {"fallback": "torch", "min_operations": 1}
TARGETS = ("host", "wormhole_n150")
bessel = torch.special.i0


class _Network(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        hidden = bessel(self.first(x).tanh())
        return self.second(hidden) + bessel(hidden.t()).t()


def test_arguments_and_results_between_die_after_their_last_use() -> None:
    alive: list[Any] = []
    dead: list[list[bool]] = []
    library = torch.library.Library("stitch_death_tests", "FRAGMENT")

    @torch.library.custom_op("stitch_death_tests::remembered", mutates_args=())  # type: ignore[untyped-decorator]  # torch has no types here
    def remembered(x: torch.Tensor) -> torch.Tensor:
        dead.append([held() is None for held in alive])
        made = x + 1
        alive.append(weakref.ref(made.untyped_storage()))
        return made

    remembered.register_fake(torch.empty_like)

    def function(x: Any) -> Any:
        for _ in range(3):
            x = remembered(x.sin() * 2)
        return (x.exp(),)

    x = torch.ones(4)
    module = make_fx(function, tracing_mode="fake")(x)
    settings = GraphSettings("dying", exact_outputs=1)
    run = stitched(module, storage_of(), settings, lambda report: None)
    arguments = [x]
    alive.append(weakref.ref(x))
    del x
    with garbage.only_of_here():
        run(arguments)
        gc.collect()
    assert not arguments
    # At each of torch's operators the argument is gone, and so is what the one before gave.
    assert [row[0] for row in dead] == [True, True, True]
    library._destroy()


@pytest.mark.parametrize("target", every(2, TARGETS))
def test_a_module_that_is_gone_takes_its_parts_with_it(target: str) -> None:
    assert_gone(_Network, (4, 8), target=target, **ALL_PARTS)


def test_what_torch_keeps_of_a_result_stays_as_it_was() -> None:
    def function(x: Any) -> Any:
        made = (x * 2).sin()
        return made, bessel(made.t()).exp() + 1

    run = compiled(function, **ALL_PARTS)
    batches = [torch.rand(3, 5) for _ in range(20)]
    kept = [run(batch) for batch in batches]
    for results, batch in zip(kept, batches, strict=True):
        assert_same(results, function(batch))
