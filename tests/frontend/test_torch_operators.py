"""Every operator of the list agrees with eager torch, traced by torch.fx or exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.grids import every
from tests.support.torch.agreement import Outcome, assert_close, outcomes_of

torch.manual_seed(7)
X = torch.randn(2, 3)
Y = torch.randn(2, 3)
POSITIVE = torch.rand(2, 3) + 0.5
WHOLE = torch.tensor([[7, -7, 3], [-2, 5, 0]])
DIVISOR = torch.tensor([[2, 2, -2], [3, -3, 4]])
FLAG = torch.tensor([[True, False, True], [False, False, True]])
IMAGE = torch.randn(2, 4, 8, 6)
CUBE = torch.randn(2, 3, 4)
IDS = torch.tensor([[0, 4, 2], [1, 1, 3]])

LAYERS: dict[str, tuple[nn.Module, Any]] = {
    "Linear": (nn.Linear(3, 5), X),
    "Linear without bias": (nn.Linear(4, 5, bias=False), CUBE),
    "Conv2d": (nn.Conv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=1, groups=2), IMAGE),
    "MaxPool2d": (nn.MaxPool2d(3, stride=2, padding=1), IMAGE),
    "MaxPool2d with ceil_mode": (nn.MaxPool2d(3, stride=2, ceil_mode=True), IMAGE),
    "AvgPool2d": (nn.AvgPool2d(2), IMAGE),
    "AvgPool2d of odd windows": (nn.AvgPool2d(3, 2, 1, True, False), IMAGE),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(1), IMAGE),
    "AdaptiveAvgPool2d dividing": (nn.AdaptiveAvgPool2d((4, 3)), IMAGE),
    "AdaptiveAvgPool2d uneven": (nn.AdaptiveAvgPool2d((3, 4)), IMAGE),
    "BatchNorm2d": (nn.BatchNorm2d(4), IMAGE),
    "Dropout": (nn.Dropout(0.5), X),
    "Flatten": (nn.Flatten(), IMAGE),
    "ReLU": (nn.ReLU(), X),
    "ReLU in place": (nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), X),
    "Sigmoid": (nn.Sigmoid(), X),
    "Tanh": (nn.Tanh(), X),
    "ELU": (nn.ELU(0.7), X),
    "Softmax": (nn.Softmax(dim=1), CUBE),
    "LayerNorm": (nn.LayerNorm((3, 4)), CUBE),
    "LayerNorm without weights": (nn.LayerNorm(4, elementwise_affine=False), CUBE),
    "Identity": (nn.Identity(), X),
    "GELU": (nn.GELU(), X),
    "GELU by tanh": (nn.GELU("tanh"), X),
    "Embedding": (nn.Embedding(5, 4), IDS),
    "Conv1d": (nn.Conv1d(3, 2, 3, padding="same"), CUBE),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 2, 3, 2, 1, output_padding=1), IMAGE),
    "GroupNorm": (nn.GroupNorm(2, 4), IMAGE),
    "InstanceNorm2d": (nn.InstanceNorm2d(4, affine=True), IMAGE),
    "BatchNorm1d": (nn.BatchNorm1d(3), X),
    "RMSNorm": (nn.RMSNorm(4), CUBE),
    "PReLU": (nn.PReLU(4), IMAGE),
    "Softplus": (nn.Softplus(2.0, 1.0), X),
    "SELU": (nn.SELU(), X),
    "SiLU": (nn.SiLU(), X),
    "Mish": (nn.Mish(), X),
    "Hardswish": (nn.Hardswish(), X),
    "Hardsigmoid": (nn.Hardsigmoid(), X),
    "LogSoftmax": (nn.LogSoftmax(-1), X),
    "PixelShuffle": (nn.PixelShuffle(2), IMAGE),
    "Upsample": (nn.Upsample(scale_factor=2), IMAGE),
    "Upsample unevenly": (nn.Upsample((5, 9)), IMAGE),
    "Upsample bilinear": (nn.Upsample((5, 9), mode="bilinear"), IMAGE),
    "Upsample with corners": (nn.Upsample(None, 2, "bilinear", True), IMAGE),
    "ZeroPad2d": (nn.ZeroPad2d((1, -1, 0, 2)), IMAGE),
    "ReflectionPad2d": (nn.ReflectionPad2d(1), IMAGE),
}

FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add of numbers of different types": (lambda x, y: x + y + 1, (X, WHOLE)),
    "floordiv of integers": (lambda x, y: x // y, (WHOLE, DIVISOR)),
    "truediv of integers": (lambda x, y: x / y, (WHOLE, DIVISOR)),
    "split in sizes": (lambda x: x.split([1, 3], dim=2), (CUBE,)),
    "getitem": (lambda x: x[:, 1:, ..., ::2], (CUBE,)),
    "getitem with an index": (lambda x: x[-1, None, 1], (CUBE,)),
    "getitem of size": (lambda x: x.reshape(x.size()[0], -1), (CUBE,)),
    "matmul of stacks": (lambda x: torch.matmul(x, x.transpose(-1, -2)), (CUBE,)),
    "getattr": (lambda x: x.view(x.shape[0] * x.shape[1], x.shape[2]), (CUBE,)),
    "expand": (lambda x: x[:, :1].expand(-1, 5), (X,)),
    "to int": (lambda x: (x * 3).to(dtype=torch.int32), (X,)),
    "pow of fractions": (lambda x: x**0.5 + x**-0.5 + x**-1 + 2**x + x**x, (POSITIVE,)),
    "type_as": (lambda x, y: x.type_as(y), (WHOLE, X)),
    "dropout": (lambda x: F.dropout(x, 0.3, training=False), (X,)),
}

EXPORTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "integers to functions": (lambda x: (x.exp(), torch.sigmoid(x)), (WHOLE,)),
    "remainders": (lambda x, y: (x % y, torch.fmod(x, y)), (WHOLE, DIVISOR)),
    "division to zero": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (WHOLE, DIVISOR)),
    "comparison of int and float": (lambda x, y: (x < y, x >= 0.5), (WHOLE, X)),
    "logic": (lambda x, y: (x & y, x | y, x ^ y, ~x, torch.logical_not(y)), (FLAG, ~FLAG)),
    "bits": (lambda x, y: (x & y, x | 3, x ^ y, ~x), (WHOLE, DIVISOR)),
    "where": (lambda m, x, y: torch.where(m, x, y) + torch.where(m, 0.0, y), (FLAG, X, Y)),
    "masked_fill": (lambda x, m: x.masked_fill(m, float("-inf")), (X, FLAG)),
    "clamp": (lambda x: (x.clamp(-0.5, 0.5), x.clamp(min=0), x.clamp(max=0.1)), (X,)),
    "maximum": (lambda x, y: (torch.maximum(x, y), torch.minimum(x, y)), (X, Y)),
    "nan and inf": (lambda x: (torch.isnan(x / 0), torch.isinf(x / 0)), (X,)),
    "attention with hidden rows": (
        lambda x, m: F.scaled_dot_product_attention(x, x, x, m), (CUBE, FLAG[:, None, :] & False),
    ),
    "attention of groups": (
        lambda x, k: F.scaled_dot_product_attention(x, k, k, enable_gqa=True), (IMAGE, IMAGE[:, :2])
    ),
    "sum of integers": (lambda x, m: (x.sum(), m.sum(1)), (WHOLE, FLAG)),
    "cumsum": (lambda x, m: (x.cumsum(1), m.cumsum(0)), (X, FLAG)),
    "two indices together": (lambda x, i: x[:, i, i], (torch.randn(2, 5, 5, 3), IDS)),
    "two indices apart": (lambda x, i: x[i[0], :, i[1]], (torch.randn(5, 2, 5), IDS)),
    "negative index": (lambda x: x[:, [-1, 0]], (CUBE,)),
    "assignment": (lambda x: _assigned(x), (CUBE,)),
    "assignment by mask": (lambda x: _masked(x), (CUBE,)),
    "constants": (
        lambda x: (torch.full((2,), 3.5), torch.zeros_like(x), x.new_ones(4), torch.arange(1, 9, 3),
                   torch.arange(3.0), torch.eye(2), torch.tensor([1, 2]), torch.ones(70, 70)), (X,),
    ),
    "max_pool with places": (lambda x: F.max_pool2d(x, 2, return_indices=True), (IMAGE,)),
    "adaptive maxima": (lambda x: F.adaptive_max_pool2d(x, (4, 3)), (IMAGE,)),
    "avg_pool with a divisor": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), (IMAGE,)),
}  # fmt: skip


def _assigned(x: Any) -> Any:
    y = x.clone()
    y[:, 1:, ::2] = 0.0
    y[0, 2] += 5.0
    return y


def _masked(x: Any) -> Any:
    y = x.clone()
    y[y > 0] = -1.0
    return y


@pytest.fixture(scope="module")
def layer_outcomes() -> dict[str, Outcome]:
    return outcomes_of({name: (layer, (x,)) for name, (layer, x) in LAYERS.items()}, traced=True)


@pytest.fixture(scope="module")
def function_outcomes() -> dict[str, Outcome]:
    return outcomes_of(FUNCTIONS, traced=True)


@pytest.fixture(scope="module")
def exported_outcomes() -> dict[str, Outcome]:
    return outcomes_of(EXPORTED, traced=False)


@pytest.mark.parametrize("name", every(3, LAYERS))
def test_a_traced_layer_agrees_with_eager(name: str, layer_outcomes: dict[str, Outcome]) -> None:
    assert_close(*layer_outcomes[name])


@pytest.mark.parametrize("name", every(3, FUNCTIONS))
def test_a_traced_function_agrees_with_eager(
    name: str, function_outcomes: dict[str, Outcome]
) -> None:
    assert_close(*function_outcomes[name])


@pytest.mark.parametrize("name", every(3, EXPORTED))
def test_an_exported_function_agrees_with_eager(
    name: str, exported_outcomes: dict[str, Outcome]
) -> None:
    assert_close(*exported_outcomes[name])
