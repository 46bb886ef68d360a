"""`torch.cond` and `while_loop` run in programs; results and gradients are those of eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

import stitch
from stitch.errors import CompileError
from stitch.torch import explain
from tests.support.grids import every, in_turn
from tests.support.torch.compiled import assert_same, assert_trains_alike, compiled, gradients

ALL_PARTS = {"min_operations": 1}
EXECUTORS = ("numpy", "auto", "torch")
WEIGHT = torch.linspace(-1, 1, 64).view(8, 8)
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of branches


def _several(x: Any) -> Any:
    first, second = torch.cond(
        x.sum() > 0, lambda y: (y.sin() * 2, y.exp()), lambda y: (y.cos(), y - 1), (x * 2,)
    )
    return first.relu() + second, second * 2


def _layers(x: Any) -> Any:
    return torch.cond(
        x.mean() > 0, lambda y, w: nn.functional.gelu(y @ w) + y, lambda y, w: y.cos() @ w.t(),
        (x * 2, WEIGHT),
    )  # fmt: skip


def _nested(x: Any) -> Any:
    def inner(y: Any) -> Any:
        return torch.cond(y.max() > 1, lambda z: z.sin(), lambda z: z.cos() @ WEIGHT, (y,)) * 2

    return torch.cond(x.sum() > 0, inner, lambda y: y * 3, (x * 2,))


def _guarded(x: Any) -> Any:
    """An index that is out of range where the branch is not taken."""
    places = (x[:, 0] * 4 + 4).long()
    return torch.cond(
        x.sum() < 0, lambda y, i: y[i.clamp(max=7)] * 2, lambda y, i: y.tanh(), (x, places)
    )


def _complex_inside(x: Any) -> Any:
    return torch.cond(
        x.sum() > 0, lambda y: torch.fft.rfft(y * 2).abs(), lambda y: y[:, :5] * 2, (x * 2,)
    )


CHOICES: dict[str, Callable[..., Any]] = {
    "several results": _several,
    "layers": _layers,
    "nested": _nested,
    "an index": _guarded,
    "a transform": _complex_inside,
}


@pytest.mark.parametrize(("name", "executor"), in_turn(CHOICES, EXECUTORS))
def test_a_branch_gives_what_eager_torch_gives(name: str, executor: str) -> None:
    function = CHOICES[name]
    torch.manual_seed(1)
    run = compiled(function, executor=executor)
    for sign in (1, -1, 1):
        x = torch.rand(8, 8) * sign
        assert_same(gradients(run, [x]), gradients(function, [x]))


@pytest.mark.parametrize("name", every(3, CHOICES))
def test_programs_run_branches_and_their_gradients(name: str) -> None:
    found = explain(CHOICES[name], options=ALL_PARTS)(torch.rand(8, 8).requires_grad_())
    assert found.by_torch == {} and found.by_stitch["cond"] >= 1


def test_a_branch_in_bfloat16_gives_what_eager_torch_gives() -> None:
    run = compiled(_several)
    for sign in (1, -1):
        x = (torch.rand(8, 8) * sign).to(torch.bfloat16)
        for got, want in zip(gradients(run, [x]), gradients(_several, [x]), strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_a_module_with_branches_trains() -> None:
    class Gated(nn.Module):  # type: ignore[misc]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return torch.cond(
                self.gate(x).sum() > 0, lambda y: self.first(y).tanh(),
                lambda y: self.second(y).relu(), (x,),
            )  # fmt: skip

    torch.manual_seed(1)
    batches = [torch.randn(4, 8) for _ in range(6)]
    assert_trains_alike(
        Gated(), batches, lambda y: y.square().sum(), lambda p: torch.optim.SGD(p, 0.05)
    )


def test_what_a_branch_lacks_leaves_it_to_torch_with_the_reason() -> None:
    def function(x: Any) -> Any:
        chosen = torch.cond(x.sum() > 0, torch.special.i0, lambda y: y.cos(), (x * 2,))
        return chosen.relu() + 1

    x = torch.rand(4, 4)
    found = explain(function, options=ALL_PARTS)(x)
    (fallback,) = found.fallbacks
    assert fallback.operator == "cond"
    assert "aten.i0.default (no lowering)" in fallback.reason
    assert_same(compiled(function, fallback="torch", min_operations=1)(x), function(x))


def test_torch_runs_branches_that_draw_random_numbers() -> None:
    def function(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y + torch.rand_like(y), lambda y: y * 1, (x,))

    (fallback,) = explain(function, options=ALL_PARTS)(torch.rand(4, 4)).fallbacks
    assert "random" in fallback.reason


# Loops -----------------------------------------------------------------------------------------


def _counted(x: Any) -> Any:
    count, last = while_loop(
        lambda i, y: (i < 5) & (y.sum() < 100), lambda i, y: (i + 1, y * 2 + WEIGHT.max()),
        (torch.tensor(0), x),
    )  # fmt: skip
    return last + 1, count


def _roots(x: Any) -> Any:
    """Newton's method, until it is near enough."""
    wanted = x.abs() + 1
    (root,) = while_loop(
        lambda y: (y * y - wanted).abs().max() > 1e-3, lambda y: ((y + wanted / y) / 2,),
        (torch.ones_like(x),),
    )  # fmt: skip
    return root


def _never(x: Any) -> Any:
    return while_loop(lambda y: y.sum() > 1e9, lambda y: (y * 2,), (x * 1,))[0]


def _choosing(x: Any) -> Any:
    def round_(i: Any, y: Any) -> Any:
        side = torch.cond(y.sum() > 10, lambda z: z / 4, lambda z: z * 3, (y,))
        return i + 1, side

    return while_loop(lambda i, y: i < 7, round_, (torch.tensor(0), x))[1]


def _never_picking(x: Any) -> Any:
    """An index, of what no round changes, that is out of range: and no round runs."""
    places = (x * 0 + 100).long()
    return while_loop(lambda y: y.sum() > 1e9, lambda y: (y + x[places[0]],), (x * 1,))[0]


def _of_constants_within(x: Any) -> Any:
    """The inner loop begins with constants, and reads a state of the outer one."""

    def round_(i: Any, y: Any) -> Any:
        (total,) = while_loop(lambda z: z.sum() < 10, lambda z: (z + y + 1,), (torch.zeros(4),))
        return i + 1, y / 2 + total

    return while_loop(lambda i, y: i < 3, round_, (torch.tensor(0), x[0]))[1]


LOOPS: dict[str, Callable[..., Any]] = {
    "counted": _counted, "until it is near": _roots, "never": _never, "choosing": _choosing,
    "never picking": _never_picking, "of constants within": _of_constants_within,
}  # fmt: skip


@pytest.mark.parametrize(("name", "executor"), in_turn(LOOPS, EXECUTORS))
def test_a_loop_gives_what_eager_torch_gives(name: str, executor: str) -> None:
    function = LOOPS[name]
    run = compiled(function, executor=executor)
    with torch.no_grad():
        for size in (1.0, 30.0, 0.1):
            x = torch.linspace(0.1, 1, 16).view(4, 4) * size
            assert_same(run(x), function(x))


@pytest.mark.parametrize("name", every(3, LOOPS))
def test_programs_run_loops(name: str) -> None:
    with torch.no_grad():
        found = explain(LOOPS[name], options=ALL_PARTS)(torch.rand(4, 4))
    assert found.by_torch == {} and found.by_stitch["while_loop"] == 1


def test_what_a_loop_lacks_leaves_it_to_torch_with_the_reason() -> None:
    def function(x: Any) -> Any:
        return while_loop(lambda y: y.sum() < 100, lambda y: (torch.special.i0(y) + y,), (x * 2,))[
            0
        ].relu()

    x = torch.rand(4, 4)
    with torch.no_grad():
        (fallback,) = explain(function, options=ALL_PARTS)(x).fallbacks
        assert fallback.operator == "while_loop"
        assert "aten.i0.default (no lowering)" in fallback.reason
        assert_same(compiled(function, fallback="torch", min_operations=1)(x), function(x))


# Whole modules ---------------------------------------------------------------------------------


class _Module(nn.Module):  # type: ignore[misc]  # torch has no types here
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", every(2, ["layers", "nested", "counted", "choosing"]))
def test_modules_with_branches_and_loops_compile_whole(name: str) -> None:
    function = {**CHOICES, **LOOPS}[name]
    model = stitch.compile(_Module(function), (torch.rand(8, 8),), target="host")
    for sign in (1, -1):
        x = torch.rand(8, 8) * sign
        found, wanted = model(x.numpy()), function(x)
        pairs = zip(
            found if isinstance(found, tuple) else (found,),
            wanted if isinstance(wanted, tuple) else (wanted,), strict=True,
        )  # fmt: skip
        for ours, theirs in pairs:
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), 1e-4, 1e-5)


def test_a_branch_that_a_whole_module_lacks_is_an_error_that_names_it() -> None:
    module = _Module(lambda x: torch.cond(x.sum() > 0, torch.special.i0, torch.cos, (x,)))
    with pytest.raises(CompileError, match=r"aten\.i0\.default"):
        stitch.compile(module, (torch.rand(4),))


@pytest.mark.parametrize("name", every(2, ["several results", "counted", "choosing"]))
def test_symbolic_sizes_are_those_of_each_call_inside_branches_and_loops(name: str) -> None:
    function = {**CHOICES, **LOOPS}[name]
    run = compiled(function, dynamic=True)
    with torch.no_grad():
        for rows in (3, 5, 7):
            x = torch.linspace(0.1, 1, rows * 4).view(rows, 4)
            assert_same(run(x), function(x))
