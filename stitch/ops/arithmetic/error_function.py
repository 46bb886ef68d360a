"""The error function as a chain of NumPy steps: Erf, and part of the exact Gelu.

float32: erf(x) = tanh(x P(x^2)) with P of degree 6, a least-squares fit of atanh(erf(x)) / x in
the relative error of erf (1e-7), reweighted towards its largest errors. P grows without end, so
that far from zero the result is exactly 1; rounding keeps the absolute error below 3e-7.
float64: W. J. Cody, "Rational Chebyshev approximations for the error function", Mathematics of
Computation 23 (1969): his first region, and his second beyond 0.46875, whose form stays within
1e-15 to the end of the line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from stitch.ops.batching import broadcasting
from stitch.ops.definition import OpDef, Thunk
from stitch.ops.element_types import FLOATS
from stitch.ops.gradient import GradientContext
from stitch.ops.inference import same_as_first
from stitch.ops.steps import chain_kernel, mask_in, polynomial, scalar
from stitch.ops.workspaces import few
from stitch.program import Array

#: Arrays as large as the operand that `erf_steps` works in.
ERF_WORKSPACES = 5

_SINGLE = (
    1.4184687176174744e-07, -5.668375191494787e-06, 8.763666465824283e-05,
    -6.197827531016297e-04, -1.9183319922610898e-04, 1.0276905694161298e-01, 1.1283792741684124,
)  # fmt: skip

_NEAR_TOP = (
    1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2,
    3.77485237685302021e2, 3.20937758913846947e3,
)  # fmt: skip
_NEAR_BOTTOM = (
    1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
    2.84423683343917062e3,
)  # fmt: skip
_FAR_TOP = (
    2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0,
    6.61191906371416295e1, 2.98635138197400131e2, 8.81952221241769090e2,
    1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3,
)  # fmt: skip
_FAR_BOTTOM = (
    1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
    1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3,
    3.43936767414372164e3, 1.23033935480374942e3,
)  # fmt: skip


def erf_steps(x: Array, out: Array, work: tuple[Array, ...], scale: float = 1.0) -> list[Thunk]:
    """The steps of erf(scale x) over a chunk; needs `ERF_WORKSPACES` workspaces; `out` may be `x`.

    Of any type but float64, the first workspace holds x^2 afterwards.
    """
    if x.dtype == np.float64:
        return _double_steps(x, out, work, scale)
    square, sum_ = work[:2]
    degree = len(_SINGLE) - 1
    scaled = [c * scale ** (2 * (degree - i) + 1) for i, c in enumerate(_SINGLE)]
    return [
        partial(np.multiply, x, x, square),
        *polynomial(scaled, square, sum_),
        partial(np.multiply, sum_, x, sum_),
        partial(np.tanh, sum_, out),
    ]


def _double_steps(x: Array, out: Array, work: tuple[Array, ...], scale: float) -> list[Thunk]:
    size, top, bottom, near = work[:4]
    mask = mask_in(work[4])
    start: list[Thunk] = []
    if scale != 1.0:
        start, x = [partial(np.multiply, x, scalar(scale, x), out)], out
    return [
        *start,
        # Near zero: x P(x^2) / Q(x^2).
        partial(np.multiply, x, x, size),
        *polynomial(_NEAR_TOP, size, top),
        *polynomial(_NEAR_BOTTOM, size, bottom),
        partial(np.divide, top, bottom, near),
        partial(np.multiply, near, x, near),
        # Beyond: sign(x) (1 - exp(-x^2) P(|x|) / Q(|x|)); at 6 the result is 1 already.
        partial(np.absolute, x, size),
        partial(np.less, size, scalar(0.46875, x), mask),
        partial(np.minimum, size, scalar(6.0, x), out=size),
        *polynomial(_FAR_TOP, size, top),
        *polynomial(_FAR_BOTTOM, size, bottom),
        partial(np.divide, top, bottom, top),
        partial(np.multiply, size, size, size),
        partial(np.negative, size, size),
        partial(np.exp, size, size),
        partial(np.multiply, top, size, top),
        partial(np.subtract, scalar(1.0, x), top, top),
        partial(np.copysign, top, x, top),
        partial(np.copyto, top, near, where=mask),
        partial(np.copyto, out, top),
    ]


def _gradient(context: GradientContext) -> Sequence[Any]:
    """d erf(x) = 2 / sqrt(pi) exp(-x^2) dx."""
    scaled, x = context.gradient * (2.0 / math.sqrt(math.pi)), context.input(0)
    return (scaled * context.apply("Exp", -(x * x)),)


OPERATORS = (
    OpDef(
        "Erf", (1, 1), same_as_first(FLOATS), chain_kernel(ERF_WORKSPACES, erf_steps),
        elementwise=True, batching=broadcasting, gradient=_gradient, workspace=few,
    ),
)  # fmt: skip
