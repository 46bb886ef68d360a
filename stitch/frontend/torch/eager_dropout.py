"""Dropout to the bit of eager torch: its factors, 0 or 1 / (1 - p), drawn and divided by torch.

Comes in: what aot_autograd asks to take apart. Goes out: `factors`, the one operator in it that
draws, and decompositions around it. Torch's own take the mask as truth values, and multiply by
what is rounded otherwise. Must not know: builders.
"""

from __future__ import annotations

from typing import Any

import torch


def dropout_factors(x: torch.Tensor, p: float) -> torch.Tensor:
    """What dropout multiplies a tensor by; of the tensor only shape, strides and type are read."""
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


_FACTORS = torch.library.custom_op(
    "stitch::dropout_factors",
    dropout_factors,
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
)
_FACTORS.register_fake(lambda x, p: torch.empty_like(x))
FACTORS = torch.ops.stitch.dropout_factors.default


def dropout_as_eager(x: Any, p: float, train: bool | None) -> tuple[Any, Any]:
    """native_dropout; its mask holds factors."""
    if train is False or p == 0 or not x.numel():
        return x.clone(), torch.ones_like(x)
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype), torch.zeros_like(x)
    factors = FACTORS(x, p)
    return x * factors, factors


def dropout_gradient_as_eager(gradient: Any, factors: Any, scale: float) -> Any:
    """native_dropout_backward, of a mask that holds factors."""
    del scale
    return NotImplemented if factors.dtype is torch.bool else gradient * factors
