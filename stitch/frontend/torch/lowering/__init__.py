"""The one table from ATen overloads to their lowerings; a new operator is one line in its theme.

Comes in: nothing. Goes out: `LOWERINGS`, and `KEPT_WHOLE`: operators that torch would take apart
although Stitch has them whole. Must not know: fx nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from stitch.frontend.torch import known_sizes
from stitch.frontend.torch.aten_call import Lowering
from stitch.frontend.torch.lowering import (
    activations,
    backward_operators,
    fused_kernels,
    layer_products,
    norms,
    pooled_windows,
    random_numbers,
    reductions,
    resizing,
    shapes,
    single_elements,
)

aten = torch.ops.aten

LOWERINGS: dict[Any, Lowering] = {
    **single_elements.LOWERINGS,
    **activations.LOWERINGS,
    **reductions.LOWERINGS,
    **shapes.LOWERINGS,
    **resizing.LOWERINGS,
    **layer_products.LOWERINGS,
    **norms.LOWERINGS,
    **pooled_windows.LOWERINGS,
    **backward_operators.LOWERINGS,
    **fused_kernels.LOWERINGS,
    **random_numbers.LOWERINGS,
    **known_sizes.LOWERINGS,
}
#: Taken apart, these would cost steps (a Linear becomes views around addmm) or digits.
KEPT_WHOLE = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default,
    aten.layer_norm.default, aten.rms_norm.default, aten.silu.default, aten.hardswish.default,
    aten.hardsigmoid.default, aten.mish.default, aten.softplus.default, aten.elu.default,
    aten.leaky_relu.default, aten.hardtanh.default, aten.gelu.default, aten.stack.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
    *resizing.LOWERINGS,
)  # fmt: skip
#: Checks of what export already knows: they make nothing.
CHECKS = frozenset((
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default,
    aten._assert_scalar.default, aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default, torch._check,
))  # fmt: skip
