"""What training steps of torch.compile are made of: normalizations, pools and products whose
backward pass is one operator each, over what lies there, with the numbers of eager torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.grids import in_turn, rows
from tests.support.torch.agreement import tensors_of
from tests.support.torch.compiled import compiled, gradients


def steps(net: Any, call: Any, *operands: Any) -> tuple[list[Any], list[Any]]:
    """Results, then gradients of operands and parameters, and what the module then keeps."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    results = tensors_of(call(*given))
    floating = [t for t in results if t.is_floating_point()]
    torch.autograd.backward(floating, [torch.arange(t.numel()).cos().view(t.shape).to(t.dtype)
                                       for t in floating])  # fmt: skip
    leaves = [x for x in given if x.requires_grad] + list(net.parameters())
    return [*results, *net.buffers()], [leaf.grad for leaf in leaves]


def compare(net: Any, *operands: Any, rtol: float = 1e-4, atol: float = 1e-5, **how: Any) -> None:
    """A module by programs alone, beside itself by eager torch; twice, for what it keeps."""
    twin = copy.deepcopy(net)
    call = compiled(twin, **how)
    for _ in range(2):
        for module in (net, twin):
            module.zero_grad()
        found, wanted = steps(twin, call, *operands), steps(net, net, *operands)
        for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


class Normalized(nn.Module):  # type: ignore[misc]
    """`batch_norm` with whatever is asked for."""

    def __init__(self, channels: int, *, affine: bool, running: bool, training: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, channels)) if affine else None
        self.shift = nn.Parameter(torch.linspace(-1, 1, channels)) if affine else None
        self.register_buffer("mean", torch.linspace(-1, 2, channels) if running else None)
        self.register_buffer("variance", torch.linspace(0.5, 3, channels) if running else None)
        self.training_mode = training

    def forward(self, x: Any) -> Any:
        return F.batch_norm(
            x, self.mean, self.variance, self.scale, self.shift, self.training_mode, 0.3, 1e-3
        )


@pytest.mark.parametrize(
    ("affine", "running", "training", "shape"),
    in_turn(
        [True, False],
        rows([(True, True), (False, True), (True, False)]),
        [(6, 3), (2, 3, 7), (4, 3, 5, 6), (1, 3, 2, 2, 2)],
    ),
)
def test_batches_are_normalized_as_eager_does_it(
    shape: tuple[int, ...], running: bool, training: bool, affine: bool
) -> None:
    torch.manual_seed(1)
    net = Normalized(3, affine=affine, running=running, training=training)
    compare(net, torch.randn(shape) * 2 + 1)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_batches_of_other_types_are_normalized_in_theirs(kind: Any) -> None:
    torch.manual_seed(1)
    net = Normalized(3, affine=True, running=True, training=True)
    narrow = {"rtol": 0.05, "atol": 0.1} if kind is torch.bfloat16 else {"rtol": 1e-9, "atol": 1e-9}
    compare(net.to(kind), torch.randn(4, 3, 5).to(kind), **narrow)


def test_narrow_batches_by_wide_weights_are_normalized_in_these() -> None:
    torch.manual_seed(1)
    net = Normalized(3, affine=True, running=True, training=True)
    compare(net, torch.randn(4, 3, 5).bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("far", [0.0, 5e4])
def test_a_channel_that_hardly_varies_is_normalized_as_eager_does_it(far: float) -> None:
    torch.manual_seed(1)
    x = torch.randn(4, 3, 5, 5)
    x[:, 1] = x[:, 1] * 1e-6 + far
    net = Normalized(3, affine=True, running=False, training=True)
    compare(net.double(), x.double(), rtol=1e-6, atol=1e-6)


class Checkpointed(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False) * 2


@pytest.mark.parametrize(("executor", "running"), in_turn(["numpy", "onnxruntime"], [True, False]))
def test_batches_within_a_checkpoint_are_normalized_again_without_what_ran(
    running: bool, executor: str
) -> None:
    torch.manual_seed(1)
    inner = nn.Sequential(
        nn.BatchNorm1d(3, track_running_stats=running), nn.Tanh(),
        nn.BatchNorm1d(3, track_running_stats=running), nn.Tanh(),
    )  # fmt: skip
    net, x = Checkpointed(inner), torch.randn(6, 3, 5) * 2 + 1
    twin = copy.deepcopy(net)
    call = compiled(twin, executor=executor)
    for _ in range(2):
        for module in (net, twin):
            module.zero_grad()
        found, wanted = steps(twin, call, x), steps(net, inner, x)
        # Unlike eager torch, compiled graphs move the statistics once.
        torch.testing.assert_close(found[0][1:], wanted[0][1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[0][0], wanted[0][0] * 2, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(found[1], wanted[1], strict=True):
            torch.testing.assert_close(ours, theirs * 2, rtol=1e-4, atol=1e-5)


class Pooled(nn.Module):  # type: ignore[misc]
    def __init__(self, spatial: int, *windows: Any, indices: bool = False) -> None:
        super().__init__()
        self.pool = getattr(F, f"max_pool{spatial}d")
        self.windows, self.indices = windows, indices

    def forward(self, x: Any) -> Any:
        found = self.pool(x, *self.windows, return_indices=self.indices)
        return (found[0] * 2, found[1]) if self.indices else found * 2


@pytest.mark.parametrize(("windows", "spatial"), in_turn([
    (2,), (3, 2, 1), (3, 1, 1, 1, True), (2, 3, 0, 2), (3, 2, 1, 2, True), (2, 2, 0, 1, True),
], [1, 2, 3]))  # fmt: skip
def test_gradients_of_pools_go_where_eager_brings_them(
    windows: tuple[Any, ...], spatial: int
) -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 3, *(9,) * spatial)
    net = Pooled(spatial, *windows)
    compare(net, torch.cat((x, x.round())))  # Several places of one window have the maximum.
    compare(net, x[0])
    compare(Pooled(spatial, *windows, indices=True), x)


def test_a_pool_that_torch_runs_has_its_gradient_too() -> None:
    x = torch.randn(2, 3, 8, 8)
    calls = [torch.compile(Pooled(2, 2), backend="stitch", options={"min_operations": 100})]
    calls.append(Pooled(2, 2))
    found, wanted = (steps(nn.Module(), call, x) for call in calls)
    for ours, theirs in zip((*found[0], *found[1]), (*wanted[0], *wanted[1]), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("is_trained", [True, False])
def test_products_that_are_transposed_afterwards_are_those_of_eager(is_trained: bool) -> None:
    def values_first(q: Any, k: Any, v: Any) -> Any:
        return v.transpose(1, 2) @ torch.softmax(k @ q.mT, -1).mT

    def turned(q: Any, k: Any, v: Any) -> Any:
        return (q @ k.transpose(1, 2)).transpose(1, 2) * 2 + (q @ v.mT).mT

    operands = [torch.randn(2, 5, 4) for _ in range(3)]
    for function in (values_first, turned):
        if is_trained:
            found, wanted = (gradients(f, operands) for f in (compiled(function), function))
        else:
            found, wanted = [compiled(function)(*operands)], [function(*operands)]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime"])
@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.LayerNorm(4), (0, 4)),
        (nn.LayerNorm((3, 4)), (0, 3, 4)),
        (nn.LayerNorm(4), (3, 0, 4)),
        (nn.GroupNorm(2, 4), (0, 4, 3)),
        (nn.RMSNorm(4), (0, 4)),
        (nn.BatchNorm1d(4).eval(), (0, 4)),
        (nn.Conv2d(3, 4, 2), (0, 3, 5, 5)),
    ],
)
def test_gradients_of_layers_over_an_empty_batch_are_those_of_eager(
    net: Any, shape: tuple[int, ...], executor: str
) -> None:
    compare(net, torch.zeros(shape), executor=executor)


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_convolutions_of_no_input_channels_are_those_of_eager(spatial: int) -> None:
    """torch gives no output channels then, though the weight and the bias have three."""

    class Convolved(nn.Module):  # type: ignore[misc]  # torch has no types here
        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            return torch.convolution(
                x, weight, bias, [1] * spatial, [0] * spatial, [1] * spatial, False,
                [0] * spatial, 1,
            )  # fmt: skip

    x, weight = torch.zeros(2, 0, *[4] * spatial), torch.zeros(3, 0, *[2] * spatial)
    compare(Convolved(), x, weight, torch.ones(3))
