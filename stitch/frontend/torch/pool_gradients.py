"""Gradients of max pools by what went in and came out: no places are saved, nor looked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
#: By the number of axes that windows go along: a pool with its places, and its gradient by these.
_POOLS = {
    2: (aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward),
    3: (aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward),
}


def max_pool_gradient(
    gradient: torch.Tensor, x: torch.Tensor, result: torch.Tensor, kernel: list[int],
    stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool,
) -> torch.Tensor:  # fmt: skip
    """As torch runs it, should it have to: where each maximum came from."""
    pool, backward = _POOLS[len(kernel)]
    windows = kernel, stride, padding, dilation, ceil_mode
    found: torch.Tensor = backward(gradient, x, *windows, pool(x, *windows)[1])
    return found


_GRADIENT = torch.library.custom_op("stitch::max_pool_gradient", max_pool_gradient, mutates_args=())
_GRADIENT.register_fake(lambda gradient, x, *_: torch.empty_like(x))
GRADIENT = torch.ops.stitch.max_pool_gradient.default


def _by_result(spatial: int, gradient: Any, x: Any, *operands: Any) -> Any:
    """The pool that is written here again is that of the forward pass: equal nodes are merged."""
    *windows, ceil_mode, _ = operands
    kernel, stride, padding, dilation = (
        list(each) * (spatial if len(each) == 1 else 1) for each in windows
    )
    stride = stride or kernel
    result, _ = _POOLS[spatial][0](x, *windows, ceil_mode)
    return GRADIENT(gradient, x, result, kernel, stride, padding, dilation, ceil_mode)


#: What aot_autograd is to take apart so.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    backward.default: partial(_by_result, spatial) for spatial, (_, backward) in _POOLS.items()
}
