"""Graphs with and without aot_autograd's wrappers give what eager torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from stitch.errors import UsageError
from stitch.frontend.torch.compile.backend import stitch_backend
from tests.support.grids import every
from tests.support.torch.compiled import assert_same, compiled

Function = Callable[..., Any]
lacking = torch.special.i0


def _writes(x: Any) -> Any:
    x.add_(1)
    return x * 2


def _gives_its_argument(x: Any) -> Any:
    return x, x * 2


def _gives_a_view(x: Any) -> Any:
    return x.view(-1), x * 2


def _gives_views_of_one(x: Any) -> Any:
    made = x * 2
    return made, made.view(-1)


def _turns_gradients_off(x: Any) -> Any:
    torch.set_grad_enabled(False)
    return x * 2


@pytest.mark.parametrize(
    "function",
    every(
        2, [_writes, _gives_its_argument, _gives_a_view, _gives_views_of_one, _turns_gradients_off]
    ),
)
def test_what_aot_autograd_does_after_a_graph_is_done(function: Function) -> None:
    run = compiled(function)
    for _ in range(4):
        mine, theirs = torch.randn(2, 4), torch.randn(2, 4)
        mine.copy_(theirs)
        on = torch.is_grad_enabled()
        try:
            made, on_mine = run(mine), torch.is_grad_enabled()
            torch.set_grad_enabled(on)
            wanted, on_theirs = function(theirs), torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(on)
        made, wanted = (v if isinstance(v, tuple) else (v,) for v in (made, wanted))
        for one, other in zip(made, wanted, strict=True):
            assert_same(one, other)
        assert torch.equal(mine, theirs)
        assert on_mine == on_theirs
        storages = {v.untyped_storage().data_ptr() for v in (mine, *made)}
        assert len(storages) == len({v.untyped_storage().data_ptr() for v in (theirs, *wanted)})


def test_one_tensor_given_twice_is_read_twice() -> None:
    run = compiled(lambda x, y: x - y * 2)
    x, y = torch.randn(3), torch.randn(3)
    for pair in ((x, x), (x, y), (y, y)):
        assert_same(run(*pair), pair[0] - pair[1] * 2)


def test_a_tensor_of_another_class_goes_through_the_wrappers() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    run = compiled(lambda x: x * 2 + 1)
    with torch.no_grad():
        made = run(TwoTensor(torch.ones(3), torch.zeros(3)))
    assert torch.equal(made.a, torch.full((3,), 3.0))
    assert torch.equal(made.b, torch.ones(3))


def test_operators_of_somebody_else_go_through_the_wrappers() -> None:
    @torch.library.custom_op("stitch_tests::doubled_straight", mutates_args=())  # type: ignore[untyped-decorator]  # torch's
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @doubled.register_fake  # type: ignore[untyped-decorator]  # torch's
    def _(x: Any) -> Any:
        return torch.empty_like(x)

    run = compiled(lambda x: doubled(x.sin()).cos(), fallback="torch")
    x = torch.randn(4)
    assert_same(run(x), (x.sin() * 2).cos())


def test_what_torch_runs_between_programs_heeds_no_mode_of_the_caller() -> None:
    """Gradients and autocast are turned off in a graph: what they do is in it already."""
    weight = torch.randn(4, 4)
    run = compiled(lambda x: (lacking(x) @ weight).sin(), fallback="torch")
    x = torch.rand(4, 4)
    wanted = (lacking(x) @ weight).sin()
    for _ in range(3):
        made = run(x)
        assert_same(made, wanted)
        assert not made.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        inside = (lacking(x) @ weight).sin()
        assert inside.dtype is torch.bfloat16
        for _ in range(3):
            assert run(x).dtype is torch.bfloat16
    assert_same(run(x), wanted)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.t() * 2, lambda x: x[:0] * 2, lambda x: nn.functional.dropout(x, 0.5) * 0,
     lambda x: lacking((x * 2).t()) + 1],
    ids=["strides", "empty", "dropout", "torch's"],
)  # fmt: skip
def test_results_lie_on_the_cpu_whatever_device_is_the_default(function: Function) -> None:
    run = compiled(function, fallback="torch", min_operations=1)
    with torch.no_grad(), torch.device("meta"):
        for _ in range(4):
            x = torch.rand(3, 4, device="cpu")
            assert_same(run(x), function(x))


# torch's own module of such derivatives asks for it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents_are_refused_and_not_lost() -> None:
    """A graph that was compiled without them is called with them."""
    run = torch.compile(lambda x, w: x @ w, backend="stitch")
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    plain = run(x, w)
    with forward_ad.dual_level():
        assert_same(run(x, w), plain)
        with pytest.raises(UsageError, match="forward-mode derivatives"):
            run(forward_ad.make_dual(x, torch.ones_like(x)), w)
    assert_same(run(x, w), plain)


def test_arguments_in_lists_reach_a_graph() -> None:
    module = torch.fx.symbolic_trace(lambda xs: (xs[0] - xs[1] * 2,))
    x, y = torch.randn(3), torch.randn(3)
    run = stitch_backend(module, [[x, y]])
    assert torch.equal(run([x, y])[0], x - y * 2)
