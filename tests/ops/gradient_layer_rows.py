"""Gradients' cases: products, normalizations, convolutions and pools."""

from __future__ import annotations

from typing import Any

import torch
from gradient_running import Case, case
from torch.nn import functional as F


def _gemm(a: bool, b: bool, alpha: float, beta: float) -> Any:
    def function(x: Any, y: Any, *c: Any) -> Any:
        made = alpha * (x.T if a else x) @ (y.T if b else y)
        return made + beta * c[0] if c else made

    return function


PRODUCTS = [
    *(
        case("MatMul", specs, torch.matmul)
        for specs in (
            ["f64[3,4]", "f64[4,5]"], ["f64[2,3,4]", "f64[4,5]"], ["f64[2,3,4]", "f64[2,4,5]"],
            ["f64[5,1,3,4]", "f64[2,4,3]"], ["f64[4]", "f64[4]"], ["f64[4]", "f64[4,5]"],
            ["f64[2,3,4]", "f64[4]"], ["f64[4]", "f64[2,4,3]"], ["f64[3,4]", "f64[2,4,5]"],
        )
    ),
    *(
        case("Gemm", ["f64[4,3]" if a else "f64[3,4]", "f64[5,4]" if b else "f64[4,5]", *c],
             _gemm(bool(a), bool(b), 0.5, 2.0), alpha=0.5, beta=2.0, transA=a, transB=b)
        for a in (0, 1) for b in (0, 1) for c in ([], ["f64[5]"], ["f64[3,1]"])
    ),
]  # fmt: skip


def _rms(x: Any, scale: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], scale, 1e-5)


def _normed(x: Any, scale: Any, shift: Any, mean: Any, variance: Any) -> Any:
    scale, shift, mean, variance = (v[:, None] for v in (scale, shift, mean, variance))
    return scale * (x - mean) / (variance + 1e-5).sqrt() + shift


NORMALIZATIONS = [
    case("LayerNormalization", ["f64[2,3,8]", "f64[8]", "f64[8]"],
         lambda x, s, b: F.layer_norm(x, (8,), s, b, 1e-5), stash_type=11),
    case("LayerNormalization", ["f64[2,3,4]", "f64[3,4]"],
         lambda x, s: F.layer_norm(x, (3, 4), s, None, 1e-3), axis=1, epsilon=1e-3, stash_type=11),
    case("LayerNormalization", ["f32[2,8]", "f32[8]", "f32[8]"],
         lambda x, s, b: F.layer_norm(x, (8,), s, b, 1e-5)),
    case("RMSNormalization", ["f64[2,3,8]", "f64[8]"], _rms),
    case("InstanceNormalization", ["f64[2,3,4,5]", "f64[3]", "f64[3]"],
         lambda x, s, b: F.instance_norm(x, weight=s, bias=b, eps=1e-5)),
    case("GroupNormalization", ["f64[2,6,5]", "f64[6]", "f64[6]"],
         lambda x, s, b: F.group_norm(x, 3, s, b, 1e-5), num_groups=3),
    case("MeanVarianceNormalization", ["f64[2,3,4,5]"]),
    case("LpNormalization", ["f64[3,4]"], lambda x: F.normalize(x, 2.0, -1)),
    case("LpNormalization", ["f64[3,4]"], lambda x: F.normalize(x, 1.0, 0), axis=0, p=1),
    case("BatchNormalization", ["f64[4,3,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         _normed),
    case("BatchNormalization", ["f64[4,3]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: s * (x - m) / (v + 1e-5).sqrt() + b),
    case("BatchNormalization", ["f64[4,3,5,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: F.batch_norm(x, None, None, s, b, True, 0.1, 1e-5), training_mode=1),
    case("BatchNormalization", ["f64[6,3]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: F.batch_norm(x, None, None, s, b, True, 0.1, 1e-5), training_mode=1),
]  # fmt: skip

ROWS: list[Case] = [*PRODUCTS, *NORMALIZATIONS]
