"""The operator passes Stitch's suite: kernel, file, gradient, ONNX form and batching rule."""

from typing import ClassVar

import numpy as np

from stitch.testing import OperatorCase, OperatorSuite

X = np.random.default_rng(1).normal(0, 2, (3, 40)).astype(np.float32)


class TestSquaredRelu(OperatorSuite):
    domain: ClassVar[str] = "lab"
    cases: ClassVar[tuple[OperatorCase, ...]] = (
        OperatorCase("SquaredRelu", (X,)),
        OperatorCase("SquaredRelu", (X.astype(np.float64),)),
        OperatorCase("SquaredRelu", (X[:, :0],)),
    )
