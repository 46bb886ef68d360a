"""The one table from ATen overloads to their lowerings; a new operator is one line in its theme.

Comes in: nothing. Goes out: `LOWERINGS`, and `KEPT_WHOLE`: operators that torch would take apart
although Stitch has them whole. Must not know: fx nodes.
"""

from __future__ import annotations

from typing import Any

import torch

from stitch.frontend import (
    torch_activations,
    torch_backward,
    torch_batch_norm,
    torch_elementwise,
    torch_fused_attention,
    torch_layers,
    torch_pooling,
    torch_random,
    torch_reductions,
    torch_resizing,
    torch_shapes,
    torch_static,
)
from stitch.frontend.torch_call import Lowering

aten = torch.ops.aten

LOWERINGS: dict[Any, Lowering] = {
    **torch_elementwise.LOWERINGS,
    **torch_activations.LOWERINGS,
    **torch_reductions.LOWERINGS,
    **torch_shapes.LOWERINGS,
    **torch_resizing.LOWERINGS,
    **torch_layers.LOWERINGS,
    **torch_batch_norm.LOWERINGS,
    **torch_pooling.LOWERINGS,
    **torch_backward.LOWERINGS,
    **torch_fused_attention.LOWERINGS,
    **torch_random.LOWERINGS,
    **torch_static.LOWERINGS,
}
#: Taken apart, these would cost steps (a Linear becomes views around addmm) or digits.
KEPT_WHOLE = (
    aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default,
    aten.layer_norm.default, aten.rms_norm.default, aten.silu.default, aten.hardswish.default,
    aten.hardsigmoid.default, aten.mish.default, aten.softplus.default, aten.elu.default,
    aten.leaky_relu.default, aten.hardtanh.default, aten.gelu.default, aten.stack.default,
    aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
    *torch_resizing.LOWERINGS,
)  # fmt: skip
#: Checks of what export already knows: they make nothing.
CHECKS = frozenset((
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_async.default,
    aten._assert_scalar.default, aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default, torch._check,
))  # fmt: skip
