"""Gradients' cases: products, normalizations, convolutions and pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tests.support.gradients.running import Case, case


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


def _einsum(equation: str) -> Any:
    return lambda *operands: torch.einsum(equation, *operands)


EINSUMS = [
    *(
        case("Einsum", specs, _einsum(equation), equation=equation)
        for equation, specs in {
            "ij,jk->ik": ["f64[3,4]", "f64[4,5]"],
            "bij, bjk": ["f64[2,3,4]", "f64[2,4,5]"],
            "ij->ji": ["f64[3,4]"],
            "ij->i": ["f64[3,4]"],
            "ii->i": ["f64[3,3]"],
            "iij,j->i": ["f64[3,3,4]", "f64[4]"],
            "i,j": ["f64[3]", "f64[4]"],
            "...ij,...jk->...ik": ["f64[2,1,3,4]", "f64[5,4,2]"],
            "b...,...->b...": ["f64[2,3,4]", "f64[3,1]"],
            "ij,jk,kl->il": ["f64[2,3]", "f64[3,4]", "f64[4,2]"],
            "ij,ij->": ["f64[3,4]", "f64[3,4]"],
        }.items()
    )
]

NORMALIZATIONS = [
    case("LRN", ["f64[2,5,3,2]"], lambda x: F.local_response_norm(x, 3, 0.5, 0.75, 2.0),
         size=3, alpha=0.5, beta=0.75, bias=2.0),
    case("LRN", ["f64[2,5,3]"], size=4, alpha=0.5),
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
    case("BatchNormalization", ["f64[4,3,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         _normed),
    case("BatchNormalization", ["f64[4,3]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: s * (x - m) / (v + 1e-5).sqrt() + b),
    case("BatchNormalization", ["f64[4,3,5,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: F.batch_norm(x, None, None, s, b, True, 0.1, 1e-5), training_mode=1),
    case("BatchNormalization", ["f64[6,3]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: F.batch_norm(x, None, None, s, b, True, 0.1, 1e-5), training_mode=1),
    case("BatchNormalization", ["f64[4,3,5,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         lambda x, s, b, m, v: F.batch_norm(x, None, None, s, b, True, 0.1, 1e-5), training_mode=1,
         momentum=0.0),
]  # fmt: skip


def _conv(dims: int, **attributes: Any) -> Any:
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    return lambda x, w, *b: function(x, w, *b, **attributes)


def _transposed(dims: int, **attributes: Any) -> Any:
    function = {1: F.conv_transpose1d, 2: F.conv_transpose2d}[dims]
    return lambda x, w, *b: function(x, w, *b, **attributes)


def _uneven(x: Any, w: Any, b: Any) -> Any:
    return F.conv2d(F.pad(x, (1, 2, 0, 1)), w, b, (1, 3))


CONVOLUTIONS = [
    case("Conv", ["f64[2,3,6,5]", "f64[4,3,3,2]", "f64[4]"], _conv(2)),
    case("Conv", ["f64[5,2,20,20]", "f64[3,2,3,3]"], _conv(2)),
    case("Conv", ["f64[2,4,7,8]", "f64[6,2,3,3]", "f64[6]"],
         _conv(2, stride=2, padding=1, groups=2), strides=(2, 2), pads=(1, 1, 1, 1), group=2),
    case("Conv", ["f64[2,3,9,9]", "f64[3,1,2,3]"], _conv(2, stride=(3, 2), dilation=2, groups=3),
         strides=(3, 2), dilations=(2, 2), group=3),
    case("Conv", ["f64[1,2,5,7]", "f64[2,2,2,2]", "f64[2]"], _uneven,
         pads=(0, 1, 1, 2), strides=(1, 3)),
    case("Conv", ["f64[2,3,5]", "f64[2,3,5]"], _conv(1)),
    case("Conv", ["f64[2,3,4]", "f64[5,3,1]"], _conv(1)),
    case("Conv", ["f64[2,2,4,3,5]", "f64[2,2,2,2,2]"], _conv(3, padding=1), pads=(1,) * 6),
    case("Conv", ["f64[2,2,5,6]", "f64[3,2,3,3]"], auto_pad="SAME_UPPER", strides=(2, 2)),
    case("ConvTranspose", ["f64[2,3,4,5]", "f64[3,2,3,2]", "f64[2]"], _transposed(2)),
    case("ConvTranspose", ["f64[2,4,3,4]", "f64[4,3,3,3]"],
         _transposed(2, stride=2, padding=1, output_padding=1, groups=2),
         strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1), group=2),
    case("ConvTranspose", ["f64[2,3,4]", "f64[3,2,3]"], _transposed(1, dilation=2, stride=3),
         dilations=(2,), strides=(3,)),
    case("ConvTranspose", ["f64[1,2,3,3]", "f64[2,2,3,3]"], output_shape=(7, 8), strides=(2, 2)),
    case("ConvTranspose", ["f64[1,2,3,3]", "f64[2,2,2,2]"], auto_pad="SAME_LOWER", strides=(2, 2)),
]  # fmt: skip

POOLS = [
    case("MaxPool", ["f64[2,3,6,4]"], lambda x: F.max_pool2d(x, 2),
         kernel_shape=(2, 2), strides=(2, 2)),
    case("MaxPool", ["f64[2,3,7,8]"], lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
         kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), ceil_mode=1),
    case("MaxPool", ["f64[2,3,9]"], lambda x: F.max_pool1d(x, 2, 1, 0, 3),
         kernel_shape=(2,), dilations=(3,)),
    case("MaxPool", ["f64[1,2,5,5]"], kernel_shape=(2, 2), strides=(2, 2), auto_pad="SAME_LOWER"),
    case("AveragePool", ["f64[2,3,6,4]"], lambda x: F.avg_pool2d(x, (3, 2)),
         kernel_shape=(3, 2), strides=(3, 2)),
    case("AveragePool", ["f64[2,3,7,8]"], lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
         kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), ceil_mode=1),
    case("AveragePool", ["f64[2,3,7,8]"], lambda x: F.avg_pool2d(x, 3, 2, 1, True, True),
         kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), ceil_mode=1, count_include_pad=1),
    case("AveragePool", ["f64[1,2,9]"], kernel_shape=(2,), dilations=(3,), pads=(1, 1)),
    case("LpPool", ["f64[2,3,6,4]"], lambda x: F.avg_pool2d(x**2, 2).mul(4).sqrt(),
         kernel_shape=(2, 2), strides=(2, 2)),
    case("LpPool", ["f64[2,3,7]"], kernel_shape=(3,), strides=(2,), pads=(1, 1), p=3),
    case("LpPool", ["f64[2,3,7]"], kernel_shape=(3,), p=1),
    case("Col2Im", ["f64[2,8,12]", [4, 5], [2, 2]], lambda x: F.fold(x, (4, 5), 2)),
    case("Col2Im", ["f64[1,18,4]", [5, 7], [3, 3]],
         lambda x: F.fold(x, (5, 7), 3, padding=1, stride=(3, 4), dilation=(1, 1)),
         pads=(1, 1, 1, 1), strides=(3, 4)),
    case("MaxUnpool", ["f64[1,2,2]", np.array([[[1, 2], [4, 7]]])],
         lambda x: F.max_unpool1d(x, torch.tensor([[[1, 2], [0, 3]]]), 2),
         kernel_shape=(2,), strides=(2,)),
    case("GlobalAveragePool", ["f64[2,3,4,5]"], lambda x: x.mean((2, 3), keepdim=True)),
    case("GlobalMaxPool", ["f64[2,3,4,5]"], lambda x: x.amax((2, 3), keepdim=True)),
]  # fmt: skip


def _resized(mode: str, corners: bool | None, **size: Any) -> Any:
    return lambda x: F.interpolate(x, mode=mode, align_corners=corners, **size)


RESIZES = [
    case("Resize", ["f64[1,2,3,4]", None, np.array([1, 1, 2, 3], np.float32)],
         _resized("nearest", None, scale_factor=(2, 3)), nearest_mode="floor",
         coordinate_transformation_mode="asymmetric"),
    case("Resize", ["f64[1,2,4,6]", None, None, [1, 2, 3, 9]],
         _resized("bilinear", False, size=(3, 9)), mode="linear"),
    case("Resize", ["f64[1,2,4,6]", None, None, [7, 3]],
         _resized("bicubic", True, size=(7, 3)), mode="cubic", axes=(2, 3),
         coordinate_transformation_mode="align_corners"),
    case("Resize", ["f64[1,2,5]", np.array([-0.5, 1.2], np.float32), None, [8]], axes=(2,),
         coordinate_transformation_mode="tf_crop_and_resize", mode="linear"),
]  # fmt: skip

ROWS: list[Case] = [*PRODUCTS, *EINSUMS, *RESIZES, *NORMALIZATIONS, *CONVOLUTIONS, *POOLS]
