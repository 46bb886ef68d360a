"""Backward passes of single operators, compiled by Stitch, agree with eager torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.grids import every
from tests.support.torch.compiled import assert_same, compiled, gradients

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def _r(*shape: int) -> Any:
    """Numbers that are the same at every run, without ties and not at kinks."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=generator)


def _ids(high: int, *shape: int) -> Any:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


PLACES, CLASSES, PIXELS, WORDS = _ids(4, 3, 2), _ids(5, 7), _ids(4, 2, 3, 3), _ids(6, 3, 4)
DISTINCT, WEIGHTS = torch.tensor([[0, 2], [3, 1], [1, 0]]), _r(4).abs()


def _convolution(dimensions: int, **options: Any) -> Callable[..., Any]:
    return lambda x, w, b: getattr(F, f"conv{dimensions}d")(x, w, b, **options)


def _transposed(**options: Any) -> Callable[..., Any]:
    return lambda x, w, b: F.conv_transpose2d(x, w, b, **options)


def _written(x: Any, y: Any) -> Any:
    made = x.clone()
    made[:, 1:3] = y
    made[0] += 1
    return made * made


def _accumulated(x: Any, places: Any, values: Any) -> Any:
    return x.index_put((places,), values, accumulate=True) ** 2


CASES: dict[str, Case] = {
    "conv2d, strides that leave a rest": (
        _convolution(2, stride=(2, 3), padding=(1, 0)), (_r(2, 3, 8, 9), _r(4, 3, 3, 2), _r(4)),
    ),
    "conv2d, groups": (
        _convolution(2, groups=2, padding=1), (_r(2, 4, 6, 6), _r(6, 2, 3, 3), _r(6)),
    ),
    "conv2d, depthwise": (
        _convolution(2, groups=4, padding=2), (_r(2, 4, 6, 6), _r(4, 1, 5, 5), _r(4)),
    ),
    "conv3d": (_convolution(3, padding=1), (_r(1, 2, 4, 5, 6), _r(3, 2, 3, 3, 3), _r(3))),
    "transposed": (
        _transposed(stride=2, padding=1, output_padding=1),
        (_r(2, 4, 5, 6), _r(4, 3, 3, 3), _r(3)),
    ),
    "transposed, groups": (
        _transposed(stride=2, groups=2), (_r(2, 4, 5, 4), _r(4, 3, 2, 2), _r(6)),
    ),
    "max_pool2d, overlapping": (lambda x: F.max_pool2d(x, 3, 2, 1), (_r(2, 3, 9, 8),)),
    "avg_pool2d, padded": (lambda x: F.avg_pool2d(x, 3, 2, 1), (_r(2, 3, 9, 8),)),
    "avg_pool2d, padding not counted": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        (_r(2, 3, 8, 8),),
    ),
    "avg_pool2d, ceiling": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (_r(2, 3, 8, 8),),
    ),
    "avg_pool2d, own divisor": (
        lambda x: F.avg_pool2d(x, 2, divisor_override=3), (_r(2, 3, 8, 8),),
    ),
    "adaptive_avg_pool2d, uneven": (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (_r(2, 3, 5, 6),)),
    "layer_norm, of two axes": (
        lambda x, w, b: F.layer_norm(x, (3, 6), w, b), (_r(4, 3, 6), _r(3, 6), _r(3, 6)),
    ),
    "layer_norm, without weights": (
        lambda x, w: F.layer_norm(x, (6,)) + F.layer_norm(x, (6,), w), (_r(4, 3, 6), _r(6)),
    ),
    "layer_norm, narrow with wide weights": (
        lambda x, w, b: F.layer_norm(x.bfloat16(), (6,), w, b).float() * 0.001,
        (_r(4, 3, 6), _r(6), _r(6)),
    ),
    "nll_loss, ignoring": (
        lambda x: F.nll_loss(F.log_softmax(x, 1), torch.tensor([1, 0, -100]), weight=WEIGHTS),
        (_r(3, 4),),
    ),
    "nll_loss over pixels": (
        lambda x: F.nll_loss(F.log_softmax(x, 1), PIXELS), (_r(2, 4, 3, 3),),
    ),
    "softmaxes": (
        lambda x: (
            F.softmax(x, -1), F.log_softmax(x, 0), torch.logsumexp(x, 1), F.softmax(x, 0),
            F.softmax(x[0, 0], 0), F.softmax(x.bfloat16(), 1).float() * 0.01,
        ),
        (_r(4, 5),),
    ),
    "embedding": (
        lambda w: F.embedding(WORDS, w, padding_idx=2), (_r(6, 5),),
    ),
    "products": (
        lambda a, b, c, d: (
            a @ b, b.T @ a.T, torch.addmm(d, a, b, beta=0.5, alpha=2.0), a.T @ d, a @ b[:, 0],
            torch.baddbmm(c, c, c), torch.einsum("ij,jk->ki", a, b), torch.outer(a[0], d[0]),
        ),
        (_r(3, 4), _r(4, 5), _r(2, 3, 3), _r(3, 5)),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (
            _r(2, 2, 5, 4), _r(2, 2, 6, 4), _r(2, 2, 6, 4),
        ),
    ),
    "attention, causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (_r(2, 2, 5, 4), _r(1, 2, 5, 4).expand(2, 2, 5, 4), _r(2, 2, 5, 4)),
    ),
    "attention, masked": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()
        ),
        (_r(2, 2, 5, 4), _r(2, 2, 5, 4), _r(2, 2, 5, 4)),
    ),
    "attention, rows that see no key": (
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.arange(5)[:, None] > torch.arange(5)
        ),
        (_r(2, 2, 5, 4), _r(2, 2, 5, 4), _r(2, 2, 5, 4)),
    ),
    "attention, heads in groups": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True),
        (_r(2, 4, 5, 4), _r(2, 2, 5, 4), _r(2, 2, 5, 4)),
    ),
    "all parts, and some": (
        lambda x: (x[0] * x[1] + x[2].sin(), x[:, 1] * x[:, 2], x[1:, :2], x[:, ::2], x[-1, 3]),
        (_r(3, 4, 2),),
    ),
    "all parts": (
        lambda x: torch.matmul(x[:, 0] * x[:, 1], x[:, 2].transpose(-1, -2)), (_r(2, 3, 4, 5),),
    ),
    "writing in place": (_written, (_r(3, 4), _r(3, 2))),
    "index_put, accumulating": (
        _accumulated, (_r(5, 2), torch.tensor([0, 3, 0, 1]), _r(4, 2)),
    ),
    "recurrent": (
        lambda x, *w: torch.lstm(
            x, (x.new_zeros(1, 3, 5), x.new_zeros(1, 3, 5)), list(w), True, 1, 0.0, True, False,
            False,
        )[0],
        (_r(6, 3, 4), _r(20, 4), _r(20, 5), _r(20), _r(20)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", every(3, CASES))
def test_results_and_gradients_agree_with_eager(name: str) -> None:
    function, operands = CASES[name]
    found, wanted = gradients(compiled(function), operands), gradients(function, operands)
    assert_same(found, wanted, strides=False)


def test_the_numpy_executor_gives_the_same_gradients() -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1))
    (x,) = operands = (_r(2, 2, 8, 8),)
    assert x.shape == (2, 2, 8, 8)
    assert_same(
        gradients(compiled(net, executor="numpy"), operands), gradients(net.train(), operands)
    )
