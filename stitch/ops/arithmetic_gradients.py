"""Gradients of elementwise arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stitch.ops.gradient import GradientContext


def add_gradient(context: GradientContext) -> Sequence[Any]:
    """Every operand gets the gradient itself (also Sum's)."""
    return [
        context.reduced(context.gradient, i) if context.wants(i) else None
        for i in range(len(context.input_types))
    ]


def sub_gradient(context: GradientContext) -> Sequence[Any]:
    """d(a - b) = da - db."""
    first = context.reduced(context.gradient, 0) if context.wants(0) else None
    second = -context.reduced(context.gradient, 1) if context.wants(1) else None
    return first, second


def mul_gradient(context: GradientContext) -> Sequence[Any]:
    """d(a·b) = b·da + a·db."""
    gradient = context.gradient
    first = context.reduced(gradient * context.input(1), 0) if context.wants(0) else None
    second = context.reduced(gradient * context.input(0), 1) if context.wants(1) else None
    return first, second
