"""Operators of the domain `stitch` pass the suite of all operators."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from stitch.program import Array
from stitch.testing import OperatorCase, OperatorSuite


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(0, 1, shape).astype(np.float32)


class TestOwnOperators(OperatorSuite):
    domain: ClassVar[str] = "stitch"
    cases: ClassVar[tuple[OperatorCase, ...]] = (
        OperatorCase("GeluGradient", (drawn(3, 4), drawn(3, 4))),
        OperatorCase("SoftmaxGradient", (drawn(2, 3, 4), drawn(2, 3, 4)), {"axis": 1}),
        OperatorCase(
            "LayerNormalizationGradient",
            (drawn(2, 6), drawn(2, 6), drawn(2, 1), abs(drawn(2, 1)) + 0.5, drawn(6)),
            outputs=3,
        ),
    )
