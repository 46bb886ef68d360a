"""Gradients' cases: products, normalizations, convolutions and pools."""

from __future__ import annotations

import numpy as np

from tests.support.gradients.running import Case, case

PRODUCTS = [
    *(
        case("MatMul", specs)
        for specs in (
            ["f64[3,4]", "f64[4,5]"], ["f64[2,3,4]", "f64[4,5]"], ["f64[2,3,4]", "f64[2,4,5]"],
            ["f64[5,1,3,4]", "f64[2,4,3]"], ["f64[4]", "f64[4]"], ["f64[4]", "f64[4,5]"],
            ["f64[2,3,4]", "f64[4]"], ["f64[4]", "f64[2,4,3]"], ["f64[3,4]", "f64[2,4,5]"],
        )
    ),
    *(
        case("Gemm", ["f64[4,3]" if a else "f64[3,4]", "f64[5,4]" if b else "f64[4,5]", *c],
             alpha=0.5, beta=2.0, transA=a, transB=b)
        for a in (0, 1) for b in (0, 1) for c in ([], ["f64[5]"], ["f64[3,1]"])
    ),
]  # fmt: skip


EINSUMS = [
    *(
        case("Einsum", specs, equation=equation)
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
    case("LRN", ["f64[2,5,3,2]"], size=3, alpha=0.5, beta=0.75, bias=2.0),
    case("LRN", ["f64[2,5,3]"], size=4, alpha=0.5),
    case("LayerNormalization", ["f64[2,3,8]", "f64[8]", "f64[8]"], stash_type=11),
    case("LayerNormalization", ["f64[2,3,4]", "f64[3,4]"], axis=1, epsilon=1e-3, stash_type=11),
    case("LayerNormalization", ["f32[2,8]", "f32[8]", "f32[8]"]),
    case("RMSNormalization", ["f64[2,3,8]", "f64[8]"]),
    case("InstanceNormalization", ["f64[2,3,4,5]", "f64[3]", "f64[3]"]),
    case("GroupNormalization", ["f64[2,6,5]", "f64[6]", "f64[6]"], num_groups=3),
    case("BatchNormalization", ["f64[4,3,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"]),
    case("BatchNormalization", ["f64[4,3]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"]),
    case("BatchNormalization", ["f64[4,3,5,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         training_mode=1),
    case("BatchNormalization", ["f64[6,3]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         training_mode=1),
    case("BatchNormalization", ["f64[4,3,5,2]", "f64[3]", "f64[3]", "f64[3]", "f64[3]+"],
         training_mode=1, momentum=0.0),
]  # fmt: skip


CONVOLUTIONS = [
    case("Conv", ["f64[2,3,6,5]", "f64[4,3,3,2]", "f64[4]"]),
    case("Conv", ["f64[5,2,20,20]", "f64[3,2,3,3]"]),
    case("Conv", ["f64[2,4,7,8]", "f64[6,2,3,3]", "f64[6]"],
         strides=(2, 2), pads=(1, 1, 1, 1), group=2),
    case("Conv", ["f64[2,3,9,9]", "f64[3,1,2,3]"], strides=(3, 2), dilations=(2, 2), group=3),
    case("Conv", ["f64[1,2,5,7]", "f64[2,2,2,2]", "f64[2]"], pads=(0, 1, 1, 2), strides=(1, 3)),
    case("Conv", ["f64[2,3,5]", "f64[2,3,5]"]),
    case("Conv", ["f64[2,3,4]", "f64[5,3,1]"]),
    case("Conv", ["f64[2,2,4,3,5]", "f64[2,2,2,2,2]"], pads=(1,) * 6),
    case("Conv", ["f64[2,2,5,6]", "f64[3,2,3,3]"], auto_pad="SAME_UPPER", strides=(2, 2)),
    case("ConvTranspose", ["f64[2,3,4,5]", "f64[3,2,3,2]", "f64[2]"]),
    case("ConvTranspose", ["f64[2,4,3,4]", "f64[4,3,3,3]"],
         strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1), group=2),
    case("ConvTranspose", ["f64[2,3,4]", "f64[3,2,3]"], dilations=(2,), strides=(3,)),
    case("ConvTranspose", ["f64[1,2,3,3]", "f64[2,2,3,3]"], output_shape=(7, 8), strides=(2, 2)),
    case("ConvTranspose", ["f64[1,2,3,3]", "f64[2,2,2,2]"], auto_pad="SAME_LOWER", strides=(2, 2)),
]  # fmt: skip

POOLS = [
    case("MaxPool", ["f64[2,3,6,4]"], kernel_shape=(2, 2), strides=(2, 2)),
    case("MaxPool", ["f64[2,3,7,8]"],
         kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), ceil_mode=1),
    case("MaxPool", ["f64[2,3,9]"], kernel_shape=(2,), dilations=(3,)),
    case("MaxPool", ["f64[1,2,5,5]"], kernel_shape=(2, 2), strides=(2, 2), auto_pad="SAME_LOWER"),
    case("AveragePool", ["f64[2,3,6,4]"], kernel_shape=(3, 2), strides=(3, 2)),
    case("AveragePool", ["f64[2,3,7,8]"],
         kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), ceil_mode=1),
    case("AveragePool", ["f64[2,3,7,8]"],
         kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1), ceil_mode=1, count_include_pad=1),
    case("AveragePool", ["f64[1,2,9]"], kernel_shape=(2,), dilations=(3,), pads=(1, 1)),
    case("LpPool", ["f64[2,3,6,4]"], kernel_shape=(2, 2), strides=(2, 2)),
    case("LpPool", ["f64[2,3,7]"], kernel_shape=(3,), strides=(2,), pads=(1, 1), p=3),
    case("LpPool", ["f64[2,3,7]"], kernel_shape=(3,), p=1),
    case("Col2Im", ["f64[2,8,12]", [4, 5], [2, 2]]),
    case("Col2Im", ["f64[1,18,4]", [5, 7], [3, 3]], pads=(1, 1, 1, 1), strides=(3, 4)),
    case("GlobalAveragePool", ["f64[2,3,4,5]"]),
    case("GlobalMaxPool", ["f64[2,3,4,5]"]),
]  # fmt: skip


RESIZES = [
    case("Resize", ["f64[1,2,3,4]", None, np.array([1, 1, 2, 3], np.float32)],
         nearest_mode="floor", coordinate_transformation_mode="asymmetric"),
    case("Resize", ["f64[1,2,4,6]", None, None, [1, 2, 3, 9]], mode="linear"),
    case("Resize", ["f64[1,2,4,6]", None, None, [7, 3]],
         mode="cubic", axes=(2, 3), coordinate_transformation_mode="align_corners"),
    case("Resize", ["f64[1,2,5]", np.array([-0.5, 1.2], np.float32), None, [8]], axes=(2,),
         coordinate_transformation_mode="tf_crop_and_resize", mode="linear"),
]  # fmt: skip

ROWS: list[Case] = [*PRODUCTS, *EINSUMS, *RESIZES, *NORMALIZATIONS, *CONVOLUTIONS, *POOLS]
